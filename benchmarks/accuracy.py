"""How far float32 is from float64: the loss and its gradients, for each backend of the model.

    python benchmarks/accuracy.py        the grid of d, n, gamma and offset, some minutes

Every case draws a task, shifts it by an offset, and compares the smoothed loss of the model's
prediction and its gradients with respect to Q, K and V with the literal definition in float64, on
the same float32 numbers. The model computes in float64 inside where its own rule says so
(``ClusteringTransformer``, Accuracy); "in float32" is what it would have given without that rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from machine import describe, save
from torch import Tensor

from leancluster_core import (
    ClusteringTransformer,
    TaskDistribution,
    embed,
    models,
    smoothed_kmeans_loss,
)
from leancluster_core.models import BACKENDS

N_FEATURES = (1, 4, 32, 128)
N_POINTS = (1, 2, 50, 512, 2048)
GAMMAS = (0.01, 1.0, 100.0)
OFFSETS = (0.0, 10.0, 1000.0)


def literal(model: ClusteringTransformer, points: Tensor, centers: Tensor) -> Tensor:
    """Equation 4 in the dtype of the input, with distances by differences of projected tokens."""
    x, c = embed(points, centers, model.embedding)
    query, key, value = (w.to(points.dtype) for w in (model.query, model.key, model.value))

    def attend(index: int, queries: Tensor, keys: Tensor) -> Tensor:
        q, k = queries @ query[index].T, keys @ key[index].T
        distances = torch.stack([(row - k).square().sum(-1) for row in q])
        scale = model.inverse_temperature / math.sqrt(model.embedding_dim)
        return torch.softmax(-scale * distances, -1) @ (keys @ value[index].T)

    x = x + attend(0, x, c) + attend(1, x, x)
    return (c + attend(2, c, x) + attend(3, c, c))[:, : model.n_features]


def outcome(model: ClusteringTransformer, points: Tensor, predicted: Tensor) -> list[Tensor]:
    """Loss of a prediction, and its gradients with respect to Q, K and V."""
    loss = smoothed_kmeans_loss(points, predicted, penalty=0.1, regularizer="l2")
    return [loss.detach(), *torch.autograd.grad(loss, [model.query, model.key, model.value])]


def relative_error(found: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """Of the loss, and of the gradient as a whole: norm of the difference over the norm."""
    pairs = [(found[0], expected[0])]
    pairs += [
        tuple(torch.cat([g.flatten() for g in gradients[1:]]) for gradients in (found, expected))
    ]
    loss, gradient = (
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in pairs
    )
    return loss, gradient


Case = tuple[int, int, float, float]


def errors(case: Case) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Whether the model switches to float64, and each backend's errors of loss and gradient.

    case: n_features, n_points, inverse_temperature, offset.
    """
    n_features, n_points, gamma, offset = case
    n_clusters = min(6, n_points)
    task = TaskDistribution(n_points=n_points, n_features=n_features, n_clusters=n_clusters)
    points, centers = task.sample((), generator=torch.Generator().manual_seed(1))
    points, centers = points + offset, centers + offset
    model = ClusteringTransformer(
        n_features,
        n_clusters,
        inverse_temperature=gamma,
        generator=torch.Generator().manual_seed(2),
    )
    expected = outcome(model, points.double(), literal(model, points.double(), centers.double()))
    found = {}
    for model.backend in BACKENDS:
        found[model.backend] = relative_error(
            outcome(model, points, model(points, centers)), expected
        )
    return model._needs_float64(points, centers, model._largest_square_norm()), found


@contextmanager
def float32_only() -> Iterator[None]:
    """Without the model's rule."""
    limits = models.LARGEST_COORDINATE, models.LARGEST_SCORE
    models.LARGEST_COORDINATE = models.LARGEST_SCORE = math.inf
    try:
        yield
    finally:
        models.LARGEST_COORDINATE, models.LARGEST_SCORE = limits


def main() -> None:
    torch.set_num_threads(1)
    print(describe())
    rows = []
    for d, gamma, offset in itertools.product(N_FEATURES, GAMMAS, OFFSETS):
        cases = [(d, n, gamma, offset) for n in N_POINTS]
        found = [errors(case) for case in cases]
        with float32_only():
            alone = [
                errors(case)[1] if switched else by_backend
                for case, (switched, by_backend) in zip(cases, found, strict=True)
            ]
        row: dict[str, object] = {
            "d": d, "gamma": gamma, "offset": int(offset),
            "float64": "yes" if any(switched for switched, _ in found) else "no",
        }  # fmt: skip
        pairs = [pair for _, by_backend in found for pair in by_backend.values()]
        row["loss"], row["gradient"] = (f"{max(errors):.0e}" for errors in zip(*pairs, strict=True))
        for backend in BACKENDS:
            row[f"{backend}_in_float32"] = f"{max(e[backend][1] for e in alone):.0e}"
        rows.append(row)
        print(*row.values(), flush=True)
    save("accuracy", rows)


if __name__ == "__main__":
    main()
