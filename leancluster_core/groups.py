"""Groups of equal rows, and sums over the rows of a group.

Equal rows are found in the time of a sort instead of by comparing all pairs. Rows are equal when
all of their numbers are (so 0.0 and -0.0 are). Each row is hashed to 64 bits, a sort (or, for few
groups, a table) brings equal hashes together, and each row is then compared with the first of its
group: the answer doesn't rest on the hash, which only decides how fast it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows hashed at once, so that the passes over them stay in cache.
_BLOCK_ROWS = 1 << 14

_FIRST_COLUMNS = 4
_SAMPLE_ROWS = 1 << 10
_TABLE_SLOTS = 1 << 20

_MOST_LABELS_IN_A_PRODUCT = 1 << 10


@dataclass(frozen=True)
class Groups:
    """The groups of equal rows among n rows, numbered in the order in which they first occur.

    first: (g,) the lowest index in each group; group: (n,) the group of each row.
    """

    first: Tensor
    group: Tensor

    @property
    def sizes(self) -> Tensor:
        """(g,) the number of rows of each group."""
        return torch.bincount(self.group, minlength=len(self.first))


@torch.no_grad()
def group_equal_rows(rows: Tensor) -> Groups | None:
    """Group the equal rows of (n, d), or of each task of (tasks, n, d); None if all rows differ.

    rows: float32 or float64, n >= 1. With tasks, rows are indexed as by ``rows.flatten(0, 1)``, and
    no group spans two tasks. Unchecked.
    """
    columns = _varying_columns(rows)
    if len(columns) == 0:
        first = torch.zeros(1, dtype=torch.int64, device=rows.device)
        return Groups(first, first.expand(columns.shape[1]))
    # Rows that differ in their first columns differ: hash the others only if need be.
    hashes = _hash(columns[:_FIRST_COLUMNS])
    if len(columns) > _FIRST_COLUMNS:
        if _share_of_distinct(hashes) == 1 and _run_starts(hashes.sort().values).all():
            return None
        hashes += _hash(columns[_FIRST_COLUMNS:], salt=1)
    groups = _groups_by_table(hashes) if _share_of_distinct(hashes) < 0.5 else None
    groups = groups or _groups_by_sorting(hashes)
    if groups is None or _hold_equal_rows(groups, columns):
        return groups
    return _groups_by_comparison(columns)


def _share_of_distinct(hashes: Tensor) -> float:
    """Among the first of them."""
    sample = hashes[:_SAMPLE_ROWS]
    return len(sample.unique()) / len(sample)


def _groups_by_table(hashes: Tensor) -> Groups | None:
    """Groups of equal hashes if there are few: None if two of them need one slot of the table."""
    n_rows = len(hashes)
    blocks = [slice(start, start + _BLOCK_ROWS) for start in range(0, n_rows, _BLOCK_ROWS)]
    table = hashes.new_full((_TABLE_SLOTS,), n_rows)
    slots = [(hashes[block] >> 40) & (_TABLE_SLOTS - 1) for block in blocks]  # high bits mix best
    for block, slot in zip(blocks, slots, strict=True):
        rows = torch.arange(block.start, block.start + len(slot), device=hashes.device)
        table.scatter_reduce_(0, slot, rows, "amin")
    first = table[table < n_rows].sort().values
    for block, slot in zip(blocks, slots, strict=True):
        if not torch.equal(hashes[table.index_select(0, slot)], hashes[block]):
            return None
    table[(hashes[first] >> 40) & (_TABLE_SLOTS - 1)] = torch.arange(len(first)).to(first)
    return Groups(first, torch.cat([table.index_select(0, slot) for slot in slots]))


def _groups_by_sorting(hashes: Tensor) -> Groups | None:
    """Groups of equal hashes; None if all differ."""
    hashes, order = torch.sort(hashes, stable=True)
    starts = _run_starts(hashes)
    if bool(starts.all()):
        return None
    return _in_order(order[starts], order, starts.cumsum(0).sub_(1))


def _run_starts(sorted_values: Tensor) -> Tensor:
    """True where a value differs from the one before it."""
    starts = torch.ones_like(sorted_values, dtype=torch.bool)
    torch.ne(sorted_values[1:], sorted_values[:-1], out=starts[1:])
    return starts


def _in_order(first: Tensor, rows: Tensor, group: Tensor) -> Groups:
    """Groups renumbered by their first rows; group (n,) belongs to rows (n,), in any order."""
    first, order = torch.sort(first)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device)
    return Groups(first, torch.empty_like(rows).scatter_(0, rows, number.index_select(0, group)))


def _hold_equal_rows(groups: Groups, columns: Tensor) -> bool:
    """Whether each row, a column of (c, n), equals the first of its group."""
    originals = columns[:, groups.first]
    for start in range(0, columns.shape[1], _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        if not torch.equal(originals.index_select(1, groups.group[rows]), columns[:, rows]):
            return False
    return True


def _varying_columns(rows: Tensor) -> Tensor:
    """Columns (c, n) of rows (..., d), without those that hold one and the same number.

    Where there are several tasks, one more column has the task of each row.
    """
    columns = rows.flatten(0, -2).t()
    varies = (columns[:, :64] != columns[:, :1]).any(1)
    if not bool(varies.all()):  # the sample decides for most; look at the others in full
        for index in (~varies).nonzero().flatten().tolist():
            varies[index] = (columns[index] != columns[index, :1]).any()
        columns = columns[varies]
    if rows.dim() == 2 or rows.shape[0] == 1:
        return columns
    task = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device)
    return torch.cat([columns, task.repeat_interleave(rows.shape[1]).unsqueeze(0)])


def _hash(columns: Tensor, salt: int = 0) -> Tensor:
    """64 bits for each row of columns (c, n); equal rows have equal hashes."""
    n_columns, n_rows = columns.shape
    generator = torch.Generator().manual_seed(0x5EED + salt)
    factors = torch.randint(-(2**63), 2**63 - 1, (2, n_columns, 1), generator=generator)
    factors = factors.bitwise_or_(1).to(columns.device)  # odd, so that multiplying loses no bit
    integer = torch.int32 if columns.dtype == torch.float32 else torch.int64
    hashes = torch.empty(n_rows, dtype=torch.int64, device=columns.device)
    for start in range(0, n_rows, _BLOCK_ROWS):
        block = columns[:, start : start + _BLOCK_ROWS] + 0.0  # which turns -0.0 into 0.0
        bits = block.contiguous().view(integer).to(torch.int64)
        # Round numbers end in zero bits, which a product alone would leave at zero: bring the high
        # bits down between two products.
        bits.mul_(factors[0]).bitwise_xor_(bits >> 29).mul_(factors[1])
        torch.sum(bits, 0, out=hashes[start : start + _BLOCK_ROWS])
    return hashes


def _groups_by_comparison(columns: Tensor) -> Groups:
    """The same by a lexicographic sort: slow, for the day on which two hashes collide."""
    _, group = torch.unique(columns.t() + 0.0, dim=0, return_inverse=True)
    rows = torch.arange(len(group), device=columns.device)
    first = rows.new_full((int(group.max()) + 1,), len(group))
    return _in_order(first.scatter_reduce_(0, group, rows, "amin"), rows, group)


def sums_by_label(columns: Tensor, labels: Tensor, n_labels: int) -> Tensor:
    """Sums (tasks, c, n_labels) of the columns (tasks, c, n) that share a label (tasks, n).

    The sums are float64; short ones are made in the columns' dtype, and added up in float64.
    """
    if columns.device.type != "cpu" and n_labels <= _MOST_LABELS_IN_A_PRODUCT:
        # A scatter adds in no fixed order there; a product gives the same bits every time.
        indices = torch.arange(n_labels, device=columns.device)
        return (columns @ (labels.unsqueeze(-1) == indices).to(columns.dtype)).double()
    # Long sums lose digits: each stretch of 32 n_labels columns is summed on its own.
    stretch = 32 * n_labels
    whole = columns.shape[2] // stretch * stretch
    total = columns.new_zeros((*columns.shape[:2], n_labels), dtype=torch.float64)
    for part, length in ((slice(whole), stretch), (slice(whole, None), columns.shape[2] - whole)):
        if length:
            terms = columns[..., part].unflatten(2, (-1, length))
            index = labels[:, None, part].unflatten(2, (-1, length)).expand_as(terms)
            sums = columns.new_zeros((*terms.shape[:3], n_labels)).scatter_add_(3, index, terms)
            total += sums.sum(2, dtype=torch.float64)
    return total
