"""Averaging hardmax against the literal weights, at ties, among duplicates, and for many keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leancluster_core import ClusteringTransformer, distance_attention, lloyd_transformer
from leancluster_core.distances import nearest_centers, squared_distances
from leancluster_core.hardmax import _hardmax_attention, _hardmax_update
from leancluster_core.kmeans import lloyd

DTYPES = (torch.float32, torch.float64)


def literal_hardmax(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Definition 2.2 at gamma = infinity, with all differences and all weights, in float64."""
    differences = queries.double().unsqueeze(-2) - keys.double().unsqueeze(-3)
    distances = differences.square().sum(-1)
    weights = (distances == distances.amin(-1, keepdim=True)).double()
    return (weights / weights.sum(-1, keepdim=True)) @ values.double()


def tokens(
    *shape: int, seed: int, grid: int | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Uniform tokens, on a coarse grid (full of ties and duplicates) if asked for."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(*shape, generator=generator, dtype=torch.float64)
    return (uniform if grid is None else (uniform * grid).round() / grid).to(dtype)


def assert_is_literal(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    found = _hardmax_attention(queries, keys, values)
    expected = literal_hardmax(queries, keys, values)
    assert found.shape == expected.shape and found.dtype == values.dtype
    tolerance = 2 * torch.finfo(values.dtype).eps * float(values.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 5)])
@pytest.mark.parametrize("grid", [None, 4, 1])
@pytest.mark.parametrize(("m", "r", "e", "v"), [
    (60, 7, 3, 4), (5, 80, 2, 3), (30, 30, 2, 1), (1, 1, 1, 1), (9, 1, 4, 2), (4, 50, 6, 9),
])  # fmt: skip
def test_hardmax_is_the_definition(
    dtype: torch.dtype, batch: tuple[int, ...], grid: int | None, m: int, r: int, e: int, v: int
) -> None:
    queries = tokens(*batch, m, e, seed=1, grid=grid, dtype=dtype)
    keys = tokens(*batch, r, e, seed=2, grid=grid, dtype=dtype)
    values = tokens(*batch, r, v, seed=3, dtype=dtype)
    assert_is_literal(queries, keys, values)
    assert_is_literal(keys, keys, values)  # self-attention, which looks at no distance
    assert_is_literal(keys.clone(), keys, values)


def test_features_common_to_all_tokens_change_nothing() -> None:
    """Projections leave constant columns, also between the others."""
    queries, keys = tokens(40, 5, seed=1), tokens(20, 5, seed=2)
    values = tokens(20, 2, seed=3)
    for column, value in ((0, 0.0), (2, 7.0), (4, -1.0)):
        queries[:, column], keys[:, column] = value, value
        assert_is_literal(queries, keys, values)
    queries[37, 2] = 7.5  # common to the first rows only
    assert_is_literal(queries, keys, values)
    zeros = torch.zeros(10, 3, dtype=torch.float64)
    assert_is_literal(zeros[:4], zeros[4:], tokens(6, 2, seed=4))


def test_ties_share_equally_and_duplicates_count() -> None:
    keys = torch.tensor([[-1.0], [1.0], [1.0], [1.0], [5.0]])
    values = torch.tensor([[0.0], [4.0], [8.0], [12.0], [100.0]])
    queries = torch.tensor([[0.0], [1.0], [3.0], [9.0]])
    found = _hardmax_attention(queries, keys, values)
    assert found.flatten().tolist() == [6.0, 8.0, 31.0, 100.0]
    among = _hardmax_attention(keys, keys, values)
    assert among.flatten().tolist() == [0.0, 8.0, 8.0, 8.0, 100.0]
    zeros = torch.tensor([[0.0], [-0.0], [2.0]])  # one number, two bit patterns
    among = _hardmax_attention(zeros, zeros, torch.tensor([[1.0], [3.0], [7.0]]))
    assert among.flatten().tolist() == [2.0, 2.0, 7.0]


def test_tasks_may_have_different_numbers_of_distinct_keys() -> None:
    queries, keys, values = (
        tokens(6, 20, 2, seed=1),
        tokens(6, 12, 2, seed=2),
        tokens(6, 12, 3, seed=3),
    )
    for task in range(6):
        keys[task, : 2 * task] = keys[task, :1]
    assert_is_literal(queries, keys, values)


def test_batches_broadcast_and_equal_a_loop() -> None:
    queries, keys = tokens(3, 1, 20, 2, seed=1, grid=3), tokens(4, 9, 2, seed=2, grid=3)
    values = tokens(9, 5, seed=3)
    found = _hardmax_attention(queries, keys, values)
    assert found.shape == (3, 4, 20, 5)
    for first in range(3):
        for second in range(4):
            alone = _hardmax_attention(queries[first, 0], keys[second], values)
            torch.testing.assert_close(found[first, second], alone, rtol=0, atol=1e-15)
    assert _hardmax_attention(queries[:0], keys, values).shape == (0, 4, 20, 5)
    assert _hardmax_attention(queries[..., :0, :], keys, values).shape == (3, 4, 0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_a_common_shift_of_queries_and_keys_changes_nothing(
    dtype: torch.dtype, offset: float
) -> None:
    """S1.3: on a grid that float32 holds exactly even after the shift, ties included."""
    queries, keys = tokens(500, 2, seed=1, grid=16), tokens(40, 2, seed=2, grid=16)
    values = tokens(40, 3, seed=3, dtype=dtype)
    expected = _hardmax_attention(queries.to(dtype), keys.to(dtype), values)
    found = _hardmax_attention((queries + offset).to(dtype), (keys + offset).to(dtype), values)
    assert torch.equal(found, expected)
    far = _hardmax_attention(queries.to(dtype), keys.to(dtype), values + offset).double()
    torch.testing.assert_close(
        far, expected.double() + offset, rtol=0, atol=2 * offset * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_of_many_values_keep_their_digits(dtype: torch.dtype) -> None:
    """Two codes, 200,000 values far from the origin: a sum in float32 would lose them."""
    codes = (torch.arange(200_000) % 2).to(dtype).unsqueeze(1)
    values = tokens(200_000, 2, seed=1).add(1e3).to(dtype)
    found = _hardmax_attention(torch.tensor([[0.0], [1.0]], dtype=dtype), codes, values).double()
    expected = torch.stack([values[::2].double().mean(0), values[1::2].double().mean(0)])
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_large_and_small_numbers() -> None:
    queries, keys, values = tokens(30, 2, seed=1), tokens(9, 2, seed=2), tokens(9, 2, seed=3)
    expected = _hardmax_attention(queries, keys, values)
    for scale in (1e-300, 1e-30, 1e30, 1e308):
        assert torch.equal(_hardmax_attention(queries * scale, keys * scale, values), expected)


def test_permutations_of_keys_and_queries() -> None:
    queries, keys = tokens(50, 2, seed=1, grid=4), tokens(30, 2, seed=2, grid=4)
    values = tokens(30, 3, seed=3)
    generator = torch.Generator().manual_seed(4)
    rows, order = torch.randperm(50, generator=generator), torch.randperm(30, generator=generator)
    expected = _hardmax_attention(queries, keys, values)
    assert torch.equal(_hardmax_attention(queries[rows], keys, values), expected[rows])
    permuted = _hardmax_attention(queries, keys[order], values[order])
    torch.testing.assert_close(permuted, expected, rtol=0, atol=1e-15)


def test_a_hundred_thousand_tokens_among_themselves() -> None:
    """No queries x keys memory: 80 GB of it would be needed here."""
    queries = tokens(100_000, 3, seed=1)
    values = tokens(100_000, 2, seed=2)
    assert torch.equal(_hardmax_attention(queries, queries.clone(), values), values)
    queries[70_000] = queries[5]
    found = _hardmax_attention(queries, queries, values)
    shared = (values[5] + values[70_000]) / 2
    assert torch.equal(found[5], shared) and torch.equal(found[70_000], shared)
    assert torch.equal(found[6:70_000], values[6:70_000])


def test_distance_attention_at_infinity_is_the_hardmax() -> None:
    queries, keys, values = tokens(20, 3, seed=1), tokens(8, 3, seed=2), tokens(8, 2, seed=3)
    found = distance_attention(queries, keys, values, inverse_temperature=math.inf)
    assert torch.equal(found, _hardmax_attention(queries, keys, values))
    sharp = distance_attention(queries, keys, values, inverse_temperature=1e12)
    torch.testing.assert_close(sharp, found, rtol=0, atol=1e-12)
    for bad in (math.nan, math.inf):
        broken = keys.clone()
        broken[2, 1] = bad
        with pytest.raises(ValueError, match=rf"keys must be finite, got {bad} at index \(2, 1\)"):
            distance_attention(queries, broken, values, inverse_temperature=math.inf)


def test_the_result_has_no_gradient() -> None:
    queries, keys, values = (tokens(5, 2, seed=seed).requires_grad_() for seed in range(3))
    assert not _hardmax_attention(queries, keys, values).requires_grad


def projection(kind: str, width: int, seed: int) -> Tensor:
    """(width, width): dense, one block of it, a choice of neighbouring features, or nothing."""
    dense = tokens(width, width, seed=seed) - 0.5
    if kind == "block":
        block = torch.zeros(width, width, dtype=torch.float64)
        block[1:3, 2:width] = dense[1:3, 2:width]
        return block
    picked = (torch.arange(width) < 2) if kind == "pick" else torch.zeros(width, dtype=torch.bool)
    return dense if kind == "dense" else torch.diag(picked.double())


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("value", ["dense", "block", "pick", "nothing"])
@pytest.mark.parametrize(("query", "key"), [
    ("dense", "dense"), ("pick", "pick"), ("block", "pick"), ("pick", "dense"),
    ("nothing", "block"),
])  # fmt: skip
@pytest.mark.parametrize(("m", "r"), [(40, 6), (6, 40), (20, 20), (20, 0)])
def test_updates_are_attention_of_projected_tokens(
    batch: tuple[int, ...], query: str, key: str, value: str, m: int, r: int
) -> None:
    """r = 0 stands for self-attention."""
    weights = [projection(kind, 5, seed) for seed, kind in enumerate((query, key, value))]
    queries = tokens(*batch, 5, m, seed=4, grid=8)
    keys = tokens(*batch, 5, r, seed=5, grid=8) if r else queries
    rows, update = _hardmax_update(*weights, queries, keys)
    q, k, v = (w @ t for w, t in zip(weights, (queries, keys, keys), strict=True))
    expected = _hardmax_attention(q.mT, k.mT, v.mT).mT
    found = torch.zeros_like(expected)
    found[..., rows, :] = update
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    before = queries.clone(), keys.clone()
    update.zero_()
    assert torch.equal(queries, before[0]) and torch.equal(keys, before[1])


def literal_attention(
    weights: dict[str, Tensor], index: int, queries: Tensor, keys: Tensor
) -> Tensor:
    def project(name: str, rows: Tensor) -> Tensor:
        return (
            rows @ weights[name][index].mT + weights.get(f"{name}_bias", torch.zeros(4, 1))[index]
        )

    return literal_hardmax(project("query", queries), project("key", keys), project("value", keys))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_trials", [None, 2])
def test_several_layers_are_the_literal_equation_again_and_again(
    bias: bool, n_trials: int | None
) -> None:
    """Equation 4 at gamma = infinity with random weights: no layer may disturb the next one's
    input, with attention maps or without."""
    generator = torch.Generator().manual_seed(0)
    model = ClusteringTransformer(
        2, 4, inverse_temperature=math.inf, n_layers=3, n_trials=n_trials, bias=bias,
        generator=generator,
    ).double()  # fmt: skip
    points = tokens(2, 30, 2, seed=1)
    centers = points[:, :4].clone()
    found = model(points, centers)
    with_maps, _ = model(points, centers, return_attention=True)
    assert torch.equal(found, with_maps)
    for task in range(2):
        weights = {
            name: value if n_trials is None else value[task]
            for name, value in model.named_parameters()
        }
        x = torch.cat([points[task], torch.zeros(30, 2)], 1)
        c = torch.cat([centers[task], model.codes], 1)
        for _ in range(3):
            x1 = x + literal_attention(weights, 0, x, c) + literal_attention(weights, 1, x, x)
            c = c + literal_attention(weights, 2, c, x1) + literal_attention(weights, 3, c, c)
            x = x1
        torch.testing.assert_close(found[task], c[:, :2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("embedding", ["binary", "onehot"])
@pytest.mark.parametrize("n_clusters", [1, 2, 6])
def test_layers_are_iterations(embedding: str, n_clusters: int) -> None:
    """Theorem 2.1: 20 layers are 20 iterations of Lloyd, on 50 tasks, to 1e-12."""
    generator = torch.Generator().manual_seed(n_clusters)
    points = torch.rand(50, 120, 4, generator=generator, dtype=torch.float64)
    centers = points[:, :n_clusters]
    iterates = lloyd(points, centers, 20, return_all=True)
    counts = [torch.stack([(nearest_centers(points, c) == j).sum(-1) for j in range(n_clusters)])
              for c in iterates]  # fmt: skip
    full = torch.stack(counts).amin((0, 1)) > 0  # the theorem needs clusters that don't go empty
    assert int(full.sum()) > 40
    model = lloyd_transformer(4, n_clusters, embedding=embedding, n_layers=20, dtype=torch.float64)
    found = model(points, centers)
    torch.testing.assert_close(found[full], iterates[-1][full], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", [1.0, 1e3, math.inf])
def test_a_center_that_no_point_is_nearest_to_gives_no_nan(
    dtype: torch.dtype, gamma: float
) -> None:
    """S1.1: the attentions' answer is finite, whatever becomes of the empty cluster."""
    points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0]], dtype=dtype)
    centers = torch.tensor([[0.0, 1.0], [8.0, 1.0], [500.0, 500.0]], dtype=dtype)
    for queries, keys in ((points, centers), (centers, points), (points, points)):
        values = keys
        found = distance_attention(queries, keys, values, inverse_temperature=gamma)
        assert bool(found.isfinite().all())
    codes = torch.eye(3, dtype=dtype)
    given = distance_attention(points, centers, codes, inverse_temperature=math.inf)
    assert given.argmax(-1).tolist() == [0, 0, 1, 1]
    assert squared_distances(points, centers).argmin(-1).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_strides(dtype: torch.dtype) -> None:
    """S1.6: columns in memory (as the model keeps its tokens), strided rows, shared values."""
    queries = tokens(3, 40, seed=1, dtype=dtype).t()
    keys = tokens(24, 3, seed=2, dtype=dtype)[::2]
    values = tokens(4, 12, seed=3, dtype=dtype).t()
    expected = _hardmax_attention(queries.contiguous(), keys.contiguous(), values.contiguous())
    assert torch.equal(_hardmax_attention(queries, keys, values), expected)
    same = _hardmax_attention(keys, keys.contiguous(), values)
    assert torch.equal(same, values)
