"""Rollouts against loops, and our Lloyd against scikit-learn, on data that nobody here wrote."""

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from leancluster_core import TaskDistribution, kmeans_loss, rescale_to_unit_cube
from leancluster_core.experiments import TrainingConfig
from leancluster_core.experiments.rollouts import (
    describe_rollout,
    lloyd_frame,
    rollout_frame,
    scikit_learn_frame,
)
from leancluster_core.experiments.store import Run
from leancluster_core.experiments.training import train


def iris(n_starts=4, n_clusters=3):
    flowers = torch.unique(torch.tensor(load_iris().data, dtype=torch.float32), dim=0)
    draw = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(len(flowers), generator=draw)[:n_clusters] for _ in range(n_starts)]
    return rescale_to_unit_cube(flowers.expand(n_starts, -1, -1), flowers[torch.stack(chosen)])


@pytest.fixture(scope="module")
def run():
    task = TaskDistribution(n_points=16, n_features=4, n_clusters=3)
    config = TrainingConfig(
        task, n_steps=2, batch_size=2, seeds=(1, 2), n_validation_batches=1, evaluate_every=1
    )
    return train(config, progress=False)


def test_our_lloyd_and_scikit_learns_go_the_same_way():
    points, centers = iris()
    ours, theirs = lloyd_frame(points, centers, 8), scikit_learn_frame(points, centers, 8)
    assert list(ours["step"]) == list(theirs["step"]) == list(range(9))
    np.testing.assert_allclose(ours["log_loss"], theirs["log_loss"], rtol=1e-5)
    assert ours["log_loss"].is_monotonic_decreasing
    assert ours["log_loss"].iloc[0] == pytest.approx(
        float(kmeans_loss(points, centers).double().log().mean())
    )


def test_a_rollout_is_the_model_again_and_again_for_each_trial(run):
    points, centers = iris()
    frame = rollout_frame([run], points, centers, 3)
    assert len(frame) == 2 * 4
    for trial in (0, 1):
        model, current = run.model(trial), centers
        for step in range(4):
            row = frame[(frame["trial"] == trial) & (frame["step"] == step)].iloc[0]
            expected = float(kmeans_loss(points, current).double().log().mean())
            assert row["log_loss"] == pytest.approx(expected, rel=1e-5)
            assert (row["embedding"], row["regularizer"]) == ("binary", "l2")
            current = model(points, current)


@pytest.mark.parametrize("reembed", [True, False])
@pytest.mark.parametrize("scale", [1e2, 1e10, 1e30])
def test_a_rollout_that_leaves_the_numbers_is_infinite(run, scale, reembed):
    """Between the two, centers are finite and their squares are not, in float32."""
    points, centers = iris()
    huge = run.weights | {"value": run.weights["value"] * scale}
    wild = Run(run.config, run.history, huge, {})
    frame = rollout_frame([wild], points, centers, 9, reembed=reembed)
    for _, losses in frame.groupby("trial")["log_loss"]:
        finite = losses.to_numpy()[np.isfinite(losses)]
        assert 0 < len(finite) < len(losses) and (np.diff(finite) > 0).all()
        assert (losses.iloc[len(finite) :] == math.inf).all()
        assert (finite[-1] > math.log(torch.finfo(torch.float32).max)) == (scale < 1e30)


def test_a_rollout_of_weights_that_are_all_huge_is_infinite(run):
    points, centers = iris()
    huge = {name: weight * 1e30 for name, weight in run.weights.items()}
    frame = rollout_frame([Run(run.config, run.history, huge, {})], points, centers, 3)
    assert math.isfinite(frame["log_loss"].iloc[0])
    assert math.isinf(frame["log_loss"].iloc[3])


def test_a_loss_that_overflows_float64_is_infinite_too():
    points, centers = (tensor.double() for tensor in iris())
    assert lloyd_frame(points, centers, 0)["log_loss"].iloc[0] < 10
    assert lloyd_frame(points, centers * 1e200, 0)["log_loss"].iloc[0] == math.inf


def test_words_compare_the_medians_with_lloyd(run):
    points, centers = iris()
    frame, lloyd = rollout_frame([run], points, centers, 2), lloyd_frame(points, centers, 2)
    middle = frame[frame["step"] == 2]["log_loss"].median()
    text = describe_rollout(frame, lloyd)
    assert f"After 2 steps Lloyd is at {lloyd['log_loss'].iloc[-1]:.2f}" in text
    assert f"BN:L2 {middle:.2f}. Below Lloyd: none of them." in text
    assert "Below Lloyd: BN:L2." in describe_rollout(frame, lloyd.assign(log_loss=99.0))


def test_wrong_input_is_refused(run):
    points, centers = iris()
    with pytest.raises(ValueError, match="n_iterations must be"):
        scikit_learn_frame(points, centers, -1)
    with pytest.raises(ValueError, match="must be finite"):
        rollout_frame([run], points * math.nan, centers, 3)
