"""Groups of equal rows against a dictionary of tuples, and on the day that two hashes collide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leancluster_core import cluster_codes
from leancluster_core import groups as rooms
from leancluster_core.groups import group_equal_rows, sums_by_label

DTYPES = (torch.float32, torch.float64)


def dictionary_groups(rows: Tensor) -> list[list[int]]:
    """The indices of equal rows, by Python's own equality of tuples (where -0.0 is 0.0)."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, row in enumerate(rows.tolist()):
        groups.setdefault(tuple(row), []).append(index)
    return sorted(groups.values())


def found_groups(rows: Tensor) -> list[list[int]]:
    groups = group_equal_rows(rows)
    if groups is None:
        return [[index] for index in range(len(rows))]
    assert int(groups.sizes.sum()) == len(rows)
    members = [(groups.group == group).nonzero().flatten() for group in range(len(groups.first))]
    assert [indices[0].item() for indices in members] == groups.first.tolist()
    assert [len(indices) for indices in members] == groups.sizes.tolist()
    return sorted(indices.tolist() for indices in members)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "n_features", "n_values"), [
    (1, 1, 1), (2, 1, 1), (100, 1, 3), (3000, 5, 2), (3000, 2, 30), (40, 6, 2),
    (300, 2, 7), (300, 9, 2), (500, 3, 1000), (50, 4, 1),
])  # fmt: skip
def test_groups_are_those_of_a_dictionary(
    dtype: torch.dtype, n_rows: int, n_features: int, n_values: int
) -> None:
    generator = torch.Generator().manual_seed(n_rows)
    rows = torch.randint(n_values, (n_rows, n_features), generator=generator).to(dtype)
    rows = (rows - n_values // 2) / 4
    assert found_groups(rows) == dictionary_groups(rows)
    assert found_groups(rows.t().contiguous().t()) == dictionary_groups(rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_is_zero(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, -0.0], [2.0, 0.0]], dtype=dtype)
    assert found_groups(rows) == [[0, 1], [2], [3]]
    assert found_groups(torch.tensor([[0.0], [-0.0]], dtype=dtype)) == [[0, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_late_difference_and_one_late_copy(dtype: torch.dtype) -> None:
    """A column that is constant in its first rows only, and a copy far from its original."""
    rows = torch.zeros(50_000, 3, dtype=dtype)
    rows[40_000, 2] = 1e-30
    assert len(group_equal_rows(rows).first) == 2
    rows = torch.arange(5000).to(dtype).unsqueeze(1).expand(-1, 6).clone()
    rows[4000:, :5] = rows[:1000, :5]  # which differ in a column behind the first ones
    assert group_equal_rows(rows) is None
    rows[4000:, 5] = rows[:1000, 5]
    assert len(group_equal_rows(rows).first) == 4000
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(50_000, 3, generator=generator, dtype=torch.float64).to(dtype)
    assert group_equal_rows(rows) is None
    rows[49_999] = rows[3]
    groups = group_equal_rows(rows)
    assert groups is not None and groups.group[49_999] == groups.group[3]
    assert len(groups.first) == 49_999


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbouring_numbers_have_different_hashes(dtype: torch.dtype) -> None:
    """Powers of two, small integers and their negatives: round bits, where weak hashes collide."""
    powers = 2.0 ** torch.arange(-12, 13, 2, dtype=dtype)
    values = torch.cat([powers, -powers, torch.arange(9).to(dtype)]).unique()
    rows = torch.cartesian_prod(values, values, values)
    assert group_equal_rows(rows) is None
    assert len(rooms._hash(rows.t()).unique()) == len(rows)


@pytest.mark.parametrize("n_rows", [1, 5, 40])
def test_a_collision_of_hashes_is_noticed(monkeypatch: pytest.MonkeyPatch, n_rows: int) -> None:
    """With a hash that is the same for all rows the groups are still right."""
    monkeypatch.setattr(
        rooms,
        "_hash",
        lambda columns, salt=0: torch.zeros(columns.shape[1], dtype=torch.int64),
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, (n_rows, 2), generator=generator).double()
    assert found_groups(rows) == dictionary_groups(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_labels", [1, 3, 50, 5000])
def test_sums_by_label_are_those_of_a_loop(dtype: torch.dtype, n_labels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = torch.rand(2, 3, 1000, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(n_labels, (2, 1000), generator=generator)
    found = sums_by_label(columns, labels, n_labels)
    assert found.dtype == torch.float64 and found.shape == (2, 3, n_labels)
    for task in range(2):
        for label in (0, n_labels // 2, n_labels - 1):
            expected = columns[task][:, labels[task] == label].double().sum(1)
            torch.testing.assert_close(
                found[task, :, label], expected, rtol=8 * torch.finfo(dtype).eps, atol=0
            )


def test_a_table_with_too_few_slots_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_TABLE_SLOTS", 4)
    rows = (torch.arange(3000) % 50).double().unsqueeze(1)
    assert rooms._groups_by_table(rooms._hash(rows.t())) is None
    assert found_groups(rows) == dictionary_groups(rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_groups_are_found_without_a_sort(dtype: torch.dtype) -> None:
    """The codes of clusters, whose bits are nearly all zero, spread over the table."""
    codes = cluster_codes(100, "binary").to(dtype)
    assert rooms._groups_by_table(rooms._hash(codes.repeat(30, 1).t())) is not None
