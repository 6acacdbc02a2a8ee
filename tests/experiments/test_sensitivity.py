"""Measured sensitivities: finite differences, random directions, exact suprema, refusals."""

import math

import pytest
import torch

from leancluster_core import ClusteringTransformer, TaskDistribution, smoothed_kmeans_loss
from leancluster_core.experiments.sensitivity import (
    WEIGHTS,
    compare_with_bounds,
    evaluation_tasks,
    loss_sensitivity,
    model_sensitivity,
    sensitivity_frame,
    spectral_norms,
    token_norms_table,
    untrained_model,
)

KINDS = ("query", "key", "value")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def setting():
    model = untrained_model(0, 3, 4, "binary").double()
    points, centers = evaluation_tasks(TaskDistribution("normal", 20, 3, 4), 0, 3)
    return model, points.double(), centers.double()


def moved(model, index, step):
    """A copy of the model with one of its twelve matrices moved."""
    kind, place = divmod(index, 4)
    copy = ClusteringTransformer(3, 4, embedding="binary").double()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        getattr(copy, KINDS[kind])[place] += step
    return copy


def test_no_direction_moves_the_centers_more(setting):
    model, points, centers = setting
    found = model_sensitivity(model, points, centers, n_iterations=20, generator=generator())
    assert found.shape == (3, 12) and found.dtype == torch.float64
    with torch.no_grad():
        before = model(points, centers)
        for index in range(12):
            for seed in range(20):
                step = torch.randn(5, 5, generator=generator(seed), dtype=torch.float64)
                left, _, right = torch.linalg.svd(step)
                after = moved(model, index, 1e-6 * left @ right)(points, centers)
                change = (after - before).norm(dim=-1).sum(-1) / 1e-6
                assert (change <= found[:, index] * (1 + 1e-4)).all(), WEIGHTS[index]


def test_more_iterations_only_go_up_and_starts_agree(setting):
    model, points, centers = setting
    few, many, other = (
        model_sensitivity(model, points, centers, n_iterations=n, generator=generator(seed))
        for n, seed in ((2, 0), (30, 0), (30, 1))
    )
    assert (many >= few - 1e-12).all()
    assert ((many - other).abs() / many).median() < 1e-2


@pytest.mark.parametrize("regularizer", ["entropy", "l2"])
def test_the_losss_supremum_is_attained_and_not_exceeded(setting, regularizer):
    model, points, centers = setting
    penalty = {"penalty": 0.2, "regularizer": regularizer}
    found = loss_sensitivity(model, points, centers, **penalty)
    task = points[:1], centers[:1]
    parameters = {kind: getattr(model, kind) for kind in KINDS}
    loss = smoothed_kmeans_loss(points[:1], model(*task), **penalty).sum()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for index in range(12):
        kind, place = divmod(index, 4)
        left, values, right = torch.linalg.svd(gradients[kind][place])
        assert float(found[0, index]) == pytest.approx(float(values.sum()), rel=1e-9, abs=1e-12)
        with torch.no_grad():
            step = 1e-6 * left @ right
            losses = [
                smoothed_kmeans_loss(points[:1], moved(model, index, s * step)(*task), **penalty)
                for s in (1, -1)
            ]
        slope = float((losses[0] - losses[1]).abs()) / 2e-6
        assert slope == pytest.approx(float(found[0, index]), rel=1e-4, abs=1e-7)


def test_comparison_holds_the_bounds_and_its_columns(setting):
    model, points, centers = setting
    table = compare_with_bounds(
        model, points, centers, penalties=[1.0, 0.1], generator=generator(), n_iterations=3
    )
    assert len(table) == 1 + 2 * 2
    measured = table["measured"].map(math.log10)
    assert (measured <= table["log10_sharp"]).all()
    assert (table["log10_sharp"] <= table["log10_bound"]).all()
    assert set(table["matrix"]) <= set(WEIGHTS)


def test_spectral_norms_and_streams():
    model = untrained_model(3, 2, 3, "onehot", inverse_temperature=2.0)
    assert model.inverse_temperature == 2.0
    norms = spectral_norms(model)
    largest = max(
        float(torch.linalg.svdvals(model.value[i].detach().double()).max()) for i in range(4)
    )
    assert norms.value_norm == pytest.approx(largest)
    again = untrained_model(3, 2, 3, "onehot")
    assert torch.equal(model.query, again.query)


def test_a_sweep_varies_one_setting_at_a_time():
    axes = {"n_features": [2, 3], "penalty": [0.1, 1.0]}
    frame = sensitivity_frame(
        axes, n_points=8, n_features=2, n_clusters=2, seeds=[0, 1], n_tasks=1, n_iterations=1
    )
    counts = frame.groupby(["axis", "quantity"]).size()
    # 2 values x 2 codes x 2 seeds, the loss with 2 regularizers
    assert counts["n_features", "centers"] == 8
    assert counts["n_features", "loss"] == counts["penalty", "loss"] == 16
    assert ("penalty", "centers") not in counts
    of_penalty = frame[frame["axis"] == "penalty"]
    assert (of_penalty["value"] == of_penalty["penalty"]).all()
    with pytest.raises(ValueError, match="axis must be one of"):
        sensitivity_frame({"gamma": [1.0]}, n_points=8, n_features=2, n_clusters=2, seeds=[0])


def test_token_norms_stay_within_table_3():
    task = TaskDistribution("normal", 16, 2, 3)
    models = {(e, "untrained"): untrained_model(1, 2, 3, e) for e in ("onehot", "binary")}
    table = token_norms_table(models, task, n_tasks=5, seed=0)
    assert list(table["attention"]) == ["A1", "A2", "A3", "A4"] * 2
    assert (table["rho"] <= table["bound rho"]).all()
    assert (table["rho'"] <= table["bound rho'"]).all()
    first = table.iloc[0]
    assert (first["m"], first["m'"]) == (16, 3)
    assert first["bound rho'"] == pytest.approx(math.sqrt(3))


def test_refusals(setting):
    _, points, centers = setting
    several = ClusteringTransformer(3, 4, n_trials=2)
    with pytest.raises(ValueError, match="single trial, got n_trials=2"):
        loss_sensitivity(several, points, centers, penalty=1.0, regularizer="l2")
    biased = ClusteringTransformer(3, 4, bias=True)
    with pytest.raises(ValueError, match="no bias"):
        model_sensitivity(biased, points, centers, generator=generator())
    with pytest.raises(ValueError, match=r"shape \(tasks, n, d\)"):
        model = untrained_model(0, 3, 4, "binary")
        model_sensitivity(model, points[0], centers[0], generator=generator())
