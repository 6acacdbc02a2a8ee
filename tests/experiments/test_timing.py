"""Trained in turns: the same numbers as trained alone, with times that compare."""

import pandas as pd
import pytest

from leancluster_core.experiments import timing
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.store import Store
from leancluster_core.experiments.sweep import OutOfTime
from leancluster_core.experiments.timing import alternated, train_alternating
from leancluster_core.experiments.training import Trainer, train
from leancluster_core.samplers import TaskDistribution


def pair(**changes):
    task = TaskDistribution(n_points=16, n_features=2, n_clusters=3)
    values = {"n_steps": 40, "batch_size": 2, "seeds": (1, 2), "evaluate_every": 10}
    return [
        TrainingConfig(task, embedding=e, n_validation_batches=1, **(values | changes))
        for e in ("onehot", "binary")
    ]


def numbers(run):
    return run.history.drop(columns="elapsed")


@pytest.fixture
def turns(monkeypatch):
    """Labels of the configs in the order in which they advance."""
    order = []
    advance = Trainer.advance

    def note(trainer):
        order.append(trainer.config.label)
        advance(trainer)

    monkeypatch.setattr(Trainer, "advance", note)
    return order


def test_they_take_turns_and_the_numbers_are_those_of_a_run_alone(tmp_path, turns):
    runs = train_alternating(pair(), store=Store(tmp_path), progress=False)
    warm_up, blocks = turns[:2], turns[2:]
    assert warm_up == ["OH:L2", "BN:L2"]
    # Four blocks of ten steps each; who goes first changes.
    assert blocks == ["OH:L2", "BN:L2", "BN:L2", "OH:L2"] * 2
    for run in runs:
        pd.testing.assert_frame_equal(numbers(run), numbers(train(run.config, progress=False)))
        assert run.history.groupby("trial")["elapsed"].is_monotonic_increasing.all()
        assert run.provenance["models_in_batch"] == 2
    assert alternated(runs[0]) == [runs[1].config.key]
    assert alternated(runs[1]) == [runs[0].config.key]


def test_what_took_turns_is_not_trained_again_and_what_did_not_is(tmp_path, turns):
    store, configs = Store(tmp_path), pair()
    store.save(train(configs[0], progress=False))
    assert alternated(store.load(configs[0])) == []
    turns.clear()
    train_alternating(configs, store=store, progress=False)
    assert len(turns) == 10
    turns.clear()
    first = train_alternating(configs, store=store, progress=False)
    assert turns == []
    # With a third curve beside them their times would be shared among three.
    third = TrainingConfig.from_dict(configs[0].to_dict() | {"embedding": "none"})
    runs = train_alternating([*configs, third], store=store, progress=False)
    assert len(turns) == 15
    assert len(alternated(runs[0])) == 2
    pd.testing.assert_frame_equal(numbers(first[0]), numbers(runs[0]))


def test_settings_wait_for_each_other(tmp_path, turns):
    configs = pair() + pair(penalty=1.0)
    runs = train_alternating(configs[::2] + configs[1::2], store=Store(tmp_path), progress=False)
    assert len(turns) == 20
    assert {run.config.penalty for run in runs[:2]} == {0.1, 1.0}
    assert all(len(alternated(run)) == 1 for run in runs)


def test_out_of_time_goes_on_from_a_checkpoint(tmp_path, turns, monkeypatch):
    store, configs = Store(tmp_path), pair()
    clock = iter([0.0, 0.0, 0.0, 100.0])
    monkeypatch.setattr(timing.time, "time", lambda: next(clock, 0.0))
    with pytest.raises(OutOfTime):
        train_alternating(configs, store=store, progress=False, minutes=1)
    assert not any(config in store for config in configs)
    done = len(turns) - 2
    assert done < 8
    turns.clear()
    runs = train_alternating(configs, store=store, progress=False)
    assert len(turns) - 2 == 8 - done
    for run in runs:
        pd.testing.assert_frame_equal(numbers(run), numbers(train(run.config, progress=False)))
