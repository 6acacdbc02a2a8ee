"""Rollouts as frames: the log k-means loss after each of many steps, of models and of baselines."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from leancluster_core.checks import check_integer, check_points_and_centers
from leancluster_core.distances import squared_distances
from leancluster_core.experiments.config import EMBEDDING_LABELS, REGULARIZER_LABELS
from leancluster_core.experiments.evaluation import multi_step
from leancluster_core.experiments.store import Run
from leancluster_core.kmeans import lloyd


def rollout_frame(
    runs: Iterable[Run], points: Tensor, centers: Tensor, n_iterations: int, *, reembed: bool = True
) -> pd.DataFrame:
    """Each trial of each run rolled out on the same tasks (Appendix E).

    points: (tasks, n, d), centers: (tasks, k, d). Columns embedding, regularizer, trial, step (0 is
    before the first) and log_loss, the mean over tasks of the log k-means loss. The log loss is inf
    where a rollout has diverged so far that centers are not finite.
    """
    points, centers = check_points_and_centers(points, centers)
    frames = []
    for run in runs:
        rollout = multi_step(
            run.model(), points[None], centers[None], n_iterations, reembed=reembed
        )
        for trial, of_trial in enumerate(rollout.unbind(1)):
            labels = {
                "embedding": run.config.embedding,
                "regularizer": run.config.regularizer,
                "trial": trial,
            }
            frames.append(_frame(points, of_trial, labels))
    return pd.concat(frames, ignore_index=True)


def lloyd_frame(points: Tensor, centers: Tensor, n_iterations: int) -> pd.DataFrame:
    """Our Lloyd on the same tasks: columns method ("Lloyd"), trial (0), step, log_loss."""
    iterates = lloyd(points, centers, n_iterations, return_all=True)
    return _frame(points, iterates, {"method": "Lloyd", "trial": 0})


def scikit_learn_frame(points: Tensor, centers: Tensor, n_iterations: int) -> pd.DataFrame:
    """scikit-learn's ``KMeans(algorithm="lloyd")`` from the same centers, stopped at each step.

    Columns as :func:`lloyd_frame`. It computes in float64, and moves the center of an empty cluster
    to a far point where our Lloyd keeps it.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    points, centers = check_points_and_centers(points, centers)
    n_iterations = check_integer("n_iterations", n_iterations, 0)
    steps = [_log_loss(points, centers)]
    tasks = list(zip(points.double().numpy(), centers.double().numpy(), strict=True))
    for step in range(1, n_iterations + 1):
        losses = []
        for task, start in tasks:
            judge = KMeans(len(start), init=start, n_init=1, max_iter=step, tol=0)
            with warnings.catch_warnings():
                # Fewer distinct labels than clusters: a cluster went empty, as it may.
                warnings.simplefilter("ignore", ConvergenceWarning)
                losses.append(judge.fit(task).inertia_)
        steps.append(float(np.log(losses).mean()))
    return pd.DataFrame(
        {
            "method": "scikit-learn",
            "trial": 0,
            "step": range(n_iterations + 1),
            "log_loss": steps,
        }
    )


def describe_rollout(rollouts: pd.DataFrame, lloyd: pd.DataFrame) -> str:
    """Where rollouts end, in words: Lloyd's last log loss, and the models' medians over trials."""
    n_iterations = int(rollouts["step"].max())
    end = float(lloyd.loc[lloyd["step"] == n_iterations, "log_loss"].iloc[0])
    last = rollouts[rollouts["step"] == n_iterations]
    curves = last.groupby(["embedding", "regularizer"], sort=False)["log_loss"].median()
    ends = {
        f"{EMBEDDING_LABELS[e]}:{REGULARIZER_LABELS[r]}": value for (e, r), value in curves.items()
    }
    below = [name for name, value in ends.items() if value < end]
    listed = ", ".join(f"{name} {value:.2f}" for name, value in ends.items())
    return (
        f"After {n_iterations} steps Lloyd is at {end:.2f}, the models (median over trials) at "
        f"{listed}. Below Lloyd: {', '.join(below) or 'none of them'}."
    )


def _frame(points: Tensor, rollout: Tensor, labels: dict[str, object]) -> pd.DataFrame:
    """Rows for the steps of a rollout (steps, tasks, k, d)."""
    losses = [_log_loss(points, centers) for centers in rollout]
    return pd.DataFrame({**labels, "step": range(len(losses)), "log_loss": losses})


def _log_loss(points: Tensor, centers: Tensor) -> float:
    """Mean over tasks of the log k-means loss, inf for centers that left the numbers."""
    if not bool(torch.isfinite(centers).all()):
        return math.inf
    # In float64: centers of a rollout that diverges are finite long after their squares are not.
    distances = squared_distances(points.double(), centers.double())
    return float(distances.amin(-1).sum(-1).log().mean())
