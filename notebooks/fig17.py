# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Figure 17: elapsed time
#
# Steps are not seconds. A one-hot code makes tokens $d + k$ wide, a binary one
# $d + \lceil \log_2 k \rceil$, so a step of BN costs less. Where one-hot learns in fewer steps,
# which of the two is ahead in time? The paper draws the curves against elapsed training time for
# two sizes, with gradients clipped, which it does in this figure only.

# %% [markdown]
# ## Parameters
#
# The paper's values; a scale below `paper` has fewer points, steps and trials ({ref}`scales`).

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
sizes = [[16, 16], [25, 32]]
n_points = [256, 512, 1024]
penalty = 1.0
clipping_norm = 1.0
n_steps = 10000
embeddings = ["onehot", "binary"]
regularizers = ["l2"]
paper_on_cpu = False

# %% tags=["hide-input"]
from leancluster_core.embeddings import EMBEDDINGS
from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.parameters import check_parameters
from leancluster_core.losses import REGULARIZERS

check_parameters(
    globals(),
    scale=list(SCALES),
    output_dir=str,
    sizes=[((1, 256), (1, 256))],
    n_points=[(8, 1_000_000)],
    penalty=(0.001, 1000.0),
    clipping_norm=(1e-6, 1e6),
    n_steps=(1, 1_000_000),
    embeddings=[EMBEDDINGS],
    regularizers=[REGULARIZERS],
    paper_on_cpu=bool,
)

# %% [markdown]
# ## The runs
#
# What is timed must be timed fairly. The models of a setting take turns, ten steps each, in one
# process, and the one that goes first changes from turn to turn (`timing.train_alternating`). A
# model's clock runs while it takes training steps. Drawing tasks and validating are left out, for
# both alike: they are the same work for every code. Every model trains by itself, not in a batch
# with other settings; its trials train together, so the seconds are those of all trials. The paper
# clips gradients here but doesn't say at which norm; ours is `clipping_norm`.

# %%
from leancluster_core.experiments.grids import (
    curve_configs,
    curve_frame,
    figure_runs,
    grid,
)

settings = [
    setting
    for k, d in sizes
    for setting in grid(
        n_clusters=k,
        n_features=d,
        n_points=n_points,
        penalty=penalty,
        n_steps=n_steps,
        gradient_clipping=clipping_norm,
    )
]
configs = curve_configs(
    settings, embeddings=embeddings, regularizers=regularizers, scale=scale
)
runs = figure_runs(configs, scale, paper_on_cpu=paper_on_cpu, taking_turns=True)
frame = curve_frame(runs)

# %% [markdown]
# ## The figure

# %% tags=["hide-input"]
from leancluster_core.experiments.pages import (
    provenance_card,
    save_figure,
    save_table,
)
from leancluster_core.experiments.plots import curve_caption, plot_convergence
from leancluster_core.experiments.summary import (
    SHORT_NAMES,
    convergence_alt,
    describe_ends,
    final_losses,
    final_table,
)

panels = ["n_clusters", "n_features", "n_points"]
save_figure(
    plot_convergence(
        frame,
        rows=["n_clusters", "n_features"],
        columns=["n_points"],
        x="elapsed",
        scale=scale,
    ),
    output_dir,
    "fig17_elapsed",
    caption="Loss against the seconds spent in training steps, for sizes $(k, d)$ (pairs of rows) and numbers of points $n$ (columns). "
    "Above the smoothed training loss, below the validation loss relative to one step of Lloyd's algorithm (dotted). "
    rf"$\tau$ = {penalty:g}, gradients clipped at norm {clipping_norm:g}, all trials in one batch. "
    + curve_caption(
        frame,
        ["training_loss", "relative_loss"],
        by=[*panels, "embedding", "regularizer"],
        scale=scale,
    ),
    alt=convergence_alt(frame, panels),
)

# %% [markdown]
# ## What we see

# %% tags=["hide-input"]
describe_ends(frame, panels)

# %% tags=["hide-input"]
save_table(
    final_table(frame, panels),
    output_dir,
    "fig17_final",
    caption="Relative loss at the end of training: median over trials (first to third quartile).",
)

# %% tags=["hide-input"]
from leancluster_core.experiments.config import EMBEDDING_LABELS

seconds = final_losses(frame, panels).groupby([*panels, "embedding"], sort=False)
times = seconds["seconds"].mean().unstack("embedding")[embeddings]
first, *others = (EMBEDDING_LABELS[name] for name in embeddings)
times = times.rename(columns=EMBEDDING_LABELS).reset_index()
save_table(
    times.assign(**{f"{name} / {first}": times[name] / times[first] for name in others})
    .rename(columns=SHORT_NAMES)
    .rename_axis(columns=None),
    output_dir,
    "fig17_seconds",
    caption="Seconds that all training steps took, all trials together, and their ratio.",
)

# %% [markdown]
# Times on a shared machine are noisy: whatever else runs on it slows a step down by half for a
# minute, then not at all. Taking turns shares such minutes out evenly, so the *ratio* of the two
# times is worth more than either of them; but the seconds themselves are those of one machine on
# one day.

# %% [markdown]
# ## The claims
#
# The paper's times are those of its own implementation, one model at a time on a GPU. In ours the
# attention among points, which costs most, doesn't see the width of the code at all (the
# projections are absorbed, see `models.py`): a one-hot code costs less here than it does there, and
# BN has less to gain. At scale `laptop` tasks are a quarter of the size as well.

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("fig17", frame, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `sizes = [[100, 32]]`: many clusters, where a one-hot token is four times as wide as its data.
# - `embeddings = ["onehot", "binary", "none"]`: what does a token without any code save?
# - The literal attention (`backend="materialised"` where `training.py` makes its models) has the
#   paper's balance of costs ({ref}`changing the package <change-the-package>`).

# %% tags=["hide-input"]
provenance_card(scale, runs)
