"""Checks at the public door: every public function refuses bad input here, before any work.

Messages name the argument, the value and what is allowed. One rule for dtypes holds everywhere:
float32 and float64 are used as they are (mixed inputs are promoted to the wider), every other real
dtype (integers, booleans, half precision) is computed in ``torch.get_default_dtype()``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral, Real

import torch
from torch import Tensor


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a value that is not one of the allowed names (ValueError)."""
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {names}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False (TypeError)."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_integer(
    name: str, value: object, minimum: int, maximum: int | None = None, note: str = ""
) -> int:
    """Return the value as int; TypeError for other types, ValueError outside [minimum, maximum].

    ``note`` says where a maximum comes from: ``note="n_points"`` prints ``[1, n_points=5]``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        upper = "inf)" if maximum is None else f"{note + '=' if note else ''}{maximum}]"
        raise ValueError(f"{name} must be in [{minimum}, {upper}, got {number}")
    return number


def check_number(
    name: str,
    value: object,
    minimum: float = -math.inf,
    *,
    above: bool = False,
    infinite: bool = False,
) -> float:
    """Return the value as float; it must be at least ``minimum`` (greater, with ``above``).

    Raises TypeError for a value that is not a real number, ValueError for NaN, for infinity (unless
    ``infinite``) and outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond what a float holds
        number = -math.inf if value < 0 else math.inf
    too_small = number <= minimum if above else number < minimum
    if math.isnan(number) or too_small or (math.isinf(number) and not infinite):
        allowed = f"{'(' if above or math.isinf(minimum) else '['}{minimum:g}, inf"
        raise ValueError(f"{name} must be in {allowed}{']' if infinite else ')'}, got {number:g}")
    return number


def check_tensor(name: str, value: object, *, min_dims: int = 0) -> Tensor:
    """Return a real, finite tensor in a dtype that sums are safe in (see the module's rule).

    Raises TypeError for anything but a tensor and for complex tensors, ValueError for too few
    dimensions and for NaN or infinite entries (the message has the index of the first).
    """
    if not isinstance(value, Tensor):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"{name} must be a torch.Tensor, got {kind}")
    if value.is_complex():
        raise TypeError(f"{name} must be real, got dtype {value.dtype}")
    if value.dim() < min_dims:
        shape = tuple(value.shape)
        raise ValueError(f"{name} must have at least {min_dims} dimensions, got shape {shape}")
    if value.dtype not in (torch.float32, torch.float64):
        value = value.to(torch.get_default_dtype())
    # The extremes show NaN and infinity as well, ten times faster than a look at every entry.
    extremes = torch.stack([value.amin(), value.amax()]) if value.numel() else value
    if not bool(torch.isfinite(extremes).all()):
        index = tuple((~torch.isfinite(value)).nonzero()[0].tolist())
        raise ValueError(f"{name} must be finite, got {float(value[index])} at index {index}")
    return value


def check_points(name: str, value: object) -> Tensor:
    """Return points (..., n, d) with n >= 1 and d >= 1, checked as by :func:`check_tensor`."""
    tensor = check_tensor(name, value, min_dims=2)
    if tensor.shape[-2] < 1 or tensor.shape[-1] < 1:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name} must have at least one row and one feature, got shape {shape}")
    return tensor


def check_points_and_centers(points: object, centers: object) -> tuple[Tensor, Tensor]:
    """Return points (..., n, d) and centers (..., k, d) in one dtype, batch shapes compatible.

    Raises ValueError for different d, for k > n, for batch dimensions that don't broadcast, and for
    what :func:`check_points` refuses.
    """
    points = check_points("points", points)
    centers = check_points("centers", centers)
    if points.shape[-1] != centers.shape[-1]:
        raise ValueError(
            f"points and centers must have the same number of features, "
            f"got {points.shape[-1]} and {centers.shape[-1]}"
        )
    n_points, n_clusters = points.shape[-2], centers.shape[-2]
    if n_clusters > n_points:
        raise ValueError(f"n_clusters must be in [1, n_points={n_points}], got {n_clusters}")
    if points.device != centers.device:
        raise ValueError(
            f"points and centers must be on one device, got {points.device} and {centers.device}"
        )
    try:
        torch.broadcast_shapes(points.shape[:-2], centers.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"batch dimensions of points and centers must broadcast, "
            f"got shapes {tuple(points.shape)} and {tuple(centers.shape)}"
        ) from None
    dtype = torch.promote_types(points.dtype, centers.dtype)
    return points.to(dtype), centers.to(dtype)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Autocast off on the tensor's device: it would round products that have to be exact."""
    kind = tensor.device.type
    available = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if available else nullcontext()
