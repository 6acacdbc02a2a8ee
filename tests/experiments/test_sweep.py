"""Training many configs: the store first, interruptions, several processes, several workers."""

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from leancluster_core import TaskDistribution
from leancluster_core.experiments import Store, TrainingConfig, sweep, train, train_all
from leancluster_core.experiments.store import CorruptRunError
from leancluster_core.experiments.sweep import (
    OutOfTime,
    dump_state,
    duration,
    expected_time,
    load_state,
    missing,
    operations,
    plan_batches,
)
from leancluster_core.experiments.training import Trainer

CONFIG = TrainingConfig(
    TaskDistribution(n_points=12, n_features=2, n_clusters=3),
    n_steps=40, batch_size=2, seeds=(1, 2), n_validation_batches=1, evaluate_every=5,
    plateau_patience=0,
)  # fmt: skip
OTHER = dataclasses.replace(CONFIG, regularizer="entropy")
THIRD = dataclasses.replace(CONFIG, embedding="onehot")

# Children start in no time: the server that forks them has imported torch once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["leancluster_core.experiments.sweep"])

# A child that trains slowly and saves a checkpoint after each block of steps.
CHILD = """
import time, torch
from leancluster_core.experiments import Store, TrainingConfig, sweep
from leancluster_core.experiments.training import Trainer
torch.set_num_threads(1)
sweep.CHECKPOINT_SECONDS = 0.0
advance = Trainer.advance
def slowly(trainer):
    advance(trainer)
    time.sleep(pause)
Trainer.advance = slowly
configs = [TrainingConfig.from_dict(each) for each in values]
sweep.train_all(configs, store=Store(root), progress=False)
"""


@pytest.fixture(autouse=True)
def one_thread():
    """The children have one; sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def child(configs, root, pause=0.0):
    values = [config.to_dict() for config in configs]
    scope = {"values": values, "root": str(root), "pause": pause}
    process = PROCESSES.Process(target=exec, args=(CHILD, scope), daemon=True)
    process.start()
    return process


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def same_bits(ours, theirs):
    """All of two runs but the times."""
    columns = ["trial", "step", "training_loss", "relative_loss", "learning_rate"]
    assert ours.config == theirs.config
    assert ours.history[columns].equals(theirs.history[columns])
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


def quiet(configs, store, **options):
    return train_all(configs, store=store, device="cpu", progress=False, **options)


# ---- plans


def test_runs_come_in_the_order_of_the_configs_and_are_stored(tmp_path):
    store = Store(tmp_path)
    configs = [THIRD, CONFIG, OTHER, CONFIG]
    runs = quiet(configs, store)
    assert [run.config for run in runs] == configs
    assert all(config in store for config in configs)
    same_bits(runs[0], train(THIRD, device="cpu", progress=False))


def test_what_is_stored_is_not_trained_again(tmp_path, monkeypatch):
    store = Store(tmp_path)
    first = quiet([CONFIG], store)[0]
    monkeypatch.setattr(sweep, "Trainer", None)
    same_bits(quiet([CONFIG], store)[0], first)


def test_weights_that_were_not_kept_are_trained_on_demand(tmp_path):
    store = Store(tmp_path)
    first = quiet([CONFIG], store)[0]
    (store.folder(CONFIG) / "weights.safetensors").unlink()
    assert quiet([CONFIG], store)[0].weights is None
    same_bits(quiet([CONFIG], store, weights=True)[0], first)


def test_a_damaged_run_is_reported_and_not_trained_over(tmp_path):
    store = Store(tmp_path)
    quiet([CONFIG], store)
    (store.folder(CONFIG) / "provenance.json").unlink()
    with pytest.raises(CorruptRunError, match=r"provenance\.json"):
        quiet([CONFIG], store)


def test_batches_hold_what_may_train_together_the_longest_first():
    longer = dataclasses.replace(CONFIG, n_steps=400)
    configs = [CONFIG, OTHER, THIRD, longer, dataclasses.replace(CONFIG, penalty=1.0), CONFIG]
    batches = plan_batches(configs, 4)
    assert batches[0] == (longer,)
    assert sorted(map(len, batches)) == [1, 1, 1, 2]
    assert (CONFIG, OTHER) in batches
    assert {c for batch in batches for c in batch} == set(configs)
    assert all(len(batch) == 1 for batch in plan_batches(configs, 1))


def test_what_is_expected_is_said_in_one_line(tmp_path):
    store = Store(tmp_path)
    line = expected_time([CONFIG, OTHER, CONFIG], store, device="cpu")
    assert line == "0 of 2 configs are stored; 2 to train, about 0 s"
    quiet([CONFIG, OTHER], store)
    assert expected_time([CONFIG, OTHER], store) == "2 of 2 configs are stored"
    (store.folder(OTHER) / "weights.safetensors").unlink()
    assert expected_time([CONFIG, OTHER], store) == "2 of 2 configs are stored"
    line = expected_time(iter([CONFIG, OTHER]), store, weights=True, device="cpu")
    assert line == "1 of 2 configs are stored; 1 to train, about 0 s"
    assert missing([CONFIG, THIRD, THIRD], store) == [THIRD]
    assert operations(dataclasses.replace(CONFIG, n_steps=80)) == 2 * operations(CONFIG)


@pytest.mark.parametrize("seconds,words", [
    (0.2, "0 s"), (89, "89 s"), (91, "2 min"), (5000, "83 min"), (6000, "1.7 h"), (72000, "20 h"),
])  # fmt: skip
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def test_progress_says_how_much_of_all_is_done(tmp_path, capsys):
    train_all([CONFIG, THIRD], store=Store(tmp_path), device="cpu")
    lines = capsys.readouterr().err.splitlines()
    assert "steps/s" in lines[0] and "% of all" in lines[0]
    assert lines[-1].split(";")[1].split() == ["100%", "of", "all"]


def test_bad_arguments_are_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="configs must hold TrainingConfig only, got 'fig02'"):
        quiet(["fig02"], Store(tmp_path))
    with pytest.raises(ValueError, match="models_per_batch must be in"):
        quiet([CONFIG], Store(tmp_path), models_per_batch=0)


# ---- interruptions


def test_a_state_survives_the_disk(tmp_path):
    """S2.7: parameters, moments, plateau counters, sums, history, all as they were."""
    store = Store(tmp_path)
    trainer = Trainer([CONFIG, OTHER], "cpu")
    trainer.advance()
    store.save_checkpoint(trainer.configs, *dump_state(trainer.state))
    for configs, rows in (([CONFIG, OTHER], slice(0, 4)), ([OTHER], slice(2, 4))):
        path, step = store.find_checkpoint(configs[0])
        state = load_state(path, configs)
        assert step == state.step == 10 and state.evaluated == trainer.state.evaluated
        for name, tensor in trainer.state.tensors.items():
            assert torch.equal(state.tensors[name], tensor[rows])
        for ours, theirs in zip(state.history, trainer.state.history, strict=True):
            assert torch.equal(ours, theirs[rows])


def test_out_of_time_stops_at_a_checkpoint_and_the_next_call_goes_on(tmp_path):
    store, expected = Store(tmp_path), Store(tmp_path / "whole")
    quiet([CONFIG, OTHER], expected)
    stops = 0
    while missing([CONFIG, OTHER], store):
        try:
            quiet([CONFIG, OTHER], store, minutes=1e-4)  # 6 ms: not even a block
        except OutOfTime:
            stops += 1
        assert stops < 10
    assert stops >= 3  # at each of the inner blocks
    for config in (CONFIG, OTHER):
        same_bits(store.load(config), expected.load(config))
        assert store.find_checkpoint(config) is None


def test_dying_between_two_saves_loses_nothing(tmp_path, monkeypatch):
    store, expected = Store(tmp_path), Store(tmp_path / "whole")
    quiet([CONFIG, OTHER], expected)
    save, saved = Store.save, []

    def die_at_the_second(store, run):
        if saved:
            raise KeyboardInterrupt
        saved.append(run.config)
        save(store, run)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            quiet([CONFIG, OTHER], store)
    assert missing([CONFIG, OTHER], store) == [OTHER]
    monkeypatch.setattr(Trainer, "advance", None)  # nothing is left to be done
    for ours, theirs in zip(
        quiet([CONFIG, OTHER], store), quiet([CONFIG, OTHER], expected), strict=True
    ):
        same_bits(ours, theirs)


@pytest.mark.parametrize("cut", [-5, 8])
def test_a_damaged_checkpoint_stops_those_that_need_it_only(tmp_path, cut):
    """Cut off at its end it still says whose it is; at its beginning it is named in a warning."""
    store, trainer = Store(tmp_path), Trainer([OTHER], "cpu")
    trainer.advance()
    store.save_checkpoint([OTHER], *dump_state(trainer.state))
    path = store.checkpoint([OTHER])
    path.write_bytes(path.read_bytes()[:cut])
    named = pytest.warns(UserWarning, match=path.name) if cut == 8 else nullcontext()
    with named:
        quiet([CONFIG], store)
    if cut == -5:
        with pytest.raises(CorruptRunError, match=rf"{path.name} .*; delete it to start over"):
            quiet([OTHER], store)
    else:
        with pytest.warns(UserWarning, match=path.name):
            (run,) = quiet([OTHER], store)
        same_bits(run, train(OTHER, device="cpu", progress=False))


def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path):
    """SIGKILL, three times, each at a random moment after a checkpoint; then to the end."""
    configs = [dataclasses.replace(c, n_steps=400) for c in (CONFIG, OTHER)]
    store, expected = Store(tmp_path), Store(tmp_path / "whole")
    quiet(configs, expected)
    moments, steps = random.Random(5), [0]
    for _ in range(3):
        process = child(configs, tmp_path, pause=0.05)
        wait_for(lambda: (store.find_checkpoint(configs[0]) or ("", 0))[1] > steps[-1])
        time.sleep(moments.uniform(0.0, 0.3))
        process.kill()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        steps.append(store.find_checkpoint(configs[0])[1])
    assert steps == sorted(set(steps)) and steps[-1] < 400
    for ours, theirs in zip(quiet(configs, store), quiet(configs, expected), strict=True):
        same_bits(ours, theirs)
        # Time is counted in the process that did the steps that are kept.
        assert ours.history.groupby("trial").elapsed.is_monotonic_increasing.all()
    assert not list((tmp_path / ".checkpoints").iterdir())


@pytest.mark.parametrize("number,exitcode", [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_a_signal_stops_at_a_checkpoint(tmp_path, number, exitcode):
    configs, store = [dataclasses.replace(CONFIG, n_steps=4000)], Store(tmp_path)
    process = child(configs, tmp_path, pause=0.02)
    wait_for(lambda: store.find_checkpoint(configs[0]) is not None)
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == exitcode
    assert 0 < store.find_checkpoint(configs[0])[1] < 4000


def test_a_signal_in_the_last_block_is_not_forgotten(tmp_path, monkeypatch):
    """The run is stored, and what would come next is not begun."""
    advance = Trainer.advance

    def advance_and_stop(trainer):
        advance(trainer)
        if trainer.done:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "advance", advance_and_stop)
    store = Store(tmp_path)
    with pytest.raises(SystemExit) as stop:
        quiet([CONFIG, THIRD], store)
    assert stop.value.code == 128 + signal.SIGTERM
    assert len(missing([CONFIG, THIRD], store)) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ---- several processes


def test_two_processes_asking_for_the_same_run_train_it_once(tmp_path):
    """The second waits and takes the result; its lock is the only thing they share."""
    store = Store(tmp_path)
    first = child([CONFIG, OTHER], tmp_path, pause=0.5)
    wait_for(lambda: store.find_checkpoint(CONFIG) is not None)
    begun = []
    trainer, sweep.Trainer = sweep.Trainer, lambda *arguments: begun.append(arguments)
    try:
        runs = quiet([CONFIG, OTHER], store)
    finally:
        sweep.Trainer = trainer
    first.join(30)
    assert first.exitcode == 0
    assert not begun and [run.config for run in runs] == [CONFIG, OTHER]


def test_waiting_for_another_process_ends_with_the_time(tmp_path):
    store = Store(tmp_path)
    with store.lock(CONFIG), pytest.raises(OutOfTime):
        quiet([CONFIG], store, minutes=0.005)


def test_what_another_process_was_training_when_it_died_is_taken_over(tmp_path):
    store, configs = Store(tmp_path), [dataclasses.replace(CONFIG, n_steps=400)]
    other = child(configs, tmp_path, pause=0.1)
    wait_for(lambda: store.find_checkpoint(configs[0]) is not None)
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(OutOfTime):
        quiet(configs, store, minutes=0.005)
    other.kill()
    other.join(30)
    (run,) = quiet(configs, store)
    same_bits(run, train(configs[0], device="cpu", progress=False))


class Inline(Executor):
    """The smallest executor: runs what is submitted at once."""

    def submit(self, function, /, *arguments, **options):
        future = Future()
        try:
            future.set_result(function(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)
        return future


def test_any_executor_gives_the_same_bits(tmp_path):
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    configs = [CONFIG, THIRD, OTHER]
    with Inline() as executor:
        for ours, theirs in zip(
            quiet(configs, there, executor=executor), quiet(configs, here), strict=True
        ):
            same_bits(ours, theirs)


def test_a_fault_is_raised_when_all_others_are_done(tmp_path, monkeypatch):
    """And before a stop that was asked for."""
    advance = Trainer.advance

    def fail(trainer):
        if trainer.config == THIRD:
            raise MemoryError("too large")
        advance(trainer)

    monkeypatch.setattr(Trainer, "advance", fail)
    store = Store(tmp_path)
    with Inline() as executor, pytest.raises(MemoryError, match="too large"):
        quiet([THIRD, CONFIG], store, executor=executor)
    assert missing([THIRD, CONFIG], store) == [THIRD]


def test_a_worker_of_another_numerics_version_refuses(tmp_path, monkeypatch):
    values = [CONFIG.to_dict()]
    with pytest.raises(RuntimeError, match="numerics must be version 999 on every worker"):
        sweep._train_in_worker(values, str(tmp_path), "cpu", False, 1e12, 999)


def test_a_pool_ends_its_own_processes_only(monkeypatch):
    """Not what else the caller has started."""
    monkeypatch.setattr(sweep, "_end_with_parent", int)  # workers need not import torch
    bystander = PROCESSES.Process(target=time.sleep, args=(60,), daemon=True)
    bystander.start()
    with pytest.raises(LookupError), sweep.process_pool(1) as executor:
        worker = executor.submit(os.getpid).result()
        raise LookupError
    try:
        assert worker not in [process.pid for process in multiprocessing.active_children()]
        assert not multiprocessing.connection.wait([bystander.sentinel], 0.2)
    finally:
        bystander.kill()
        bystander.join(30)


def test_a_pool_of_processes(tmp_path):
    store, expected = Store(tmp_path / "pool"), Store(tmp_path / "whole")
    configs = [CONFIG, OTHER, THIRD]
    with ProcessPoolExecutor(2, PROCESSES) as executor:
        runs = quiet(configs, store, executor=executor)
    for ours, theirs in zip(runs, quiet(configs, expected), strict=True):
        same_bits(ours, theirs)
        assert ours.provenance["threads"] == 1
