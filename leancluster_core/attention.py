"""Negative-squared-distance attention (Definition 2.2): softmax of -(gamma/sqrt(e)) |q - k|^2.

The term in |q|^2 is the same for all keys and drops out of the softmax, so a score is a product of
query and key plus a bias of the key. Attention does not change when queries and keys are shifted
together; they are centred first, since the product form loses digits far from the origin.

Inside, tokens are columns (as in the paper): on a CPU a softmax over the rows of a (k, n) matrix is
ten times faster than over the short rows of an (n, k) one, and so are the products.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leancluster_core.checks import check_choice, check_number, check_tensor, without_autocast
from leancluster_core.hardmax import _hardmax_attention

BACKENDS = ("fused", "materialised")

# Entries of one block of scores (2 MiB in float32): small enough to stay in a core's cache.
BLOCK_ENTRIES = 2**19

# Up to so many weights (64 MiB in float32) are kept for the backward pass. They are kept block by
# block: for more than 32 MiB at once the allocator asks the system for fresh memory each time.
KEPT_ENTRIES = 2**24

# The product form errs by a few eps * scale * |token|^2 in a score. Up to this score magnitude the
# weights keep four digits; beyond it float32 input is computed in float64, and beyond what float64
# holds, distances are formed by differences.
LARGEST_SCORE = {torch.float32: 2.0**9, torch.float64: 2.0**38}


_buffers = threading.local()


def _block_buffer(which: int, size: int, like: Tensor) -> Tensor:
    """Room for a block of scores, kept by each thread: fresh memory costs more than the sums."""
    name = f"{which} {like.dtype} {like.device}"
    kept: Tensor | None = getattr(_buffers, name, None)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # or it could not serve training later
            kept = torch.empty(size, dtype=like.dtype, device=like.device)
        setattr(_buffers, name, kept)
    return kept


class _BlockedAttention(torch.autograd.Function):
    """softmax_r(q'k + bias) applied to values, in blocks of tasks and queries.

    queries (b, w, m), keys (b, w, r), bias (b, 1, r), values (b, v, r) -> (b, v, m). Weights are
    computed again in the backward pass unless they are few, so memory is linear in m and r. NaN in,
    NaN out.
    """

    @staticmethod
    def _blocks(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
        n_tasks, m, r = queries.shape[0], queries.shape[2], keys.shape[2]
        rows = max(1, min(m, BLOCK_ENTRIES // r))
        tasks = max(1, BLOCK_ENTRIES // (rows * r)) if rows >= m else 1
        for first in range(0, n_tasks, tasks):
            for start in range(0, m, rows):
                yield slice(first, first + tasks), slice(start, start + rows)

    @staticmethod
    def _products(left: Tensor, right: Tensor, buffer: Tensor) -> Tensor:
        """left' right (b, m, r), written into the buffer."""
        shape = left.shape[0], left.shape[2], right.shape[2]
        return torch.bmm(left.mT, right, out=buffer[: math.prod(shape)].view(shape))

    @staticmethod
    def _weighted(values: Tensor, weights: Tensor, out: Tensor) -> None:
        """values weights' (b, v, m), written to out."""
        if out.is_contiguous():
            torch.bmm(values, weights.mT, out=out)
        else:
            out.copy_(torch.bmm(values, weights.mT))

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor) -> Tensor:
        # The bias travels as one more feature: one product gives the whole score.
        left = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)
        right = torch.cat([keys, bias], 1)
        n_tasks, _, m = queries.shape
        r = keys.shape[2]
        out = queries.new_empty(n_tasks, values.shape[1], m)
        few = any(ctx.needs_input_grad) and n_tasks * m * r <= KEPT_ENTRIES
        kept = []
        buffer = _block_buffer(0, max(BLOCK_ENTRIES, r), queries)
        for b, i in _BlockedAttention._blocks(queries, keys):
            # A product goes to memory that is in the cache; what is kept is then written in order.
            scores = _BlockedAttention._products(left[b, :, i], right[b], buffer)
            weights = torch.softmax(scores, -1, out=torch.empty_like(scores) if few else scores)
            _BlockedAttention._weighted(values[b], weights, out[b, :, i])
            if few:
                kept.append(weights)
        ctx.save_for_backward(left, right, values, out, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, values, out, *kept = ctx.saved_tensors
        needs_queries, needs_keys, needs_bias, needs_values = ctx.needs_input_grad
        # Score gradients are w * (g'v - g'out), again as one product.
        grad_left = torch.cat([grad, (grad * out).sum(1, keepdim=True).neg_()], 1)
        grad_right = torch.cat([values, torch.ones_like(values[:, :1])], 1)
        grad_queries = torch.empty_like(left) if needs_queries else None
        grad_keys = torch.zeros_like(right) if needs_keys else None
        grad_bias = torch.zeros_like(right[:, -1:]) if needs_bias else None
        grad_values = torch.zeros_like(values) if needs_values else None
        buffer, other = (
            _block_buffer(which, max(BLOCK_ENTRIES, right.shape[2]), left) for which in (0, 1)
        )
        for block, (b, i) in enumerate(_BlockedAttention._blocks(left, right)):
            if kept:
                weights = kept[block]
            else:
                weights = _BlockedAttention._products(left[b, :, i], right[b], buffer)
                torch.softmax(weights, -1, out=weights)
            if grad_values is not None:
                grad_values[b] += torch.bmm(grad[b, :, i], weights)
            scores = _BlockedAttention._products(grad_left[b, :, i], grad_right[b], other)
            scores.mul_(weights)
            if grad_queries is not None:
                _BlockedAttention._weighted(right[b], scores, grad_queries[b, :, i])
            if grad_keys is not None:
                grad_keys[b] += torch.bmm(left[b, :, i], scores)
            if grad_bias is not None:
                grad_bias[b] += scores.sum(1, keepdim=True)
        return (
            None if grad_queries is None else grad_queries[:, :-1],
            None if grad_keys is None else grad_keys[:, :-1],
            grad_bias,
            grad_values,
        )


class _FewQueries(torch.autograd.Function):
    """Few queries (b.., e, m), many keys (b.., e, r) and values (b.., v, r) -> (b.., v, m).

    Weights softmax_r of scale * (2 q'k - |k|^2), kept. The products are ordered such that their
    results are short and wide, which is several times faster than tall and narrow.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        weights = (2 * scale * queries).mT @ keys
        weights -= scale * torch.linalg.vecdot(keys, keys, dim=-2).unsqueeze(-2)
        weights = torch.softmax(weights, -1)
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.scale = scale
        return (weights @ values.mT).mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, weights = ctx.saved_tensors
        scores = grad.mT @ values
        scores -= torch.linalg.vecdot(scores, weights).unsqueeze(-1)
        scores *= weights
        scores *= 2 * ctx.scale
        grad_keys = queries @ scores
        grad_keys.addcmul_(keys, scores.sum(-2, keepdim=True), value=-1)
        return (scores @ keys.mT).mT, grad_keys, grad @ weights, None


class _FewKeys(torch.autograd.Function):
    """Many queries (b.., w, m), few keys (b.., w, r), bias (b.., r, 1), values (b.., v, r)
    -> (b.., v, m): weights softmax_r(q'k + bias), stored as (r, m) and kept. The leading rows get
    onto (b.., u, m) added, u <= v."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor, onto: Tensor
    ) -> Tensor:
        weights = torch.softmax(keys.mT @ queries + bias, -2)
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.onto_rows = onto.shape[-2]
        out = values @ weights
        out[..., : ctx.onto_rows, :] += onto
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, weights = ctx.saved_tensors
        grad_values = (weights @ grad.mT).mT
        scores = values.mT @ grad
        scores *= weights
        scores -= weights * scores.sum(-2, keepdim=True)
        grad_queries = keys @ scores if ctx.needs_input_grad[0] else None
        grad_keys = (scores @ queries.mT).mT
        grad_onto = grad[..., : ctx.onto_rows, :] if ctx.needs_input_grad[4] else None
        return grad_queries, grad_keys, scores.sum(-1, keepdim=True), grad_values, grad_onto


def _sdpa(queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor) -> Tensor:
    """The same attention by torch's fused kernel: the bias travels as one more feature."""
    width = -(-max(queries.shape[1] + 1, values.shape[1]) // 16) * 16  # what the kernels want

    def rows(tensor: Tensor) -> Tensor:
        # Contiguous tokens, by the padding: with others torch falls back on the whole matrix.
        return F.pad(tensor.mT, (0, width - tensor.shape[1])).unsqueeze(1)

    ones = torch.ones_like(queries[:, :1])
    out = F.scaled_dot_product_attention(
        rows(torch.cat([queries, ones], 1)), rows(torch.cat([keys, bias], 1)), rows(values), scale=1
    )
    return out.squeeze(1).mT[:, : values.shape[1]]


def _product_attention(queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor) -> Tensor:
    """Attention with scores q'k + bias, linear in memory: columns (..., w, m), (..., w, r),
    (..., 1, r), (..., v, r) -> (..., v, m)."""
    tensors = (queries, keys, bias, values)
    batch = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))
    flat = [
        tensor.expand(*batch, *tensor.shape[-2:]).reshape(batch.numel(), *tensor.shape[-2:])
        for tensor in tensors
    ]
    # torch's fused kernels have no float64: it would fall back on the whole matrix.
    blocked = queries.device.type == "cpu" or queries.dtype == torch.float64
    kernel = _BlockedAttention.apply if blocked else _sdpa
    return kernel(*flat).reshape(*batch, values.shape[-2], queries.shape[-1])


def _fused(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """queries (..., e, m), keys (..., e, r), values (..., v, r) as columns -> (..., v, m)."""
    shift = keys.detach().mean(-1, keepdim=True)
    queries, keys = queries - shift, keys - shift
    bias = -scale * keys.square().sum(-2, keepdim=True)
    return _product_attention(2 * scale * queries, keys, bias, values)


def _materialised_weights(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Weights (..., m, r) of queries (..., m, e) and keys (..., r, e), all of them at once."""
    shift = keys.detach().mean(-2, keepdim=True)
    queries, keys = queries - shift, keys - shift
    distances = (
        queries.square().sum(-1, keepdim=True)
        + keys.square().sum(-1).unsqueeze(-2)
        - 2 * queries @ keys.mT
    )
    if scale == 0:
        return torch.softmax(0 * distances, -1)
    # The smallest distance goes first: -scale * distance alone would reach -inf for all keys.
    smallest = distances.detach().amin(-1, keepdim=True)
    scale = min(scale, torch.finfo(queries.dtype).max)  # 0 * inf would be NaN
    return torch.softmax(-scale * (distances - smallest), -1)


def _by_differences(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Rows as in :func:`_materialised_weights`; for scales at which the product form is noise."""
    dtype = values.dtype
    largest = max(float(t.detach().abs().amax()) if t.numel() else 0.0 for t in (queries, keys))
    power = 2.0 ** max(0, math.frexp(largest)[1] - 1)  # squares of what is left cannot overflow
    queries, keys, values = queries.double() / power, keys.double() / power, values.double()
    distances = (queries.unsqueeze(-2) - keys.unsqueeze(-3)).square().sum(-1)
    smallest = distances.detach().amin(-1, keepdim=True)
    limits = torch.finfo(torch.float64)
    # The clamp keeps -inf, whose gradient is NaN, out of the softmax.
    scores = -min(scale, limits.max) * (distances - smallest) * power * power
    return (torch.softmax(scores.clamp_min(limits.min), -1) @ values).to(dtype)


def distance_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    inverse_temperature: float = 1.0,
    backend: str = "fused",
) -> Tensor:
    """Attention by negative squared distance (Definition 2.2), without projections.

    queries: (..., m, e), keys: (..., r, e), values: (..., r, v) -> (..., m, v); batch dimensions
    broadcast. Weights are softmax over r of -(inverse_temperature / sqrt(e)) |q - k|^2;
    ``math.inf`` gives the averaging hardmax (equal weight on all nearest keys; no gradients), 0
    gives equal weights.

    backend: "fused" needs memory linear in m and r; "materialised" builds the (m, r) weights. The
    result doesn't depend on a common shift of queries and keys. Where inverse_temperature *
    |token|^2 / sqrt(e) passes 2^9, float32 input is computed in float64, and past 2^38 by
    differences, which takes (m, r, e) memory. "fused" has first derivatives only. autocast has no
    effect on the forward pass.

    Raises ValueError for NaN or infinite entries, no key, widths or lengths that don't match,
    a negative inverse_temperature, an unknown backend.
    """
    tensors = {"queries": queries, "keys": keys, "values": values}
    queries, keys, values = (check_tensor(name, t, min_dims=2) for name, t in tensors.items())
    gamma = check_number("inverse_temperature", inverse_temperature, 0.0, infinite=True)
    check_choice("backend", backend, BACKENDS)
    if queries.shape[-1] != keys.shape[-1] or keys.shape[-1] == 0:
        raise ValueError(
            f"queries and keys must have the same number (at least 1) of features, "
            f"got {queries.shape[-1]} and {keys.shape[-1]}"
        )
    if keys.shape[-2] != values.shape[-2] or keys.shape[-2] == 0:
        raise ValueError(
            f"keys and values must have the same number (at least 1) of rows, "
            f"got {keys.shape[-2]} and {values.shape[-2]}"
        )
    dtype = torch.promote_types(torch.promote_types(queries.dtype, keys.dtype), values.dtype)
    try:
        batch = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2], values.shape[:-2])
    except RuntimeError:
        shapes = [tuple(t.shape) for t in (queries, keys, values)]
        raise ValueError(f"batch dimensions must broadcast, got shapes {shapes}") from None
    queries, keys, values = (
        t.to(dtype).contiguous().expand(*batch, *t.shape[-2:]) for t in (queries, keys, values)
    )
    with without_autocast(queries):
        if math.isinf(gamma):  # which may share memory with values
            return _hardmax_attention(queries, keys, values).clone()
        return _attend(queries, keys, values, gamma / math.sqrt(queries.shape[-1]), backend)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, backend: str) -> Tensor:
    """:func:`distance_attention` of one dtype and batch shape, in a precision that suffices."""
    dtype = queries.dtype
    square = _largest_square(queries, keys)

    def suffices(dtype: torch.dtype) -> bool:  # False for NaN, where the scale is 0 and squares inf
        return scale * square <= LARGEST_SCORE[dtype] and square <= torch.finfo(dtype).max / 16

    if not suffices(torch.float64):
        return _by_differences(queries, keys, values, scale)
    working = dtype if suffices(dtype) else torch.float64
    queries, keys, values = (t.to(working) for t in (queries, keys, values))
    if backend == "materialised":
        return (_materialised_weights(queries, keys, scale) @ values).to(dtype)
    # One memory layout, so that a strided view gives the same bits as its copy.
    q, k, v = (t.mT.contiguous() for t in (queries, keys, values))
    return _fused(q, k, v, scale).mT.to(dtype)


def _largest_square(queries: Tensor, keys: Tensor) -> float:
    """Largest squared norm of a token after centring, in float64."""
    shift = keys.detach().double().mean(-2, keepdim=True)
    return max(
        float((tokens.detach().double() - shift).square().sum(-1).amax()) if tokens.numel() else 0.0
        for tokens in (queries, keys)
    )
