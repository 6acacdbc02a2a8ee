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
# # Table 3: the constants of the four attentions
#
# The stability bounds of Appendix I speak of one attention with $m$ queries of norm at most $\rho$ and $m'$ keys of norm at
# most $\rho'$. A layer has four attentions, and Table 3 says what $m$, $m'$, $\rho$ and $\rho'$ are for each. Two facts make it up: points and centres lie
# in the unit cube, and a layer's values have spectral norm at most $G_2$ (Lemma I.1, {prf:ref}`lem-norms`).
#
# Here the table is computed for one size, beside the norms that tokens of sampled tasks really have, in untrained and in
# trained models. Then Lemma I.1 is attacked.

# %% [markdown]
# ## Parameters

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
n_features = 4
n_clusters = 6
penalty = 0.1
n_tasks = 64
model_sizes = [[1, 1, 1], [3, 1, 2], [4, 2, 3]]
dispersions = [0.01, 1.0, 10.0]
seed = 0
paper_on_cpu = False

# %% tags=["hide-input"]
from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.parameters import check_parameters

check_parameters(
    globals(),
    scale=list(SCALES),
    output_dir=str,
    n_features=(1, 256),
    n_clusters=(2, 100),
    penalty=(0.001, 1000.0),
    n_tasks=(1, 1000),
    model_sizes=[[(1, 64)]],
    dispersions=[(1e-3, 30.0)],
    seed=(0, 2**31),
    paper_on_cpu=bool,
)

# %% [markdown]
# ## The models
#
# Trained models are taken from `results/`, or trained now: one for each code, with the L2 regulariser. $G_2$ is the largest spectral norm of their four value matrices.

# %%
import torch

from leancluster_core.experiments.grids import curve_configs, figure_runs, grid
from leancluster_core.experiments.sensitivity import token_norms_table, untrained_model

torch.set_num_threads(1)
settings = grid(n_features=n_features, n_clusters=n_clusters, penalty=penalty)
configs = curve_configs(
    settings, embeddings=["onehot", "binary"], regularizers=["l2"], scale=scale
)
runs = figure_runs(configs, scale, paper_on_cpu=paper_on_cpu, weights=True)
task = runs[0].config.task
models = {
    (name, state): model
    for run, name in zip(runs, ("onehot", "binary"), strict=True)
    for state, model in (
        ("untrained", untrained_model(run.config.seeds[0], n_features, n_clusters, name)),
        ("trained", run.model(0)),
    )
}
norms = token_norms_table(models, task, n_tasks=n_tasks, seed=runs[0].config.seeds[0])

# %% tags=["hide-input"]
from leancluster_core.experiments.pages import provenance_card, save_table

within = (norms["rho"] <= norms["bound rho"]) & (norms["rho'"] <= norms["bound rho'"])
save_table(
    norms,
    output_dir,
    "tab03_constants",
    caption=f"Table 3 for n = {task.n_points}, d = {n_features}, k = {n_clusters}: the bounds on the norms, and the largest norms "
    f"found in {n_tasks} sampled tasks. {within.sum()} of {len(within)} rows are within the bounds.",
)

# %% [markdown]
# Points in the unit cube reach $\sqrt d$ only in a corner, which sampled tasks do not hit exactly, but almost: every
# feature is scaled to $[0, 1]$. After a layer the bound adds up worst cases that do not occur together: the attention would have to
# average over corners, and the values to stretch all of them along one direction.
#
# One entry is larger than it need be. The paper counts $d + \lceil \log_2 k \rceil$ for the largest squared norm $d_E$ of a binary-coded centre,
# as if some code were all ones. The codes are the numbers below $k$, and none of them has more than
# $\lfloor \log_2 k \rfloor$ ones, so for $k$ between two powers of two $d_E$ is one less.

# %% tags=["hide-input"]
import pandas as pd

from leancluster_core.experiments.bounds import attained_center_square_norm, center_square_norm

counts = [2, 3, 6, 8, 10, 16, 25, 100]
save_table(
    pd.DataFrame(
        {
            "k": counts,
            "OH": [center_square_norm(n_features, k, "onehot") for k in counts],
            "BN, as counted": [center_square_norm(n_features, k, "binary") for k in counts],
            "BN, attained": [attained_center_square_norm(n_features, k, "binary") for k in counts],
        }
    ),
    output_dir,
    "tab03_center_norms",
    caption=f"The largest squared norm of an embedded centre at d = {n_features}.",
)

# %% [markdown]
# ## Lemma I.1 under attack
#
# Is there a task in the unit cube, and are there weights within their spectral norms, such that a token gets longer than the lemma allows?
# Points, centres, all twelve matrices, $G_1$ and $G_2$ are searched, for small sizes $(n, d, k)$ and all embeddings.

# %%
from leancluster_core.experiments.attacks import (
    attack_all,
    bounds_table,
    model_problems,
    verdicts_table,
)

problems = [
    problem
    for size in model_sizes
    for embedding in ("none", "onehot", "binary")
    for dispersion in dispersions
    for problem in model_problems(*size, embedding, dispersion)
    if problem.claim == "I-1"
]
table = bounds_table(attack_all(problems, scale=scale, seed=seed))

# %% tags=["hide-input"]
save_table(
    verdicts_table(table),
    output_dir,
    "tab03_attacks",
    caption=f"The worst ratio of the norm to Lemma I.1's bound, of {len(table)} attacks.",
    digits=4,
)

# %% [markdown]
# Without codes the bound is attained: put all points and centres into the corner $(1, \dots, 1)$, let the values be $G_2$ times the
# identity, and all terms of the bound add up. With codes, $d_E > d$, and the lemma's last step $\sqrt d \le \sqrt{d_E}$ loses
# a little.
#
# ## The claims

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

keys = [run.config.key for run in runs]
save_verdicts(evaluate_claims("tab03", {"bounds": table}, scale=scale, run_keys=keys), output_dir)

# %% [markdown]
# ## What to change
#
# - `n_features = 32`: longer tokens. Are the trained models' $G_2$ smaller there?
# - `penalty = 1.0`: a smoother loss. Do its models need values as large?
# - In a copy, sample from other families: `TaskDistribution(family="cauchy")` crowds most points into a small part of the cube.

# %% tags=["hide-input"]
provenance_card(scale, runs)
