"""Distances against loops in float64, at ties, at zero, far from the origin, and at the door."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from leancluster_core.distances import (
    _center,
    _centered_blocks,
    _nearest_centers,
    _proven_labels,
    _squared_distances,
    nearest_centers,
    squared_distances,
)

DTYPES = (torch.float32, torch.float64)


def random_task(
    *shape: int, seed: int = 0, n_clusters: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Points (*shape) uniform in the unit cube, and centers drawn apart from them."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(*shape, generator=generator, dtype=torch.float64)
    *batch, _, n_features = shape
    centers = torch.rand(*batch, n_clusters, n_features, generator=generator, dtype=torch.float64)
    return points.to(dtype), centers.to(dtype)


def loop_distances(points: Tensor, centers: Tensor) -> np.ndarray:
    """The definition in float64, one pair at a time; points (n, d), centers (k, d)."""
    rows, columns = points.double().numpy(), centers.double().numpy()
    return np.array([[((row - column) ** 2).sum() for column in columns] for row in rows])


def loop_labels(points: Tensor, centers: Tensor) -> list[int]:
    """The first of the smallest distances, one point at a time."""
    return [int(np.argmin(row)) for row in loop_distances(points, centers)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_features", [1, 3, 16, 129])
def test_distances_are_the_definition(dtype: torch.dtype, n_features: int) -> None:
    points, centers = random_task(30, n_features, n_clusters=7, dtype=dtype)
    expected = loop_distances(points, centers)
    tolerance = 2 * n_features * torch.finfo(dtype).eps
    found = squared_distances(points, centers)
    assert found.shape == (30, 7) and found.dtype == dtype
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=tolerance)


def test_batches_broadcast_and_equal_a_loop() -> None:
    points, centers = random_task(3, 2, 20, 4, n_clusters=6)
    distances = squared_distances(points, centers)
    labels = nearest_centers(points, centers)
    assert distances.shape == (3, 2, 20, 6) and labels.shape == (3, 2, 20)
    assert labels.dtype == torch.int64
    for index in np.ndindex(3, 2):
        alone = squared_distances(points[index], centers[index])
        assert torch.equal(distances[index], alone)
        assert torch.equal(labels[index], alone.argmin(-1))
    shared = nearest_centers(points[0, 0], centers)  # one set of points, many sets of centers
    assert torch.equal(shared, squared_distances(points[0, 0], centers).argmin(-1))
    one_by_one = [nearest_centers(row, centers[1, 1]) for row in points.flatten(0, 1)]
    expected = torch.stack(one_by_one).reshape(3, 2, 20)
    assert torch.equal(nearest_centers(points, centers[1, 1]), expected)


def test_no_tasks_give_no_labels() -> None:
    assert nearest_centers(torch.zeros(0, 5, 2), torch.zeros(0, 3, 2)).shape == (0, 5)


def test_distance_of_a_pair_does_not_depend_on_company() -> None:
    """S2.2: the same with 25 and 26 rows, 0.25 apart at 3000, and zero on the diagonal."""
    for n_rows in (1, 2, 25, 26, 1000):
        rows = torch.full((n_rows, 2), 3000.0)
        rows[:, 0] += torch.arange(n_rows) * 0.25
        distances = squared_distances(rows, rows)
        assert bool((distances.diagonal() == 0).all())
        if n_rows > 1:
            assert distances[0, 1] == 0.0625


@pytest.mark.parametrize("dtype", DTYPES)
def test_distance_of_a_pair_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """S2.2, its kind: neither the number of rows nor their place changes one bit of a pair."""
    points, centers = random_task(203, 19, n_clusters=37, dtype=dtype)
    together = squared_distances(points, centers)
    for row in (0, 1, 100, 202):
        for column in (0, 17, 36):
            pair = squared_distances(points[[row]], centers[[column]])
            assert pair.item() == together[row, column].item()
    assert torch.equal(together[:40], squared_distances(points[:40], centers))
    assert torch.equal(together[60:, 5:20], squared_distances(points[60:], centers[5:20]))
    assert torch.equal(together.t()[:, :37], squared_distances(points[:37], centers).t())


def test_gradients_at_zero_distance() -> None:
    """S2.1: no root, so the slope at zero is 0 and the second derivative is 2."""
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    squared_distances(points, torch.zeros(1, 2)).sum().backward()
    assert torch.equal(points.grad, torch.tensor([[0.0, 0.0], [6.0, 8.0]]))
    hessian = torch.autograd.functional.hessian(
        lambda row: squared_distances(row, torch.zeros(1, 2)).sum(), torch.zeros(1, 2)
    )
    assert torch.equal(hessian.reshape(2, 2), 2 * torch.eye(2))


def test_gradients_agree_with_finite_differences() -> None:
    """S2.1: first and second derivatives, centers equal to data points included."""
    points, _ = random_task(2, 6, 3)
    centers = points[:, :3].clone().requires_grad_()
    points.requires_grad_()
    assert torch.autograd.gradcheck(squared_distances, (points, centers))
    assert torch.autograd.gradgradcheck(squared_distances, (points, centers))


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e3, 1e4, 1e5])
def test_labels_do_not_depend_on_a_common_offset(offset: float) -> None:
    """S1.3: float32 labels of shifted data are those of float64 on the unshifted data."""
    generator = np.random.default_rng(0)
    blobs = [generator.normal(0, 0.1, (50, 2)), generator.normal(1, 0.1, (50, 2))]
    points = torch.from_numpy(np.concatenate(blobs))
    centers = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    expected = loop_labels(points, centers)
    found = nearest_centers((points + offset).float(), (centers + offset).float())
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
@pytest.mark.parametrize("n_features", [1, 2, 16, 64])
def test_labels_are_those_of_differences(
    dtype: torch.dtype, offset: float, n_features: int
) -> None:
    """S1.3: on shifted data on a coarse grid, which is full of ties, every label is the argmin."""
    points, centers = random_task(4, 3000, n_features, n_clusters=20)
    points, centers = (4 * points).round() / 4 + offset, (4 * centers).round() / 4 + offset
    points, centers = points.to(dtype), centers.to(dtype)
    expected = _squared_distances(points, centers).argmin(-1)
    assert torch.equal(nearest_centers(points, centers), expected)


def test_labels_with_outliers_and_blocks() -> None:
    """Heavy tails, so that a bound for the whole set would be useless, and more than one block."""
    generator = torch.Generator().manual_seed(3)
    points = torch.empty(200_003, 3).cauchy_(generator=generator)
    centers = points[:11].clone()
    assert torch.equal(
        nearest_centers(points, centers), _squared_distances(points, centers).argmin(-1)
    )


@pytest.mark.parametrize("threads,parts", [(1, {1}), (2, {1, 2}), (3, {1}), (4, {1, 4})])
def test_labels_do_not_depend_on_the_threads(threads: int, parts: set[int]) -> None:
    """Each thread has its part of a block; the last block is a part of its own."""
    points, centers = random_task(2, 20_000, 3, n_clusters=40, dtype=torch.float32)
    expected = _squared_distances(points, centers).argmin(-1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        blocks = _centered_blocks(points, _center(points), 40)
        assert {len(block.columns) for block in blocks} == parts
        assert torch.equal(nearest_centers(points, centers), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_points_are_left_to_differences(dtype: torch.dtype) -> None:
    """Neither an offset, nor outliers, nor a center far away make the bound useless."""
    points, centers = random_task(1, 100_000, 8, n_clusters=30, dtype=dtype)
    points[0, 5], centers[0, 7] = 1e6, -1e7
    for offset in (0.0, 100.0):
        shifted = points + offset
        shift = _center(shifted)
        blocks = _centered_blocks(shifted, shift, 30)
        labels, undecided = _proven_labels(shifted, shift, blocks, centers + offset)
        assert int(undecided.sum()) < 200
        expected = _squared_distances(shifted, centers + offset).argmin(-1)
        assert torch.equal(labels[~undecided], expected[~undecided])


def test_ties_go_to_the_lowest_index() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [1.0, 7.0]])
    centers = torch.tensor([[9.0, 9.0], [2.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    for shift in (0.0, 1e3):
        labels = nearest_centers(points + shift, centers + shift)
        assert labels.tolist() == [2, 1, 1, 1]
    points, centers = random_task(100, 4, n_clusters=6)
    twins = torch.cat([centers, centers])
    assert int(nearest_centers(points, twins).max()) < 6
    assert nearest_centers(torch.ones(5, 2), torch.ones(4, 2)).tolist() == [0] * 5


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-30, 1e30, 1e200, 1.5e308])
def test_labels_of_very_large_and_very_small_numbers(scale: float) -> None:
    """Squares that overflow or vanish do not send every point to the first center."""
    points, centers = random_task(50, 3)
    expected = nearest_centers(points, centers)
    assert torch.equal(nearest_centers(points * scale, centers * scale), expected)
    if 1e-38 < scale < 3e38:
        found = nearest_centers((points * scale).float(), (centers * scale).float())
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype,factors", [
    (torch.float32, (1e-30, 1e-18, 1e30)), (torch.float64, (1e-300, 1e-170, 1e300)),
])  # fmt: skip
def test_a_task_does_not_depend_on_the_magnitude_of_others(
    dtype: torch.dtype, factors: tuple[float, ...]
) -> None:
    points, centers = random_task(20, 2, n_clusters=4, dtype=dtype)
    expected = squared_distances(points, centers).argmin(-1)
    for factor in factors:
        tasks = torch.stack([points, points * factor]), torch.stack([centers, centers * factor])
        assert torch.equal(nearest_centers(*tasks), expected.expand(2, -1))


@pytest.mark.parametrize("dtype,far", [
    (torch.float32, 1e12), (torch.float32, 1e22), (torch.float32, 1e25), (torch.float32, 3e38),
    (torch.float64, 1e170), (torch.float64, 1e200), (torch.float64, 1.7e308),
])  # fmt: skip
def test_one_far_row_leaves_the_others_their_labels(dtype: torch.dtype, far: float) -> None:
    points, centers = random_task(20, 2, n_clusters=4, dtype=dtype)
    expected = squared_distances(points, centers).argmin(-1)
    points[7] = far
    centers = torch.cat([centers, points[7:8]])
    expected[7] = 4
    assert torch.equal(nearest_centers(points, centers), expected)


@pytest.mark.parametrize("n_clusters", [30, 300])
def test_labels_under_autocast(n_clusters: int) -> None:
    points, centers = random_task(600, 3, n_clusters=n_clusters, dtype=torch.float32)
    expected = squared_distances(points, centers).argmin(-1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nearest_centers(points, centers), expected)


def test_labels_do_not_depend_on_the_precision_of_products() -> None:
    points, centers = random_task(20_000, 8, n_clusters=30, dtype=torch.float32)
    expected = _squared_distances(points, centers).argmin(-1)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(nearest_centers(points, centers), expected)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_products_of_reduced_precision_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    points, _ = random_task(1, 50, 3, dtype=torch.float32)

    def dtype_of_blocks() -> torch.dtype:
        return next(_centered_blocks(points, _center(points), 5)).columns.dtype

    assert dtype_of_blocks() == torch.float32
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert dtype_of_blocks() == torch.float64

    def lowered_for_one_backend() -> str:
        raise RuntimeError

    monkeypatch.setattr(torch, "get_float32_matmul_precision", lowered_for_one_backend)
    assert dtype_of_blocks() == torch.float64


def test_permutations_and_one_center() -> None:
    points, centers = random_task(300, 5, n_clusters=9)
    labels = nearest_centers(points, centers)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(300, generator=generator)
    columns = torch.randperm(9, generator=generator)
    assert torch.equal(nearest_centers(points[rows], centers), labels[rows])
    assert torch.equal(columns[nearest_centers(points, centers[columns])], labels)
    assert nearest_centers(points, centers[:1]).tolist() == [0] * 300


def test_views_integers_and_half_precision() -> None:
    """S1.6: non-contiguous, strided, integer, mixed and half input."""
    generator = torch.Generator().manual_seed(0)
    view = torch.randn(2, 30, generator=generator).t()
    strided = torch.randn(60, 2, generator=generator)[::2]
    for points in (view, strided):
        centers = points[:4]
        packed = points.contiguous(), centers.contiguous()
        assert torch.equal(squared_distances(points, centers), squared_distances(*packed))
        assert torch.equal(nearest_centers(points, centers), nearest_centers(*packed))
    whole = torch.tensor([[0], [1], [10], [11]])
    centers = torch.tensor([[0.5], [10.5]])
    assert squared_distances(whole, centers).tolist() == [
        [0.25, 110.25], [0.25, 90.25], [90.25, 0.25], [110.25, 0.25],
    ]  # fmt: skip
    assert nearest_centers(whole, centers).tolist() == [0, 0, 1, 1]
    assert squared_distances(whole.double(), centers).dtype == torch.float64
    large = torch.full((3, 1), 300.0).half()  # whose square overflows half precision
    assert squared_distances(large, torch.zeros(1, 1)).tolist() == [[90_000.0]] * 3


@pytest.mark.parametrize("function", [squared_distances, nearest_centers])
def test_bad_input_is_refused_by_name(function) -> None:  # type: ignore[no-untyped-def]
    """S1.5: NaN and inf, and everything else that the door is there for."""
    points, centers = torch.zeros(4, 2), torch.zeros(3, 2)
    for bad in (float("nan"), float("inf")):
        points[2, 0] = bad
        with pytest.raises(ValueError, match=rf"points must be finite, got {bad} at index \(2, 0"):
            function(points, centers)
        points[2, 0] = 0.0
        centers[1, 1] = bad
        with pytest.raises(ValueError, match=r"centers must be finite.* at index \(1, 1\)"):
            function(points, centers)
        centers[1, 1] = 0.0
    with pytest.raises(ValueError, match=r"n_clusters must be in \[1, n_points=4\], got 5"):
        function(points, torch.zeros(5, 2))
    with pytest.raises(ValueError, match="same number of features, got 2 and 3"):
        function(points, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="points must have at least 2 dimensions"):
        function(torch.zeros(4), centers)
    with pytest.raises(ValueError, match="centers must have at least one row"):
        function(points, torch.zeros(0, 2))
    with pytest.raises(ValueError, match="must broadcast"):
        function(torch.zeros(2, 4, 2), torch.zeros(3, 3, 2))
    with pytest.raises(TypeError, match=r"points must be a torch.Tensor, got numpy.ndarray"):
        function(np.zeros((4, 2)), centers)


def test_the_result_has_the_layout_it_promises() -> None:
    points, centers = random_task(2, 8, 3)
    assert squared_distances(points, centers).transpose(-2, -1).is_contiguous()
    assert not _nearest_centers(points.requires_grad_(), centers).requires_grad
