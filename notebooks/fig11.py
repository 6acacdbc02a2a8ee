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
# # Figure 11: the learning rate
#
# All other experiments start Adam with the rate $\eta=0.01$. Is that a lucky choice? The paper
# tries four rates that span three orders of magnitude, in four and in 32 dimensions, for half as
# many steps.
#
# Adam's steps don't depend on the size of the gradient, so $\eta$ is about how far a weight moves
# in a step. Weights start in $\pm 1/\sqrt{d_\mathrm{emb}}$, between 0.16 and 0.5 here: $\eta=1$
# overwrites them at the first step. The rate is halved whenever the relative validation loss has
# not improved for more than five evaluations.

# %% [markdown]
# ## Parameters
#
# The paper's values; a scale below `paper` has fewer points, steps and trials ({ref}`scales`).

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
learning_rates = [0.001, 0.01, 0.1, 1.0]
n_features = [4, 32]
penalty = 0.1
n_clusters = 6
n_steps = 5000
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
    learning_rates=[(1e-6, 100.0)],
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
    learning_rate=learning_rates,
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

panels = ["n_features", "initial_learning_rate"]
save_figure(
    plot_convergence(
        frame, rows=["n_features"], columns=["initial_learning_rate"], scale=scale
    ),
    output_dir,
    "fig11_learning_rate",
    caption=r"The initial learning rate $\eta$ (columns) for each dimension $d$ (pairs of rows): above the smoothed training "
    f"loss, below the validation loss relative to one step of Lloyd's algorithm (dotted). $k$ = {n_clusters}, $n$ = {frame['n_points'].max()}, "
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
    "fig11_final",
    caption="Relative loss at the end of training: median over trials (first to third quartile).",
)

# %% [markdown]
# A rate that is too large need not diverge for good: the plateau rule halves it until training
# settles. What it costs then is the steps that were spent until there, and where in the landscape
# the weights were thrown.

# %% [markdown]
# ## The claims
#
# With 1500 steps instead of 5000 at scale `laptop`, the smallest rate moves a weight by about 1.5
# at most, and the largest has time for fewer halvings. Both ends of the grid look worse here than
# they would at the paper's scale.

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("fig11", frame, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `learning_rates = [0.003, 0.01, 0.03]`: how wide is the good range?
# - `n_steps = 20000`: does the smallest rate catch up?
# - In a copy, `grid(gradient_clipping=1.0, ...)`, or `plateau_factor=1.0` for a rate that stays
#   what it is.

# %% tags=["hide-input"]
provenance_card(scale, runs)
