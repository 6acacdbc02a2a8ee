"""Trained in turns: the same numbers as trained alone, with times that compare."""

import os
import signal
from dataclasses import replace

import pandas as pd
import pytest

from leancluster_core.experiments import timing
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.store import Store
from leancluster_core.experiments.sweep import OutOfTime, dump_state, train_all
from leancluster_core.experiments.timing import alternated, not_alternated, train_alternating
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
    monkeypatch.setattr(timing.time, "time", lambda: 100.0 if len(turns) >= 6 else 0.0)
    with pytest.raises(OutOfTime):
        train_alternating(configs, store=store, progress=False, minutes=1)
    assert not any(config in store for config in configs)
    assert len(turns) == 2 + 4
    goes_on_from_half(configs, store, turns)


def goes_on_from_half(configs, store, turns):
    """Two of the four blocks of each config are left, and the numbers are those of a run alone."""
    turns.clear()
    runs = train_alternating(configs, store=store, progress=False)
    assert len(turns) == 2 + 4
    for run in runs:
        pd.testing.assert_frame_equal(numbers(run), numbers(train(run.config, progress=False)))
        assert store.find_checkpoint(run.config) is None


def test_out_of_time_begins_nothing(tmp_path, turns):
    with pytest.raises(OutOfTime):
        train_alternating(pair(), store=Store(tmp_path), progress=False, minutes=-1)
    assert turns == []


def test_waiting_for_another_process_ends_with_the_time(tmp_path):
    store, configs = Store(tmp_path), pair()
    with store.lock(configs[1]), pytest.raises(OutOfTime):
        train_alternating(configs, store=store, progress=False, minutes=0.001)


@pytest.mark.parametrize(
    ("number", "stop"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_stops_at_a_checkpoint(tmp_path, turns, monkeypatch, number, stop):
    """In the middle of a round, which is done to its end."""
    advance = Trainer.advance

    def advance_and_stop(trainer):
        advance(trainer)
        if len(turns) == 2 + 3:
            os.kill(os.getpid(), number)

    store, configs = Store(tmp_path), pair()
    with monkeypatch.context() as patch, pytest.raises(stop):
        patch.setattr(Trainer, "advance", advance_and_stop)
        train_alternating(configs, store=store, progress=False)
    assert len(turns) == 2 + 4
    goes_on_from_half(configs, store, turns)


def test_a_process_that_is_killed_loses_one_checkpoint_at_most(tmp_path, turns, monkeypatch):
    """As the third round begins to be saved: the second is there, of all of them."""
    save = Store.save_checkpoint

    def die_at_step_30(store, configs, tensors, facts):
        if facts["step"] == 30:
            raise MemoryError
        save(store, configs, tensors, facts)

    store, configs = Store(tmp_path), pair()
    monkeypatch.setattr(timing, "CHECKPOINT_SECONDS", -1.0)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Store, "save_checkpoint", die_at_step_30)
        train_alternating(configs, store=store, progress=False)
    assert len(list(tmp_path.glob(".checkpoints/*.safetensors"))) == 1  # or one could be ahead
    goes_on_from_half(configs, store, turns)


def test_a_process_that_dies_between_two_runs_loses_nothing(tmp_path, turns, monkeypatch):
    save = Store.save

    def die_at_the_second(store, run):
        if configs[0] in store:
            raise MemoryError
        save(store, run)

    store, configs = Store(tmp_path), pair()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Store, "save", die_at_the_second)
        train_alternating(configs, store=store, progress=False)
    assert not_alternated(configs, store) == configs
    turns.clear()
    runs = train_alternating(configs, store=store, progress=False)
    assert len(turns) == 2 and all(alternated(run) for run in runs)


def test_checkpoints_of_turns_and_of_batches_are_told_apart(tmp_path, turns, monkeypatch):
    """A batch may go on from where turns have stopped, not the other way round."""
    store, configs = Store(tmp_path), pair()
    monkeypatch.setattr(timing.time, "time", lambda: 100.0 if len(turns) >= 6 else 0.0)
    with pytest.raises(OutOfTime):
        train_alternating(configs, store=store, progress=False, minutes=1)
    turns.clear()
    (run,) = train_all(configs[:1], store=store, device="cpu", progress=False)
    assert len(turns) == 2
    pd.testing.assert_frame_equal(numbers(run), numbers(train(run.config, progress=False)))
    elsewhere = Store(tmp_path / "elsewhere")
    for config in configs:
        trainer = Trainer([config], "cpu")
        trainer.advance()
        elsewhere.save_checkpoint([config], *dump_state(trainer.state))
    turns.clear()
    train_alternating(configs, store=elsewhere, progress=False)
    assert len(turns) == 2 + 8


def test_what_took_turns_is_told_apart_setting_by_setting(tmp_path):
    store, first, second = Store(tmp_path), pair(), pair(penalty=1.0)
    assert not_alternated(first + second, store) == first + second
    runs = train_alternating(first, store=store, progress=False)
    store.save(train(second[0], progress=False))
    assert not_alternated(first + second + first, store) == second
    assert not_alternated(first[:1], store) == first[:1]  # alone it would be faster
    store.save(replace(runs[1], weights=None))
    assert not_alternated(first, store) == []
    assert not_alternated(first, store, weights=True) == first
    runs = train_alternating(first, store=store, weights=True, progress=False)
    assert not_alternated(first, store, weights=True) == []
    assert all(run.weights is not None for run in runs)
