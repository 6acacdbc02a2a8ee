"""The smoothed k-means loss (Section 3, Appendix H): two methods agree, limits, ties, gradients."""

import itertools
import math

import entmax
import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from leancluster_core import (
    kmeans_loss,
    min_weights,
    smoothed_kmeans_loss,
    sparsemax,
    squared_distances,
)
from leancluster_core.losses import (
    PAIRWISE_LIMIT,
    REGULARIZERS,
    _smoothed_minimum,
    _SmoothedMinimum,
)

PENALTIES = [1e-3, 0.02, 0.1, 1.0, 30.0, 1e3]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def cloud(n=30, d=3, k=5, batch=(), seed=0):
    points = torch.rand(*batch, n, d, generator=generator(seed), dtype=torch.float64)
    return points, points[..., :k, :].clone()


def projection_by_bisection(scores):
    """Euclidean projection of a vector onto the simplex: the threshold by bisection."""
    low, high = scores.max() - 1.0, scores.max()
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(scores - middle, 0).sum() > 1:
            low = middle
        else:
            high = middle
    return np.maximum(scores - high, 0)


# ---- sparsemax


@pytest.mark.parametrize("size", [1, 2, 5, PAIRWISE_LIMIT, PAIRWISE_LIMIT + 1, 200])
@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 100.0])
def test_sparsemax_agrees_with_entmax_and_with_bisection(size, scale):
    scores = scale * random(20, size)
    found = sparsemax(scores)
    torch.testing.assert_close(found, entmax.sparsemax(scores, dim=-1), atol=1e-12, rtol=0)
    by_hand = np.stack([projection_by_bisection(row) for row in scores.numpy()])
    np.testing.assert_allclose(found.numpy(), by_hand, atol=1e-12)


def test_sparsemax_meets_the_optimality_conditions():
    """Of min |w - z|^2 on the simplex: w = max(z - kappa, 0) with sum 1 for one kappa."""
    scores = random(50, 9)
    weights = sparsemax(scores)
    kappa = torch.where(weights > 0, scores - weights, -math.inf).amax(-1, keepdim=True)
    torch.testing.assert_close((scores - kappa).clamp_min(0), weights, atol=1e-12, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(50, dtype=torch.float64))


def test_sparsemax_reported_cases():
    """S2.4: the threshold, ties at any size of the numbers, -inf."""
    assert sparsemax(torch.tensor([[0.0, 0.25, 1.0]])).tolist() == [[0.0, 0.125, 0.875]]
    large = torch.tensor([[1.0, 1.0, 0.5, 0.0]]) * torch.tensor([[1e4], [1e8]])
    assert sparsemax(large).tolist() == [[0.5, 0.5, 0.0, 0.0]] * 2
    masked = sparsemax(torch.tensor([[-math.inf, 0.0, 1.0]]))
    assert masked.tolist() == [[0.0, 0.0, 1.0]]
    with pytest.raises(ValueError, match="finite entry"):
        sparsemax(torch.full((1, 3), -math.inf))


@pytest.mark.parametrize("size", [3, 40])
def test_sparsemax_of_ties_is_equal_shares(size):
    weights = sparsemax(torch.full((2, size), 7.0, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / size), rtol=1e-14, atol=0)


@pytest.mark.parametrize("masked", [1, 30])
def test_sparsemax_with_masked_entries_equals_that_of_the_rest(masked):
    scores = random(4, 12)
    padded = torch.cat([scores, torch.full((4, masked), -math.inf, dtype=torch.float64)], -1)
    torch.testing.assert_close(sparsemax(padded)[:, :12], sparsemax(scores), rtol=0, atol=1e-15)
    assert not sparsemax(padded)[:, 12:].any()


@pytest.mark.parametrize("shape,dim", [
    ((4, 1, 3), 0), ((4, 1, 3), 1), ((4, 1, 3), 2), ((4, 1, 3), -1), ((4, 1, 3), -3), ((5,), 0),
    ((2, 40), 1), ((40, 2), 0), ((40, 2), -2),
])  # fmt: skip
def test_sparsemax_derivatives_on_every_axis(shape, dim):
    scores = random(*shape).requires_grad_()
    assert gradcheck(lambda z: sparsemax(z, dim), scores)
    assert gradgradcheck(lambda z: sparsemax(z, dim).square(), scores)
    moved = sparsemax(scores.movedim(dim, -1)).movedim(-1, dim)
    torch.testing.assert_close(sparsemax(scores, dim), moved, rtol=0, atol=1e-15)


def test_sparsemax_gradient_on_a_size_one_axis_is_zero():
    scores = random(4, 1, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(sparsemax(scores, 1).square().sum(), scores)
    assert torch.equal(gradient, torch.zeros_like(scores))


def test_sparsemax_refuses_what_has_no_answer():
    with pytest.raises(ValueError, match="must be finite, got nan at index"):
        sparsemax(torch.tensor([0.0, math.nan]))
    with pytest.raises(ValueError, match="must be finite, got inf"):
        sparsemax(torch.tensor([0.0, math.inf]))
    with pytest.raises(ValueError, match="empty along dim"):
        sparsemax(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"dim must be in \[-2, 1\], got 2"):
        sparsemax(torch.zeros(3, 2), 2)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        sparsemax([0.0, 1.0])


def test_sparsemax_of_integers_and_half_precision_is_computed_in_the_default_dtype():
    assert sparsemax(torch.tensor([0, 0, 5])).tolist() == [0.0, 0.0, 1.0]
    assert sparsemax(torch.tensor([0.5, 0.25]).half()).dtype == torch.get_default_dtype()


# ---- weights


@pytest.mark.parametrize("penalty", PENALTIES)
def test_weights_minimise_what_they_should(penalty):
    """No random direction on the simplex lowers <w, r> + penalty * Omega(w)."""
    distances = squared_distances(*cloud())

    def entropy(w):
        return torch.special.xlogy(w, w).sum(-1)

    omegas = {"entropy": entropy, "l2": lambda w: w.square().sum(-1) / 2}
    for regularizer in REGULARIZERS:

        def objective(w, omega=omegas[regularizer]):
            return (w * distances).sum(-1) + penalty * omega(w)

        weights = min_weights(distances, penalty=penalty, regularizer=regularizer)
        torch.testing.assert_close(weights.sum(-1), torch.ones(30, dtype=torch.float64))
        assert (weights >= 0).all()
        for seed in range(20):
            other = torch.softmax(3 * random(30, 5, seed=seed), -1)
            for step in (1.0, 1e-2, 1e-4):
                assert (objective(weights.lerp(other, step)) >= objective(weights) - 1e-14).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_at_every_sharpness(dtype):
    """S2.5: no NaN from 0 to infinity, in values or gradients, and the limits are right."""
    distances = torch.tensor([[4.0, 5.0, 4.0], [0.0, 1e-3, 7.0]], dtype=dtype)
    hard = {False: [0.5, 0.0, 0.5], True: [1.0, 0.0, 0.0]}
    for regularizer in REGULARIZERS:
        for penalty in (1e-3, 1e-10, 1e-38, 1e-45, 1e-300, 1e-320):
            variable = distances.clone().requires_grad_()
            weights = min_weights(variable, penalty=penalty, regularizer=regularizer)
            (gradient,) = torch.autograd.grad((weights * variable).sum(), variable)
            assert weights.isfinite().all() and gradient.isfinite().all()
            if penalty < 1e-4:
                torch.testing.assert_close(weights[0].tolist(), hard[False])
                torch.testing.assert_close(weights[1].tolist(), hard[True])
        for penalty in (1e3, 1e38, 1e300, math.inf):
            weights = min_weights(distances, penalty=penalty, regularizer=regularizer)
            torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3), atol=5e-3, rtol=0)


def test_weights_of_the_reported_cases():
    weights = min_weights(torch.tensor([4.0, 5.0]), penalty=1e-38, regularizer="entropy")
    assert weights.tolist() == [1.0, 0.0]
    huge = torch.tensor([[3e38, 2e38, 3e38]])
    for regularizer in REGULARIZERS:
        weights = min_weights(huge, penalty=1e-3, regularizer=regularizer)
        assert weights.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("distance_to_argmin,regularizer", [
    (lambda k: math.sqrt(1 - 1 / k), "l2"), (lambda k: math.sqrt(2 * math.log(k)), "entropy")
])  # fmt: skip
@pytest.mark.parametrize("k", [2, 6, 40])
def test_distance_to_the_argmin_is_bounded(distance_to_argmin, regularizer, k):
    """Blondel et al. 2020, Proposition 1; the worst case is all distances nearly equal."""
    for spread in (1e-6, 0.1, 10.0):
        distances = spread * torch.rand(200, k, generator=generator(), dtype=torch.float64)
        weights = min_weights(distances, penalty=1.0, regularizer=regularizer)
        hard = torch.nn.functional.one_hot(distances.argmin(-1), k)
        assert ((weights - hard).norm(dim=-1) <= distance_to_argmin(k) + 1e-12).all()


@pytest.mark.parametrize("call,message", [
    (lambda r: min_weights(r, penalty=0.0, regularizer="l2"), r"penalty must be in \(0, inf\]"),
    (lambda r: min_weights(r, penalty=-1, regularizer="l2"), "penalty must be in"),
    (lambda r: min_weights(r, penalty=math.nan, regularizer="l2"), "penalty must be in"),
    (lambda r: min_weights(r, penalty=1.0, regularizer="L2"), "regularizer must be one of"),
    (lambda r: min_weights(-r, penalty=1.0, regularizer="l2"), "distances must be non-negative"),
    (lambda r: min_weights(r * math.inf, penalty=1.0, regularizer="l2"), "must be finite"),
])  # fmt: skip
def test_weights_refuse_bad_input_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3, 4))


# ---- losses


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 5, 33])
def test_order_of_the_bounds(penalty, dtype, k):
    """k-means loss <= L2's bound <= NE's bound, with ties and zero distances among the input."""
    for seed in range(5):
        points, centers = (t.to(dtype) for t in cloud(n=60, k=k, batch=(4,), seed=seed))
        centers = (centers * 4).round() / 4
        loss = kmeans_loss(points, centers)
        l2, entropy = (
            smoothed_kmeans_loss(points, centers, penalty=penalty, regularizer=regularizer)
            for regularizer in ("l2", "entropy")
        )
        rounding = 60 * torch.finfo(dtype).eps * entropy
        assert (loss <= l2).all()
        assert (l2 <= entropy + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_become_the_loss_as_the_penalty_vanishes(dtype):
    points, centers = (t.to(dtype) for t in cloud(batch=(3,)))
    loss = kmeans_loss(points, centers)
    for regularizer in REGULARIZERS:
        gaps = [
            smoothed_kmeans_loss(points, centers, penalty=penalty, regularizer=regularizer) - loss
            for penalty in (1.0, 1e-1, 1e-2, 1e-3, 1e-10, 1e-38, 1e-300)
        ]
        assert all((after <= before).all() for before, after in itertools.pairwise(gaps))
        assert not gaps[-1].any()
        equal = smoothed_kmeans_loss(points, centers, penalty=math.inf, regularizer=regularizer)
        torch.testing.assert_close(equal, squared_distances(points, centers).mean(-1).sum(-1))


def test_l2_is_exact_where_the_margin_exceeds_the_penalty_and_entropy_is_not():
    distances = torch.tensor([[0.3, 0.5, 0.9], [0.2, 0.5, 0.5]], dtype=torch.float64)
    smallest = distances.amin(-1)
    exact = _smoothed_minimum(distances, 0.199, "l2")
    assert torch.equal(exact, smallest)
    inexact = _smoothed_minimum(distances, 0.201, "l2") > smallest
    assert inexact.tolist() == [True, False]
    assert (_smoothed_minimum(distances, 0.199, "entropy") > smallest).all()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_smoothed_minimum_of_two_has_the_closed_form(penalty):
    """k = 2 with margin m: m / (1 + e^(m/penalty)) for NE, m (1 - m/penalty) / 2 for L2, over r."""
    margin = torch.linspace(0, 3, 50, dtype=torch.float64)
    distances = torch.stack([0.7 + margin, torch.full_like(margin, 0.7)], -1)
    entropy = margin * torch.sigmoid(-margin / penalty)
    l2 = margin * (1 - margin / penalty).clamp_min(0) / 2
    found = {name: _smoothed_minimum(distances, penalty, name) - 0.7 for name in REGULARIZERS}
    torch.testing.assert_close(found["entropy"], entropy, atol=1e-14, rtol=1e-9)
    torch.testing.assert_close(found["l2"], l2, atol=1e-14, rtol=1e-9)


def test_loss_is_a_sum_over_points_written_out():
    points, centers = cloud(batch=(2,))
    expected = [
        sum(min(float(((x - c) ** 2).sum()) for c in centers[b]) for x in points[b])
        for b in range(2)
    ]
    torch.testing.assert_close(kmeans_loss(points, centers).tolist(), expected)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("penalty", [0.05, 1.0])
def test_derivatives_where_points_sit_on_centers(regularizer, penalty):
    """S2.1: zero distances, first and second derivatives, with respect to points and centers."""
    points, centers = (t.requires_grad_() for t in cloud(n=6, d=2, k=3))

    def loss(points, centers):
        return smoothed_kmeans_loss(points, centers, penalty=penalty, regularizer=regularizer)

    assert gradcheck(loss, (points, centers))
    assert gradgradcheck(loss, (points, centers))


def test_gradient_of_the_reported_case():
    """S2.1: [[0, 0], [6, 8]], no NaN where the point is the center."""
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    center = torch.zeros(1, 2)
    losses = [kmeans_loss(points, center)]
    losses += [
        smoothed_kmeans_loss(points, center, penalty=penalty, regularizer=regularizer)
        for regularizer in REGULARIZERS
        for penalty in (1e-3, 1.0)
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, points)
        assert gradient.tolist() == [[0.0, 0.0], [6.0, 8.0]]


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_twin_of_the_training_loop_is_the_same(regularizer, k):
    """Weights along dim -2, one penalty a model, the derivative in closed form; ties included."""
    distances = torch.rand(3, 2, k, 7, generator=generator(), dtype=torch.float64)
    distances[..., 0] = 0.25
    penalties = [1e-3, 0.3, 20.0]
    together = distances.clone().requires_grad_()
    penalty = torch.tensor(penalties, dtype=torch.float64).view(-1, 1, 1, 1)
    values = _SmoothedMinimum.apply(together, penalty, regularizer, -2).sum((-1, -2))
    alone = distances.clone().requires_grad_()
    expected = torch.stack([
        _smoothed_minimum(alone[i].mT, penalties[i], regularizer).sum() for i in range(3)
    ])  # fmt: skip
    torch.testing.assert_close(values, expected)
    (found,) = torch.autograd.grad(values.sum(), together)
    (wanted,) = torch.autograd.grad(expected.sum(), alone)
    torch.testing.assert_close(found, wanted)
    # NaN stays in its model.
    distances[1] = math.nan
    values = _SmoothedMinimum.apply(distances, penalty, regularizer, -2).sum((-1, -2))
    assert values.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("penalty", [1e-30, 1e-38, 0.0])
def test_the_twin_at_penalties_that_underflow(regularizer, penalty):
    """The minimum itself, and its slope: 0 stands for a penalty that float32 doesn't hold."""
    distances = torch.tensor([0.1, 5.0, 0.2], requires_grad=True)
    value = _SmoothedMinimum.apply(distances, torch.tensor([penalty]), regularizer, -1)
    assert value.item() == distances[0].item()
    (slope,) = torch.autograd.grad(value, distances)
    assert slope.tolist() == [1, 0, 0]


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
def test_losses_do_not_depend_on_a_common_offset(offset):
    """S1.3, with coordinates that float32 can hold at any of the offsets."""
    points, centers = cloud(n=60)
    points = ((points * 64).round() / 64).float()
    centers = points[:5].clone()
    for loss in (
        kmeans_loss,
        lambda x, c: smoothed_kmeans_loss(x, c, penalty=0.1, regularizer="l2"),
        lambda x, c: smoothed_kmeans_loss(x, c, penalty=0.1, regularizer="entropy"),
    ):
        shifted = loss(points + offset, centers + offset)
        torch.testing.assert_close(shifted, loss(points, centers), rtol=1e-6, atol=0)


def test_orders_of_points_and_centers_do_not_matter():
    points, centers = cloud()
    for regularizer in REGULARIZERS:

        def loss(x, c, regularizer=regularizer):
            return smoothed_kmeans_loss(x, c, penalty=0.1, regularizer=regularizer)

        shuffled = loss(
            points[torch.randperm(30, generator=generator(1))], centers[[3, 0, 4, 1, 2]]
        )
        torch.testing.assert_close(shuffled, loss(points, centers), rtol=1e-13, atol=0)


def test_integers_half_precision_and_views():
    """S1.6: half precision does not overflow, a view equals its copy bit for bit."""
    halves = torch.full((2000, 1), 50.0).half()
    assert kmeans_loss(halves, halves[:1] * 0) == 2000 * 2500
    integers = torch.tensor([[0], [1], [10], [11]])
    assert kmeans_loss(integers, torch.tensor([[0.5], [10.5]])) == 1.0
    points, centers = cloud()
    view = points.t().contiguous().t()
    assert not view.is_contiguous()
    for regularizer in REGULARIZERS:
        found, expected = (
            smoothed_kmeans_loss(x, centers, penalty=0.1, regularizer=regularizer)
            for x in (view, points)
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_refuse_what_is_not_finite(bad):
    """S1.5: by name and row, before any work."""
    points, centers = cloud()
    points[2, 1] = bad
    for loss in (
        kmeans_loss,
        lambda x, c: smoothed_kmeans_loss(x, c, penalty=0.1, regularizer="l2"),
    ):
        with pytest.raises(ValueError, match=r"points must be finite, got .* at index \(2, 1\)"):
            loss(points, centers)


def test_overflowing_distances_are_refused():
    points = torch.tensor([[0.0], [3e19]])
    with pytest.raises(ValueError, match=r"squared distances must fit torch.float32"):
        kmeans_loss(points, points[:1])
    assert kmeans_loss(points.double(), points[:1].double()) == pytest.approx(9e38)
