"""Grids become the paper's configs; notebooks and command line train the same ones."""

from pathlib import Path
from types import SimpleNamespace

import jupytext
import pytest

from leancluster_core.experiments import grids
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.grids import (
    GRIDS,
    TIMED_FIGURES,
    NotTrainedYet,
    curve_configs,
    curve_frame,
    figure_configs,
    figure_runs,
    grid,
)
from leancluster_core.experiments.parameters import read_parameters
from leancluster_core.experiments.store import Store
from leancluster_core.experiments.timing import alternated
from leancluster_core.experiments.training import train
from leancluster_core.samplers import TaskDistribution

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def small(**changes):
    """A config that trains in a moment."""
    task = TaskDistribution(n_points=16, n_features=2, n_clusters=3)
    values = {"n_steps": 4, "batch_size": 2, "seeds": (1, 2), "evaluate_every": 2}
    return TrainingConfig(task, n_validation_batches=1, **(values | changes))


def test_the_paper_has_54_settings_and_the_two_figures_with_clipping_add_their_own():
    """Section 6: 54 settings of six curves; then four clipped curves, and twelve timed ones."""
    configs = {config for figure in GRIDS for config in figure_configs(figure)}
    plain = {config for config in configs if config.gradient_clipping is None}
    settings = {
        (c.task, c.penalty, c.learning_rate, c.n_steps)
        for c in plain
    }  # fmt: skip
    assert len(settings) == 54
    assert len(plain) == 54 * 6
    assert len(configs - plain) == 4 + 12
    assert all(len(config.seeds) == 10 for config in configs)
    assert {config.n_steps for config in configs} == {5000, 10_000}


@pytest.mark.parametrize(
    ("figure", "other", "shared"),
    [("fig02", "fig10", 18), ("fig04", "fig16", 60), ("fig10", "fig14", 24), ("fig15", "fig17", 0)],
)
def test_figures_share_the_configs_that_they_can_share(figure, other, shared):
    keys = [{config.key for config in figure_configs(name, "laptop")} for name in (figure, other)]
    assert len(keys[0] & keys[1]) == shared


@pytest.mark.parametrize("figure", list(GRIDS))
def test_a_notebook_trains_what_the_command_line_trains(figure, monkeypatch):
    """The notebook's own parameters and its grid, run up to where it would train."""
    source = NOTEBOOKS / f"{figure}.py"
    asked = {}

    def note(configs, scale, **options):
        asked.update(configs=list(dict.fromkeys(configs)), scale=scale, **options)
        raise StopIteration

    monkeypatch.setattr(grids, "figure_runs", note)
    namespace = read_parameters(source) | {"scale": "paper"}
    cells = [cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    with pytest.raises(StopIteration):
        exec(cells[2], namespace)
    assert asked["configs"] == figure_configs(figure)
    assert asked.get("taking_turns", False) == (figure in TIMED_FIGURES)
    assert read_parameters(source)["paper_on_cpu"] is False


def test_a_grid_is_every_combination_the_last_axis_fastest():
    assert grid(penalty=[1.0, 0.1], n_features=4, n_clusters=(6, 10)) == [
        {"penalty": 1.0, "n_features": 4, "n_clusters": 6},
        {"penalty": 1.0, "n_features": 4, "n_clusters": 10},
        {"penalty": 0.1, "n_features": 4, "n_clusters": 6},
        {"penalty": 0.1, "n_features": 4, "n_clusters": 10},
    ]


def test_curves_of_a_setting_stand_once_and_in_order():
    configs = curve_configs(grid(penalty=[0.1, 0.1]), embeddings=["onehot", "binary"])
    assert [config.label for config in configs] == ["OH:NE", "OH:L2", "BN:NE", "BN:L2"]
    assert configs[0] == TrainingConfig(
        TaskDistribution(), embedding="onehot", regularizer="entropy", penalty=0.1
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: curve_configs(grid(penalties=[0.1])), "has no field 'penalties'"),
        (lambda: curve_configs(grid(penalty=-1.0)), "penalty must be"),
        (lambda: curve_configs(grid(penalty=1.0), scale="huge"), "scale must be one of"),
        (lambda: figure_configs("fig03"), "figure must be one of"),
        (lambda: figure_configs("fig02", "huge"), "scale must be one of"),
    ],
)
def test_wrong_names_and_values_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_frame_has_a_row_a_trial_and_evaluation_and_says_what_it_is_of():
    runs = [train(small(learning_rate=rate), progress=False) for rate in (0.01, 0.1)]
    frame = curve_frame(runs)
    assert len(frame) == 2 * 2 * 2
    assert list(frame["initial_learning_rate"].unique()) == [0.01, 0.1]
    assert set(frame["key"]) == {run.config.key for run in runs}
    assert frame["n_trials"].eq(2).all()
    assert not frame["clipped"].any()
    assert (
        frame.groupby("key", sort=False)["relative_loss"].first().iloc[1]
        == (runs[1].history["relative_loss"].iloc[0])
    )


def test_runs_come_from_the_store_and_a_line_says_what_will_be_trained(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("LEANCLUSTER_RESULTS", str(tmp_path))
    first, second = small(), small(regularizer="entropy")
    store = Store(tmp_path / "smoke")
    store.save(train(first, progress=False))
    runs = figure_runs([first, second, first], "smoke")
    assert [run.config for run in runs] == [first, second]
    assert "1 of 2 configs are stored; 1 to train, about" in capfd.readouterr().err
    figure_runs([first, second], "smoke")
    assert capfd.readouterr().err == ""


def test_paper_scale_on_a_cpu_must_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANCLUSTER_RESULTS", str(tmp_path))
    monkeypatch.setattr(grids, "resolve_device", lambda device: SimpleNamespace(type="cpu"))
    with pytest.raises(ValueError, match=r"paper_on_cpu must be True .* 24 to train, about .* got"):
        figure_runs(figure_configs("fig02"), "paper")
    assert len(figure_runs([small()], "paper", paper_on_cpu=True)) == 1
    figure_runs([small()], "paper")  # nothing left to train


def test_an_environment_may_forbid_training(monkeypatch, tmp_path):
    monkeypatch.setattr("leancluster_core.experiments.grids.results_root", lambda: tmp_path)
    monkeypatch.setenv("LEANCLUSTER_TRAIN", "never")
    with pytest.raises(NotTrainedYet, match="0 of 1 configs are stored"):
        figure_runs([small()], "smoke")


def test_what_is_stored_but_has_not_taken_turns_is_yet_to_be_trained(monkeypatch, tmp_path, capfd):
    """Where that is forbidden, and where it would fall to a CPU, as any training."""
    monkeypatch.setenv("LEANCLUSTER_RESULTS", str(tmp_path))
    monkeypatch.setattr(grids, "resolve_device", lambda device: SimpleNamespace(type="cpu"))
    pair = [small(), small(embedding="onehot")]
    for scale in ("smoke", "paper"):
        for config in pair:
            Store(tmp_path / scale).save(train(config, progress=False))
    with pytest.raises(ValueError, match=r"paper_on_cpu must be True .*2 to train"):
        figure_runs(pair, "paper", taking_turns=True)
    with monkeypatch.context() as patch:
        patch.setenv("LEANCLUSTER_TRAIN", "never")
        with pytest.raises(NotTrainedYet, match="0 of 2 configs are stored; 2 to train"):
            figure_runs(pair, "smoke", taking_turns=True)
    assert all(alternated(run) for run in figure_runs(pair, "smoke", taking_turns=True))
    assert "2 to train" in capfd.readouterr().err
    monkeypatch.setenv("LEANCLUSTER_TRAIN", "never")
    figure_runs(pair, "smoke", taking_turns=True)


@pytest.mark.parametrize("taking_turns", [False, True])
def test_weights_that_were_not_kept_are_trained_on_demand(
    monkeypatch, tmp_path, capfd, taking_turns
):
    monkeypatch.setenv("LEANCLUSTER_RESULTS", str(tmp_path))
    (run,) = figure_runs([small()], "smoke", taking_turns=taking_turns)
    (Store(tmp_path / "smoke").folder(run.config) / "weights.safetensors").unlink()
    capfd.readouterr()
    (run,) = figure_runs([small()], "smoke", taking_turns=taking_turns)
    assert run.weights is None and capfd.readouterr().err == ""
    (run,) = figure_runs([small()], "smoke", taking_turns=taking_turns, weights=True)
    assert run.weights is not None
    assert "0 of 1 configs are stored; 1 to train, about" in capfd.readouterr().err
