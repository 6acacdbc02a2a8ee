"""Theorem 2.1 checked: layers of the Lloyd transformer against Lloyd iterations, as frames."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from leancluster_core.distances import nearest_centers, squared_distances
from leancluster_core.embeddings import EMBEDDINGS
from leancluster_core.experiments.config import EMBEDDING_LABELS
from leancluster_core.experiments.evaluation import multi_step
from leancluster_core.experiments.streams import random_stream
from leancluster_core.kmeans import lloyd
from leancluster_core.models import ClusteringTransformer, lloyd_transformer
from leancluster_core.samplers import TaskDistribution

CODED = ("onehot", "binary")

# Two nearest centers whose squared distances agree to this share count as a tie: arithmetic, and
# not the data, would choose between them.
TIE = 1e-9

# Measurements on a grid (millimetres, grey levels) tie all the time if single rows are centers.
ROWS_PER_START = 5


def exact_table(
    shapes: Iterable[Sequence[int]],
    *,
    n_centers: int,
    points_per_cluster: int,
    n_iterations: int,
    seed: int,
    embeddings: Sequence[str] = CODED,
) -> pd.DataFrame:
    """Layers against iterations on random tasks, in float64 (claims S2-exact, S2-exact-oh).

    shapes: pairs (n_features, n_clusters). Each gets as many tasks as have n_centers centers in
    all, with points_per_cluster points a cluster. Tasks on which Lloyd's algorithm meets a tie or
    empties a cluster are outside the theorem: they are replaced by fresh ones and counted. One row
    an embedding, shape and iteration: n_tasks, n_replaced, max_difference (of centers),
    labels_equal.
    """
    rows = []
    for index, (d, k) in enumerate(shapes):
        n_tasks = -(-n_centers // k)
        points, iterates, n_replaced = _tasks_within_assumptions(
            TaskDistribution(n_points=points_per_cluster * k, n_features=d, n_clusters=k),
            n_tasks,
            n_iterations,
            random_stream(seed, "evaluation", index),
        )
        labels = nearest_centers(points, iterates)
        for embedding in embeddings:
            model = lloyd_transformer(d, k, embedding=embedding, dtype=torch.float64)
            layers = multi_step(model, points, iterates[0], n_iterations, reembed=False)
            differences = (layers - iterates).abs().flatten(1).amax(1)
            equal = (nearest_centers(points, layers) == labels).flatten(1).all(1)
            rows += [
                {
                    "embedding": embedding,
                    "n_features": d,
                    "n_clusters": k,
                    "iteration": t,
                    "n_tasks": n_tasks,
                    "n_replaced": n_replaced,
                    "max_difference": float(differences[t]),
                    "labels_equal": bool(equal[t]),
                }
                for t in range(1, n_iterations + 1)
            ]
    return pd.DataFrame(rows)


def _tasks_within_assumptions(
    tasks: TaskDistribution, n_tasks: int, n_iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Points (tasks, n, d), Lloyd's iterates (T + 1, tasks, k, d), and how many were replaced."""
    kept: list[tuple[Tensor, Tensor]] = []
    n_found = n_replaced = 0
    while n_found < n_tasks:
        points, centers = (t.double() for t in tasks.sample((n_tasks,), generator=generator))
        iterates = lloyd(points, centers, n_iterations, return_all=True)
        whole = assumptions_hold(points, iterates[:-1])
        kept.append((points[whole], iterates[:, whole]))
        n_found += int(whole.sum())
        n_replaced += int((~whole).sum())
        if n_replaced > 100 * n_tasks:
            raise RuntimeError(f"of {n_found + n_replaced} tasks {n_replaced} break an assumption")
    points = torch.cat([p for p, _ in kept])[:n_tasks]
    return points, torch.cat([i for _, i in kept], 1)[:, :n_tasks], n_replaced


def assumptions_hold(points: Tensor, iterates: Tensor) -> Tensor:
    """Where no cluster is empty and no nearest center tied, at any iterate: bool (tasks,).

    points: (tasks, n, d), iterates: (T, tasks, k, d).
    """
    holds = torch.ones(points.shape[0], dtype=torch.bool)
    for centers in iterates:
        distances = squared_distances(points, centers)
        k = centers.shape[-2]
        labels = distances.argmin(-1)
        occupied = torch.nn.functional.one_hot(labels, k).any(-2).all(-1)
        nearest, second = distances.topk(min(2, k), largest=False).values.unbind(-1)
        holds &= occupied & (second - nearest > TIE * second).all(-1)
    return holds


def real_data() -> dict[str, tuple[Tensor, int]]:
    """scikit-learn's bundled data sets: name -> points (n, d) in float64, number of classes."""
    from sklearn import datasets

    loaders: dict[str, Callable[[], Any]] = {
        "iris": datasets.load_iris,
        "wine": datasets.load_wine,
        "breast cancer": datasets.load_breast_cancer,
        "digits": datasets.load_digits,
    }
    loaded = {name: load() for name, load in loaders.items()}
    return {
        name: (torch.from_numpy(np.asarray(data.data, dtype=np.float64)), len(data.target_names))
        for name, data in loaded.items()
    }


def judged_table(
    data: dict[str, tuple[Tensor, int]], *, n_starts: int, n_iterations: int, seed: int
) -> pd.DataFrame:
    """The transformer and our Lloyd on real data, with scikit-learn's KMeans as the judge.

    data: name -> points (n, d) in float64 and k. An initial center is the mean of ROWS_PER_START
    random rows, n_starts times; starts from which Lloyd's algorithm meets a tie or empties a
    cluster are replaced and counted. One row a data set and
    method: the largest difference of a center to scikit-learn's over all starts and iterations, in
    the data's units, and whether all labels are the same.
    """
    rows = []
    for index, (name, (points, k)) in enumerate(data.items()):
        generator = random_stream(seed, "evaluation", index)
        starts, n_replaced = _starts(points, k, n_starts, n_iterations, generator)
        tasks = points.expand(n_starts, -1, -1)
        judged = [_judge(points, start, n_iterations) for start in starts]
        judge_centers = torch.stack([centers for centers, _ in judged], 1)
        judge_labels = torch.stack([labels for _, labels in judged], 1)
        rollouts = {"our Lloyd": lloyd(tasks, starts, n_iterations, return_all=True)}
        for embedding in CODED:
            model = lloyd_transformer(points.shape[1], k, embedding=embedding, dtype=points.dtype)
            layers = multi_step(model, tasks, starts, n_iterations, reembed=False)
            rollouts[f"transformer, {EMBEDDING_LABELS[embedding]}"] = layers
        for method, rollout in rollouts.items():
            labels = nearest_centers(tasks, rollout[1:])
            rows.append(
                {
                    "data": name,
                    "n": len(points),
                    "d": points.shape[1],
                    "k": k,
                    "method": method,
                    "starts": n_starts,
                    "replaced": n_replaced,
                    "largest difference": float((rollout[1:] - judge_centers).abs().max()),
                    "labels equal": bool(torch.equal(labels, judge_labels)),
                }
            )
    return pd.DataFrame(rows)


def _starts(
    points: Tensor, k: int, n_starts: int, n_iterations: int, generator: torch.Generator
) -> tuple[Tensor, int]:
    """Initial centers (n_starts, k, d) within the assumptions, and how many were not."""
    kept: list[Tensor] = []
    n_drawn = 0
    while len(kept) < n_starts:
        rows = torch.randperm(len(points), generator=generator)[: k * ROWS_PER_START]
        start = points[rows].unflatten(0, (k, ROWS_PER_START)).mean(1)
        iterates = lloyd(points, start, n_iterations, return_all=True)
        n_drawn += 1
        if assumptions_hold(points[None], iterates[:-1, None]):
            kept.append(start)
        if n_drawn > 100 * n_starts:
            raise RuntimeError(f"only {len(kept)} of {n_drawn} starts are within the assumptions")
    return torch.stack(kept), n_drawn - n_starts


def _judge(points: Tensor, start: Tensor, n_iterations: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's centers (T, k, d) and labels (T, n) after 1..T iterations."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    centers, labels = [], []
    for iterations in range(1, n_iterations + 1):
        judge = KMeans(
            len(start), init=start.numpy(), n_init=1, max_iter=iterations, tol=0, algorithm="lloyd"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            judge.fit(points.numpy())
        centers.append(torch.from_numpy(judge.cluster_centers_))
        labels.append(torch.from_numpy(judge.labels_).long())
    return torch.stack(centers), torch.stack(labels)


def toy_task(seed: int) -> tuple[Tensor, Tensor]:
    """Sixty points in the plane and three initial centers, in float64: (60, 2), (3, 2)."""
    tasks = TaskDistribution(n_points=60, n_features=2, n_clusters=3)
    points, centers = tasks.sample((), generator=random_stream(seed, "evaluation"))
    return points.double(), centers.double()


def parameter_table(sizes: Iterable[int]) -> pd.DataFrame:
    """Parameters of one layer at k = d and k = 4d (claim S2-params), counted from the models."""
    return pd.DataFrame(
        {
            "embedding": embedding,
            "n_features": d,
            "n_clusters": k,
            "n_parameters": ClusteringTransformer(d, k, embedding=embedding).n_parameters,
        }
        for d in sizes
        for k in (d, 4 * d)
        for embedding in EMBEDDINGS
    )


def broken_assumptions() -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest tasks that break one assumption of Theorem 2.1 each, in float64: name -> (X, C)."""
    tasks = {
        "duplicate points": ([[0, 0], [0, 0], [0, 2], [6, 0], [6, 2]], [[0, 1], [6, 1]]),
        "a tie": ([[0, 0], [2, 0], [4, 0]], [[0, 0], [4, 0]]),
        "an empty cluster": ([[0, 0], [0, 2], [6, 0], [6, 2]], [[0, 1], [6, 1], [50, 50]]),
    }
    return {
        name: (torch.tensor(x, dtype=torch.float64), torch.tensor(c, dtype=torch.float64))
        for name, (x, c) in tasks.items()
    }


def broken_table() -> pd.DataFrame:
    """One step from each of :func:`broken_assumptions`: centers of Lloyd and the transformers."""
    rows = []
    for name, (points, centers) in broken_assumptions().items():
        d, k = centers.shape[1], len(centers)
        results = {"Lloyd": lloyd(points, centers, 1)}
        for embedding in CODED:
            model = lloyd_transformer(d, k, embedding=embedding, dtype=points.dtype)
            results[f"transformer, {EMBEDDING_LABELS[embedding]}"] = model(points, centers)
        for method, result in results.items():
            written = [f"({', '.join(f'{x:g}' for x in row)})" for row in result.tolist()]
            same = bool(torch.allclose(result, results["Lloyd"], rtol=0, atol=1e-12))
            rows.append(
                {"case": name, "method": method, "as Lloyd": same}
                | {f"centre {i + 1}": text for i, text in enumerate(written)}
            )
    return pd.DataFrame(rows)
