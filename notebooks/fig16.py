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
# # Figure 16: families and penalties
#
# {doc}`fig04` once more, with two numbers of clusters: is it the family, the penalty or the number
# of clusters that decides whether a layer learns? The dimension is 32 throughout.

# %% [markdown]
# ## Parameters
#
# The paper's values; a scale below `paper` has fewer points, steps and trials ({ref}`scales`).

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
families = ["normal", "cauchy", "gumbel", "laplace", "lognormal"]
n_clusters = [6, 10]
penalties = [1.0, 0.1]
n_features = 32
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
    n_clusters=[(1, 100)],
    penalties=[(0.001, 1000.0)],
    n_features=(1, 256),
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
    n_clusters=n_clusters,
    penalty=penalties,
    family=families,
    n_features=n_features,
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

panels = ["n_clusters", "penalty", "family"]
save_figure(
    plot_convergence(
        frame, rows=["n_clusters", "penalty"], columns=["family"], scale=scale
    ),
    output_dir,
    "fig16_families",
    caption=r"Families (columns) with numbers of clusters $k$ and penalties $\tau$. Odd rows: smoothed training loss; even rows: "
    f"validation loss relative to one step of Lloyd's algorithm (dotted). $d$ = {n_features}, $n$ = {frame['n_points'].max()}. "
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
    "fig16_final",
    caption="Relative loss at the end of training: median over trials (first to third quartile).",
)

# %% [markdown]
# Gumbel and laplace have heavier tails than the normal family, though nothing like cauchy's. Scaled
# to the unit cube by their largest points, the bulk of their points lies closer together, and a
# penalty that is small for normal tasks is larger for theirs.

# %% [markdown]
# ## The claims
#
# As for {doc}`fig04`: a quarter of the points makes the tails of a task shorter at scale `laptop`,
# and there are three tenths of the steps.

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("fig16", frame, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `penalties = [0.1, 0.03, 0.01]` on `families = ["gumbel", "laplace"]`: is it only a matter of
#   scale?
# - `n_clusters = [25]`: see {doc}`fig15` for normal tasks.

# %% tags=["hide-input"]
provenance_card(scale, runs)
