"""Theorem 2.1 on random and real data, and what happens when an assumption fails."""

import pytest
import torch

from leancluster_core import TaskDistribution, lloyd, lloyd_transformer
from leancluster_core.experiments.exact import (
    assumptions_hold,
    broken_table,
    exact_table,
    judged_table,
    parameter_table,
    real_data,
)


def test_layers_are_iterations_over_dimensions_and_clusters():
    """S2-exact and S2-exact-oh, with fewer tasks than the page has."""
    shapes = [(1, 2), (2, 3), (4, 6), (16, 10), (3, 25), (64, 4)]
    table = exact_table(shapes, n_centers=24, points_per_cluster=10, n_iterations=20, seed=1)
    assert len(table) == len(shapes) * 2 * 20
    assert table["max_difference"].max() <= 1e-12
    assert table["labels_equal"].all()


@pytest.mark.parametrize("embedding", ["onehot", "binary"])
def test_layers_with_shared_weights_equal_a_deep_model(embedding):
    tasks = TaskDistribution(n_points=60, n_features=3, n_clusters=5)
    points, centers = tasks.sample((4,), generator=torch.Generator().manual_seed(0))
    points, centers = points.double(), centers.double()
    model = lloyd_transformer(3, 5, embedding=embedding, n_layers=7, dtype=torch.float64)
    difference = (model(points, centers) - lloyd(points, centers, 7)).abs().max()
    assert difference <= 1e-12


def test_real_data_as_scikit_learn_says():
    table = judged_table(real_data(), n_starts=2, n_iterations=8, seed=3)
    assert len(table) == 4 * 3
    assert table["largest difference"].max() <= 1e-9
    assert table["labels equal"].all()


def test_a_wrong_layer_is_told(monkeypatch):
    """The comparison can fail: a model that moves centers by a millionth more is seen."""

    def nearly(*arguments, **settings):
        model = lloyd_transformer(*arguments, **settings)
        model.value[2] *= 1 + 1e-6
        return model

    monkeypatch.setattr("leancluster_core.experiments.exact.lloyd_transformer", nearly)
    table = exact_table([(2, 3)], n_centers=6, points_per_cluster=10, n_iterations=2, seed=1)
    assert table["max_difference"].min() > 1e-8


def test_broken_assumptions():
    """Duplicates change nothing, a tied point counts for nobody, an empty cluster's center moves to
    the mean of the points with the nearest codes: all of them for one-hot codes."""
    table = broken_table().set_index(["case", "method"])
    assert table.xs("duplicate points")["as Lloyd"].all()
    for name in ("OH", "BN"):
        tie = table.loc[("a tie", f"transformer, {name}")]
        assert (tie["centre 1"], tie["centre 2"]) == ("(0, 0)", "(4, 0)")
    assert table.loc[("a tie", "Lloyd")]["centre 1"] == "(1, 0)"
    empty = table.xs("an empty cluster")["centre 3"]
    assert empty["Lloyd"] == "(50, 50)"
    assert empty["transformer, OH"] == "(3, 1)"  # the mean of all points
    assert empty["transformer, BN"] == "(0, 1)"  # code 01 is one bit from 00, two from 10


def test_empty_cluster_is_never_nan():
    """S1.1, for the construction at gamma = infinity and for layers at any finite gamma."""
    points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0]])
    centers = torch.tensor([[0.0, 1.0], [8.0, 1.0], [500.0, 500.0]])
    for dtype in (torch.float32, torch.float64):
        for gamma in (1.0, 1e3, float("inf")):
            for embedding in ("onehot", "binary"):
                model = lloyd_transformer(2, 3, embedding=embedding, n_layers=5, dtype=dtype)
                model.inverse_temperature = gamma
                assert torch.isfinite(model(points, centers)).all()


def test_assumptions_are_seen():
    points = torch.tensor([[[0.0], [2.0], [4.0], [5.0]]])
    assert assumptions_hold(points, torch.tensor([[[[0.0], [4.1]]]])).tolist() == [True]
    assert assumptions_hold(points, torch.tensor([[[[0.0], [4.0]]]])).tolist() == [False]  # a tie
    assert assumptions_hold(points, torch.tensor([[[[0.0], [99.0]]]])).tolist() == [False]  # empty


def test_parameters_are_counted():
    table = parameter_table([8]).set_index(["embedding", "n_clusters"])["n_parameters"]
    assert table["onehot", 8] == 12 * 16**2
    assert table["binary", 8] == 12 * 11**2
    assert table["none", 32] == 12 * 8**2
