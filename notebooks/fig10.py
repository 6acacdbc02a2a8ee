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
# # Figure 10: the penalty
#
# The penalty $\tau$ decides how smooth the training loss is. The smoothed loss of a point weighs
# its centres by softmax or sparsemax of $-r/\tau$, with $r$ the squared distances (see
# {doc}`fig02`). A large $\tau$ spreads the weights: the loss is easy to descend and a loose bound
# of what we want. A small one concentrates them on the nearest centre: the bound is tight, and flat
# for every centre that is not the nearest.
#
# The paper compares four values in four dimensions and in 32. Squared distances grow with the
# dimension, so the same $\tau$ smooths less at $d=32$.

# %% [markdown]
# ## Parameters
#
# The paper's values; a scale below `paper` has fewer points, steps and trials ({ref}`scales`).

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
penalties = [1.0, 0.25, 0.14, 0.1]
n_features = [4, 32]
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
    penalties=[(0.001, 1000.0)],
    n_features=[(1, 256)],
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
    n_features=n_features, penalty=penalties, n_clusters=n_clusters, n_steps=n_steps
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

panels = ["n_features", "penalty"]
save_figure(
    plot_convergence(frame, rows=["n_features"], columns=["penalty"], scale=scale),
    output_dir,
    "fig10_penalty",
    caption=r"The penalty $\tau$ (columns) for each dimension $d$ (pairs of rows): above the smoothed training loss, below the "
    f"validation loss relative to one step of Lloyd's algorithm (dotted). $k$ = {n_clusters}, $n$ = {frame['n_points'].max()}, "
    "normal clusters. "
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
    "fig10_final",
    caption="Relative loss at the end of training: median over trials (first to third quartile).",
)

# %% [markdown]
# Smoothed losses with different penalties, or with different regularisers, are different functions
# of the same centres. In the upper row of a pair only curves of one regulariser in one panel
# compare; in the lower row all do, since the k-means loss has neither of the two in it.

# %% [markdown]
# ## The claims
#
# The relative loss depends little on the number of points where curves have settled ({doc}`fig13`),
# so it is mostly the number of steps that makes our runs smaller than the paper's in what matters
# here. Small penalties, which learn later, lose more by it than large ones.

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("fig10", frame, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `penalties = [1.0, 0.1, 0.01, 0.001]`: where does a penalty get too small to learn with?
# - `n_features = [4, 8, 16, 32]` with `penalties = [1.0]`: at which dimension does $\tau=1$ begin
#   to do?
# - An annealed penalty, which the paper leaves open, needs a change of `training.py`, where the
#   penalty enters the objective ({ref}`changing the package <change-the-package>`).

# %% tags=["hide-input"]
provenance_card(scale, runs)
