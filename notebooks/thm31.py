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
# # Theorem 3.1: the loss and its sensitivity
#
# Training works on a smooth upper bound of the k-means loss (Appendix H), and it works the better the less the loss
# jumps when the weights move. Theorem 3.1 bounds that: if the twelve weight matrices of a layer change by a total of
# $\varepsilon$ (spectral norms), a task's loss changes by at most $\kappa_1 \varphi\, \varepsilon$. Here $\varphi$ says how far the centres
# move (Theorem I.1), and $\kappa_1$ how much the loss makes of it (Lemma I.2). The paper explains with it why one-hot codes
# train faster than binary ones when $d$ is small: their $\varphi$ is smaller.
#
# This page attacks both bounds and Appendix H's. Then it measures what they bound, in untrained and in trained models: the
# derivative of the centres and of the loss, in the very norms of the theorem. {doc}`theory_loss` and
# {doc}`theory_stability` have the statements and the proofs.

# %% [markdown]
# ## Parameters
#
# Sweeps vary one setting at a time and keep the others at `n_features`, `n_clusters`, $\gamma = 1$ and `penalty`.

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
n_features = 4
n_clusters = 6
penalty = 0.1
n_features_swept = [2, 4, 8, 16, 32, 64]
n_clusters_swept = [2, 4, 6, 10, 25, 64]
inverse_temperatures_swept = [0.01, 0.1, 1.0, 10.0, 100.0]
penalties_swept = [0.01, 0.1, 1.0, 10.0]
n_features_trained = [4, 32]
n_tasks = 4
dispersions = [0.01, 3.0]
model_sizes = [[1, 1, 1], [3, 1, 2], [4, 2, 3]]
n_clusters_attacked = [2, 3, 4, 8, 32]
seed = 0
paper_on_cpu = False

# %% tags=["hide-input"]
from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.parameters import check_parameters

check_parameters(
    globals(),
    scale=list(SCALES),
    output_dir=str,
    n_features=(1, 128),
    n_clusters=(2, 100),
    penalty=(0.001, 1000.0),
    n_features_swept=[(1, 128)],
    n_clusters_swept=[(2, 128)],
    inverse_temperatures_swept=[(1e-6, 1e6)],
    penalties_swept=[(0.001, 1000.0)],
    n_features_trained=[(1, 128)],
    n_tasks=(1, 1000),
    dispersions=[(1e-3, 30.0)],
    model_sizes=[[(1, 64)]],
    n_clusters_attacked=[(2, 1000)],
    seed=(0, 2**31),
    paper_on_cpu=bool,
)

# %% [markdown]
# ## Appendix H: the smoothed loss
#
# With two centres, one nearer by a *margin*, both smoothings overestimate the smaller squared distance by the margin times the weight of the
# farther centre. L2's weight falls in a straight line and is zero once the margin exceeds $\tau$; NE's never is.

# %% tags=["hide-input"]
import numpy as np
import pandas as pd
import torch

from leancluster_core import min_weights
from leancluster_core.experiments.pages import provenance_card, save_figure, save_table
from leancluster_core.experiments.theory_plots import plot_sensitivity, plot_smoothing

torch.set_num_threads(1)
margins = torch.linspace(0, 5, 201, dtype=torch.float64)
pairs = torch.stack([torch.zeros_like(margins), margins], -1)
smoothing = pd.concat(
    pd.DataFrame({"margin": margins, "regularizer": name, "weight": weight, "gap": margins * weight})
    for name in ("entropy", "l2")
    for weight in [min_weights(pairs, penalty=1.0, regularizer=name)[:, 1]]
)
largest = smoothing.groupby("regularizer")["gap"].max()
save_figure(
    plot_smoothing(smoothing),
    output_dir,
    "thm31_smoothing",
    caption=r"Two centres: how far the smoothed minimum lies above the exact one (left), and the weight that the farther "
    r"centre gets (right), against the margin, all in units of the penalty $\tau$.",
    alt=f"The gap of NE rises to {largest['entropy']:.2f} penalties and decays slowly; that of L2 rises to "
    f"{largest['l2']:.3f} and is zero from a margin of one penalty on.",
)

# %% [markdown]
# ## The attacks
#
# Appendix H for one point with $k$ distances; Lemma I.2 for points in the unit cube and centres wherever a layer can put them; Theorem I.1 for
# whole layers. The paper leaves some norms open, so "other readings" are tried too; bounds called "sharp" are ours, proved in {doc}`theory_loss` and
# {doc}`theory_stability`.

# %%
from leancluster_core.experiments.attacks import (
    attack_all,
    bounds_table,
    loss_problems,
    model_problems,
    smoothing_problems,
    verdicts_table,
)

problems = [
    problem
    for k in n_clusters_attacked
    for tau in (0.001, 1.0)
    for problem in smoothing_problems(k, tau)
]
for dispersion in dispersions:
    for n, d, k in model_sizes:
        for embedding in ("onehot", "binary"):
            problems += loss_problems(n, d, max(2, k), embedding, dispersion)
            whole = model_problems(n, d, k, embedding, dispersion)
            problems += [problem for problem in whole if problem.claim == "I-phi"]
table = bounds_table(attack_all(problems, scale=scale, seed=seed))

# %% tags=["hide-input"]
save_table(
    verdicts_table(table),
    output_dir,
    "thm31_attacks",
    caption=f"The worst ratio of {len(table)} attacks, by bound and reading; where it was found.",
    digits=4,
)

# %% tags=["remove-cell"]
save_table(table, output_dir, "thm31_all_attacks", caption="Every attack.", digits=9)

# %% [markdown]
# All of Appendix H holds, and its bound for L2 is attained: at a tie the weights are farthest from the argmin. The
# bound for NE never is; the nearest it comes is at $k = 4$.
#
# Theorem I.1 holds when the change of the weights is the *sum* of the twelve spectral norms, as composing the
# lemmas gives it. If it is meant as the *largest* of the twelve, it is refuted: at small $\gamma$ every value matrix adds its own share.
#
# ## The paper's explanation: $\varphi$ for one-hot and binary codes
#
# A one-hot code makes tokens wide ($d_\text{emb} = d + k$) and short ($d_E = d + 1$), a binary code narrow and long. Both work in the
# same direction: with $s = d_E / \sqrt{d_\text{emb}}$, $\varphi$ grows with $d_E$ and with $e^{O(s)}$.

# %% tags=["hide-input"]
from leancluster_core.experiments.bounds import model_stability, model_stability_sharp

unit = {"qk_norm": 1.0, "value_norm": 1.0}
grid_of_phi = pd.DataFrame(
    [
        {
            "embedding": embedding,
            "n_features": d,
            "n_clusters": k,
            "phi": model_stability(d, k, embedding, **unit).value,
            "log10_phi": model_stability(d, k, embedding, **unit).log10,
            "log10_sharp": model_stability_sharp(d, k, embedding, **unit).log10,
        }
        for d in n_features_swept
        for k in n_clusters_swept
        for embedding in ("onehot", "binary")
    ]
)
wide = grid_of_phi.pivot(index=["n_features", "n_clusters"], columns="embedding")
difference = (wide["log10_phi"]["binary"] - wide["log10_phi"]["onehot"]).unstack()
difference.columns = [f"k = {k}" for k in difference.columns]
save_table(
    difference.reset_index(names="d"),
    output_dir,
    "thm31_phi",
    caption="How many orders of magnitude the bound for binary codes lies above that for one-hot codes "
    f"(G1 = G2 = gamma = 1): positive in {int((difference > 0).sum().sum())} of {difference.size} cells.",
    digits=1,
)

# %% [markdown]
# So the formula says what the paper says. It also says something odd: for one-hot codes $\varphi$ *falls* as clusters are added, since every cluster
# widens the tokens. Is that how models behave?
#
# ## Measured against bounded
#
# The derivative of the new centres, as a linear map from a weight matrix (spectral norm) to centres (sum of Euclidean norms), has a norm. We
# compute it for each of the twelve matrices, by ascent over directions, on sampled tasks, and take the largest. For the loss the norm is
# exact: the nuclear norm of the gradient. Untrained models first, as training starts from them; the bounds use each model's own $G_1$ and $G_2$.

# %%
from leancluster_core.experiments.config import PAPER_SEEDS
from leancluster_core.experiments.sensitivity import compare_with_bounds, sensitivity_frame

axes = {
    "n_features": n_features_swept,
    "n_clusters": n_clusters_swept,
    "inverse_temperature": inverse_temperatures_swept,
    "penalty": penalties_swept,
}
quick = scale == "smoke"
n_tasks = 1 if quick else n_tasks
effort = SCALES[scale]
seeds = PAPER_SEEDS[: 1 if quick else effort.n_trials]
measured = sensitivity_frame(
    axes,
    n_points=round(512 * effort.n_points),
    n_features=n_features,
    n_clusters=n_clusters,
    penalty=penalty,
    seeds=seeds,
    n_tasks=n_tasks,
    n_iterations=2 if quick else 10,
)

# %% tags=["hide-input"]
of_centers = measured[measured["quantity"] == "centers"]
swept = [name for name in axes if name != "penalty"]
spans = of_centers[["log10_bound", "log10_measured"]].agg(["min", "max"])
save_figure(
    plot_sensitivity(of_centers, columns=swept),
    output_dir,
    "thm31_centers",
    caption="Sensitivity of the new centres to the weights, untrained models: the paper's $\\varphi$ (top), ours without "
    "exponentials (middle), and the largest derivative found (bottom), as powers of ten. "
    f"Median and range over {len(seeds)} seeds, {n_tasks} tasks each, {scale} scale.",
    alt=f"The paper's bound spans powers of ten from {spans['log10_bound']['min']:.0f} to {spans['log10_bound']['max']:.0f}, "
    f"the measured sensitivity from {spans['log10_measured']['min']:.1f} to {spans['log10_measured']['max']:.1f}; "
    "it grows with d and k alike for both codes.",
)

# %% tags=["hide-input"]
of_loss = measured[(measured["quantity"] == "loss") & (measured["regularizer"] == "entropy")]
along = of_loss[of_loss["axis"] == "penalty"].groupby("value")["measured"].median()
loss_spans = of_loss[["log10_bound", "log10_measured"]].agg(["min", "max"])
save_figure(
    plot_sensitivity(of_loss, columns=list(axes)),
    output_dir,
    "thm31_loss",
    caption="Sensitivity of a task's smoothed loss (NE) to the weights, untrained models: the paper's $\\kappa_1 \\varphi$ (top), "
    f"ours (middle), and the largest derivative found (bottom), as powers of ten. Median and range over {len(seeds)} seeds, "
    f"{n_tasks} tasks each, {scale} scale.",
    alt=f"The paper's bound spans powers of ten from {loss_spans['log10_bound']['min']:.0f} to {loss_spans['log10_bound']['max']:.0f} and "
    f"explodes as the penalty falls, while the measured sensitivity changes by a factor of {along.max() / along.min():.1f}.",
)

# %% [markdown]
# ## Trained models

# %%
from leancluster_core.experiments.grids import curve_configs, figure_runs, grid
from leancluster_core.experiments.sensitivity import evaluation_tasks, untrained_model
from leancluster_core.experiments.streams import random_stream

settings = grid(n_features=n_features_trained, n_clusters=n_clusters, penalty=penalty)
configs = curve_configs(settings, embeddings=["onehot", "binary"], scale=scale)
runs = figure_runs(configs, scale, paper_on_cpu=paper_on_cpu, weights=True)
rows = []
for run in runs:
    task, embedding = run.config.task, run.config.embedding
    for trial, trial_seed in enumerate(run.config.seeds):
        tasks = evaluation_tasks(task, trial_seed, n_tasks)
        start = untrained_model(trial_seed, task.n_features, task.n_clusters, embedding)
        for state, model in (("untrained", start), ("trained", run.model(trial))):
            found = compare_with_bounds(
                model,
                *tasks,
                penalties=[penalty],
                regularizers=[run.config.regularizer],
                n_iterations=2 if quick else 10,
                generator=random_stream(trial_seed, "directions"),
            )
            rows.append(found.assign(d=task.n_features, curve=run.config.label, weights=state))
trained = pd.concat(rows)

# %% tags=["hide-input"]
keys = ["d", "curve", "weights", "quantity"]
medians = trained.assign(log10_measured=np.log10(trained["measured"])).groupby(keys, sort=False)[
    ["qk_norm", "value_norm", "log10_bound", "log10_sharp", "log10_measured"]
].median()
loose = medians["log10_bound"] - medians["log10_measured"]
save_table(
    medians.assign(loose=loose).rename({"centers": "centres"}, level="quantity").reset_index().rename(
        columns={"qk_norm": "G1", "value_norm": "G2", "log10_bound": "paper's bound", "log10_sharp": "our bound", "log10_measured": "measured", "loose": "paper's is loose by"}
    ),
    output_dir,
    "thm31_trained",
    caption=f"Sensitivities before and after training at tau = {penalty}, k = {n_clusters}, as powers of ten: medians over "
    f"{len(runs[0].config.seeds)} trials, {n_tasks} tasks each.",
    digits=2,
)

# %% [markdown]
# ## What we see

# %% tags=["hide-input"]
from IPython.display import Markdown

by_code = measured.groupby(["quantity", "axis", "value", "embedding"])["measured"].median().unstack()
ratio = by_code["binary"] / by_code["onehot"]
of_d = ratio.loc["centers", "n_features"]
lower = [f"{d:g}" for d in of_d.index[of_d > 1]]
spread = {name: max(part.max(), 1 / part.min()) for name, part in ratio.groupby(level="quantity")}
swept_d = of_centers[of_centers["axis"] == "n_features"]
slack, ours = ((swept_d[name] - swept_d["log10_measured"]) for name in ("log10_bound", "log10_sharp"))
by_k = of_centers[(of_centers["axis"] == "n_clusters") & (of_centers["embedding"] == "onehot")]
by_k = by_k.groupby("value")[["measured", "log10_bound"]].median()
by_tau = of_loss[of_loss["axis"] == "penalty"].groupby("value")[["measured", "log10_bound"]].median()
end = medians.xs("loss", level="quantity")["log10_measured"].unstack("weights")
fell = int((end["trained"] < end["untrained"]).sum())
after = medians.xs("trained", level="weights")
Markdown(
    f"- *How loose.* Over the dimensions swept, the paper's $\\varphi$ exceeds the measured sensitivity of the centres by {slack.min():.0f} to {slack.max():.0f} orders of magnitude, "
    f"ours by {ours.min():.1f} to {ours.max():.1f}.\n"
    f"- *Codes.* The measured sensitivity of the centres is smaller for one-hot codes than for binary ones at $d$ = {', '.join(lower) or 'none'} "
    f"of {', '.join(f'{d:g}' for d in of_d.index)} (medians), as the paper's order has it. Over all sweeps the two codes differ by at most a factor of {spread['centers']:.1f} for the "
    f"centres and {spread['loss']:.1f} for the loss.\n"
    f"- *Clusters.* For one-hot codes, from $k$ = {by_k.index[0]:g} to {by_k.index[-1]:g}, $\\varphi$ goes from $10^{{{by_k['log10_bound'].iloc[0]:.0f}}}$ to "
    f"$10^{{{by_k['log10_bound'].iloc[-1]:.0f}}}$, the measured sensitivity of the centres from {by_k['measured'].iloc[0]:.2g} to {by_k['measured'].iloc[-1]:.2g}.\n"
    f"- *Penalty.* From $\\tau$ = {by_tau.index[-1]:g} to {by_tau.index[0]:g} the bound on the loss (NE) goes from $10^{{{by_tau['log10_bound'].iloc[-1]:.0f}}}$ to "
    f"$10^{{{by_tau['log10_bound'].iloc[0]:.0f}}}$, the measured sensitivity from {by_tau['measured'].iloc[-1]:.0f} to {by_tau['measured'].iloc[0]:.0f}.\n"
    f"- *Training.* Queries and keys grow to $G_1$ = {after['qk_norm'].min():.1f} to {after['qk_norm'].max():.1f}, which lifts the paper's bounds to powers of ten between "
    f"{after['log10_bound'].min():.0f} and {after['log10_bound'].max():.0f}. The measured sensitivity of the loss falls in training for {fell} of {len(end)} curves."
)

# %% [markdown]
# The paper explains with $\varphi$ that one-hot codes train faster in few dimensions, and that the codes become alike as $d$ grows. In direction, the measured
# sensitivities of untrained models fit that story where $d$ is small. In size they don't: the codes differ by a small factor where the
# bound sees many orders of magnitude. So the bound can hardly be the reason for a speed; what it bounds may be.
#
# In two respects the bound has not even the direction right. It falls with the number of clusters for one-hot codes, while the centres' sensitivity
# grows: there are more centres to move. And it explodes as the penalty falls, while the loss' sensitivity stays: no
# derivative of a smoothed minimum by a distance exceeds $2 - 1/k$ for L2, or a constant that grows as $\frac14 \log k$ for NE, whatever
# $\tau$ is ({prf:ref}`thm-slope`).
#
# ## The claims

# %% tags=["hide-input"]
from leancluster_core.experiments.claims import evaluate_claims, save_verdicts

frames = {"bounds": table, "phi": grid_of_phi}
save_verdicts(
    evaluate_claims("thm31", frames, scale=scale, run_keys=[run.config.key for run in runs]), output_dir
)

# %% [markdown]
# ## What to change
#
# - `n_features = 32`: does the number of clusters still matter for the measured sensitivity?
# - `inverse_temperatures_swept = [100.0, 1000.0, 10000.0]`: toward the hardmax of Theorem 2.1, where derivatives vanish or explode.
# - `penalty = 1.0` and `n_features_trained = [4]`: models that stay above Lloyd's step. Are they less sensitive?

# %% tags=["hide-input"]
provenance_card(scale, runs)
