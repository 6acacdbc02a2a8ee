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
# # Figure 13: the number of points
#
# Attention averages, so more points should make the averages steadier and change little else. The
# paper varies the number of points of a task, in four and in 32 dimensions.
#
# A model's weights don't know how many points there are: one trained with 512 can be applied to 128
# (the paper's Figure 12 does). Here each model is trained and validated with the same number.

# %% [markdown]
# ## Parameters
#
# The paper's values; a scale below `paper` has fewer points, steps and trials ({ref}`scales`).

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
n_points = [128, 256, 512, 1024]
n_features = [4, 32]
penalty = 0.1
n_clusters = 6
n_steps = 10000
embeddings = ["onehot", "binary", "none"]
regularizers = ["entropy", "l2"]
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
    n_points=[(8, 1_000_000)],
    n_features=[(1, 256)],
    penalty=(0.001, 1000.0),
    n_clusters=(1, 100),
    n_steps=(1, 1_000_000),
    embeddings=[EMBEDDINGS],
    regularizers=[REGULARIZERS],
    paper_on_cpu=bool,
)

# %% [markdown]
# ## The runs
#
# Six curves a setting, from `results/` or trained now; runs that other figures share are trained
# once.

# %%
from leancluster_core.experiments.grids import (
    curve_configs,
    curve_frame,
    figure_runs,
    grid,
)

settings = grid(
    n_features=n_features,
    n_points=n_points,
    penalty=penalty,
    n_clusters=n_clusters,
    n_steps=n_steps,
)
configs = curve_configs(
    settings, embeddings=embeddings, regularizers=regularizers, scale=scale
)
runs = figure_runs(configs, scale, paper_on_cpu=paper_on_cpu)
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
    convergence_alt,
    describe_ends,
    final_table,
)

panels = ["n_features", "n_points"]
save_figure(
    plot_convergence(frame, rows=["n_features"], columns=["n_points"], scale=scale),
    output_dir,
    "fig13_points",
    caption="The number of points $n$ (columns) for each dimension $d$ (pairs of rows): above the smoothed training loss, a sum "
    f"over points, below the validation loss relative to one step of Lloyd's algorithm (dotted). $k$ = {n_clusters}, "
    rf"$\tau$ = {penalty:g}, normal clusters. "
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
    "fig13_final",
    caption="Relative loss at the end of training: median over trials (first to third quartile).",
)

# %% [markdown]
# The smoothed loss is a sum over points, so it grows with $n$, though not quite in proportion: the
# more points, the wider their range, by which a task is scaled to the unit cube. The relative loss
# is comparable throughout.

# %% [markdown]
# ## The claims
#
# At scale `laptop` the four numbers are a quarter of the paper's. That reaches down to 32 points
# for six clusters, about five a cluster, where means are noisy; the paper's smallest tasks have
# four times as many.

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("fig13", frame, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `n_points = [64, 4096]`: memory grows in proportion to $n$ here, time with its square.
# - `n_clusters = 16` with `n_points = [128]`: few points a cluster.

# %% tags=["hide-input"]
provenance_card(scale, runs)
