"""The k-means loss and its smoothed upper bounds (Section 3, Appendix H).

With r_j the squared distance of a point to center j, the bound replaces min_j r_j by
sum_j w_j r_j, where w minimises <w, r> + penalty * Omega(w) over the simplex: softmax weights for
the negative entropy (NE, "entropy"), sparsemax weights for half the squared norm (L2, "l2").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leancluster_core.checks import (
    check_choice,
    check_integer,
    check_number,
    check_points_and_centers,
    check_tensor,
)
from leancluster_core.distances import _squared_distances

REGULARIZERS = ("entropy", "l2")

# Up to this many entries the support is found by comparing all pairs, which beats sorting.
PAIRWISE_LIMIT = 32


def _project_on_simplex(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Sparsemax weights along ``dim``, and their support as ones and zeros."""
    # Weights don't change under a common shift; with the maximum at 0 nothing cancels.
    scores = scores - scores.amax(dim, keepdim=True)
    n_entries = scores.shape[dim]
    if n_entries <= PAIRWISE_LIMIT:
        # j is in the support exactly if the scores above it exceed it by less than 1 in total.
        excess = scores * -n_entries
        larger = torch.empty_like(scores)
        for score in scores.unbind(dim):
            excess += torch.maximum(scores, score.unsqueeze(dim), out=larger)
        support = excess < 1
    else:
        ordered = scores.sort(dim, descending=True).values
        sizes = torch.arange(1, n_entries + 1, dtype=scores.dtype, device=scores.device)
        sizes = sizes.view([-1] + [1] * (scores.dim() - 1 - dim % scores.dim()))
        size = (1 + sizes * ordered > ordered.cumsum(dim)).sum(dim, keepdim=True)
        support = scores >= ordered.gather(dim, size.clamp_min(1) - 1)  # 0 where all is NaN
    # As numbers, since arithmetic with booleans copies them each time. Scores in the support are
    # above -1; the others may be -inf, which times 0 is no 0.
    inside = support.to(scores.dtype)
    total = (scores.clamp_min(-1) * inside).sum(dim, keepdim=True)
    threshold = (total - 1) / inside.sum(dim, keepdim=True)
    return (scores - threshold).clamp_min_(0).mul_(inside), inside


class _Sparsemax(torch.autograd.Function):
    """Sparsemax with its exact Jacobian, diag(s) - s s'/|s| on the support s (no saved sort)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        weights, support = _project_on_simplex(scores, dim)
        ctx.save_for_backward(support)
        ctx.dim = dim
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Plain differentiable operations, so that second derivatives work too.
        (support,) = ctx.saved_tensors
        mean = (grad * support).sum(ctx.dim, keepdim=True) / support.sum(ctx.dim, keepdim=True)
        return (grad - mean) * support, None


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """Euclidean projection of scores onto the probability simplex along ``dim``.

    The result has the shape of scores, is non-negative and sums to 1 along ``dim``; ties share
    equally. An entry of -inf gets weight 0. Differentiable twice.

    Raises ValueError for NaN or +inf, for a slice without a finite entry, and for an empty axis.
    Source: Section 3, Appendix H.
    """
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__qualname__}")
    masked = scores == -torch.inf
    check_tensor("scores (entries other than -inf)", torch.where(masked, 0, scores), min_dims=1)
    check_integer("dim", dim, -scores.dim(), scores.dim() - 1)
    if scores.shape[dim] == 0:
        raise ValueError(f"scores must not be empty along dim={dim}, got {tuple(scores.shape)}")
    if bool(masked.all(dim).any()):
        raise ValueError(f"scores must have a finite entry in each slice along dim={dim}")
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.to(torch.get_default_dtype())
    return _Sparsemax.apply(scores, dim)


def _min_weights(
    distances: Tensor, penalty: float | Tensor, regularizer: str, dim: int = -1
) -> Tensor:
    """Simplex weights along ``dim``; penalty may be a tensor that broadcasts (one a model)."""
    smallest = distances.detach().amin(dim, keepdim=True)
    if not isinstance(penalty, Tensor):
        # A penalty that underflows in this dtype would give 0/0 at the smallest distance.
        penalty = max(penalty, torch.finfo(distances.dtype).tiny)
    scores = (smallest - distances) / penalty
    # Far below any weight that a float can hold, and -inf would poison the gradients.
    scores = scores.clamp_min(-torch.finfo(distances.dtype).max / distances.shape[dim])
    if regularizer == "entropy":
        return torch.softmax(scores, dim)
    return _Sparsemax.apply(scores, dim)


def _smoothed_minimum(
    distances: Tensor, penalty: float | Tensor, regularizer: str, dim: int = -1
) -> Tensor:
    """Smoothed min of the distances over ``dim``; never below the minimum, rounding included."""
    weights = _min_weights(distances, penalty, regularizer, dim)
    smallest = distances.amin(dim, keepdim=True)
    return (weights * (distances - smallest)).sum(dim) + smallest.squeeze(dim)


class _SmoothedMinimum(torch.autograd.Function):
    """:func:`_smoothed_minimum` for the training loop, with its derivative in closed form.

    With m the mean gap to the minimum, d/dr_j is w_j (1 + (m - gap_j) / penalty) for NE with m
    weighted by w, and w_j + (m - gap_j) / penalty on the support for L2 with m its plain mean.
    """

    @staticmethod
    def forward(ctx: Any, distances: Tensor, penalty: Tensor, regularizer: str, dim: int) -> Tensor:
        smallest = distances.amin(dim, keepdim=True)
        # Bounded, as _min_weights does: an infinite gap in units of the penalty gives NaN slopes.
        limits = torch.finfo(distances.dtype)
        penalty = penalty.clamp_min(limits.tiny)
        gaps = (distances - smallest).clamp_max(penalty * (limits.max / distances.shape[dim]))
        if regularizer == "entropy":
            weights = torch.softmax(gaps / -penalty, dim)
            value = mean = (weights * gaps).sum(dim, keepdim=True)
            slope = ((mean - gaps) / penalty).add_(1).mul_(weights)
        else:
            weights, support = _project_on_simplex(gaps / -penalty, dim)
            value = (weights * gaps).sum(dim, keepdim=True)
            mean = (gaps * support).sum(dim, keepdim=True) / support.sum(dim, keepdim=True)
            slope = ((mean - gaps) / penalty).add_(weights).mul_(support)
        ctx.save_for_backward(slope)
        ctx.dim = dim
        return (value + smallest).squeeze(dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad.unsqueeze(ctx.dim), None, None, None


def min_weights(distances: Tensor, *, penalty: float, regularizer: str) -> Tensor:
    """Weights of the smoothed minimum (Section 3): softmax or sparsemax of -distances/penalty.

    distances: (..., n, k), squared distances -> weights (..., n, k), rows on the simplex.
    penalty: tau > 0; an infinite penalty gives equal weights.

    Raises ValueError for penalty <= 0, an unknown regularizer, negative or non-finite distances.
    """
    distances = check_tensor("distances", distances, min_dims=1)
    if distances.shape[-1] == 0:
        raise ValueError(f"distances must have a cluster axis, got {tuple(distances.shape)}")
    if bool((distances < 0).any()):
        raise ValueError(f"distances must be non-negative, got {float(distances.min()):g}")
    penalty = check_number("penalty", penalty, 0.0, above=True, infinite=True)
    check_choice("regularizer", regularizer, REGULARIZERS)
    return _min_weights(distances, penalty, regularizer)


def _finite_distances(points: Tensor, centers: Tensor) -> Tensor:
    points, centers = check_points_and_centers(points, centers)
    distances = _squared_distances(points, centers)
    if not bool(torch.isfinite(distances).all()):
        raise ValueError(
            f"squared distances must fit {distances.dtype}, got an overflow: "
            "rescale the data (rescale_to_unit_cube) or use float64"
        )
    return distances


def kmeans_loss(points: Tensor, centers: Tensor) -> Tensor:
    """Sum over points of the squared distance to the nearest center (Section 3).

    points: (..., n, d), centers: (..., k, d) -> (...), in squared data units.

    Raises ValueError for NaN or infinite entries, different d, k > n, overflowing distances.
    """
    return _finite_distances(points, centers).amin(-1).sum(-1)


def smoothed_kmeans_loss(
    points: Tensor, centers: Tensor, *, penalty: float, regularizer: str
) -> Tensor:
    """Smoothed upper bound of the k-means loss (Section 3): sum over points of sum_j w_j r_j.

    points: (..., n, d), centers: (..., k, d) -> (...), in squared data units. Gradients flow
    through the weights as well as through the distances. Never below :func:`kmeans_loss`.

    Raises ValueError as :func:`kmeans_loss` and :func:`min_weights`.
    """
    penalty = check_number("penalty", penalty, 0.0, above=True, infinite=True)
    check_choice("regularizer", regularizer, REGULARIZERS)
    distances = _finite_distances(points, centers)
    return _smoothed_minimum(distances, penalty, regularizer).sum(-1)
