"""Token embeddings: what is appended to points and centers so that attention can name a cluster.

Centers carry a code of their cluster, points carry zeros in its place (Section 2). One-hot codes
(OH) take k extra features, binary codes (BN) ceil(log2 k), and "none" (NA) takes none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leancluster_core.checks import check_choice, check_integer, check_points_and_centers

EMBEDDINGS = ("onehot", "binary", "none")


def code_width(n_clusters: int, embedding: str) -> int:
    """Features that the embedding appends: k (onehot), ceil(log2 k) (binary) or 0 (none)."""
    check_choice("embedding", embedding, EMBEDDINGS)
    n_clusters = check_integer("n_clusters", n_clusters, 1)
    return {"onehot": n_clusters, "binary": (n_clusters - 1).bit_length(), "none": 0}[embedding]


def cluster_codes(n_clusters: int, embedding: str) -> Tensor:
    """Code rows of the clusters: (k, c), row i is the code of cluster i (Section 2).

    Binary codes hold the bits of the 0-based index, least significant bit first: for k = 6 the rows
    are 000, 100, 010, 110, 001, 101. A single cluster needs no bit: the result is (1, 0).

    Raises ValueError for an unknown embedding or n_clusters < 1.
    """
    width = code_width(n_clusters, embedding)
    if embedding == "onehot":
        return torch.eye(n_clusters)
    bits = torch.arange(n_clusters).unsqueeze(1) >> torch.arange(width)
    return (bits & 1).to(torch.get_default_dtype())


def embed(points: Tensor, centers: Tensor, embedding: str) -> tuple[Tensor, Tensor]:
    """Token pair of a task: points with zeros, centers with their codes (Section 2).

    points: (..., n, d), centers: (..., k, d) -> (..., n, d + c), (..., k, d + c).

    Raises ValueError for an unknown embedding, NaN or infinite entries, different d, k > n.
    """
    points, centers = check_points_and_centers(points, centers)
    codes = cluster_codes(centers.shape[-2], embedding).to(centers)
    zeros = points.new_zeros(()).expand(*points.shape[:-1], codes.shape[-1])
    codes = codes.expand(*centers.shape[:-2], *codes.shape)
    return torch.cat([points, zeros], -1), torch.cat([centers, codes], -1)
