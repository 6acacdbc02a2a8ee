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
# # Figure 14: the number of dimensions
#
# Squared distances add up over the dimensions. The more of them there are, the less depends on
# chance: two clusters that lie close together by accident in one dimension lie apart in others, and
# a point's nearest centre is nearest by a wide margin. The paper follows this from four to 32
# dimensions at two penalties.
#
# It bears on the smoothing too: the wider the margin, the less the entropy's soft weights leak to
# the other centres, and the less it should matter which of the two regularisers is used.

# %% [markdown]
# ## Parameters
#
# The paper's values; a scale below `paper` has fewer points, steps and trials ({ref}`scales`).

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
n_features = [4, 8, 16, 32]
penalties = [0.25, 0.1]
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
    n_features=[(1, 256)],
    penalties=[(0.001, 1000.0)],
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
    penalty=penalties, n_features=n_features, n_clusters=n_clusters, n_steps=n_steps
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

panels = ["penalty", "n_features"]
save_figure(
    plot_convergence(frame, rows=["penalty"], columns=["n_features"], scale=scale),
    output_dir,
    "fig14_dimensions",
    caption=r"The dimension $d$ (columns) for each penalty $\tau$ (pairs of rows): above the smoothed training loss, below the "
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
    "fig14_final",
    caption="Relative loss at the end of training: median over trials (first to third quartile).",
)

# %% [markdown]
# The number of weights grows with the square of the token's width, and the number of steps is the
# same in all panels: a model of 32 dimensions has many times the weights to fit.

# %% [markdown]
# ## The claims
#
# Fewer steps at scale `laptop` show most where learning starts late. The claim compares
# regularisers at equal steps, so both sides lose by it.

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("fig14", frame, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `n_features = [1, 2, 3, 4]`: is there a dimension too small to learn in?
# - `n_features = [64, 128]`: does the trend go on?
# - `penalties = [1.0]`: with a loose bound the dimension should matter most.

# %% tags=["hide-input"]
provenance_card(scale, runs)
