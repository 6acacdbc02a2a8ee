"""How strongly a model and its loss react to a small change of the weights, measured (Theorem 3.1).

The bounds of Appendix I measure a change of weights by the sum over the twelve matrices of spectral
norms, and a change of centers by the sum of Euclidean norms. The derivative's norm in these is the
largest of the twelve matrices' own, so each is measured on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from leancluster_core.checks import check_choice, check_integer, check_number
from leancluster_core.distances import _squared_distances
from leancluster_core.embeddings import embed
from leancluster_core.experiments import bounds
from leancluster_core.experiments.attacks import literal_layer
from leancluster_core.experiments.bounds import Constant
from leancluster_core.experiments.config import EMBEDDING_LABELS
from leancluster_core.experiments.streams import random_stream
from leancluster_core.losses import REGULARIZERS, _smoothed_minimum
from leancluster_core.models import ClusteringTransformer
from leancluster_core.samplers import TaskDistribution

WEIGHTS = tuple(f"{kind}{index}" for kind in ("Q", "K", "V") for index in (1, 2, 3, 4))
_KINDS = ("query", "key", "value")


class SpectralNorms(NamedTuple):
    """Largest spectral norms of a model's Q and K (G1) and V (G2)."""

    qk_norm: float
    value_norm: float


def spectral_norms(model: ClusteringTransformer) -> SpectralNorms:
    """G1 and G2 of a model (over all of its trials)."""
    norms = [
        float(torch.linalg.matrix_norm(getattr(model, kind).detach().double(), ord=2).max())
        for kind in _KINDS
    ]
    return SpectralNorms(max(norms[:2]), norms[2])


def model_sensitivity(
    model: ClusteringTransformer,
    points: Tensor,
    centers: Tensor,
    *,
    n_iterations: int = 10,
    generator: torch.Generator,
) -> Tensor:
    """Largest change of the new centers per change of each weight matrix: (tasks, 12), float64.

    For every task and matrix, the supremum over directions of spectral norm 1 of the derivative's
    sum of Euclidean norms. It is found by ascent: linearise at the direction, move to the
    orthogonal matrix that the linearisation prefers. Each step can only go up, so the result is a
    lower bound of the supremum, from a random start drawn from ``generator``.

    model: one trial, finite inverse temperature, one layer. points: (tasks, n, d), centers:
    (tasks, k, d). Columns as in WEIGHTS.
    """
    weights, tokens, gamma = _prepared(model, points, centers)
    check_integer("n_iterations", n_iterations, 1)
    d, n_tasks = model.n_features, points.shape[0]
    found = []
    for index in range(12):
        kind, place = divmod(index, 4)

        def new_centers(matrix: Tensor, kind: int = kind, place: int = place) -> Tensor:
            changed = list(weights)
            changed[kind] = weights[kind].index_copy(1, torch.tensor([place]), matrix[:, None])
            return literal_layer(*tokens, *changed, inverse_temperature=gamma)[1][..., :d]

        at = weights[kind][:, place].clone().requires_grad_(True)
        out = new_centers(at)
        # The derivative at a direction is the derivative of the pull-back, which is linear.
        cotangent = torch.zeros_like(out, requires_grad=True)
        (pulled,) = torch.autograd.grad(out, at, cotangent, create_graph=True)
        direction = torch.randn(at.shape, generator=generator, dtype=torch.float64)
        best = torch.zeros(n_tasks, dtype=torch.float64)
        for _ in range(n_iterations):
            direction = _closest_orthogonal(direction)
            (change,) = torch.autograd.grad(pulled, cotangent, direction, retain_graph=True)
            length = change.norm(dim=-1, keepdim=True)
            best = torch.maximum(best, length.sum((-2, -1)))
            unit = change / length.clamp_min(1e-300)
            (direction,) = torch.autograd.grad(out, at, unit, retain_graph=True)
        found.append(best)
    return torch.stack(found, -1)


def loss_sensitivity(
    model: ClusteringTransformer,
    points: Tensor,
    centers: Tensor,
    *,
    penalty: float,
    regularizer: str,
) -> Tensor:
    """Largest change of a task's smoothed loss per change of each weight: (tasks, 12), float64.

    Exact: the supremum of a linear function over the spectral unit ball is the nuclear norm of the
    gradient. Arguments as in :func:`model_sensitivity`; columns as in WEIGHTS.
    """
    penalty = check_number("penalty", penalty, 0.0, above=True)
    check_choice("regularizer", regularizer, REGULARIZERS)
    weights, tokens, gamma = _prepared(model, points, centers)
    leaves = [weight.clone().requires_grad_(True) for weight in weights]
    _, updated = literal_layer(*tokens, *leaves, inverse_temperature=gamma)
    data = tokens[0][..., : model.n_features]
    distances = _squared_distances(data, updated[..., : model.n_features])
    loss = _smoothed_minimum(distances, penalty, regularizer).sum()
    gradients = torch.autograd.grad(loss, leaves)
    return torch.cat([torch.linalg.matrix_norm(g, ord="nuc") for g in gradients], -1)


def compare_with_bounds(
    model: ClusteringTransformer,
    points: Tensor,
    centers: Tensor,
    *,
    penalties: Sequence[float],
    regularizers: Sequence[str] = REGULARIZERS,
    n_iterations: int = 10,
    generator: torch.Generator,
) -> pd.DataFrame:
    """Measured sensitivities of one model beside what the theorems allow, with its own G1 and G2.

    One row for the centers (quantity "centers": Theorem I.1's phi) and one a penalty and
    regularizer (quantity "loss": kappa1 phi, Theorem 3.1). Columns quantity, regularizer, penalty,
    qk_norm, value_norm, measured (the largest over tasks and matrices), matrix (where), log10_bound
    (the paper's), log10_sharp (ours, without exponentials).
    """
    d, k, embedding = model.n_features, model.n_clusters, model.embedding
    norms = spectral_norms(model)
    own = {**norms._asdict(), "inverse_temperature": model.inverse_temperature}
    phi = bounds.model_stability(d, k, embedding, **own)
    sharp = bounds.model_stability_sharp(d, k, embedding, **own)

    def row(found: Tensor, bound: Constant, sharp: Constant, **labels: object) -> dict[str, object]:
        largest = found.amax(0)
        return {
            **labels,
            **norms._asdict(),
            "measured": float(largest.max()),
            "matrix": WEIGHTS[int(largest.argmax())],
            "log10_bound": bound.log10,
            "log10_sharp": sharp.log10,
        }

    found = model_sensitivity(
        model, points, centers, n_iterations=n_iterations, generator=generator
    )
    rows = [row(found, phi, sharp, quantity="centers", regularizer="", penalty=math.nan)]
    with torch.no_grad():
        distances = _squared_distances(points.double(), model(points, centers).double())
    spread = float((distances.amax((-2, -1)) - distances.amin((-2, -1))).max())
    for penalty in penalties:
        for regularizer in regularizers:
            found = loss_sensitivity(
                model, points, centers, penalty=penalty, regularizer=regularizer
            )
            size = (points.shape[-2], d, k, embedding)
            g2 = norms.value_norm
            kappa = bounds.loss_stability(
                *size, value_norm=g2, penalty=penalty, spread=spread, regularizer=regularizer
            )
            tight = bounds.loss_stability_sharp(*size, value_norm=g2, regularizer=regularizer)
            labels = {"quantity": "loss", "regularizer": regularizer, "penalty": penalty}
            rows.append(row(found, kappa.times(phi), tight.times(sharp), **labels))
    return pd.DataFrame(rows)


def untrained_model(
    seed: int,
    n_features: int,
    n_clusters: int,
    embedding: str,
    *,
    inverse_temperature: float = 1.0,
) -> ClusteringTransformer:
    """A model as training starts from it, its weights drawn from the seed's own stream."""
    return ClusteringTransformer(
        n_features,
        n_clusters,
        embedding=embedding,
        inverse_temperature=inverse_temperature,
        generator=random_stream(seed, "initialisation"),
    )


def evaluation_tasks(task: TaskDistribution, seed: int, n_tasks: int) -> tuple[Tensor, Tensor]:
    """Tasks of a seed's evaluation stream: points (tasks, n, d), centers (tasks, k, d)."""
    return task.sample((n_tasks,), generator=random_stream(seed, "evaluation"))


def sensitivity_frame(
    axes: Mapping[str, Sequence[float]],
    *,
    n_points: int,
    n_features: int,
    n_clusters: int,
    inverse_temperature: float = 1.0,
    penalty: float = 0.1,
    embeddings: Sequence[str] = ("onehot", "binary"),
    seeds: Sequence[int],
    n_tasks: int = 4,
    n_iterations: int = 10,
) -> pd.DataFrame:
    """Sensitivities of untrained models while one setting at a time is varied.

    axes: "n_features", "n_clusters", "inverse_temperature" or "penalty" -> its values; the others
    stay as given. Columns of :func:`compare_with_bounds`, and axis, value, embedding, seed,
    log10_measured. "penalty" has rows of the loss alone.
    """
    base = {
        "n_features": n_features,
        "n_clusters": n_clusters,
        "inverse_temperature": inverse_temperature,
        "penalty": penalty,
    }
    frames = []
    for axis, values in axes.items():
        check_choice("axis", axis, base)
        # All penalties share the models and tasks, and the centers' sensitivity.
        penalties = list(values) if axis == "penalty" else [penalty]
        for value in [penalty] if axis == "penalty" else values:
            at = base | {axis: value}
            d, k = int(at["n_features"]), int(at["n_clusters"])
            for embedding in embeddings:
                for seed in seeds:
                    model = untrained_model(
                        seed, d, k, embedding, inverse_temperature=at["inverse_temperature"]
                    )
                    task = TaskDistribution(n_points=max(n_points, k), n_features=d, n_clusters=k)
                    table = compare_with_bounds(
                        model,
                        *evaluation_tasks(task, seed, n_tasks),
                        penalties=penalties,
                        n_iterations=n_iterations,
                        generator=random_stream(seed, "directions"),
                    )
                    if axis == "penalty":
                        table = table[table["quantity"] == "loss"]
                    labels = {"axis": axis, "embedding": embedding, "seed": seed}
                    table = table.assign(**labels)
                    table["value"] = table["penalty"] if axis == "penalty" else value
                    frames.append(table)
    frame = pd.concat(frames, ignore_index=True)
    return frame.assign(log10_measured=np.log10(frame["measured"]))


@torch.no_grad()
def token_norms_table(
    models: Mapping[tuple[str, str], ClusteringTransformer],
    task: TaskDistribution,
    *,
    n_tasks: int,
    seed: int,
) -> pd.DataFrame:
    """Table 3, and the largest norms found: one row a model and attention's queries and keys.

    models: by (embedding, state), each a single trial. Columns embedding, weights (the state), G2,
    attention, m, m', and for the queries and the keys the bound and the measured norm: "bound rho",
    "rho", "bound rho'", "rho'".
    """
    points, centers = evaluation_tasks(task, seed, n_tasks)
    rows = []
    for (embedding, state), model in models.items():
        norms = spectral_norms(model)
        weights, tokens, gamma = _prepared(model, points, centers)
        updated, _ = literal_layer(*tokens, *weights, inverse_temperature=gamma)
        point, center, new_point = (float(t.norm(dim=-1).max()) for t in (*tokens, updated))
        found = ((point, center), (point, point), (center, new_point), (center, center))
        terms = bounds.attention_terms(
            task.n_points, task.n_features, task.n_clusters, embedding, **norms._asdict()
        )
        for (name, of), (query, key) in zip(terms.items(), found, strict=True):
            rows.append(
                {
                    "embedding": EMBEDDING_LABELS[embedding],
                    "weights": state,
                    "G2": norms.value_norm,
                    "attention": name,
                    "m": of.n_queries,
                    "m'": of.n_keys,
                    "bound rho": of.query_norm,
                    "rho": query,
                    "bound rho'": of.key_norm,
                    "rho'": key,
                }
            )
    return pd.DataFrame(rows)


def _prepared(
    model: ClusteringTransformer, points: Tensor, centers: Tensor
) -> tuple[Sequence[Tensor], tuple[Tensor, Tensor], Tensor]:
    """Weights (tasks, 4, e, e) for each task, token rows, gamma (tasks,): all float64."""
    n_trials = model.n_trials
    if n_trials is not None:
        raise ValueError(f"model must be a single trial, got n_trials={n_trials}")
    if points.dim() != 3:
        raise ValueError(f"points must have the shape (tasks, n, d), got {tuple(points.shape)}")
    bias = "query_bias" in dict(model.named_parameters())
    if math.isinf(model.inverse_temperature) or model.n_layers != 1 or bias:
        raise ValueError(
            "model must have one layer, no bias and a finite inverse_temperature, got "
            f"n_layers={model.n_layers}, bias={bias}, "
            f"inverse_temperature={model.inverse_temperature:g}"
        )
    tokens = embed(points.double(), centers.double(), model.embedding)
    n_tasks = points.shape[0]
    weights = [
        getattr(model, kind).detach().double().expand(n_tasks, -1, -1, -1).clone()
        for kind in _KINDS
    ]
    gamma = torch.full((n_tasks,), model.inverse_temperature, dtype=torch.float64)
    return weights, tokens, gamma


def _closest_orthogonal(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix)
    return left @ right
