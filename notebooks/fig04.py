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
# # Figure 4: families of tasks
#
# What is learned may depend on what is learned from. The paper trains on mixtures of five families.
# Four of them, normal, gumbel, laplace and lognormal, have a mean and a variance; cauchy has
# neither. After the features of a task are scaled to the unit cube, a few far points of a cauchy
# task span the cube, and all the others crowd into a small box somewhere inside.
#
# Larger tasks than in {doc}`fig02`: 32 dimensions and ten clusters, with a large penalty and with a
# small one.

# %% [markdown]
# ## Parameters
#
# The paper's values; a scale below `paper` has fewer points, steps and trials ({ref}`scales`).

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
families = ["normal", "cauchy", "gumbel", "laplace", "lognormal"]
penalties = [1.0, 0.1]
n_features = 32
n_clusters = 10
n_steps = 10000
embeddings = ["onehot", "binary", "none"]
regularizers = ["entropy", "l2"]
paper_on_cpu = False

# %% tags=["hide-input"]
from leancluster_core.embeddings import EMBEDDINGS
from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.parameters import check_parameters
from leancluster_core.losses import REGULARIZERS
from leancluster_core.samplers import FAMILIES

check_parameters(
    globals(),
    scale=list(SCALES),
    output_dir=str,
    families=[FAMILIES],
    penalties=[(0.001, 1000.0)],
    n_features=(1, 256),
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
    penalty=penalties,
    family=families,
    n_features=n_features,
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

panels = ["penalty", "family"]
save_figure(
    plot_convergence(frame, rows=["penalty"], columns=["family"], scale=scale),
    output_dir,
    "fig04_families",
    caption=r"Families of tasks (columns) with the penalties $\tau$. Above the smoothed training loss, below the "
    f"validation loss relative to one step of Lloyd's algorithm (dotted). $d$ = {n_features}, $k$ = {n_clusters}, "
    f"$n$ = {frame['n_points'].max()}. "
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
    "fig04_final",
    caption="Relative loss at the end of training: median over trials (first to third quartile).",
)

# %% [markdown]
# Training and validation tasks are of the same family here; how a model does on another family than
# its own is the question of the paper's Figure 8.
#
# Why cauchy is different the paper leaves open, with a suspicion: the smoothed loss is a loose
# bound where outliers set the scale. A few far points span the cube, all others lie close together,
# and for these nearly all centres are about equally near: within $\tau$ of each other, so that the
# smoothed loss does not tell them apart. The paper's Figure 5 measures how loose the bound is.

# %% [markdown]
# ## The claims
#
# At scale `laptop` a cauchy task has a quarter of the points, so its outliers lie less far out than
# the paper's: if anything cauchy is easier here. The other families change less. Three tenths of
# the steps is what separates most of our curves from the paper's.

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("fig04", frame, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `families = ["normal", "cauchy"]` with `penalties = [0.1, 0.01, 0.001]`: does a penalty in
#   proportion to cauchy's small distances help?
# - `n_features = 4`: fewer dimensions, fewer outliers in a task.
# - In a copy, `grid(scale=[0.05, 0.1, 0.2], ...)` varies how far the clusters overlap, with "scale"
#   among the columns and in `panels`.

# %% tags=["hide-input"]
provenance_card(scale, runs)
