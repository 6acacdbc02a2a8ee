"""The clustering transformer: Definition 2.3, Equation 4, and Theorem 2.1's weights for it."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from leancluster_core.attention import (
    _FewKeys,
    _FewQueries,
    _fused,
    _materialised_weights,
    _product_attention,
)
from leancluster_core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_points_and_centers,
    without_autocast,
)
from leancluster_core.embeddings import EMBEDDINGS, cluster_codes, code_width
from leancluster_core.hardmax import _hardmax_attention, _hardmax_update

BACKENDS = ("absorbed", "fused", "materialised")

_Module = TypeVar("_Module", bound=nn.Module)

# Up to here, one wide product over all tasks beats a narrow one for each.
FEW_TOKENS = 32

# Up to here float32 keeps four digits of losses and gradients (benchmarks/accuracy.py).
LARGEST_COORDINATE = 2.0
LARGEST_SCORE = 4096.0

# Positions of the four attentions of Equation 4 along the parameters' attention axis.
POINTS_TO_CENTERS, POINTS_TO_POINTS, CENTERS_TO_POINTS, CENTERS_TO_CENTERS = range(4)


class ClusteringTransformer(nn.Module):
    """Transformer layers that move centers, with four distance attentions each (Equation 4):

    X1 = X0 + A1(X0, C0) + A2(X0, X0),    C1 = C0 + A3(C0, X1) + A4(C0, C0),

    where X0 = [points, 0] and C0 = [centers, codes] are the embedded tokens of width e. Every layer
    has the same weights. ``model(points, centers)`` maps (..., n, d) and (..., k, d) to the new
    centers (..., k, d): the first d features of the last layer's center tokens.

    n_features, n_clusters: d and k of the tasks. embedding: "onehot", "binary" or "none".
    inverse_temperature: gamma >= 0; ``math.inf`` is the averaging hardmax (no gradients).
    n_layers: how often Equation 4 is applied. bias: adds a bias to Q, K and V (the paper has none).
    n_trials: None, or R independent models in one: parameters get a leading axis of length R, and
    so must points and centers. generator: draws the weights, uniform(-1/sqrt(e), 1/sqrt(e)).
    backend: how the same numbers are computed. "absorbed" (default) attends over the tokens
    themselves and applies the projections before and after, so that the first layer's attention
    among points costs what d costs, not e; "fused" projects, then attends, in linear memory;
    "materialised" is the literal definition with its (n, n) weights.

    Accuracy: losses and gradients are right to 1e-4 in float32 as long as the data are about in the
    unit cube and no attention score can be large. Where a coordinate passes LARGEST_COORDINATE, or
    gamma / sqrt(e) * (largest spectral norm of Q and K)^2 * (largest norm of a token)^2 passes
    LARGEST_SCORE in any layer, a float32 model computes in float64 inside and returns float32.
    :meth:`layer`, and with it the training loop, does not check: its data are in the unit cube, and
    a step forgives what a test does not. Under autocast the model computes as without it; backward
    belongs outside, as torch advises.

    Attributes: query, key, value (*trials, 4, e, e), applied as ``weight @ token``;
    query_bias, key_bias, value_bias (*trials, 4, e) or None; codes (k, c).

    Raises ValueError or TypeError naming the argument for values outside these ranges.
    """

    codes: Tensor
    query: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter

    def __init__(
        self,
        n_features: int,
        n_clusters: int,
        *,
        embedding: str = "binary",
        inverse_temperature: float = 1.0,
        n_layers: int = 1,
        n_trials: int | None = None,
        bias: bool = False,
        backend: str = "absorbed",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.n_features = check_integer("n_features", n_features, 1)
        self.n_clusters = check_integer("n_clusters", n_clusters, 1)
        check_choice("embedding", embedding, EMBEDDINGS)
        self.embedding = embedding
        self.inverse_temperature = check_number(
            "inverse_temperature", inverse_temperature, 0.0, infinite=True
        )
        self.n_layers = check_integer("n_layers", n_layers, 1)
        if n_trials is not None:
            n_trials = check_integer("n_trials", n_trials, 1)
        self.n_trials = n_trials
        check_flag("bias", bias)
        check_choice("backend", backend, BACKENDS)
        self.backend = backend

        width = self.embedding_dim
        shape = (*self._trials, 4, width, width)
        bound = 1 / math.sqrt(width)
        device = None if generator is None else generator.device
        for name in ("query", "key", "value"):
            weight = torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)
            setattr(self, name, nn.Parameter(weight))
        for name in ("query_bias", "key_bias", "value_bias"):
            offset = torch.empty(shape[:-1], device=device) if bias else None
            if offset is not None:
                offset = nn.Parameter(offset.uniform_(-bound, bound, generator=generator))
            self.register_parameter(name, offset)
        codes = cluster_codes(n_clusters, embedding).to(self.query)
        self.register_buffer("codes", codes, persistent=False)

    @property
    def _trials(self) -> tuple[int, ...]:
        return () if self.n_trials is None else (self.n_trials,)

    @property
    def embedding_dim(self) -> int:
        """Token width e: d + k (onehot), d + ceil(log2 k) (binary), d (none)."""
        return self.n_features + code_width(self.n_clusters, self.embedding)

    @property
    def n_parameters(self) -> int:
        """Parameters of one trial."""
        return sum(p.numel() for p in self.parameters()) // (self.n_trials or 1)

    def extra_repr(self) -> str:
        return (
            f"n_features={self.n_features}, n_clusters={self.n_clusters}, "
            f"embedding={self.embedding!r}, inverse_temperature={self.inverse_temperature:g}, "
            f"n_layers={self.n_layers}, n_trials={self.n_trials}, backend={self.backend!r}"
        )

    def forward(
        self, points: Tensor, centers: Tensor, *, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, list[tuple[Tensor, ...]]]:
        """New centers (..., k, d) of the tasks; input is cast to the parameters' dtype.

        points: (..., n, d), centers: (..., k, d); with n_trials=R both have as many dimensions, and
        the leading one is R (or 1). With ``return_attention`` also, for each layer, the four
        attention maps (..., n, k), (..., n, n), (..., k, n), (..., k, k), whatever the backend.

        Raises ValueError for NaN or infinite entries, other d or k than the model's, k > n, batch
        dimensions that don't broadcast or don't start with the trials.
        """
        points, centers = self._checked(points, centers)
        with without_autocast(points):
            result, allowed = None, self._largest_square_norm()
            if not self._needs_float64(points, centers, allowed):
                result = self._transform(points, centers, return_attention, allowed)
            if result is None:
                wide = _in_float64(self)._transform(points, centers, return_attention)
                result = tree_map(Tensor.float, wide)
        return result

    def _transform(
        self, points: Tensor, centers: Tensor, return_attention: bool, allowed: float = math.inf
    ) -> Tensor | tuple[Tensor, list[tuple[Tensor, ...]]] | None:
        """:meth:`forward` in the parameters' dtype; None where a token's squared norm passes what
        is allowed."""
        point_tokens, center_tokens = self.tokens(points, centers)
        maps = []
        for layer in range(self.n_layers):
            if return_attention:
                maps.append(self.attention_maps(point_tokens, center_tokens))
            point_tokens, center_tokens = self.layer(
                point_tokens, center_tokens, overwrite=layer > 0
            )
            for tokens in (point_tokens, center_tokens):
                if allowed < math.inf and tokens.numel():
                    square_norms = tokens.detach().square().sum(-2).nan_to_num(0, 0)
                    if float(square_norms.amax()) > allowed:
                        return None
        result = center_tokens[..., : self.n_features, :].mT
        if self.n_trials is None:
            result = result.squeeze(0)
            maps = [tuple(weights.squeeze(0) for weights in layer) for layer in maps]
        return (result, maps) if return_attention else result

    def _checked(self, points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
        points, centers = check_points_and_centers(points, centers)
        if points.shape[-1] != self.n_features:
            raise ValueError(f"n_features must be {self.n_features}, got {points.shape[-1]}")
        if centers.shape[-2] != self.n_clusters:
            raise ValueError(f"n_clusters must be {self.n_clusters}, got {centers.shape[-2]}")
        if self.n_trials is not None:
            for name, tensor in (("points", points), ("centers", centers)):
                if tensor.dim() < 3 or tensor.shape[0] not in (1, self.n_trials):
                    raise ValueError(
                        f"the leading dimension of {name} must be n_trials={self.n_trials} or 1, "
                        f"got shape {tuple(tensor.shape)}"
                    )
            if points.dim() != centers.dim():  # or the trials of one would meet tasks of the other
                raise ValueError(
                    "points and centers must have as many dimensions with n_trials, "
                    f"got shapes {tuple(points.shape)} and {tuple(centers.shape)}"
                )
        return points, centers

    @torch.no_grad()
    def _needs_float64(self, points: Tensor, centers: Tensor, allowed: float) -> bool:
        """Whether the accuracy that the class promises is out of float32's reach from the start.

        allowed: :meth:`_largest_square_norm`.
        """
        if math.isinf(allowed):
            return False
        largest = max(
            float(tokens.abs().amax()) if tokens.numel() else 0.0 for tokens in (points, centers)
        )
        return largest > LARGEST_COORDINATE or self.embedding_dim > allowed

    @torch.no_grad()
    def _largest_square_norm(self) -> float:
        """Squared norm of a token up to which the parameters' dtype keeps the promised accuracy."""
        if self.query.dtype == torch.float64 or math.isinf(self.inverse_temperature):
            return math.inf  # at infinity nearest keys are decided by differences
        # A model that has blown up has no accuracy to lose, and others beside it may.
        projections = torch.stack([self.query, self.key]).double().nan_to_num(0, 0, 0)
        gain = float(torch.linalg.matrix_norm(projections, 2).amax())
        slope = self._scale * gain**2
        return LARGEST_SCORE / slope if slope else torch.finfo(torch.float64).max

    def tokens(self, points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
        """Token columns for :meth:`layer`: points (R, ..., d, n) and centers (R, ..., e, k).

        The points' zeros are left out: :meth:`layer` reads a token of f < e rows as padded with
        zeros, which is what makes the first layer cheap. R is 1 without trials. Unchecked.
        """
        # One memory layout, so that a strided view gives the same bits as its copy.
        points, centers = (t.to(self.query).mT.contiguous() for t in (points, centers))
        codes = self.codes.mT.expand(*centers.shape[:-2], -1, -1)
        tokens = points, torch.cat([centers, codes], -2)
        return tokens if self.n_trials is not None else (points[None], tokens[1][None])

    def layer(
        self, points: Tensor, centers: Tensor, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Equation 4 on token columns: (R, ..., f, n), (R, ..., e, k) -> (R, ..., e, n),
        (R, ..., e, k). Unchecked: the training loop calls it.

        overwrite: the result may take the memory of points (which exact mode makes use of).
        """
        with without_autocast(points):
            if math.isinf(self.inverse_temperature):
                return self._layer_to_nearest(points, centers, overwrite)
            moved = self._attend(POINTS_TO_CENTERS, points, centers, points)
            points = self._attend(POINTS_TO_POINTS, points, points, moved)
            moved = self._attend(CENTERS_TO_CENTERS, centers, centers, centers)
            return points, self._attend(CENTERS_TO_POINTS, centers, points, moved)

    @torch.no_grad()
    def _layer_to_nearest(
        self, points: Tensor, centers: Tensor, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        """:meth:`layer` at gamma = infinity, for a million points as well.

        What a token holds is taken away before the new comes in (A2 before A1, A4 before A3): sums
        that cancel do so exactly.
        """
        updates = [
            self._update_to_nearest(index, points, keys)
            for index, keys in ((POINTS_TO_POINTS, points), (POINTS_TO_CENTERS, centers))
        ]
        trials = (self.n_trials or 1, *((1,) * (points.dim() - 3)))
        batch = torch.broadcast_shapes(trials, points.shape[:-2], centers.shape[:-2])
        shape = (*batch, self.embedding_dim, points.shape[-1])
        tokens = points
        if not overwrite or points.shape != shape:
            tokens = points.new_empty(shape)
            tokens[..., : points.shape[-2], :] = points
            tokens[..., points.shape[-2] :, :] = 0
        for features, update in updates:
            tokens[..., features, :] += update
        moved = centers.expand(*batch, -1, -1).clone()
        for index, keys in ((CENTERS_TO_CENTERS, centers), (CENTERS_TO_POINTS, tokens)):
            features, update = self._update_to_nearest(index, centers, keys)
            moved[..., features, :] += update
        return tokens, moved

    def _update_to_nearest(self, index: int, queries: Tensor, keys: Tensor) -> tuple[slice, Tensor]:
        """Features that attention ``index`` can change, and what it adds to them."""
        projections = [
            self._projection(name, index, tokens)
            for name, tokens in (("query", queries), ("key", keys), ("value", keys))
        ]
        if any(bias is not None for _, bias in projections):
            return slice(None), self._attend_projected(index, queries, keys)
        query, key, value = (weight for weight, _ in projections)
        return _hardmax_update(query, key, value, queries, keys)

    def attention_maps(self, points: Tensor, centers: Tensor) -> tuple[Tensor, ...]:
        """The layer's four weight matrices, rows are queries; arguments as in :meth:`layer`."""
        first = [self._weights(index, points, keys) for index, keys in enumerate((centers, points))]
        points, _ = self.layer(points, centers)
        return (
            *first,
            self._weights(CENTERS_TO_POINTS, centers, points),
            self._weights(CENTERS_TO_CENTERS, centers, centers),
        )

    def _projection(self, name: str, index: int, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight (R, 1.., e, f) for tokens (R, ..., f, n) and bias (R, 1.., e, 1) or None."""
        ones = (1,) * (tokens.dim() - 3)
        weight = getattr(self, name)[..., index, :, : tokens.shape[-2]]
        weight = weight.reshape(-1, *ones, *weight.shape[-2:])
        bias = getattr(self, f"{name}_bias")
        if bias is not None:
            bias = bias[..., index, :].reshape(-1, *ones, weight.shape[-2], 1)
        return weight, bias

    def _project(self, name: str, index: int, tokens: Tensor) -> Tensor:
        weight, bias = self._projection(name, index, tokens)
        projected = _apply(weight, tokens)
        return projected if bias is None else projected + bias

    def _add_values(self, onto: Tensor, index: int, mean: Tensor) -> Tensor:
        """onto (R, ..., f, n) + value projection of weighted means of tokens, (R, ..., e, n)."""
        weight, bias = self._projection("value", index, mean)
        shape = *mean.shape[:-2], weight.shape[-2], mean.shape[-1]
        if onto.shape == shape and mean.shape[-1] > FEW_TOKENS:
            moved = _apply_onto(onto, weight, mean)
        else:
            moved = _add_rows(_apply(weight, mean), onto)
        return moved if bias is None else moved + bias

    def _weights(self, index: int, queries: Tensor, keys: Tensor) -> Tensor:
        projected = self._project("query", index, queries).mT, self._project("key", index, keys).mT
        if math.isinf(self.inverse_temperature):
            identity = torch.eye(keys.shape[-1]).to(keys)
            identity = identity.expand(*projected[1].shape[:-2], -1, -1)
            return _hardmax_attention(*projected, identity)
        return _materialised_weights(*projected, self._scale)

    @property
    def _scale(self) -> float:
        return self.inverse_temperature / math.sqrt(self.embedding_dim)

    def _attend(self, index: int, queries: Tensor, keys: Tensor, onto: Tensor) -> Tensor:
        """onto + one attention on token columns: (R, ..., f, m), (R, ..., g, r), (R, ..., h, m)
        -> (R, ..., e, m); rows that onto lacks count as zero."""
        if self.backend != "absorbed":
            return _add_rows(self._attend_projected(index, queries, keys), onto)
        if index == POINTS_TO_POINTS:
            return self._add_values(onto, index, self._mean_among_points(keys))
        # Any key's projection serves as the common shift that keeps the products accurate.
        query, query_bias = self._projection("query", index, queries)
        k = self._project("key", index, keys)
        shift = k.detach()[..., :1].clone()
        k -= shift
        offset = -shift if query_bias is None else query_bias - shift
        if index == POINTS_TO_CENTERS:
            # The query projection is absorbed into the few keys.
            bias = 2 * (k.mT @ offset) - k.square().sum(-2).unsqueeze(-1)
            absorbed = 2 * self._scale * _apply(query.mT, k)
            v = self._project("value", index, keys)
            return _FewKeys.apply(queries, absorbed, self._scale * bias, v, onto)
        mean = _FewQueries.apply(_apply(query, queries) + offset, k, keys, self._scale)
        return self._add_values(onto, index, mean)

    def _attend_projected(self, index: int, queries: Tensor, keys: Tensor) -> Tensor:
        q = self._project("query", index, queries)
        k = self._project("key", index, keys)
        v = self._project("value", index, keys)
        if math.isinf(self.inverse_temperature):
            return _hardmax_attention(q.mT, k.mT, v.mT).mT
        if self.backend == "materialised":
            return v @ _materialised_weights(q.mT, k.mT, self._scale).mT
        return _fused(q, k, v, self._scale)

    def _mean_among_points(self, tokens: Tensor) -> Tensor:
        """A2's weights applied to the tokens themselves: nothing here has the width e."""
        query, query_bias = self._projection("query", POINTS_TO_POINTS, tokens)
        key, key_bias = self._projection("key", POINTS_TO_POINTS, tokens)
        shift = tokens.detach()[..., :1]
        centred = tokens - shift
        # Query minus key at the same token, (Q - K) x + b: what is left of a common offset.
        offset = (query - key) @ shift
        if query_bias is not None and key_bias is not None:
            offset = offset + query_bias - key_bias
        queries = 2 * self._scale * ((key.mT @ query) @ centred + key.mT @ offset)
        norms = torch.linalg.vecdot(centred, (key.mT @ key) @ centred, dim=-2).unsqueeze(-2)
        return _product_attention(queries, centred, -self._scale * norms, tokens)


def _in_float64(module: _Module) -> _Module:
    """A twin whose weights are the module's in float64, submodules (of a fork, say) included.

    The module is left alone, since other threads may be using it.
    """
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        tensors = module.__dict__[kind].items()
        twin.__dict__[kind] = {
            n: t.double() if t is not None and t.is_floating_point() else t for n, t in tensors
        }
    parts = module._modules.items()
    twin.__dict__["_modules"] = {n: None if m is None else _in_float64(m) for n, m in parts}
    return twin


def _apply(weight: Tensor, tokens: Tensor) -> Tensor:
    """weight (R, 1.., o, f) @ tokens (R, ..., f, n), as one product a trial where n is small."""
    n_trials, *batch, rows, columns = tokens.shape
    if columns > FEW_TOKENS or not batch or n_trials != weight.shape[0]:
        return weight @ tokens
    n_tokens = math.prod(batch) * columns
    together = tokens.movedim(-2, 1).reshape(n_trials, rows, n_tokens)
    product = weight.reshape(n_trials, *weight.shape[-2:]) @ together
    # Contiguous, since batched products of other layouts run one by one.
    return product.view(n_trials, weight.shape[-2], *batch, columns).movedim(1, -2).contiguous()


def _apply_onto(onto: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """onto (R, ..., o, n) + weight (R, 1.., o, f) @ tokens (R, ..., f, n)."""
    weight = weight.expand(*tokens.shape[:-2], *weight.shape[-2:])
    size = math.prod(tokens.shape[:-2])
    flat = (tensor.reshape(size, *tensor.shape[-2:]) for tensor in (onto, weight, tokens))
    return torch.baddbmm(*flat).view(*tokens.shape[:-2], *onto.shape[-2:])


def _add_rows(tokens: Tensor, leading: Tensor) -> Tensor:
    """tokens (..., e, n) + leading (..., f, n) padded with zero rows to f = e."""
    if leading.shape[-2] == tokens.shape[-2]:
        return tokens + leading
    missing = tokens.shape[-2] - leading.shape[-2]
    return tokens + nn.functional.pad(leading, (0, 0, 0, missing))


def lloyd_transformer(
    n_features: int,
    n_clusters: int,
    *,
    embedding: str = "binary",
    n_layers: int = 1,
    dtype: torch.dtype | None = None,
) -> ClusteringTransformer:
    """The transformer whose t layers are t Lloyd iterations (Theorem 2.1).

    A :class:`ClusteringTransformer` at gamma = infinity with 0/1 weights: P projects on the d data
    features, R on the code; Q1=K1=Q2=K2=P, V1=R, V2=-R, Q3=K3=Q4=K4=R, V3=P, V4=-P.

    Exact where each point has a unique nearest center and no cluster goes empty. Where these fail:
    a point that ties between centers counts for none of them, as its code is an average; the center
    of an empty cluster becomes the mean of the points whose codes are nearest to its own (under
    "onehot" all points, unless some tie). Duplicate points are harmless. dtype: of weights and
    output, float32 or float64 (default: torch's default).

    Raises ValueError for embedding "none" with more than one cluster: without codes the update
    cannot tell centers apart.
    """
    check_choice("embedding", embedding, EMBEDDINGS)
    if embedding == "none" and n_clusters != 1:
        raise ValueError(
            "embedding must be 'onehot' or 'binary' for the Lloyd construction, got 'none': "
            "without codes attention cannot tell the centers apart"
        )
    model = ClusteringTransformer(
        n_features,
        n_clusters,
        embedding=embedding,
        inverse_temperature=math.inf,
        n_layers=n_layers,
        generator=torch.Generator(),  # overwritten below; the global one is left alone
    )
    width = model.embedding_dim
    data = torch.diag((torch.arange(width) < n_features).to(torch.get_default_dtype()))
    code = torch.eye(width) - data
    with torch.no_grad():
        model.query.copy_(torch.stack([data, data, code, code]))
        model.key.copy_(torch.stack([data, data, code, code]))
        model.value.copy_(torch.stack([code, -code, data, -data]))
    return model.requires_grad_(False).to(dtype or torch.get_default_dtype())
