"""Relative loss and rollouts against loops that are written out."""

import math

import pytest
import torch

from leancluster_core import (
    ClusteringTransformer,
    TaskDistribution,
    kmeans_loss,
    lloyd,
    lloyd_step,
    lloyd_transformer,
)
from leancluster_core.experiments import multi_step, relative_loss

TASK = TaskDistribution(n_points=40, n_features=3, n_clusters=4)


def tasks(*batch, seed=0):
    return TASK.sample(batch, generator=torch.Generator().manual_seed(seed))


def model(**options):
    return ClusteringTransformer(3, 4, generator=torch.Generator().manual_seed(1), **options)


def test_relative_loss_is_the_mean_of_ratios():
    """Equation 20: not the ratio of means."""
    points, centers = tasks(2, 5)
    predicted, reference = centers + 0.1, lloyd_step(points, centers)
    expected = [
        sum(
            kmeans_loss(points[i, j], predicted[i, j]) / kmeans_loss(points[i, j], reference[i, j])
            for j in range(5)
        ) / 5
        for i in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(relative_loss(points, predicted, reference), torch.stack(expected))


def test_relative_loss_of_lloyds_own_step_is_one():
    points, centers = tasks(5)
    reference = lloyd_step(points, centers)
    assert relative_loss(points, reference, reference) == 1.0


def test_relative_loss_refuses_nan_by_name():
    points, centers = tasks(5)
    with pytest.raises(ValueError, match="must be finite, got nan"):
        relative_loss(points, centers * math.nan, centers)


def test_reembedding_is_calling_the_model_again_and_again():
    points, centers = tasks(3)
    found = multi_step(model(), points, centers, 4)
    assert found.shape == (5, 3, 4, 3)
    assert torch.equal(found[0], centers)
    for step in range(4):
        centers = model()(points, centers)
        torch.testing.assert_close(found[step + 1], centers)


def test_iterating_is_a_model_of_more_layers():
    points, centers = tasks(3)
    found = multi_step(model(), points, centers, 4, reembed=False)
    for n_layers in range(1, 5):
        torch.testing.assert_close(found[n_layers], model(n_layers=n_layers)(points, centers))
    assert not torch.allclose(found[2], multi_step(model(), points, centers, 2)[2])


@pytest.mark.parametrize("reembed", [True, False])
def test_the_construction_rolls_out_lloyds_iterations(reembed):
    points, centers = (t.double() for t in tasks(3, seed=3))
    construction = lloyd_transformer(3, 4, dtype=torch.float64)
    found = multi_step(construction, points, centers, 6, reembed=reembed)
    expected = lloyd(points, centers, 6, return_all=True)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_model_of_two_layers_takes_two_a_step():
    points, centers = tasks(3)
    found = multi_step(model(n_layers=2), points, centers, 2)
    torch.testing.assert_close(found[1], model(n_layers=2)(points, centers))


def test_trials_keep_their_axis_and_share_tasks():
    together = ClusteringTransformer(3, 4, n_trials=2)
    together.load_state_dict({
        name: torch.stack([weight, 2 * weight]) for name, weight in model().state_dict().items()
    })  # fmt: skip
    points, centers = tasks(1, 3)
    found = multi_step(together, points, centers, 3)
    assert found.shape == (4, 2, 3, 4, 3)
    torch.testing.assert_close(found[:, 0], multi_step(model(), points[0], centers[0], 3))


def test_no_iterations_are_the_initial_centers_without_gradients():
    points, centers = tasks()
    found = multi_step(model(), points, centers, 0)
    assert torch.equal(found, centers[None]) and not found.requires_grad


def test_a_rollout_that_diverges_is_a_result():
    points, centers = tasks(3)
    wild = model()
    with torch.no_grad():
        wild.value.mul_(1e20)
    assert not multi_step(wild, points, centers, 3)[-1].isfinite().any()


def test_bad_arguments_are_refused_by_name():
    points, centers = tasks()
    with pytest.raises(ValueError, match=r"n_iterations must be in \[0, inf\), got -1"):
        multi_step(model(), points, centers, -1)
    with pytest.raises(TypeError, match="reembed must be True or False, got 'no'"):
        multi_step(model(), points, centers, 1, reembed="no")
