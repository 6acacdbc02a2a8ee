"""The worked examples of the theory chapters, computed."""

import math

import torch

from leancluster_core import cluster_codes, lloyd_transformer


def test_the_toy_of_theorem_21():
    """book/theory_model.md: four points on a line, two centers, binary codes."""
    points = torch.tensor([[0.0], [0.2], [0.7], [1.0]], dtype=torch.float64)
    centers = torch.tensor([[0.2], [1.0]], dtype=torch.float64)
    model = lloyd_transformer(1, 2, dtype=torch.float64)
    moved, (maps,) = model(points, centers, return_attention=True)
    assignment = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]).double()
    expected = (assignment, torch.eye(4).double(), assignment.T / 2, torch.eye(2).double())
    for found, wanted in zip(maps, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(moved, torch.tensor([[0.1], [0.85]]).double())


def test_the_codes_of_six_clusters():
    rows = ["".join(str(int(bit)) for bit in row) for row in cluster_codes(6, "binary")]
    assert rows == ["000", "100", "010", "110", "001", "101"]
    widths = {k: [4 + cluster_codes(k, e).shape[1] for e in ("onehot", "binary")] for k in (6, 100)}
    assert widths == {6: [10, 7], 100: [104, 11]}


def test_inequalities_that_proofs_leave_to_trying():
    """book/theory_loss.md: 2 (1 - 1/k) < sqrt(2 log k)."""
    assert all(2 * (1 - 1 / k) < math.sqrt(2 * math.log(k)) for k in range(2, 50))
