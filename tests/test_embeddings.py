"""Codes and token pairs (Section 2, Appendix B)."""

import math

import pytest
import torch

from leancluster_core import cluster_codes, embed
from leancluster_core.embeddings import EMBEDDINGS


def test_binary_codes_of_six_clusters_are_the_papers():
    """Bits of i - 1, least significant first: columns 000, 100, 010, 110, 001, 101."""
    expected = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1]]
    assert cluster_codes(6, "binary").tolist() == expected


@pytest.mark.parametrize("k,bits", [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_binary_codes_are_distinct_and_as_short_as_can_be(k, bits):
    codes = cluster_codes(k, "binary")
    assert codes.shape == (k, bits)
    assert len({tuple(row) for row in codes.tolist()}) == k
    assert bits == math.ceil(math.log2(k))


def test_other_codes():
    assert torch.equal(cluster_codes(4, "onehot"), torch.eye(4))
    assert cluster_codes(4, "none").shape == (4, 0)


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_points_get_zeros_and_centers_get_codes(embedding):
    points, centers = torch.rand(2, 7, 3), torch.rand(2, 5, 3)
    point_tokens, center_tokens = embed(points, centers, embedding)
    codes = cluster_codes(5, embedding)
    width = 3 + codes.shape[1]
    assert point_tokens.shape == (2, 7, width) and center_tokens.shape == (2, 5, width)
    assert torch.equal(point_tokens[..., :3], points)
    assert not point_tokens[..., 3:].any()
    assert torch.equal(center_tokens[..., :3], centers)
    assert torch.equal(center_tokens[..., 3:], codes.expand(2, -1, -1))


def test_embedding_keeps_dtype_and_batch_dimensions_and_passes_gradients():
    points = torch.zeros(4, 1, 7, 3, dtype=torch.float64)
    centers = torch.zeros(5, 2, 3, dtype=torch.float64, requires_grad=True)
    point_tokens, center_tokens = embed(points, centers, "binary")
    assert point_tokens.dtype == center_tokens.dtype == torch.float64
    (gradient,) = torch.autograd.grad(center_tokens.sum(), centers)
    assert torch.equal(gradient, torch.ones_like(centers))


@pytest.mark.parametrize("call,error,message", [
    (lambda: cluster_codes(0, "binary"), ValueError, r"n_clusters must be in \[1, inf\), got 0"),
    (lambda: cluster_codes(2.0, "binary"), TypeError, "n_clusters must be an integer"),
    (lambda: cluster_codes(3, "BN"), ValueError, "embedding must be one of 'onehot', 'binary'"),
    (lambda: embed(torch.rand(5, 3), torch.rand(2, 4), "none"), ValueError, "same number of fea"),
    (lambda: embed(torch.rand(1, 3), torch.rand(2, 3), "none"), ValueError,
     r"n_clusters must be in \[1, n_points=1\], got 2"),
    (lambda: embed(torch.rand(5, 3), torch.full((2, 3), math.nan), "none"), ValueError,
     r"centers must be finite, got nan at index \(0, 0\)"),
])  # fmt: skip
def test_bad_input_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
