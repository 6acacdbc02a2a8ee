"""Lloyd's algorithm, batched: the baseline of every figure, and what Theorem 2.1 reproduces.

An iteration gives each point to its nearest center (of equally near ones, the one of lowest index)
and moves each center to the mean of its points. What happens to a cluster without points is the
caller's choice; the default, "keep", is deterministic. To see which clusters are empty, count
labels: no entry of ``nearest_centers(points, centers)`` is the index of an empty cluster.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from leancluster_core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_points_and_centers,
    without_autocast,
)
from leancluster_core.distances import (
    _as_tasks,
    _Block,
    _center,
    _centered_blocks,
    _decide_by_differences,
    _proven_labels,
    _scaled_into_range,
    _times_power_of_two,
)
from leancluster_core.groups import group_equal_rows, sums_by_label

EMPTY_RULES = ("keep", "resample", "raise")


def lloyd_step(
    points: Tensor,
    centers: Tensor,
    *,
    empty: str = "keep",
    generator: torch.Generator | None = None,
) -> Tensor:
    """One Lloyd iteration: the means of the points nearest to each center (Section 5, Equation 20).

    The same as ``lloyd(points, centers, 1)``; see :func:`lloyd`.
    """
    return lloyd(points, centers, 1, empty=empty, generator=generator)


def lloyd(
    points: Tensor,
    centers: Tensor,
    n_iterations: int,
    *,
    empty: str = "keep",
    return_all: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Run Lloyd's algorithm on each task, from the given centers.

    points: (..., n, d); centers: (..., k, d) with 1 <= k <= n; batch dimensions broadcast.
    n_iterations: at least 0. Returns the centers (..., k, d), or with ``return_all`` the centers
    before the first and after each iteration, (n_iterations + 1, ..., k, d). Means are taken of
    centered points and added up in float64, so a common offset costs no accuracy. Ties go to the
    center of lowest index. Stops early where nothing moves any more, which changes no result.

    empty: what becomes of a center without points. "keep" leaves it where it is. "resample" puts
    it on a random point of its task (as the authors' code does) drawn with ``generator``, which is
    then required. "raise" refuses, naming task, cluster and iteration.

    Warns (UserWarning) when a task has fewer distinct points than clusters, so that some clusters
    cannot be distinct. Not differentiable. Raises ValueError or TypeError for NaN or infinite
    entries, wrong rank, different d, k > n, a negative n_iterations, an unknown ``empty``, and a
    missing generator.
    """
    points, centers = check_points_and_centers(points, centers)
    n_iterations = check_integer("n_iterations", n_iterations, 0)
    check_choice("empty", empty, EMPTY_RULES)
    check_flag("return_all", return_all)
    if empty == "resample" and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator for empty='resample', got {generator}"
        )
    batch_shape, points, centers = _as_tasks(points, centers)
    with without_autocast(points):
        iterates, occupied = _iterate(points, centers, n_iterations, empty, generator, batch_shape)
    _warn_about_duplicates(points, occupied, batch_shape)
    iterates = iterates.reshape(n_iterations + 1, *batch_shape, *centers.shape[-2:])
    return iterates if return_all else iterates[-1].clone()


@torch.no_grad()
def _lloyd(points: Tensor, centers: Tensor, n_iterations: int = 1) -> Tensor:
    """Unchecked: the centers (..., k, d) after some iterations, empty clusters kept."""
    batch_shape, points, centers = _as_tasks(points, centers)
    iterates, _ = _iterate(points, centers, n_iterations, "keep", None, batch_shape)
    return iterates[-1].reshape(*batch_shape, *centers.shape[-2:])


@torch.no_grad()
def _iterate(
    points: Tensor,
    centers: Tensor,
    n_iterations: int,
    empty: str,
    generator: torch.Generator | None,
    batch_shape: torch.Size,
) -> tuple[Tensor, Tensor]:
    """All iterates (n_iterations + 1, tasks, k, d) of points (tasks, n, d), and which clusters had
    points in the last one, (tasks, k)."""
    points, centers, exponent = _scaled_into_range(points, centers)
    iterates = centers.repeat(n_iterations + 1, 1, 1, 1)  # memory of its own, never the caller's
    occupied = torch.ones(centers.shape[:-1], dtype=torch.bool, device=centers.device)
    shift = _center(points)
    # Centered once for all iterations, as columns: another copy of the points.
    blocks = list(_centered_blocks(points, shift, centers.shape[-2])) if n_iterations else []
    for iteration in range(1, n_iterations + 1):
        centers = iterates[iteration - 1]
        labels, undecided = _proven_labels(points, shift, blocks, centers)
        _decide_by_differences(points, centers, labels, undecided)
        means, occupied = _means(blocks, labels, shift, centers)
        if empty != "keep" and not bool(occupied.all()):
            if empty == "raise":
                _refuse_empty(occupied, batch_shape, iteration)
            means = torch.where(
                occupied[..., None], means, _random_points(points, means, generator)
            )
        elif torch.equal(means, centers):
            iterates[iteration:] = means
            break
        iterates[iteration] = means
    return _times_power_of_two(iterates, exponent), occupied


def _means(
    blocks: Iterable[_Block], labels: Tensor, shift: Tensor, centers: Tensor
) -> tuple[Tensor, Tensor]:
    """Means (tasks, k, d) of the points of each label, and which labels occur, (tasks, k).

    The mean of no point is the given center.
    """
    n_tasks, n_clusters, n_features = centers.shape
    sums = centers.new_zeros((n_tasks, n_features + 1, n_clusters), dtype=torch.float64)
    for block in blocks:
        own = labels[block.tasks, block.rows].reshape(len(block.columns), -1)
        of_parts = sums_by_label(block.columns, own, n_clusters)
        sums[block.tasks] += of_parts.view(len(sums[block.tasks]), -1, *sums.shape[1:]).sum(1)
    # The last row of each block holds ones: its sum is the number of points.
    totals, counts = sums[:, :-1].transpose(-2, -1), sums[:, -1, :, None]
    means = (totals / counts.clamp_min(1) + shift).to(centers.dtype)
    occupied = counts > 0
    return torch.where(occupied, means, centers), occupied.squeeze(-1)


def _random_points(points: Tensor, centers: Tensor, generator: torch.Generator | None) -> Tensor:
    """A point of each task, drawn anew, in place of each center (tasks, k, d)."""
    assert generator is not None
    drawn = torch.randint(
        points.shape[-2], centers.shape[:-1], generator=generator, device=generator.device
    ).to(points.device)
    return torch.take_along_dim(points, drawn.unsqueeze(-1), -2)


def _refuse_empty(occupied: Tensor, batch_shape: torch.Size, iteration: int) -> NoReturn:
    task, cluster = (~occupied).nonzero()[0].tolist()
    raise ValueError(
        f"no point is nearest to center {cluster} of task {_index(task, batch_shape)} in iteration "
        f"{iteration}, got empty='raise'; 'keep' and 'resample' allow empty clusters"
    )


def _warn_about_duplicates(points: Tensor, occupied: Tensor, batch_shape: torch.Size) -> None:
    """Warn of tasks (tasks, n, d) with fewer distinct points than clusters.

    Equal points share a label, so only tasks with an empty cluster need a look.
    """
    n_clusters = occupied.shape[-1]
    suspects = (~occupied.all(-1)).nonzero().flatten()
    for feature in points.unbind(-1):  # one with enough distinct values settles it, batched
        values = feature[suspects].sort(-1).values
        suspects = suspects[(values.diff(dim=-1) != 0).sum(-1) + 1 < n_clusters]
    n_distinct = {}
    for task in suspects.tolist():
        groups = group_equal_rows(points[task])
        if groups is not None:
            n_distinct[task] = len(groups.first)
    found = [task for task, number in n_distinct.items() if number < n_clusters]
    if found:
        task = found[0]
        others = f" (and {len(found) - 1} more tasks like it)" if len(found) > 1 else ""
        warnings.warn(
            f"only {int(occupied[task].sum())} of n_clusters={n_clusters} clusters are distinct in "
            f"task {_index(task, batch_shape)}, whose points have {n_distinct[task]} distinct "
            f"rows{others}",
            stacklevel=3,
        )


def _index(task: int, batch_shape: torch.Size) -> tuple[int, ...]:
    index = torch.unravel_index(torch.tensor(task), batch_shape) if batch_shape else ()
    return tuple(int(position) for position in index)
