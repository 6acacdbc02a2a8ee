"""Squared distances between points and centers, and the nearest center of each point.

Distances are sums of squared differences (``r_ij = ||x_i - c_j||^2``, Section 3 of the paper).
There is no square root, whose slope at 0 is infinite, and no expansion ``|x|^2 - 2 x.c + |c|^2``,
which loses all digits far from the origin. :func:`nearest_centers` does use the expansion, on
centered data, because it is the only form that runs at the speed of a matrix product; it then
proves, row by row, that rounding cannot have changed the answer, and decides the other rows by
differences.

The bound. Let u be the unit roundoff, d the number of features, x a centered point, c_j the
centered centers, r_j their true squared distances, s_j = ||c_j||^2 - 2 c_j.x = r_j - ||x||^2 the
scores, and M_j = (||x|| + ||c_j||)^2. Centering and the sum of d + 1 terms leave an error of at
most (d + 4) u M_j in s_j, to first order in u; the sum of squared differences is rounded by at most
(d + 3) u M_j. Let center 0 have the smallest computed score. Center j can be as near by differences
only if s_j - s_0 <= (2 d + 7) u (M_j + M_0) as computed. Since ||c_j|| <= ||x|| + sqrt(r_j), each M
is at most 8 ||x||^2 + 2 r, and for such a center r_j is r_0 but for rounding. So the center decided
by differences is among those with

    s_j <= s_0 + (2 d + 7) eps (10 ||x||^2 + 2 s_0),    eps = 2 u,

which depends on the point and its nearest center alone: centers far away blur nothing. We use
2 d + 16 in place of 2 d + 7, which pays for terms of second order, and add 4 (2 d + 16) of the
smallest normal number, which pays for squares that vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leancluster_core.checks import check_points_and_centers, without_autocast

# Scores held at once: large enough that a kernel's overhead does not count, small enough that the
# passes over them stay in cache.
_BLOCK_BYTES = 1 << 22
_BLOCK_ROWS = 1 << 13

_CENTER_ROWS = 16

# A task whose largest number is within 2^-40 and 2^40 can be squared, in float32 too.
_SAFE_EXPONENT = 40


def squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    """Return the squared distances of all pairs, ``||x_i - c_j||^2`` (Section 3).

    points: (..., n, d); centers: (..., k, d) with 1 <= k <= n. Returns (..., n, k), differentiable
    as often as wanted, also at distance 0. Equal rows have distance exactly 0, and the distance of
    a pair does not depend on the rows that come along: features are added one after another.
    The memory behind the result is laid out as (..., k, n), which later reductions over the
    centers like best.

    Raises ValueError or TypeError for NaN or infinite entries, wrong rank, different d, k > n.
    """
    return _squared_distances(*check_points_and_centers(points, centers))


def _squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    features_first = points.movedim(-1, 0).contiguous().unsqueeze(-2)  # (d, ..., 1, n)
    centers_first = centers.movedim(-1, 0).unsqueeze(-1)  # (d, ..., k, 1)
    return _sum_of_squares(features_first, centers_first).transpose(-2, -1)


def _sum_of_squares(left: Tensor, right: Tensor) -> Tensor:
    """Sum of (left - right)^2 over the FIRST dimension, in order, which fixes every rounding."""
    total: Tensor | None = None
    for left_feature, right_feature in zip(left.unbind(0), right.unbind(0), strict=True):
        difference = left_feature - right_feature
        # Not addcmul: it may fuse multiply and add for some of the entries only.
        square = difference * difference
        total = square if total is None else total.add_(square)
    assert total is not None
    return total


def nearest_centers(points: Tensor, centers: Tensor) -> Tensor:
    """Return the index of each point's nearest center; of equally near ones the lowest index.

    points: (..., n, d); centers: (..., k, d) with 1 <= k <= n. Returns int64 (..., n), the same
    labels as ``squared_distances(points, centers).argmin(-1)``, also far from the origin, without
    memory for n x k distances. A task with entries so large or so small that their squares leave
    the dtype's range is scaled by a power of two first (and what is then too small to see counts as
    0). Not differentiable; autocast has no effect.

    Raises ValueError or TypeError for NaN or infinite entries, wrong rank, different d, k > n.
    """
    points, centers = check_points_and_centers(points, centers)
    with without_autocast(points):
        return _nearest_centers(points, centers)


@torch.no_grad()
def _nearest_centers(points: Tensor, centers: Tensor) -> Tensor:
    batch_shape, points, centers = _as_tasks(points, centers)
    points, centers, _ = _scaled_into_range(points, centers)
    shift = _center(points)
    blocks = _centered_blocks(points, shift, centers.shape[-2])
    labels, undecided = _proven_labels(points, shift, blocks, centers)
    _decide_by_differences(points, centers, labels, undecided)
    return labels.reshape(*batch_shape, points.shape[-2])


def _as_tasks(points: Tensor, centers: Tensor) -> tuple[torch.Size, Tensor, Tensor]:
    """The broadcast batch shape, points (tasks, n, d) and centers (tasks, k, d)."""
    batch_shape = torch.broadcast_shapes(points.shape[:-2], centers.shape[:-2])
    n_tasks = math.prod(batch_shape)
    points, centers = (
        tensor.expand(*batch_shape, -1, -1).reshape(n_tasks, *tensor.shape[-2:])
        for tensor in (points, centers)
    )
    return batch_shape, points, centers


def _center(points: Tensor) -> Tensor:
    """A place (tasks, 1, d) amid the points (tasks, n, d), whatever their outliers.

    The median of a few rows, and not a mean: it doesn't depend on how the memory is laid out, and
    points that are all the same are centered to exactly 0.
    """
    step = max(1, points.shape[1] // _CENTER_ROWS)
    return points[:, ::step].median(-2, keepdim=True).values


@dataclass(frozen=True)
class _Block:
    """Some tasks' centered points as columns, or one task's in equal parts, one for each thread:
    every operation then gives a thread the part that is in its core's cache already.

    The row of ones below them is for the counts in sums by label.
    """

    tasks: slice
    rows: slice
    columns: Tensor  # (parts, d + 1, columns), in the dtype to multiply in
    slack: Tensor  # (parts, 1, columns), the bound's term in ||x||^2


def _centered_blocks(points: Tensor, shift: Tensor, n_clusters: int) -> Iterator[_Block]:
    """Blocks of points (tasks, n, d) minus shift (tasks, 1, d)."""
    n_tasks, n_points, n_features = points.shape
    dtype = points.dtype if _has_precise_products() else torch.float64
    n_columns = _BLOCK_BYTES // (dtype.itemsize * max(n_clusters, n_features + 1))
    n_rows = min(n_points, _BLOCK_ROWS, max(64, n_columns // 64 * 64))
    n_together = max(1, n_columns // n_rows) if n_rows == n_points else 1
    for task in range(0, n_tasks, n_together):
        tasks = slice(task, task + n_together)
        for row in range(0, n_points, n_rows):
            rows = slice(row, row + n_rows)
            part = points[tasks, rows]
            if n_together == 1:
                part = part.reshape(_n_parts(part), -1, n_features)
            part = part.mT
            columns = part.new_ones((part.shape[0], n_features + 1, part.shape[2]), dtype=dtype)
            torch.sub(part, shift[tasks].mT, out=columns[:, :-1])
            slack = columns[:, :-1].square().sum(-2, keepdim=True)
            tolerance, limits = _tolerance(points), torch.finfo(points.dtype)
            slack.mul_(10 * tolerance).add_(4 * tolerance / limits.eps * limits.tiny)
            yield _Block(tasks, rows, columns, slack)


def _n_parts(rows: Tensor) -> int:
    """In how many equal parts (of a multiple of 64) threads share the rows (1, n, d) of a block."""
    n_threads = torch.get_num_threads() if rows.device.type == "cpu" else 1
    return max(1, math.gcd(rows.shape[1], 64 * n_threads) // 64)


def _has_precise_products() -> bool:
    """Whether float32 products are float32: the bound does not hold for TF32 and bfloat16."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was lowered for one backend alone, and torch won't say for which
        return False


def _tolerance(points: Tensor) -> float:
    return (2 * points.shape[-1] + 16) * torch.finfo(points.dtype).eps


def _proven_labels(
    points: Tensor, shift: Tensor, blocks: Iterable[_Block], centers: Tensor
) -> tuple[Tensor, Tensor]:
    """Labels (tasks, n) of points (tasks, n, d), whose centered blocks are given, and for which of
    them the bound leaves open whether they are right (tasks, n); those are 0."""
    n_tasks, n_points, n_clusters = *points.shape[:-1], centers.shape[-2]
    if n_clusters == 1:
        labels = points.new_zeros((n_tasks, n_points), dtype=torch.int64)
        return labels, labels.bool()
    # The code of center j is k + j. A sum of codes is below 2 k if and only if it is of one center.
    codes = torch.arange(n_clusters, 2 * n_clusters, dtype=points.dtype, device=points.device)
    code_sums = points.new_empty((n_tasks, n_points))
    centered = centers - shift
    squares = centered.square().sum(-1, keepdim=True)
    factors = -2 * centered
    memory = None
    for block in blocks:
        tasks, rows, columns = block.tasks, block.rows, block.columns
        shape = (columns.shape[0], n_clusters, columns.shape[2])
        if memory is None:  # the first block is the largest; new memory for each costs page faults
            memory = columns.new_empty(math.prod(shape))
        scores = torch.baddbmm(
            squares[tasks].to(columns),
            factors[tasks].to(columns).expand(len(columns), -1, -1),
            columns[:, :-1],
            out=memory[: math.prod(shape)].view(shape),
        )
        near_enough = scores.amin(-2, keepdim=True).mul_(1 + 2 * _tolerance(points))
        near_enough += block.slack
        # 1 where a center may be the nearest, else 0. Written over the scores, as floats: five
        # times faster than booleans, and what happens to it next is a product.
        near = torch.le(scores, near_enough, out=scores)
        code_sums[tasks, rows] = (codes.to(columns) @ near).reshape(code_sums[tasks, rows].shape)
    undecided = code_sums >= 2 * n_clusters
    labels = code_sums.to(torch.int64).sub_(n_clusters)
    return labels.masked_fill_(undecided, 0), undecided


def _scaled_into_range(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tasks (tasks, ..) and (tasks, ..), each times a power of two where squares of its numbers
    would leave the dtype's range, and the exponents (tasks, 1, 1) that undo it; None for all 0."""
    largest = torch.maximum(_largest(left), _largest(right))
    exponent = torch.frexp(largest).exponent
    exponent = exponent - exponent.clamp(-_SAFE_EXPONENT, _SAFE_EXPONENT)
    if not bool(exponent.any()):
        return left, right, None
    return _times_power_of_two(left, -exponent), _times_power_of_two(right, -exponent), exponent


def _times_power_of_two(values: Tensor, exponent: Tensor | None) -> Tensor:
    """values (..., tasks, n, d) times 2^exponent (tasks, 1, 1)."""
    if exponent is None:
        return values
    # In two steps, since the power alone may be out of the dtype's range.
    for part in (exponent // 2, exponent - exponent // 2):
        powers = [2.0**number for number in part.flatten().tolist()]  # exact, as torch.pow is not
        values = values * values.new_tensor(powers).view(part.shape)
    return values


def _largest(values: Tensor) -> Tensor:
    """Largest absolute value of each task: (tasks, n, d) -> (tasks, 1, 1)."""
    low, high = (extreme(values, (1, 2), keepdim=True) for extreme in (torch.amin, torch.amax))
    return torch.maximum(-low, high)


def _decide_by_differences(
    points: Tensor, centers: Tensor, labels: Tensor, undecided: Tensor
) -> None:
    """Overwrite the labels (tasks, n) of undecided rows by those of exact differences."""
    for task, row, distances in _exact_distances(points, centers, undecided):
        labels[task, row] = distances.argmin(0)


def _exact_distances(
    points: Tensor, centers: Tensor, chosen: Tensor, width: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Task (p,), row (p,) and squared distances (k, p) of the chosen points, in pieces.

    Only distances of one point compare: where they would vanish, they are of magnified differences.

    width: numbers that the caller will hold for each of the p * k pairs, if more than d.
    """
    tasks, rows = chosen.nonzero(as_tuple=True)
    centers_first = centers.permute(2, 1, 0).contiguous()  # (d, k, tasks)
    per_row = centers.shape[1] * (width or centers.shape[2]) * centers.itemsize
    size = max(1, _BLOCK_BYTES // per_row)
    for task, row in zip(tasks.split(size), rows.split(size), strict=True):
        candidates = centers_first if centers.shape[0] == 1 else centers_first[..., task]
        chosen_points = points[task, row].t().unsqueeze(1)
        distances = _sum_of_squares(chosen_points, candidates)
        limits = torch.finfo(points.dtype)
        lost = distances.amin(0) < limits.tiny / limits.eps
        if bool(lost.any()):
            if candidates.shape[-1] > 1:
                candidates = candidates[..., lost]
            pair = chosen_points[..., lost], candidates
            magnified = (tensor.double() * limits.tiny**-0.5 for tensor in pair)
            yield task[lost], row[lost], _sum_of_squares(*magnified)
            task, row, distances = task[~lost], row[~lost], distances[:, ~lost]
        yield task, row, distances
