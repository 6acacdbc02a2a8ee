"""Accuracy of float32 against float64, on a thinned grid of benchmarks/accuracy.py."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

from leancluster_core import ClusteringTransformer, TaskDistribution

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def accuracy():
    sys.path.insert(0, str(BENCHMARKS))  # the script imports its neighbor
    specification = importlib.util.spec_from_file_location("accuracy", BENCHMARKS / "accuracy.py")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


GRID = [*itertools.product((1, 32, 128), (2, 60), (0.01, 1.0, 100.0), (0.0, 10.0, 1000.0))]
GRID += [(4, 1, 1.0, 10.0), (4, 2048, 1.0, 0.0), (4, 2048, 100.0, 0.0), (4, 700, 0.01, 1000.0)]


def test_loss_and_gradient_are_right_to_four_digits(accuracy):
    switches = set()
    for case in GRID:
        switched, errors = accuracy.errors(case)
        assert set(errors) == {"absorbed", "fused", "materialised"}
        assert max(max(pair) for pair in errors.values()) < 1e-4, case
        switches.add(switched)
    assert switches == {True, False}


def test_the_switch_is_needed(accuracy):
    """Without it some of these cases have no digit right: the test above would see it."""
    with accuracy.float32_only():
        _, errors = accuracy.errors((32, 60, 1.0, 1000.0))
    assert errors["fused"][1] > 1e-2


@pytest.mark.parametrize("n_layers,values,projections", [
    (1, 1, 1), (4, 1, 1), (8, 1, 1), (20, 1, 1), (1, 100, 2), (1, 30, 1), (2, 3, 2),
])  # fmt: skip
def test_layers_and_values_that_enlarge_the_tokens_cost_no_accuracy(n_layers, values, projections):
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        points, centers = TaskDistribution(n_points=64).sample((3,), generator=generator)
        model = ClusteringTransformer(4, 6, n_layers=n_layers, generator=generator)
        with torch.no_grad():
            model.value *= values
            model.query *= projections
            model.key *= projections

        def gradient(model, points, centers):
            loss = model(points, centers).double().square().sum()
            parts = torch.autograd.grad(loss, list(model.parameters()))
            return torch.cat([part.double().flatten() for part in parts])

        found = gradient(model, points, centers)
        expected = gradient(model.double(), points, centers)
        assert float((found - expected).norm()) < 1e-4 * float(expected.norm())


def test_data_in_the_unit_cube_stay_in_float32_and_others_come_back_in_it():
    points, centers = TaskDistribution().sample((2,), generator=torch.Generator().manual_seed(0))
    model = ClusteringTransformer(4, 6, generator=torch.Generator().manual_seed(0))
    allowed = model._largest_square_norm()
    assert not model._needs_float64(points, centers, allowed)
    assert model._needs_float64(points + 10, centers + 10, allowed)
    flat = ClusteringTransformer(4, 6, inverse_temperature=0.0)
    assert flat._needs_float64(points + 10, centers + 10, flat._largest_square_norm())
    result, maps = model(points + 10, centers + 10, return_attention=True)
    assert result.dtype == torch.float32
    assert all(weights.dtype == torch.float32 for layer in maps for weights in layer)
    gradients = torch.autograd.grad(result.sum(), list(model.parameters()))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert model.query.dtype == torch.float32
