"""Squared distances between points and centers, and the nearest center of each point.

Distances are sums of squared differences (``r_ij = ||x_i - c_j||^2``, Section 3 of the paper). There
is no square root, whose slope at 0 is infinite, and no expansion ``|x|^2 - 2 x.c + |c|^2``, which
loses all digits far from the origin. :func:`nearest_centers` does use the expansion, on centered
data, because it is the only form that runs at the speed of a matrix product; it then proves, row by
row, that rounding cannot have changed the answer, and decides the other rows by differences.

The bound. Let u be the unit roundoff, d the number of features, x and c the centered point and
center, and S = (||x|| + max ||c||)^2. Centering and the product of d + 1 terms
(``-2 c.x + ||c||^2``) leave an error of at most (d + 4) u S in a score, to first order in u. The
sum of squared differences is itself rounded, by at most (d + 3) u S. The two methods can order two
centers differently only if their scores differ by less than twice the sum of both, which is
(2 d + 7) eps S with eps = 2 u. We use (2 d + 16) eps S; the slack pays for second-order terms and
for the rounding of S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from leancluster_core.checks import check_points_and_centers

# Scores held at once: large enough that a kernel's overhead does not count, small enough that the
# passes over them stay in cache.
_BLOCK_ELEMENTS = 1 << 20

# Squares of numbers beyond these overflow or vanish in float32.
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
    memory for n x k distances. Entries so large or so small that their squares leave the dtype's
    range are scaled by a power of two first. Not differentiable.

    Raises ValueError or TypeError for NaN or infinite entries, wrong rank, different d, k > n.
    """
    return _nearest_centers(*check_points_and_centers(points, centers))


@torch.no_grad()
def _nearest_centers(points: Tensor, centers: Tensor) -> Tensor:
    batch_shape = torch.broadcast_shapes(points.shape[:-2], centers.shape[:-2])
    (n_points, n_features), n_clusters = points.shape[-2:], centers.shape[-2]
    if n_clusters == 1 or math.prod(batch_shape) == 0:
        return points.new_zeros((*batch_shape, n_points), dtype=torch.int64)
    points = points.expand(*batch_shape, -1, -1).reshape(-1, n_points, n_features)
    centers = centers.expand(*batch_shape, -1, -1).reshape(-1, n_clusters, n_features)
    points, centers = _within_range(points, centers)

    n_tasks = points.shape[0]
    labels = points.new_empty((n_tasks, n_points), dtype=torch.int64)
    undecided = points.new_empty((n_tasks, n_points), dtype=torch.bool)
    shift = points.mean(-2, keepdim=True)
    precise = _precise_dtype(points.dtype)
    augmented_centers, reach = _augmented_centers((centers - shift).to(precise))
    count_and_index = points.new_ones((2, n_clusters), dtype=precise)
    count_and_index[1] = torch.arange(n_clusters)
    for tasks, rows in _blocks(n_tasks, n_points, n_clusters):
        augmented_points, slack = _augmented_points(
            (points[tasks, rows] - shift[tasks]).to(precise), reach[tasks], points.dtype
        )
        near = _near_centers(augmented_points, augmented_centers[tasks], slack)
        found = count_and_index @ near  # (tasks, 2, rows)
        labels[tasks, rows] = found[:, 1].to(torch.int64)
        undecided[tasks, rows] = found[:, 0] != 1
    _decide_by_differences(points, centers, labels, undecided)
    return labels.reshape(*batch_shape, n_points)


def _within_range(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Scale by a power of two (exact) if squares would overflow or vanish."""
    largest = max(float(points.abs().max()), float(centers.abs().max()))
    exponent = math.frexp(largest)[1]
    if largest == 0 or abs(exponent) <= _SAFE_EXPONENT:
        return points, centers
    # In two steps, since 2**-exponent alone may be out of the dtype's range.
    first, second = 2.0 ** (-exponent // 2), 2.0 ** (-exponent - (-exponent // 2))
    return points * first * second, centers * first * second


def _precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply in: the bound above does not hold for products in TF32 or bfloat16."""
    return dtype if torch.get_float32_matmul_precision() == "highest" else torch.float64


def _blocks(n_tasks: int, n_points: int, n_keys: int) -> Iterator[tuple[slice, slice]]:
    """Slices of tasks and rows that together hold about ``_BLOCK_ELEMENTS`` scores."""
    n_rows = min(n_points, max(1, _BLOCK_ELEMENTS // n_keys))
    n_together = max(1, _BLOCK_ELEMENTS // (n_keys * n_rows)) if n_rows == n_points else 1
    for task in range(0, n_tasks, n_together):
        for row in range(0, n_points, n_rows):
            yield slice(task, task + n_together), slice(row, row + n_rows)


def _augmented_centers(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [-2 c, ||c||^2] (..., k, d+1) and the largest norm of a center, (..., 1, 1)."""
    squares = centered.square().sum(-1, keepdim=True)
    return torch.cat([-2 * centered, squares], -1), squares.amax(-2, keepdim=True).sqrt()


def _augmented_points(centered: Tensor, reach: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns [x; 1] (..., d+1, n) and the rounding bound on score differences, (..., 1, n)."""
    *batch, n_points, n_features = centered.shape
    augmented = centered.new_ones((*batch, n_features + 1, n_points))
    columns = augmented[..., :n_features, :]
    columns.copy_(centered.transpose(-2, -1))
    scale = (columns.square().sum(-2, keepdim=True).sqrt_() + reach).square_()
    return augmented, scale.mul_((2 * n_features + 16) * torch.finfo(dtype).eps)


def _near_centers(augmented_points: Tensor, augmented_centers: Tensor, slack: Tensor) -> Tensor:
    """1.0 where a center may be the nearest one, 0.0 where it cannot, (..., k, n)."""
    scores = augmented_centers @ augmented_points
    # Written over the scores, as floats: five times faster than a mask of booleans, and the next
    # thing that happens to it is a matrix product.
    return torch.le(scores, scores.amin(-2, keepdim=True).add_(slack), out=scores)


def _decide_by_differences(
    points: Tensor, centers: Tensor, labels: Tensor, undecided: Tensor
) -> None:
    """Overwrite the labels (tasks, n) of undecided rows by those of exact differences."""
    tasks, rows = undecided.nonzero(as_tuple=True)
    centers_first = centers.movedim(-1, 0).transpose(-2, -1).contiguous()  # (d, k, tasks)
    for task, row in zip(*_in_pieces(tasks, rows, centers_first[..., 0].numel()), strict=True):
        candidates = centers_first if centers.shape[0] == 1 else centers_first[..., task]
        distances = _sum_of_squares(points[task, row].t().unsqueeze(1), candidates)  # (k, piece)
        labels[task, row] = distances.argmin(0)


def _in_pieces(tasks: Tensor, rows: Tensor, per_row: int) -> tuple[tuple[Tensor, ...], ...]:
    size = max(1, _BLOCK_ELEMENTS // per_row)
    return tasks.split(size), rows.split(size)
