"""Distance attention (Definition 2.2): fused, literal and by-hand agree; limits; bad input."""

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

from leancluster_core import attention, distance_attention
from leancluster_core.attention import (
    LARGEST_SCORE,
    _BlockedAttention,
    _FewKeys,
    _FewQueries,
    _sdpa,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(m=9, r=13, e=4, v=3, batch=(2,), seed=0, dtype=torch.float64):
    shapes = (*batch, m, e), (*batch, r, e), (*batch, r, v)
    g = generator(seed)
    return [torch.rand(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def by_hand(queries, keys, values, gamma):
    """The definition in float64, by differences."""
    queries, keys, values = (t.double() for t in (queries, keys, values))
    scale = gamma / math.sqrt(queries.shape[-1])
    distances = (queries.unsqueeze(-2) - keys.unsqueeze(-3)).square().sum(-1)
    nearest = distances.amin(-1, keepdim=True)
    return torch.softmax(-scale * (distances - nearest), -1) @ values


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("gamma", [0.0, 0.01, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (9, 13, 4, 3), (3, 40, 1, 7), (40, 2, 17, 1)])
def test_backends_compute_the_definition(backend, gamma, shape):
    q, k, v = tokens(*shape)
    expected = by_hand(q, k, v, gamma)
    found = distance_attention(q, k, v, inverse_temperature=gamma, backend=backend)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)
    single = distance_attention(
        q.float(), k.float(), v.float(), inverse_temperature=gamma, backend=backend
    )
    assert single.dtype == torch.float32
    rounded = by_hand(q.float(), k.float(), v.float(), gamma)
    torch.testing.assert_close(single.double(), rounded, atol=3e-4, rtol=0)


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("gamma", [0.5, 20.0])
@pytest.mark.parametrize("shape", [(3, 4, 2, 2), (1, 1, 1, 1), (5, 2, 3, 1)])
def test_gradients(backend, gamma, shape):
    inputs = [t.requires_grad_() for t in tokens(*shape)]
    assert gradcheck(
        lambda q, k, v: distance_attention(q, k, v, inverse_temperature=gamma, backend=backend),
        inputs,
    )


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_of_some_of_the_inputs(needed):
    """Each alone equals the one that is computed with all others."""
    inputs = tokens()
    for tensor in inputs:
        tensor.requires_grad_()
    expected = torch.autograd.grad(by_hand(*inputs, 2.0).square().sum(), inputs)
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(index in needed)
    result = distance_attention(*inputs, inverse_temperature=2.0).square().sum()
    found = torch.autograd.grad(result, [inputs[index] for index in needed])
    for index, gradient in zip(needed, found, strict=True):
        torch.testing.assert_close(gradient, expected[index])


def test_points_on_keys_have_finite_gradients():
    """S2.1: distances without a root."""
    _, k, v = tokens(m=4, r=4)
    for backend in attention.BACKENDS:
        same = k.clone().requires_grad_()
        result = distance_attention(same, same, v, backend=backend)
        (gradient,) = torch.autograd.grad(result.sum(), same)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_the_limits_of_the_inverse_temperature(backend):
    """S2.5: 0 gives the mean, infinity the nearest keys, and large values approach it."""
    q, k, v = tokens(batch=())
    mean = distance_attention(q, k, v, inverse_temperature=0, backend=backend)
    torch.testing.assert_close(mean, v.mean(0).expand(9, 3))
    nearest = (q[:, None] - k[None]).square().sum(-1).argmin(-1)
    for gamma in (1e8, 1e10, 1e30, 1e38, 1e300, math.inf):
        for dtype in (torch.float64, torch.float32):
            inputs = [t.to(dtype) for t in (q, k, v)]
            found = distance_attention(*inputs, inverse_temperature=gamma, backend=backend)
            torch.testing.assert_close(found, inputs[2][nearest], atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("gamma", [1e3, 1e20, math.inf])
def test_ties_share_equally(backend, gamma):
    keys = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    values = torch.tensor([[1.0], [3.0], [10.0]])
    queries = torch.tensor([[0.1, 0.0], [0.9, 1.0]])
    found = distance_attention(queries, keys, values, inverse_temperature=gamma, backend=backend)
    torch.testing.assert_close(found, torch.tensor([[2.0], [10.0]]))


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("gamma", [1.0, 10.0, math.inf])
@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4])
def test_a_common_offset_changes_nothing(backend, gamma, offset):
    """S1.3, with coordinates that float32 holds at any of the offsets; values move not."""
    q, k, v = tokens(m=40, r=4, e=2, dtype=torch.float32)
    q, k = ((t * 512).round() / 512 for t in (q, k))
    expected = distance_attention(q, k, v, inverse_temperature=gamma, backend=backend)
    found = distance_attention(
        q + offset, k + offset, v, inverse_temperature=gamma, backend=backend
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_orders_and_joint_scaling(backend):
    q, k, v = tokens(batch=())
    expected = distance_attention(q, k, v, inverse_temperature=2.0, backend=backend)
    order = torch.randperm(13, generator=generator())
    shuffled = distance_attention(q, k[order], v[order], inverse_temperature=2.0, backend=backend)
    torch.testing.assert_close(shuffled, expected)
    flipped = distance_attention(q.flip(0), k, v, inverse_temperature=2.0, backend=backend)
    torch.testing.assert_close(flipped.flip(0), expected)
    for factor in (1e-3, 1e3):
        scaled = distance_attention(
            factor * q, factor * k, v, inverse_temperature=2.0 / factor**2, backend=backend
        )
        torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize("m,r", [(25, 26), (26, 25), (1, 300)])
def test_a_querys_answer_does_not_depend_on_the_company_it_keeps(m, r):
    """S2.2: far from the origin, fewer and more than 25 rows."""
    q, k, v = tokens(m=m, r=r, batch=(), dtype=torch.float32)
    q, k = ((t * 256).round() / 256 + 3000 for t in (q, k))
    whole = distance_attention(q, k, v, inverse_temperature=5.0)
    rows = [distance_attention(row, k, v, inverse_temperature=5.0) for row in q.split(1)]
    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kept", [0, 2**24])
@pytest.mark.parametrize("entries", [1, 7, 13, 50, 13 * 9, 13 * 9 * 2])
def test_blocks_of_any_size_give_the_same(monkeypatch, entries, kept):
    """Whether the weights are kept for the gradient, or computed again."""
    inputs = [t.requires_grad_() for t in tokens(batch=(3, 2))]

    def both():
        result = distance_attention(*inputs)
        return result, *torch.autograd.grad(result.square().sum(), inputs)

    whole = both()
    monkeypatch.setattr(attention, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(attention, "KEPT_ENTRIES", kept)
    for found, expected in zip(both(), whole, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("batch,m,r,e,v", [((2,), 9, 13, 4, 3), ((2,), 5, 40, 20, 31)])
def test_the_kernel_of_other_devices_gives_the_same(batch, m, r, e, v):
    """What CUDA uses runs on a CPU too: torch's fused attention, padded, and no fallback."""
    q, k, v = (t.mT.contiguous().requires_grad_() for t in tokens(m, r, e, v, batch))
    bias = torch.rand(*batch, 1, r, generator=generator(5), dtype=torch.float64).requires_grad_()
    inputs = (q, k, bias, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = _sdpa(*inputs)
    expected = _BlockedAttention.apply(*inputs)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_kernels_for_few_keys_and_few_queries(batch):
    q, k, v = (t.mT.contiguous().requires_grad_() for t in tokens(4, 7, 3, 2, batch))
    bias = torch.rand(*batch, 7, 1, generator=generator(5), dtype=torch.float64).requires_grad_()
    onto = torch.rand(*batch, 1, 4, generator=generator(6), dtype=torch.float64).requires_grad_()
    assert gradcheck(_FewKeys.apply, (q, k, bias, v, onto))
    assert gradcheck(lambda *t: _FewQueries.apply(*t, 0.7), (q, k, v))
    scores = k.mT @ q + bias
    update = v @ torch.softmax(scores, -2)
    update[..., :1, :] += onto
    torch.testing.assert_close(_FewKeys.apply(q, k, bias, v, onto), update)
    expected = by_hand(q.mT, k.mT, v.mT, 0.7 * math.sqrt(3)).mT
    torch.testing.assert_close(_FewQueries.apply(q, k, v, 0.7), expected)


def test_a_switch_to_float64_keeps_the_accuracy_and_the_dtype():
    q, k, v = tokens(dtype=torch.float32, batch=())
    for factor in (1.0, 30.0, 1e3, 1e6):
        gamma = 0.5
        found = distance_attention(q * factor, k * factor, v, inverse_temperature=gamma)
        assert found.dtype == torch.float32
        expected = by_hand(q * factor, k * factor, v, gamma)
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("side", [0.99, 1.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accuracy_on_both_sides_of_each_switch(side, dtype):
    q, k, v = tokens(m=30, r=60, dtype=torch.float32, batch=())
    shift = k.double().mean(0)
    reach = max(float((t.double() - shift).square().sum(-1).amax()) for t in (q, k))
    gamma = side * LARGEST_SCORE[dtype] / reach * math.sqrt(4)
    found = distance_attention(q, k, v, inverse_temperature=gamma)
    torch.testing.assert_close(found.double(), by_hand(q, k, v, gamma), atol=2e-4, rtol=0)


def test_broadcasting_batch_dimensions():
    q, k, v = tokens(batch=(2, 3))
    for backend, gamma in itertools.product(attention.BACKENDS, (1.0, math.inf)):
        expected = distance_attention(
            q[:, :1], k[:1], v, inverse_temperature=gamma, backend=backend
        )
        for i, j in itertools.product(range(2), range(3)):
            alone = distance_attention(
                q[i, 0], k[0, j], v[i, j], inverse_temperature=gamma, backend=backend
            )
            torch.testing.assert_close(expected[i, j], alone)


@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_integers_half_precision_mixed_dtypes_and_views(backend):
    """S1.6"""
    q, k, v = tokens(dtype=torch.float32)
    expected = distance_attention(q, k, v, backend=backend)
    view = torch.stack([k, k], -1)[..., 0].mT.contiguous().mT
    assert torch.equal(distance_attention(q, view, v, backend=backend), expected)
    assert distance_attention(q.double(), k, v, backend=backend).dtype == torch.float64
    assert distance_attention(q.half(), k.half(), v.half(), backend=backend).dtype == torch.float32
    whole = (10 * k).long()
    same = distance_attention(whole, whole, whole, backend=backend)
    assert torch.equal(same, distance_attention(*[whole.float()] * 3, backend=backend))


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("name", ["queries", "keys", "values"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_are_refused_before_the_kernel(backend, name, bad):
    """S2.3: the fused kernel would answer a NaN query with zeros."""
    inputs = dict(zip(("queries", "keys", "values"), tokens(), strict=True))
    inputs[name][1, 2, 0] = bad
    with pytest.raises(ValueError, match=rf"{name} must be finite, got .* at index \(1, 2, 0\)"):
        distance_attention(**inputs, backend=backend)


def test_value_width_does_not_change_the_answer():
    """S2.3: on a CPU it picks torch's backend."""
    q, k, v = tokens(v=4, dtype=torch.float32)
    narrow = distance_attention(q, k, v[..., :3])
    torch.testing.assert_close(narrow, distance_attention(q, k, v)[..., :3])


def test_nan_inside_the_training_loop_stays_nan_and_stays_in_its_task():
    q, k, v = (t.mT.contiguous() for t in tokens(batch=(3,)))
    bias = torch.zeros(3, 1, 13, dtype=torch.float64)
    clean = _BlockedAttention.apply(q, k, bias, v)
    q[1] = math.nan
    result = _BlockedAttention.apply(q, k, bias, v)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


def test_inference_mode_leaves_nothing_behind():
    """Buffers that are kept between calls must serve training after an evaluation."""
    attention._buffers.__dict__.clear()
    inputs = [t.requires_grad_() for t in tokens()]
    with torch.inference_mode():
        expected = distance_attention(*inputs)
    result = distance_attention(*inputs)
    assert torch.equal(result, expected)
    torch.autograd.grad(result.sum(), inputs)


@pytest.mark.parametrize("change,error,message", [
    ({"keys": torch.rand(2, 13, 5)}, ValueError, "same number .* of features, got 4 and 5"),
    ({"values": torch.rand(2, 12, 3)}, ValueError, "same number .* of rows, got 13 and 12"),
    ({"keys": torch.rand(2, 0, 4), "values": torch.rand(2, 0, 3)}, ValueError, "at least 1"),
    ({"keys": torch.rand(3, 13, 4)}, ValueError, "batch dimensions must broadcast"),
    ({"queries": torch.rand(4)}, ValueError, "queries must have at least 2 dimensions"),
    ({"queries": [[1.0]]}, TypeError, "queries must be a torch.Tensor, got list"),
    ({"inverse_temperature": -1.0}, ValueError, r"inverse_temperature must be in \[0, inf\]"),
    ({"inverse_temperature": math.nan}, ValueError, "inverse_temperature must be in"),
    ({"backend": "sdpa"}, ValueError, "backend must be one of 'fused', 'materialised'"),
])  # fmt: skip
def test_bad_arguments_are_refused_by_name(change, error, message):
    arguments = dict(zip(("queries", "keys", "values"), tokens(), strict=True)) | change
    with pytest.raises(error, match=message):
        distance_attention(**arguments)


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("far", [1e2, 1e4, 1e6, 1e15])
def test_one_far_key_costs_the_others_no_accuracy(backend, far):
    q, k, v = tokens(m=40, r=8, e=2, batch=(), dtype=torch.float32)
    k[3] = far
    expected = (
        torch.softmax(-10 / math.sqrt(2) * (q.double()[:, None] - k.double()).square().sum(-1), -1)
        @ v.double()
    )
    found = distance_attention(q, k, v, inverse_temperature=10.0, backend=backend)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("dtype,factor", [
    (torch.float32, 1e20), (torch.float32, 1e38), (torch.float64, 1e160), (torch.float64, 1e307),
])  # fmt: skip
def test_tokens_whose_squares_overflow_go_to_the_nearest_key(backend, dtype, factor):
    q, k, v = tokens(batch=(), dtype=dtype)
    expected = distance_attention(q, k, v, inverse_temperature=math.inf)
    for gamma in (1e-3, 1.0, 1e300):
        found = distance_attention(
            q * factor, k * factor, v, inverse_temperature=gamma, backend=backend
        )
        torch.testing.assert_close(found, expected)
    equal = distance_attention(q * factor, k * factor, v, inverse_temperature=0.0, backend=backend)
    torch.testing.assert_close(equal, v.mean(0).expand_as(equal))


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("gamma", [1.0, math.inf])
def test_nothing_to_compute_gives_nothing(backend, gamma):
    for m, v, batch in ((0, 3, ()), (4, 0, (2,)), (4, 3, (0,))):
        q, k, values = tokens(m=m, v=v, batch=batch)
        found = distance_attention(q, k, values, inverse_temperature=gamma, backend=backend)
        assert found.shape == (*batch, m, v)


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("gamma", [1.0, math.inf])
def test_autocast_has_no_effect(backend, gamma):
    q, k, v = tokens(m=300, r=300, dtype=torch.float32)
    expected = distance_attention(q, k, v, inverse_temperature=gamma, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = distance_attention(q, k, v, inverse_temperature=gamma, backend=backend)
    assert torch.equal(found, expected)
