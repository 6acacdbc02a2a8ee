"""Distance attention at inverse temperature infinity: the averaging hardmax of Theorem 2.1.

Each query attends to the keys at exactly the smallest distance, with equal weights. Nothing of
size queries x keys is built. What makes it fast is that the construction's keys are few (centers),
or few DIFFERENT ones (codes), or the queries themselves:

- equal keys are grouped first, and a group counts as one key whose value is the mean of its values
  and whose weight is its size;
- a query that is itself a key is nearest to its own group, whatever the other keys are;
- the nearest of few groups is found as :func:`leancluster_core.distances.nearest_centers` finds it.

Means are added up in float64. There are no gradients: the weights are piecewise constant, and where
they jump the derivative does not exist.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leancluster_core.distances import (
    _center,
    _centered_blocks,
    _exact_distances,
    _proven_labels,
    _scaled_into_range,
)
from leancluster_core.groups import Groups, group_equal_rows, sums_by_label

# Rows converted to float64 at once, so that they stay in cache.
_BLOCK_ROWS = 1 << 14


@torch.no_grad()
def _hardmax_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mean of the values whose keys are nearest to each query (Definition 2.2, gamma = infinity).

    queries: (..., m, e), keys: (..., r, e), values: (..., r, v) -> (..., m, v), detached. All
    finite and of one dtype, r >= 1. "Nearest" is decided by the smallest computed sum of squared
    differences, "equal" by all numbers. The result may share memory with ``values``. Unchecked.
    """
    batch_shape = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2], values.shape[:-2])
    if batch_shape.numel() * queries.shape[-2] == 0:
        return values.new_zeros((*batch_shape, queries.shape[-2], values.shape[-1]))
    among_themselves = _same(queries, keys)
    queries, keys, values = (
        tensor.expand(*batch_shape, -1, -1).reshape(batch_shape.numel(), *tensor.shape[-2:])
        for tensor in (queries, keys, values)
    )
    groups = group_equal_rows(keys)
    if not among_themselves:
        result = _attend_to_groups(queries, keys, values, groups or _singletons(keys)).mT
    elif groups is None:
        result = values
    else:
        means = _group_means(values, groups).to(values.dtype)
        result = means.index_select(1, groups.group).t()
    return result.reshape(*batch_shape, queries.shape[-2], values.shape[-1])


@torch.no_grad()
def _hardmax_update(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor
) -> tuple[slice, Tensor]:
    """What projected hardmax attention adds to the queries' tokens, and to which of their features.

    query, key: (..., e, f), (..., e, g), value: (..., e, g); tokens as columns, queries (..., f, m)
    and keys (..., g, r). Returns a range of features, outside which the update is zero, and the
    update there, (..., features, m), in memory of its own: the same as those rows of
    ``_hardmax_attention((query @ queries).mT, (key @ keys).mT, (value @ keys).mT).mT``.

    Of many tokens only those features are touched that the weights can reach; a projection that
    just picks neighbouring features (as all of Theorem 2.1 do) costs nothing.
    """
    scored = _reach(torch.cat([query, key], -1), -2)
    q = _project(query[..., scored, :], queries)
    k = _project(key[..., scored, :], keys)
    rows, read = _reach(value, -2), _reach(value, -1)
    value, keys = value[..., rows, read], keys[..., read, :]
    if keys.shape[-1] < queries.shape[-1]:
        return rows, _hardmax_attention(q.mT, k.mT, _project(value, keys).mT).mT
    # Attention weights sum to one, so the mean may come first: the many keys aren't projected.
    update = _project(value, _hardmax_attention(q.mT, k.mT, keys.mT).mT)
    own_memory = update.untyped_storage().data_ptr() != keys.untyped_storage().data_ptr()
    return rows, update if own_memory else update.clone()


def _reach(weight: Tensor, dim: int) -> slice:
    """The range of rows (dim -2) or columns (dim -1) of weight (..., e, f) with all nonzeros."""
    nonzero = (weight != 0).movedim(dim, 0).flatten(1).any(1).nonzero().flatten().tolist() or [0]
    return slice(nonzero[0], nonzero[-1] + 1)


def _project(weight: Tensor, tokens: Tensor) -> Tensor:
    """weight (..., e, f) @ tokens (..., f, n); a view where that picks neighbouring features."""
    columns = _reach(weight, -1)
    weight, tokens = weight[..., columns], tokens[..., columns, :]
    identity = torch.eye(weight.shape[-1]).to(weight)
    picks = weight.shape[-2:] == identity.shape and bool((weight == identity).all())
    return tokens if picks else weight @ tokens


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    one_memory = left.data_ptr() == right.data_ptr() and left.stride() == right.stride()
    return one_memory or torch.equal(left, right)


def _singletons(keys: Tensor) -> Groups:
    indices = torch.arange(keys.shape[0] * keys.shape[1], device=keys.device)
    return Groups(indices, indices)


def _group_means(values: Tensor, groups: Groups) -> Tensor:
    """Mean value (v, g) of each group of rows of values (tasks, r, v), in float64."""
    columns = values.flatten(0, 1).t()
    n_groups = len(groups.first)
    sums = columns.new_zeros((len(columns), n_groups), dtype=torch.float64)
    size = max(_BLOCK_ROWS, 4 * n_groups)
    for start in range(0, columns.shape[1], size):
        rows = slice(start, start + size)
        block = columns[None, :, rows].double()
        sums += sums_by_label(block, groups.group[None, rows], n_groups)[0]
    return sums.div_(groups.sizes)


def _attend_to_groups(queries: Tensor, keys: Tensor, values: Tensor, groups: Groups) -> Tensor:
    """Queries (tasks, m, e) to groups of keys (tasks, r, e) with values (tasks, r, v)
    -> (tasks, v, m)."""
    means = _group_means(values, groups)
    n_tasks, n_keys = keys.shape[:2]
    queries, keys = _without_common_features(queries, keys)
    queries, keys, _ = _scaled_into_range(queries, keys)
    distinct_keys = keys.flatten(0, 1)[groups.first]
    task = groups.first // n_keys
    n_groups = torch.bincount(task, minlength=n_tasks)
    result = means.new_empty((n_tasks, len(means), queries.shape[1]), dtype=values.dtype)
    # Tasks with equally many groups are handled together: mostly that is all of them.
    for number in n_groups.unique().tolist():
        tasks = n_groups == number
        members = tasks[task]
        together = int(tasks.sum()), number
        attended = _attend_to_few(
            queries[tasks] if together[0] < n_tasks else queries,
            distinct_keys[members].unflatten(0, together),
            groups.sizes[members].unflatten(0, together),
            means[:, members].unflatten(1, together).transpose(0, 1),
        )
        if together[0] == n_tasks:
            return attended
        result[tasks] = attended
    return result


def _attend_to_few(queries: Tensor, keys: Tensor, sizes: Tensor, values: Tensor) -> Tensor:
    """Queries (tasks, m, e) to distinct keys (tasks, g, e), which count sizes (tasks, g) times and
    have values (tasks, v, g) -> (tasks, v, m)."""
    shift = _center(queries)
    blocks = _centered_blocks(queries, shift, keys.shape[1])
    nearest, undecided = _proven_labels(queries, shift, blocks, keys)
    index = nearest.unsqueeze(1).expand(-1, values.shape[1], -1)
    result = torch.gather(values.to(queries.dtype), 2, index)
    width = max(keys.shape[2], values.shape[1])
    for task, row, distances in _exact_distances(queries, keys, undecided, width):
        weights = (distances == distances.amin(0)) * sizes[task].t()
        weights = weights.double() / weights.sum(0)  # exactly 1 for one nearest key
        mixed = torch.einsum("pvg,gp->pv", values[task].double(), weights)
        result[task, :, row] = mixed.to(result.dtype)
    return result


def _without_common_features(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Drop features that are one and the same number everywhere: projections make many of them."""
    common = keys[0, 0]
    differs = (queries[:, :64] != common).any(0).any(0) | (keys[:, :64] != common).any(0).any(0)
    for feature in (~differs).nonzero().flatten().tolist():
        differs[feature] = bool((queries[..., feature] != common[feature]).any()) or bool(
            (keys[..., feature] != common[feature]).any()
        )
    kept = differs.nonzero().flatten().tolist() or [0]
    if kept == list(range(kept[0], kept[-1] + 1)):
        return queries[..., kept[0] : kept[-1] + 1], keys[..., kept[0] : kept[-1] + 1]
    return queries[..., kept], keys[..., kept]
