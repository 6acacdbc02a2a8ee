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
# # Theorem 2.1: layers that are Lloyd iterations
#
# Lloyd's algorithm repeats two steps: every point looks up its nearest centre, and every centre moves to the
# mean of the points that chose it. The theorem gives weights with which one layer of four attentions does just this, and $t$
# layers with the *same* weights do $t$ iterations. No training is involved: the matrices hold zeros and ones.
#
# A centre's token is its position followed by a code; a point's token has zeros in the place of the code. Let attention
# be infinitely sharp: each query gives all its weight to its nearest key, in equal shares if several are equally near. Then
#
# 1. $A_1$: each point looks for the nearest centre *by position*, and adds that centre's code to its own;
# 2. $A_2$: each point finds itself, and subtracts the code that it carried before;
# 3. $A_3$: each centre looks for the points *with its code*, and adds the mean of their positions;
# 4. $A_4$: each centre finds itself, and subtracts its old position.
#
# What the code needs is only to be different for each centre. One-hot codes (OH) take $k$ features for that, binary codes
# (BN) $\lceil \log_2 k \rceil$: the rest of this book asks what that saves. `lloyd_transformer` builds these
# weights into the same class that is trained elsewhere, {doc}`fig02` for one.

# %% [markdown]
# ## Parameters

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
dimensions = [1, 2, 4, 8, 16, 32, 64]
clusters = [2, 3, 6, 10, 25, 50, 100]
n_centers = 128
points_per_cluster = 10
n_iterations = 20
n_starts = 10
seed = 153476998

# %% tags=["hide-input"]
import torch

from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.parameters import check_parameters

check_parameters(
    globals(),
    scale=list(SCALES),
    output_dir=str,
    dimensions=[(1, 1024)],
    clusters=[(2, 1024)],
    n_centers=(1, 1_000_000),
    points_per_cluster=(2, 10_000),
    n_iterations=(1, 1000),
    n_starts=(1, 1000),
    seed=(0, 2**63 - 1),
)
torch.set_num_threads(1)  # small tasks: threads would only wait for each other
if scale == "smoke":
    dimensions, clusters = dimensions[:2], clusters[:2]
    n_centers, n_starts, n_iterations = min(n_centers, 8), min(n_starts, 1), min(n_iterations, 3)

# %% [markdown]
# ## One layer in the plane
#
# Sixty points, three centres, two bits of code each.

# %%
from leancluster_core import lloyd, lloyd_transformer
from leancluster_core.experiments.exact import toy_task
from leancluster_core.experiments.exact_plots import (
    plot_attention_maps,
    plot_layer,
)

points, centers = toy_task(seed)
model = lloyd_transformer(2, 3, dtype=torch.float64)
moved, (maps,) = model(points, centers, return_attention=True)
point_tokens, _ = model.layer(*model.tokens(points, centers))
point_codes = point_tokens[0, 2:].mT
error = float((moved - lloyd(points, centers, 1)).abs().max())
difference = f" up to {error:.0e}" if error else ", to the last bit"

# %% tags=["hide-input"]
from leancluster_core.experiments.pages import provenance_card, save_figure, save_table

save_figure(
    plot_layer(points, centers, point_codes, model.codes, moved),
    output_dir,
    "thm21_layer",
    caption="Tokens of a task in the plane before and after one layer, position as coordinates, code as colour and marker. "
    f"The new centres are Lloyd's{difference}.",
    alt="Left: sixty grey points and three marked centres. Right: every point has the colour of its nearest centre, "
    "and arrows lead the centres to the means of their points.",
)

# %% [markdown]
# The four attention matrices of that layer say how. Sorted by cluster, the points' lookup ($A_1$) is a staircase, the points' search
# for themselves ($A_2$) a diagonal. The centres average over their own points ($A_3$; each row's weights are equal, drawn relative to the largest one) and find
# themselves ($A_4$).

# %% tags=["hide-input"]
save_figure(
    plot_attention_maps(maps, maps[0].argmax(-1).argsort(stable=True)),
    output_dir,
    "thm21_attention",
    caption="The four attention matrices of the layer above, queries as rows, points sorted by cluster.",
    alt="Four matrices: a staircase of three steps, a diagonal, three horizontal bars that do not overlap, a diagonal of three.",
)

# %% [markdown]
# ## Random tasks
#
# In float64, for every pair of a dimension and a number of clusters: after each of the layers, the centres are compared with those of
# Lloyd's algorithm, and so are the labels. The theorem assumes that no point ties between two nearest centres and that no
# cluster goes empty. Tasks on which Lloyd's algorithm runs into either are replaced, and counted.

# %%
from itertools import product

from leancluster_core.experiments.exact import exact_table, parameter_table

exact = exact_table(
    product(dimensions, clusters),
    n_centers=n_centers,
    points_per_cluster=points_per_cluster,
    n_iterations=n_iterations,
    seed=seed,
)

# %% tags=["hide-input"]
summary = (
    exact.groupby(["embedding", "n_features"], sort=False)
    .agg(
        tasks=("n_tasks", lambda tasks: tasks.sum() // n_iterations),
        replaced=("n_replaced", lambda tasks: tasks.sum() // n_iterations),
        largest_difference=("max_difference", "max"),
        labels_equal=("labels_equal", "all"),
    )
    .reset_index()
    .rename(columns={"n_features": "d", "largest_difference": "largest difference", "labels_equal": "labels equal"})
)
summary["largest difference"] = summary["largest difference"].map("{:.1e}".format)
save_table(
    summary,
    output_dir,
    "thm21_random",
    caption=f"Layers against iterations 1 to {n_iterations} on random tasks, over k = {', '.join(map(str, clusters))}: the largest difference of any "
    "coordinate of a centre, whether all labels agree, and how many tasks broke an assumption and were replaced.",
)

# %% [markdown]
# The differences are single roundings: a centre is computed as old + mean − old. Empty clusters are common where the dimension and the number
# of clusters are large, and the initial centres are points of the same few clusters.
#
# ## Data that nobody here made
#
# scikit-learn's bundled data sets, unscaled, with scikit-learn's own `KMeans(init=C, n_init=1, algorithm="lloyd")` as the judge. These
# data lie on grids (tenths of centimetres, grey levels), where single rows as initial centres tie all the time: an initial centre is the mean of five random rows.

# %%
from leancluster_core.experiments.exact import judged_table, real_data

judged = judged_table(real_data(), n_starts=n_starts, n_iterations=n_iterations, seed=seed)

# %% tags=["hide-input"]
shown = judged.copy()
shown["largest difference"] = shown["largest difference"].map("{:.1e}".format)
save_table(
    shown,
    output_dir,
    "thm21_real",
    caption=f"Real data in float64: the largest difference of any coordinate of a centre to scikit-learn's, after each of {n_iterations} iterations, in the data's own "
    "units (the largest values of breast cancer are in the thousands), and whether all labels are the same.",
)

# %% [markdown]
# ## What if an assumption fails?
#
# **Duplicate points are harmless**, though the theorem's proof asks for distinct points. A point's nearest points are then all its copies; but copies carry the same code, so the mean
# code that $A_2$ subtracts is still the point's own.
#
# **A point that ties between centres is lost.** It takes the average of the tied centres' codes, and no centre looks for that: the point counts
# for none of them. Lloyd's algorithm, in contrast, has to choose (ours takes the first).
#
# **The centre of an empty cluster moves.** No point carries its code, and the nearest codes win. With one-hot codes, all others are equally far, so it moves to the mean of all points; with binary
# codes, to the mean of the points whose codes differ in the fewest bits. Our Lloyd leaves such a centre where it is. So a transformer revives an empty cluster where Lloyd's algorithm, left alone, does not.

# %%
from leancluster_core.experiments.exact import broken_assumptions, broken_table

broken = broken_table()

# %% tags=["hide-input"]
tasks = "; ".join(
    f"{name}: points {points.int().tolist()}, centres {centers.int().tolist()}"
    for name, (points, centers) in broken_assumptions().items()
)
save_table(
    broken.fillna("–"),
    output_dir,
    "thm21_assumptions",
    caption=f"One step from the smallest tasks that break an assumption. {tasks}.",
)

# %% [markdown]
# ## What the code costs
#
# All twelve matrices of a layer are as wide as a token, so their parameters grow with its square. Shown is the share that a binary code saves.

# %% tags=["hide-input"]
sizes = sorted(set(dimensions))
counts = parameter_table(sizes)
by_size = counts.pivot(index=["n_features", "n_clusters"], columns="embedding", values="n_parameters").reset_index()
by_size["saved"] = (100 * (1 - by_size["binary"] / by_size["onehot"])).map("{:.1f}%".format)
save_table(
    by_size.rename(columns={"n_features": "d", "n_clusters": "k", "onehot": "OH", "binary": "BN", "none": "NA"}).rename_axis(columns=None),
    output_dir,
    "thm21_parameters",
    caption="Parameters of one layer, counted from the models, at k = d and k = 4d, and the share that BN saves over OH.",
)

# %% [markdown]
# ## The claims

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

save_verdicts(evaluate_claims("thm21", {"exact": exact, "parameters": counts}, scale=scale), output_dir)

# %% [markdown]
# ## What to change
#
# - `points_per_cluster = 3`: how many tasks now empty a cluster?
# - `n_iterations = 100`: does anything change after Lloyd's algorithm has converged?
# - In a copy, use `lloyd_transformer(...)` with `model.inverse_temperature = 100.0`: how sharp must attention be before a layer is no longer told from Lloyd's step?

# %% tags=["hide-input"]
provenance_card(scale, seeds=[seed])
