"""Lloyd against a loop in float64 and scikit-learn, and where clusters are empty, tied or twins."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from torch import Tensor

from leancluster_core.distances import nearest_centers, squared_distances
from leancluster_core.kmeans import _lloyd, lloyd, lloyd_step

DTYPES = (torch.float32, torch.float64)
REAL_DATA = {
    "iris": load_iris,
    "wine": load_wine,
    "digits": load_digits,
    "breast_cancer": load_breast_cancer,
}


def random_task(
    *shape: int, seed: int = 0, n_clusters: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Points (*shape) uniform in the unit cube, the first n_clusters of them as centers."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return points, points[..., :n_clusters, :].clone()


def loop_lloyd(points: Tensor, centers: Tensor, n_iterations: int) -> np.ndarray:
    """The definition in float64 for one task, one cluster at a time; empty clusters kept."""
    rows, means = points.double().numpy(), centers.double().numpy().copy()
    for _ in range(n_iterations):
        distances = ((rows[:, None, :] - means[None]) ** 2).sum(-1)
        labels = distances.argmin(1)
        for cluster in range(len(means)):
            if (labels == cluster).any():
                means[cluster] = rows[labels == cluster].mean(0)
    return means


def kmeans_loss(points: Tensor, centers: Tensor) -> float:
    return float(squared_distances(points, centers).amin(-1).sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n_iterations", [0, 1, 2, 10])
def test_lloyd_is_the_definition(seed: int, n_iterations: int) -> None:
    points, centers = random_task(200, 3, seed=seed, n_clusters=7)
    found = lloyd(points, centers, n_iterations)
    expected = loop_lloyd(points, centers, n_iterations)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-15)


def judge(points: Tensor, centers: Tensor, n_iterations: int) -> KMeans:
    """scikit-learn's Lloyd from the same centers, at most n_iterations of them."""
    estimator = KMeans(
        len(centers),
        init=centers.numpy(),
        n_init=1,
        algorithm="lloyd",
        max_iter=n_iterations,
        tol=0,
    )
    return estimator.fit(points.numpy())


@pytest.mark.parametrize("n_iterations", [1, 5, 300])
@pytest.mark.parametrize("n_clusters", [3, 10])
@pytest.mark.parametrize("name", REAL_DATA)
def test_real_data_agrees_with_scikit_learn(name: str, n_clusters: int, n_iterations: int) -> None:
    """Four data sets that nobody here wrote: centers to 1e-9, labels the same, run to the end."""
    points = torch.from_numpy(REAL_DATA[name]().data).double()
    generator = torch.Generator().manual_seed(n_clusters)
    distinct = torch.unique(points, dim=0)
    centers = distinct[torch.randperm(len(distinct), generator=generator)[:n_clusters]]
    # Digits are whole numbers, so that centers on data points tie, and ties are decided differently
    # here (by index) and there (by rounding).
    centers = centers + 1e-3 * torch.rand(centers.shape, generator=generator, dtype=torch.float64)
    found = lloyd(points, centers, n_iterations)
    assert len(nearest_centers(points, found).unique()) == n_clusters
    expected = judge(points, centers, n_iterations)
    np.testing.assert_allclose(found.numpy(), expected.cluster_centers_, rtol=1e-12, atol=1e-9)
    assert nearest_centers(points, found).tolist() == expected.labels_.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_random_data_agrees_with_scikit_learn(seed: int) -> None:
    points, centers = random_task(20_000, 8, seed=seed, n_clusters=20)
    for n_iterations in (1, 10):
        found = lloyd(points, centers, n_iterations)
        expected = judge(points, centers, n_iterations).cluster_centers_
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_broadcast_and_equal_a_loop(dtype: torch.dtype) -> None:
    points, centers = random_task(3, 40, 50, 4, n_clusters=6, dtype=dtype)
    found = lloyd(points, centers, 4, return_all=True)
    assert found.shape == (5, 3, 40, 6, 4) and found.dtype == dtype
    for index in np.ndindex(3, 40):
        alone = lloyd(points[index], centers[index], 4, return_all=True)
        assert torch.equal(found[:, *index], alone)
    shared = lloyd(points[0, 0], centers, 2)  # one set of points, many starts
    assert shared.shape == (3, 40, 6, 4)
    assert torch.equal(shared[1, 7], lloyd(points[0, 0], centers[1, 7], 2))
    assert torch.equal(_lloyd(points, centers, 4), found[-1])
    assert lloyd(points[:, :0], centers[:, :0], 2).shape == (3, 0, 6, 4)


def test_all_iterates_start_with_the_given_centers() -> None:
    points, centers = random_task(100, 2)
    iterates = lloyd(points, centers, 60, return_all=True)
    assert torch.equal(iterates[0], centers)
    for before, after in itertools.pairwise(iterates):
        torch.testing.assert_close(after, lloyd_step(points, before), rtol=0, atol=1e-15)
    losses = [kmeans_loss(points, iterate) for iterate in iterates]
    assert all(after <= before for before, after in itertools.pairwise(losses))
    assert torch.equal(iterates[-1], iterates[-2])  # at rest, whether or not it stopped early


def test_the_input_is_left_alone() -> None:
    points, centers = random_task(100, 2)
    copies = points.clone(), centers.clone()
    for return_all in (False, True):
        lloyd(points, centers, 0, return_all=return_all).zero_()
    lloyd(points, centers, 3)
    assert torch.equal(points, copies[0]) and torch.equal(centers, copies[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_cluster_gives_the_mean(dtype: torch.dtype) -> None:
    """S1.2: k = 1; and the sum of 300,000 float32 values keeps its digits."""
    points, centers = random_task(300_000, 2, n_clusters=1, dtype=dtype)
    expected = points.double().mean(0, keepdim=True)
    found = lloyd(points, centers, 2).double()
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_cluster_keeps_its_center(dtype: torch.dtype) -> None:
    """S1.1: no NaN at any step, and the caller can see that the third cluster is empty."""
    points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0]], dtype=dtype)
    centers = torch.tensor([[0.0, 1.0], [8.0, 1.0], [500.0, 500.0]], dtype=dtype)
    iterates = lloyd(points, centers, 5, return_all=True)
    assert torch.equal(iterates, centers.expand(6, 3, 2))
    assert 2 not in nearest_centers(points, iterates[-1])


def test_an_empty_cluster_among_full_ones_in_a_batch() -> None:
    """S1.1: one task's empty cluster doesn't touch the others."""
    points, centers = random_task(4, 30, 2)
    centers[2, 3] = 1e6
    found = lloyd(points, centers, 3)
    assert torch.equal(found[2, 3], centers[2, 3]) and bool(found.isfinite().all())
    for task in range(4):
        expected = loop_lloyd(points[task], centers[task], 3)
        np.testing.assert_allclose(found[task].numpy(), expected, rtol=0, atol=1e-15)


def test_an_empty_cluster_can_be_put_on_a_random_point() -> None:
    points, centers = random_task(4, 30, 2)
    centers[:, 3] = 1e6
    found = lloyd(points, centers, 1, empty="resample", generator=torch.Generator().manual_seed(0))
    again = lloyd(points, centers, 1, empty="resample", generator=torch.Generator().manual_seed(0))
    other = lloyd(points, centers, 1, empty="resample", generator=torch.Generator().manual_seed(1))
    kept = lloyd(points, centers, 1)
    assert torch.equal(found, again)
    assert torch.equal(found[:, :3], kept[:, :3]) and torch.equal(found[:, 4:], kept[:, 4:])
    for task in range(4):
        assert found[task, 3].tolist() in points[task].tolist()
    assert not torch.equal(found[:, 3], other[:, 3])
    later = lloyd(points, centers, 9, empty="resample", generator=torch.Generator().manual_seed(0))
    assert float(later.max()) <= 1.0


def test_an_empty_cluster_can_be_refused() -> None:
    points, centers = random_task(2, 3, 30, 2)
    assert lloyd(points, centers, 1, empty="raise").shape == (2, 3, 5, 2)
    centers[1, 2, 4] = 1e6
    with pytest.raises(ValueError, match=r"center 4 of task \(1, 2\) in iteration 1"):
        lloyd(points, centers, 1, empty="raise")
    with pytest.raises(ValueError, match=r"center 4 of task \(\) in iteration 1"):
        lloyd_step(points[1, 2], centers[1, 2], empty="raise")


@pytest.mark.parametrize("n_clusters", [2, 5])
@pytest.mark.parametrize("value", [1.0, 0.1])
def test_identical_points_warn_and_have_loss_zero(n_clusters: int, value: float) -> None:
    """S1.2, X1: five equal points, two and five clusters."""
    points = torch.full((5, 2), value, dtype=torch.float64)
    with pytest.warns(UserWarning, match=rf"only 1 of n_clusters={n_clusters} clusters"):
        found = lloyd(points, points[:n_clusters], 1000)
    assert kmeans_loss(points, found) == 0
    assert torch.equal(lloyd(points, points[:1], 1000), points[:1])


@pytest.mark.parametrize("empty", ["keep", "resample"])
def test_fewer_distinct_points_than_clusters(empty: str) -> None:
    """S1.2, X2: two distinct points, three clusters, from twin and from distinct centers."""
    points = torch.tensor([[1.0, 1.0]] * 3 + [[4.0, 4.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for centers in (points[[0, 1, 3]], torch.tensor([[0.0, 0.0], [1.0, 1.0], [4.0, 4.0]])):
        with pytest.warns(UserWarning, match=r"only 2 of n_clusters=3 .* have 2 distinct rows"):
            found = lloyd(points, centers, 100, empty=empty, generator=generator)
        assert kmeans_loss(points, found) == 0


def test_the_warning_names_the_task() -> None:
    """S1.2: in a batch, the first such task and the number of others; full tasks are silent."""
    points, centers = random_task(2, 3, 30, 2)
    points[1, 1:] = 0.5
    with pytest.warns(UserWarning, match=r"in task \(1, 1\).* \(and 1 more tasks like it\)"):
        lloyd(points, centers, 3)
    points[1, 1, :, 0] = torch.arange(30).remainder(2)  # 2 x 2 distinct points for 5 clusters
    points[1, 1, :, 1] = torch.arange(30).remainder(4).div(2, rounding_mode="floor")
    with pytest.warns(UserWarning, match=r"in task \(1, 1\), whose points have 4 distinct rows"):
        lloyd(points[:, :2], centers[:, :2], 3)


def test_fewer_points_than_clusters_are_refused() -> None:
    """S1.2, X3: the message has n and k."""
    with pytest.raises(ValueError, match=r"n_clusters must be in \[1, n_points=2\], got 3"):
        lloyd(torch.tensor([[0.0], [1.0]]), torch.zeros(3, 1), 1)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e3, 1e4])
def test_float32_means_do_not_depend_on_a_common_offset(offset: float) -> None:
    """S1.3: float32 keeps what float32 input can hold; the judge is a loop in float64."""
    points, centers = random_task(5000, 3, n_clusters=8)
    points, centers = (points + offset).float(), (centers + offset).float()
    found = lloyd(points, centers, 5).double().numpy()
    expected = loop_lloyd(points, centers, 5)
    # Centers are rounded to float32 after each iteration, which can flip a label here and there.
    tolerance = 20 * max(offset, 1.0) * torch.finfo(torch.float32).eps
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    one_step = lloyd_step(points, centers).double().numpy()
    half_ulp = max(offset + 1, 1.0) * torch.finfo(torch.float32).eps
    np.testing.assert_allclose(one_step, loop_lloyd(points, centers, 1), rtol=0, atol=half_ulp)


def test_an_outlier_costs_the_other_means_no_digits() -> None:
    """S1.3, its kind: a point at 1e8 must not decide where float32 data are centered."""
    points, centers = random_task(5000, 3, n_clusters=8)
    points[17], centers[3] = 1e8, 9e7
    found = lloyd_step(points.float(), centers.float()).double().numpy()
    expected = loop_lloyd(points.float(), centers.float(), 1)
    np.testing.assert_allclose(found, expected, rtol=torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_shifted_data_give_shifted_centers(offset: float) -> None:
    """S1.3: in float64 the shift comes out again."""
    points, centers = random_task(5000, 3, n_clusters=8)
    shifted = lloyd(points + offset, centers + offset, 10) - offset
    torch.testing.assert_close(shifted, lloyd(points, centers, 10), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1.5e308])
def test_very_large_and_very_small_numbers(scale: float) -> None:
    points, centers = random_task(50, 2, n_clusters=3)
    found = lloyd(points * scale, centers * scale, 5) / scale
    torch.testing.assert_close(found, lloyd(points, centers, 5), rtol=1e-13, atol=0)


def test_ties_go_to_the_center_of_lowest_index() -> None:
    points = torch.tensor([[0.0], [1.0], [2.0]])
    assert lloyd_step(points, torch.tensor([[0.0], [2.0]])).tolist() == [[0.5], [2.0]]
    assert lloyd_step(points, torch.tensor([[2.0], [0.0]])).tolist() == [[1.5], [0.0]]


def test_permutations() -> None:
    points, centers = random_task(300, 3, n_clusters=9)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(300, generator=generator)
    columns = torch.randperm(9, generator=generator)
    expected = lloyd(points, centers, 6)
    torch.testing.assert_close(lloyd(points[rows], centers, 6), expected, rtol=0, atol=1e-15)
    assert torch.equal(lloyd(points, centers[columns], 6), expected[columns])


def test_other_dtypes_and_layouts() -> None:
    """S1.6: integers are not cut to whole numbers, half sums don't overflow, views are fine."""
    whole = torch.tensor([[0], [1], [10], [11]])
    assert lloyd(whole, whole[[0, 2]], 3).tolist() == [[0.5], [10.5]]
    half = torch.full((2000, 1), 50.0).half()
    assert lloyd(half, half[:1], 2).tolist() == [[50.0]]
    generator = torch.Generator().manual_seed(0)
    view = torch.randn(2, 30, generator=generator).t()
    strided = torch.randn(60, 2, generator=generator)[::2]
    for points in (view, strided):
        expected = lloyd(points.contiguous(), points[:4].contiguous(), 5)
        assert torch.equal(lloyd(points, points[:4], 5), expected)
    doubles = torch.rand(30, 2, dtype=torch.float64, generator=generator)
    assert lloyd(doubles, doubles[:3].float(), 2).dtype == torch.float64


def test_bad_input_is_refused_by_name() -> None:
    """S1.5: NaN and inf name the row, before the first step; so does everything else."""
    points, centers = random_task(4, 2, n_clusters=2, dtype=torch.float32)
    for bad in (math.nan, math.inf):
        broken = points.clone()
        broken[2, 0] = bad
        for call in (lambda p: lloyd(p, centers, 0), lambda p: lloyd_step(p, centers)):
            with pytest.raises(ValueError, match=rf"points must be finite, got {bad} at index \(2"):
                call(broken)
    with pytest.raises(ValueError, match=r"n_iterations must be in \[0, inf\), got -1"):
        lloyd(points, centers, -1)
    with pytest.raises(TypeError, match=r"n_iterations must be an integer, got 1.5"):
        lloyd(points, centers, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty must be one of 'keep', 'resample', 'raise'"):
        lloyd(points, centers, 1, empty="drop")
    with pytest.raises(
        TypeError, match=r"generator must be a torch.Generator for empty='resample'"
    ):
        lloyd_step(points, centers, empty="resample")
    with pytest.raises(TypeError, match="return_all must be True or False, got 1"):
        lloyd(points, centers, 1, return_all=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same number of features, got 2 and 3"):
        lloyd(points, torch.zeros(2, 3), 1)
    with pytest.raises(ValueError, match="points must have at least 2 dimensions"):
        lloyd(torch.zeros(4), centers, 1)
