"""Tasks follow Appendix D: distributions against scipy, scaling, centers, degenerate cases."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from leancluster_core.samplers import (
    CHUNK_ELEMENTS,
    FAMILIES,
    TaskDistribution,
    _fill_noise,
    rescale_to_unit_cube,
)

STANDARD_FORM = {
    "normal": stats.norm,
    "cauchy": stats.cauchy,
    "gumbel": stats.gumbel_r,
    "laplace": stats.laplace,
    "lognormal": stats.norm,  # its exponential is taken later
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unscaled(distribution: TaskDistribution, n_tasks: int, seed: int, monkeypatch) -> np.ndarray:
    """Points before the scaling to [0, 1], as the sampler makes them."""
    monkeypatch.setattr("leancluster_core.samplers._scale_features", lambda points: None)
    points, _ = distribution.sample((n_tasks,), generator=seeded(seed))
    return points.double().numpy()


# --- distributions -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_has_the_familys_distribution(family):
    noise = torch.empty(200_000)
    _fill_noise(noise, family, seeded(3))
    assert noise.isfinite().all()
    assert stats.kstest(noise.double().numpy(), STANDARD_FORM[family].cdf).pvalue > 0.01


@pytest.mark.parametrize("family", ["gumbel", "laplace", "cauchy"])
def test_noise_is_finite_at_the_ends_of_the_uniform(family, monkeypatch):
    """Every end of the interval that a uniform can return, in one tensor."""

    def ends(self, low=0.0, high=1.0, *, generator):
        one_below = math.nextafter(1.0, 0.0) if self.dtype == torch.float64 else 1 - 2.0**-24
        grid = torch.tensor([0.0, 2.0**-24, 0.5, one_below])
        return self.copy_(low + (high - low) * grid)

    monkeypatch.setattr(torch.Tensor, "uniform_", ends)
    noise = torch.empty(4)
    _fill_noise(noise, family, seeded())
    assert noise.isfinite().all()
    assert noise.abs().max() < 3e7


@pytest.mark.parametrize("scale", [0.1, 0.7, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_cluster_has_the_familys_shape(family, scale, monkeypatch):
    """k = 1: a task's points are location + scale * noise; scales above 1 in units of the scale."""
    monkeypatch.setattr("leancluster_core.samplers._exponentiate", lambda points, factor: None)
    distribution = TaskDistribution(family, n_points=512, n_features=2, n_clusters=1, scale=scale)
    points = unscaled(distribution, 100, 5, monkeypatch)
    locations = torch.rand(100, 2, generator=seeded(5)).double().numpy()[:, None, :]
    noise = (points - locations / max(scale, 1.0)) / min(scale, 1.0)
    assert stats.kstest(noise.ravel(), STANDARD_FORM[family].cdf).pvalue > 0.01
    assert stats.kstest(locations.ravel(), stats.uniform.cdf).pvalue > 0.01


@pytest.mark.parametrize("scale", [0.1, 0.9, 4.0])
def test_lognormal_is_the_exponential_of_the_normal(scale):
    """Same stream, so the same draws: scaling exp(normal) by hand in float64 gives the points."""
    make = {"n_points": 64, "n_features": 3, "n_clusters": 4, "scale": scale}
    points, _ = TaskDistribution("lognormal", **make).sample((20,), generator=seeded(8))
    with pytest.MonkeyPatch.context() as patch:
        normal = unscaled(TaskDistribution("normal", **make), 20, 8, patch)
    raw = np.exp(normal * max(scale, 1.0))
    low, high = raw.min(1, keepdims=True), raw.max(1, keepdims=True)
    np.testing.assert_allclose(points.numpy(), (raw - low) / (high - low), atol=3e-6 * scale)


def test_anisotropic_scales_are_uniform_per_cluster_and_feature(monkeypatch):
    distribution = TaskDistribution(
        n_points=2048, n_features=3, n_clusters=1, scale=0.2, isotropic=False
    )
    spread = unscaled(distribution, 400, 11, monkeypatch).std(axis=1) / 0.2  # (tasks, d)
    assert stats.kstest(spread.ravel(), stats.uniform.cdf).pvalue > 0.01
    assert abs(np.corrcoef(spread.T)[np.triu_indices(3, 1)]).max() < 0.15


def cluster_shares(equal_weights: bool, n_tasks: int) -> np.ndarray:
    distribution = TaskDistribution(n_points=512, n_clusters=4, equal_weights=equal_weights)
    clusters = distribution._draw_clusters(n_tasks, seeded(2))
    assert clusters.min() >= 0 and clusters.max() < 4
    return (clusters[..., None] == torch.arange(4)).double().mean(1).numpy()


def test_equal_weights_are_multinomial():
    shares = cluster_shares(True, 2000)
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=0.002)
    assert shares.std(0) == pytest.approx([math.sqrt(0.25 * 0.75 / 512)] * 4, rel=0.06)


def test_unequal_weights_are_normalised_uniforms():
    """First two moments of a share against normalised uniforms drawn by numpy."""
    shares = cluster_shares(False, 4000)
    weights = np.random.default_rng(0).uniform(size=(200_000, 4))
    weights /= weights.sum(1, keepdims=True)
    sampling = (weights * (1 - weights)).mean() / 512
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=0.01)
    assert shares.var(0) == pytest.approx([weights[:, 0].var() + sampling] * 4, rel=0.08)


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("weight", [0.0, 1e-38, 0.3, 1 - 2.0**-24])
def test_unequal_weights_never_leave_the_range(value, weight, monkeypatch):
    """Extreme uniforms and weights, even all zero, still name a cluster."""

    def constant(self, *, generator):
        return self.fill_(weight if self.shape[-1] == 7 else value)

    monkeypatch.setattr(torch.Tensor, "uniform_", constant)
    distribution = TaskDistribution(n_points=50, n_clusters=7, equal_weights=False)
    clusters = distribution._draw_clusters(3, seeded())
    assert clusters.min() >= 0 and clusters.max() <= 6


# --- scaling and centers -----------------------------------------------------------------------


@pytest.mark.parametrize("n_points", [24, 25, 512])
@pytest.mark.parametrize("n_features", [1, 4, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_unit_range_is_attained_and_centers_are_distinct_points(family, n_features, n_points):
    distribution = TaskDistribution(
        family, n_points, n_features, 5, equal_weights=False, isotropic=False
    )
    points, centers = distribution.sample((2, 3), generator=seeded(1))
    assert points.shape == (2, 3, n_points, n_features) and points.dtype == torch.float32
    assert centers.shape == (2, 3, 5, n_features)
    assert points.is_contiguous() and centers.is_contiguous()
    assert (points.amin(-2) == 0).all() and (points.amax(-2) == 1).all()
    is_row = (centers[..., :, None, :] == points[..., None, :, :]).all(-1)  # (2, 3, k, n)
    assert is_row.any(-1).all()
    # k different rows can be named, also where rows are equal: cauchy's bulk may collapse
    assert (is_row.any(-2).sum(-1) >= 5).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_scaling_agrees_with_float64(family, monkeypatch):
    distribution = TaskDistribution(family, n_points=48, n_features=3)
    points, _ = distribution.sample((50,), generator=seeded(6))
    raw = unscaled(distribution, 50, 6, monkeypatch)
    low, high = raw.min(1, keepdims=True), raw.max(1, keepdims=True)
    np.testing.assert_allclose(points.numpy(), (raw - low) / (high - low), rtol=2e-6, atol=1e-7)


def test_every_row_is_a_center_equally_often():
    points, centers = TaskDistribution(n_points=10, n_clusters=3, n_features=2).sample(
        (6000,), generator=seeded(4)
    )
    is_row = (centers[:, :, None] == points[:, None]).all(-1)
    assert (is_row.sum(-1) == 1).all()  # 2-d normal points are distinct here
    counts = is_row.sum((0, 1)).double().numpy()  # rows used, 18000 in all
    assert stats.chisquare(counts).pvalue > 0.01


def test_centers_have_the_law_of_rows_drawn_without_replacement():
    """Distance between the first two centers against two rows that numpy picks."""
    points, centers = TaskDistribution(n_points=40, n_clusters=4, n_features=2).sample(
        (4000,), generator=seeded(9)
    )
    rng = np.random.default_rng(1)
    rows = torch.tensor(np.array([rng.choice(40, 2, replace=False) for _ in range(4000)]))
    picked = points[torch.arange(4000)[:, None], rows]
    distance = [(pair[:, 0] - pair[:, 1]).norm(dim=-1).numpy() for pair in (centers, picked)]
    assert stats.ks_2samp(*distance).pvalue > 0.01


def test_centers_do_not_share_memory_with_points():
    points, centers = TaskDistribution(n_points=9).sample((2,), generator=seeded())
    before = centers.clone()
    points.zero_()
    assert torch.equal(centers, before)


# --- determinism -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_tasks(family):
    distribution = TaskDistribution(family, n_points=30)
    first, again, other = (distribution.sample((3,), generator=seeded(s)) for s in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_batch_shape_only_reshapes():
    distribution = TaskDistribution(n_points=30)
    flat, nested = (distribution.sample(s, generator=seeded()) for s in ((6,), (2, 3)))
    assert torch.equal(flat[0].view(2, 3, 30, 4), nested[0])
    assert torch.equal(flat[1].view(2, 3, 6, 4), nested[1])
    points, centers = distribution.sample((), generator=seeded())
    assert points.shape == (30, 4) and centers.shape == (6, 4)


def test_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    TaskDistribution("gumbel", isotropic=False, equal_weights=False).sample(
        (2,), generator=seeded()
    )
    assert torch.equal(torch.random.get_rng_state(), before)


def test_default_dtype_does_not_matter():
    distribution = TaskDistribution("laplace", n_points=20, equal_weights=False, isotropic=False)
    expected = distribution.sample((2,), generator=seeded())
    torch.set_default_dtype(torch.float64)
    try:
        got = distribution.sample((2,), generator=seeded())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_tasks_beyond_one_chunk_are_tasks_too():
    """More elements than a chunk, and a chunk border inside a task."""
    n_tasks = CHUNK_ELEMENTS // (100 * 6) + 20
    points, _ = TaskDistribution(n_points=100, n_features=6).sample((n_tasks,), generator=seeded())
    assert (points.amin(1) == 0).all() and (points.amax(1) == 1).all()
    flat = points.view(n_tasks, -1)
    assert flat.unique(dim=0).shape[0] == n_tasks


# --- degenerate and extreme tasks --------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-45, 1e-12, 1e-9, 1.0, 1e6, 1e20, 1e300])
@pytest.mark.parametrize("isotropic", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_scale_gives_points_in_the_cube(family, isotropic, scale):
    distribution = TaskDistribution(family, 40, 3, 2, scale=scale, isotropic=isotropic)
    points, _ = distribution.sample((200,), generator=seeded(5))
    assert points.isfinite().all()
    assert ((points.amin(1) == 0) & ((points.amax(1) == 1) | (points.amax(1) == 0))).all()


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-9])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_tight_cluster_is_constant(family, scale):
    """k = 1 and no scale above rounding: noise must not be blown up to [0, 1]."""
    if family == "cauchy":
        scale *= 1e-7  # its tail reaches 3e7 scales
    distribution = TaskDistribution(family, 16, 2, 1, scale=scale)
    points, centers = distribution.sample((500,), generator=seeded(5))
    near_zero_location = points.any(1)  # where rounding is finer, so the spread is data
    assert near_zero_location.double().mean() < 0.1
    if scale < 1e-9:
        assert not near_zero_location.any() and not centers.any()


def test_zero_scale_gives_the_locations():
    points, _ = TaskDistribution(n_points=60, n_clusters=3, scale=0.0).sample(
        (20,), generator=seeded()
    )
    assert all(len(task.unique(dim=0)) <= 3 for task in points)
    assert (points.amax(1) == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_point(family):
    points, centers = TaskDistribution(family, 1, 3, 1).sample((4,), generator=seeded())
    assert torch.equal(points, torch.zeros(4, 1, 3)) and torch.equal(centers, points)


def test_as_many_clusters_as_points():
    points, centers = TaskDistribution(n_points=7, n_features=2, n_clusters=7).sample(
        (50,), generator=seeded()
    )
    for task, start in zip(points, centers, strict=True):
        assert torch.equal(task.unique(dim=0), start.unique(dim=0))


# --- the dataclass and its refusals ------------------------------------------------------------


def test_is_a_plain_hashable_value():
    first = TaskDistribution(n_points=np.int64(64), scale=1)
    second = TaskDistribution(n_points=64, scale=1.0)
    assert first == second and hash(first) == hash(second)
    dumped = json.dumps(dataclasses.asdict(first))
    assert dumped == json.dumps(dataclasses.asdict(second))
    assert TaskDistribution(**json.loads(dumped)) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.scale = 2.0


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"family": "gauss"}, ValueError, "family must be one of 'normal', .* got 'gauss'"),
        ({"family": None}, ValueError, "family"),
        ({"n_points": 0}, ValueError, r"n_points must be in \[1, inf\), got 0"),
        ({"n_points": 5.0}, TypeError, "n_points must be an integer, got 5.0"),
        ({"n_points": True}, TypeError, "n_points"),
        ({"n_features": 0}, ValueError, "n_features"),
        ({"n_clusters": 0}, ValueError, "n_clusters"),
        (
            {"n_clusters": 7, "n_points": 5},
            ValueError,
            r"n_clusters must be in \[1, n_points=5\], got 7",
        ),
        ({"scale": -0.1}, ValueError, "scale"),
        ({"scale": math.nan}, ValueError, "scale"),
        ({"scale": math.inf}, ValueError, "scale"),
        ({"scale": "0.1"}, TypeError, "scale"),
        ({"equal_weights": 1}, TypeError, "equal_weights"),
        ({"isotropic": None}, TypeError, "isotropic"),
    ],
)
def test_refuses_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        TaskDistribution(**fields)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        (4, TypeError, "batch_shape must be a sequence of integers, got 4"),
        ("3", TypeError, r"batch_shape\[0\]"),
        ((2, 0), ValueError, r"batch_shape\[1\] must be in \[1, inf\), got 0"),
        ((2.0,), TypeError, r"batch_shape\[0\]"),
    ],
)
def test_refuses_bad_batch_shapes(shape, error, message):
    with pytest.raises(error, match=message):
        TaskDistribution().sample(shape, generator=seeded())


def test_generator_is_required():
    with pytest.raises(TypeError, match="generator"):
        TaskDistribution().sample((2,))
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator, got None"):
        TaskDistribution().sample((2,), generator=None)


# --- external data -----------------------------------------------------------------------------


def external(dtype=torch.float64, n_points=30):
    generator = seeded(12)
    points = torch.randn(n_points, 3, generator=generator, dtype=torch.float64)
    points = points * torch.tensor([1.0, 40.0, 0.01]) + torch.tensor([5.0, -1e3, 0.0])
    centers = points[:4] + 0.5
    return points.to(dtype), centers.to(dtype)


def test_rescaling_is_one_shift_and_one_scale():
    points, centers = external()
    new_points, new_centers = rescale_to_unit_cube(points, centers)
    low = torch.cat([points, centers]).amin(0)
    largest = (torch.cat([points, centers]) - low).max()
    torch.testing.assert_close(new_points, (points - low) / largest)
    torch.testing.assert_close(new_centers, (centers - low) / largest)
    both = torch.cat([new_points, new_centers])
    assert (both.amin(0) == 0).all() and both.max() == 1
    # the k-means problem: all squared distances by one factor
    before, after = torch.cdist(points, centers) ** 2, torch.cdist(new_points, new_centers) ** 2
    torch.testing.assert_close(after * largest**2, before)


def test_rescaling_treats_every_task_by_itself():
    points = (
        torch.rand(2, 3, 8, 2, generator=seeded()) * torch.tensor([1.0, 50.0])[:, None, None, None]
    )
    centers = points[0, :, :2]  # broadcasts over the first dimension
    new_points, new_centers = rescale_to_unit_cube(points, centers)
    assert new_points.shape == (2, 3, 8, 2) and new_centers.shape == (2, 3, 2, 2)
    for i in range(2):
        for j in range(3):
            alone = rescale_to_unit_cube(points[i, j], centers[j])
            assert torch.equal(new_points[i, j], alone[0])
            assert torch.equal(new_centers[i, j], alone[1])


def test_public_case_s1_4_scaling_of_constant_features():
    """Constant, constant up to rounding, and a range that overflows float32."""
    constant = torch.tensor([[5.0, 1.0], [5.0, 2.0], [5.0, 3.0]], dtype=torch.float64)
    rounding = torch.tensor([[0.1 + 0.2, 1.0], [0.3, 2.0], [0.3, 3.0]], dtype=torch.float64)
    for points in (constant, rounding):
        new_points, new_centers = rescale_to_unit_cube(points, points[:1])
        assert torch.equal(new_points, torch.tensor([[0, 0], [0, 0.5], [0, 1]]).double())
        assert torch.equal(new_centers, torch.zeros(1, 2).double())
    huge = torch.tensor([[3e38], [-3e38], [0.0]])
    assert torch.equal(rescale_to_unit_cube(huge, huge[:1])[0], torch.tensor([[1], [0], [0.5]]))
    largest = torch.finfo(torch.float64).max
    huge = torch.tensor([[largest], [-largest], [0.0]], dtype=torch.float64)
    assert rescale_to_unit_cube(huge, huge[:1])[0].flatten().tolist() == [1, 0, 0.5]


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e30, -1e-30])
def test_rescaling_of_data_that_is_all_rounding(value):
    points = torch.full((4, 2), value)
    points[0, 0] = math.nextafter(value, 9.0) if value == 0.1 else value
    new_points, new_centers = rescale_to_unit_cube(points, points[:2])
    assert not new_points.any() and not new_centers.any()


def test_rounding_noise_beside_small_data_stays_out():
    """A feature of rounding noise must not set the scale of a small but real one."""
    points = torch.tensor([[1.0, 0.0], [1.0 + 2.0**-23, 1e-9], [1.0, 2e-9]])
    new_points, _ = rescale_to_unit_cube(points, points[:1])
    torch.testing.assert_close(new_points, torch.tensor([[0, 0], [0, 0.5], [0, 1]]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32, torch.float64])
def test_rescaling_casts_once(dtype):
    points = torch.tensor([[0], [1], [10], [11]], dtype=dtype)
    new_points, new_centers = rescale_to_unit_cube(points, points[:2])
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert new_points.dtype == new_centers.dtype == expected
    torch.testing.assert_close(
        new_points[:, 0].double(), torch.tensor([0, 1, 10, 11]) / 11.0, check_dtype=False
    )


def test_rescaling_ignores_memory_layout_and_its_input():
    points, centers = external(torch.float32)
    view = points.t().contiguous().t()
    before = points.clone()
    assert torch.equal(
        rescale_to_unit_cube(view, centers)[0], rescale_to_unit_cube(points, centers)[0]
    )
    assert torch.equal(points, before)


@pytest.mark.parametrize(
    ("points", "centers", "error", "message"),
    [
        (torch.tensor([[0.0], [math.nan]]), torch.zeros(1, 1), ValueError, "points must be finite"),
        (torch.zeros(2, 1), torch.tensor([[math.inf]]), ValueError, "centers must be finite"),
        (torch.zeros(2, 1), torch.zeros(3, 1), ValueError, r"n_clusters .*n_points=2\], got 3"),
        (torch.zeros(2, 1), torch.zeros(1, 2), ValueError, "same number of features"),
        (torch.zeros(0, 1), torch.zeros(1, 1), ValueError, "points"),
        (torch.zeros(2), torch.zeros(1, 1), ValueError, "points"),
        ([[0.0]], torch.zeros(1, 1), TypeError, "points must be a torch.Tensor"),
    ],
)
def test_rescaling_refuses(points, centers, error, message):
    with pytest.raises(error, match=message):
        rescale_to_unit_cube(points, centers)
