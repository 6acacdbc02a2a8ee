"""Synthetic clustering tasks (Appendix D), and external data mapped into the unit cube.

A task is a cloud of points from a mixture of k clusters, scaled feature by feature to [0, 1], and k
of these points as initial centers. All tasks of a call are drawn at once, on the device of
the generator. Tokens are rows: points are (..., n, d), centers (..., k, d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leancluster_core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_points_and_centers,
)

FAMILIES = ("normal", "cauchy", "gumbel", "laplace", "lognormal")

# A range below this many units of rounding (relative to the largest value) is rounding, not data.
ROUNDING_UNITS = 8

# On a CPU the points are filled in pieces that stay in its cache: up to 1.7x faster than at once.
CHUNK_ELEMENTS = 2**18


@dataclass(frozen=True)
class TaskDistribution:
    """The distribution that tasks are drawn from (Appendix D).

    Each of the ``n_clusters`` clusters has a location uniform in the unit cube and draws every
    feature on its own from ``family``, with that location and a scale.

    family: one of ``FAMILIES``; "lognormal" is the exponential of the normal's draws.
    n_points, n_features, n_clusters: n, d and k of a task, k in [1, n].
    scale: the families' scale parameter, before the points are scaled to [0, 1]; at least 0.
    equal_weights: clusters equally likely, or with weights uniform(0, 1), normalised.
    isotropic: one scale for all, or the scale times uniform(0, 1) per cluster and feature.

    Raises ValueError (out of range) or TypeError, naming field, value and what is allowed.
    """

    family: str = "normal"
    n_points: int = 512
    n_features: int = 4
    n_clusters: int = 6
    scale: float = 0.1
    equal_weights: bool = True
    isotropic: bool = True

    def __post_init__(self) -> None:
        check_choice("family", self.family, FAMILIES)
        n_points = check_integer("n_points", self.n_points, 1)
        n_features = check_integer("n_features", self.n_features, 1)
        n_clusters = check_integer("n_clusters", self.n_clusters, 1, n_points, note="n_points")
        scale = check_number("scale", self.scale, 0.0)
        check_flag("equal_weights", self.equal_weights)
        check_flag("isotropic", self.isotropic)
        # Plain Python numbers, so that equal distributions have equal JSON (1 and 1.0).
        for name, value in (
            ("n_points", n_points),
            ("n_features", n_features),
            ("n_clusters", n_clusters),
            ("scale", scale),
        ):
            object.__setattr__(self, name, value)

    def sample(
        self, batch_shape: Sequence[int], *, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw tasks: points (*batch_shape, n, d) and centers (*batch_shape, k, d), float32.

        Every feature of a task's points has minimum 0 and maximum 1; a feature that is constant up
        to rounding is 0 throughout. The centers are rows of the points. The same generator state
        gives the same tasks (on one kind of device, and for one ``batch_shape``).

        batch_shape: sizes of the leading dimensions, each at least 1; ``()`` draws one task.
        generator: the only source of randomness; the tasks are made on its device.
        """
        if not isinstance(batch_shape, Sequence):
            raise TypeError(f"batch_shape must be a sequence of integers, got {batch_shape!r}")
        shape = tuple(
            check_integer(f"batch_shape[{axis}]", size, 1) for axis, size in enumerate(batch_shape)
        )
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        return self._sample(shape, generator)

    def _sample(
        self, batch_shape: tuple[int, ...], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """:meth:`sample` without its checks, for the training loop."""
        n, d, k = self.n_points, self.n_features, self.n_clusters
        n_tasks, device = math.prod(batch_shape), generator.device

        def uniform() -> Tensor:
            table = torch.empty(n_tasks * k, d, dtype=torch.float32, device=device)
            return table.uniform_(generator=generator)

        locations = uniform()
        scales = None if self.isotropic else uniform()
        clusters = self._draw_clusters(n_tasks, generator)
        clusters += k * torch.arange(n_tasks, device=device)[:, None]  # rows of all tasks' tables

        # Scaling to [0, 1] removes a common factor, so a scale above 1 divides the locations and
        # does not multiply the noise: nothing can overflow then.
        locations /= max(self.scale, 1.0)
        points = torch.empty(n_tasks * n, d, dtype=torch.float32, device=device)
        chunk = max(1, CHUNK_ELEMENTS // d) if device.type == "cpu" else n_tasks * n
        for part, rows in zip(points.split(chunk), clusters.view(-1).split(chunk), strict=True):
            _fill_noise(part, self.family, generator)
            if scales is not None:
                part *= scales.index_select(0, rows)
            shift = locations.index_select(0, rows)
            torch.add(shift, part, alpha=min(self.scale, 1.0), out=part)

        points = points.view(n_tasks, n, d)
        if self.family == "lognormal":
            _exponentiate(points, max(self.scale, 1.0))
        _scale_features(points)
        centers = _draw_centers(points, k, generator)
        return points.view(*batch_shape, n, d), centers.view(*batch_shape, k, d)

    def _draw_clusters(self, n_tasks: int, generator: torch.Generator) -> Tensor:
        """Cluster index of every point, (n_tasks, n), int64 in [0, k)."""
        n, k, device = self.n_points, self.n_clusters, generator.device
        if self.equal_weights:
            return torch.randint(k, (n_tasks, n), generator=generator, device=device)
        weights = torch.empty(n_tasks, k, dtype=torch.float32, device=device)
        cumulative = weights.uniform_(generator=generator).cumsum(-1)
        target = torch.empty(n_tasks, n, dtype=torch.float32, device=device)
        target.uniform_(generator=generator).mul_(cumulative[:, -1:])
        # Without the last cumulative weight, a target that rounding lifts to the total still falls
        # into the last cluster: no index can be out of range.
        return torch.searchsorted(cumulative[:, :-1].contiguous(), target, right=True)


def rescale_to_unit_cube(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Map external data into [0, 1]^d by a shift and ONE scale, so the k-means problem is the same.

    Subtracts each feature's minimum over points and centers and divides by the single largest value
    left, task by task. A feature that is constant up to rounding becomes 0.

    points: (..., n, d), centers: (..., k, d), in any finite range; integers are computed in the
    default dtype. Returns both, batch dimensions broadcast. Raises ValueError as the package's
    checks do: NaN, inf, k > n, different d, no rows.
    """
    points, centers = check_points_and_centers(points, centers)
    batch = torch.broadcast_shapes(points.shape[:-2], centers.shape[:-2])
    # In halves: a range may exceed the dtype's largest value.
    tokens = torch.cat([t.expand(*batch, -1, -1) for t in (points, centers)], dim=-2) / 2
    low = tokens.amin(dim=-2, keepdim=True)
    span = _spread(low, tokens.amax(dim=-2, keepdim=True))
    tokens = torch.where(span > 0, tokens - low, 0)
    largest = span.amax(dim=-1, keepdim=True)
    tokens /= torch.where(largest > 0, largest, 1)
    n_points = points.shape[-2]
    return tokens[..., :n_points, :], tokens[..., n_points:, :]


def _fill_noise(noise: Tensor, family: str, generator: torch.Generator) -> None:
    """Fill with draws of the family's standard form (location 0, scale 1), all finite.

    "lognormal" gets normal draws: its exponential is taken after location and scale.
    """
    if family == "cauchy":
        # No float32 equals pi/2, so the tangent stays below 3e7.
        noise.uniform_(-math.pi / 2, math.pi / 2, generator=generator).tan_()
    elif family == "gumbel":
        # Uniforms lie on a grid of 2^-24 in [0, 1): only 0 has to be kept from the logarithm.
        noise.uniform_(generator=generator).clamp_(min=2.0**-25)
        noise.log_().neg_().log_().neg_()
    elif family == "laplace":
        sign = noise.uniform_(-1, 1, generator=generator).sign()
        noise.abs_().clamp_(min=2.0**-25).log_().mul_(sign)
    else:
        noise.normal_(generator=generator)


def _draw_centers(points: Tensor, n_clusters: int, generator: torch.Generator) -> Tensor:
    """Distinct rows of points (t, n, d) as centers (t, k, d): k neighbors from a random start.

    The rows are exchangeable (given the clusters they are independent draws of one mixture), so
    every choice of rows that ignores their values has the law of k rows drawn without replacement;
    this one needs a single random number a task.
    """
    n_tasks, n_points, n_features = points.shape
    start = torch.randint(n_points, (n_tasks, 1), generator=generator, device=points.device)
    rows = (start + torch.arange(n_clusters, device=points.device)) % n_points
    rows += n_points * torch.arange(n_tasks, device=points.device)[:, None]
    return points.reshape(-1, n_features).index_select(0, rows.view(-1))


def _exponentiate(points: Tensor, factor: float) -> None:
    """exp(factor * points) up to one positive factor a feature, at most 1, in place: (t, n, d)."""
    wide = _widen(points)
    wide -= _tile(_over_rows(torch.amax, wide, points.shape[-1]), wide)
    wide.mul_(min(factor, torch.finfo(points.dtype).max)).exp_()


def _scale_features(points: Tensor) -> None:
    """Scale every feature of points (t, n, d) to [0, 1], in place; constant features become 0."""
    wide = _widen(points)
    low = _over_rows(torch.amin, wide, points.shape[-1])
    span = _spread(low, _over_rows(torch.amax, wide, points.shape[-1]))
    span = torch.where(span > 0, span, math.inf)
    # A quotient, not a product with the reciprocal: the largest value becomes exactly 1.
    wide.sub_(_tile(low, wide)).div_(_tile(span, wide))


def _spread(low: Tensor, high: Tensor) -> Tensor:
    """high - low, and 0 where that is no more than rounding of the values themselves."""
    span = high - low
    rounding = ROUNDING_UNITS * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    return torch.where(span > rounding, span, 0)


def _widen(points: Tensor) -> Tensor:
    """View points (t, n, d) as (t, n / m, m * d): rows of a few features are slow to reduce."""
    n_tasks, n_points, n_features = points.shape
    folds = math.gcd(n_points, 1 << max(0, 6 - (n_features - 1).bit_length()))
    return points.view(n_tasks, n_points // folds, folds * n_features)


def _over_rows(reduce: Callable[..., Tensor], wide: Tensor, n_features: int) -> Tensor:
    """Each feature's extreme over a task's points, (t, 1, d), from the wide view."""
    return reduce(reduce(wide, 1).view(wide.shape[0], -1, n_features), 1, keepdim=True)


def _tile(features: Tensor, wide: Tensor) -> Tensor:
    """Repeat (t, 1, d) to the width of the wide view: (t, 1, m * d)."""
    return features.repeat(1, 1, wide.shape[-1] // features.shape[-1])
