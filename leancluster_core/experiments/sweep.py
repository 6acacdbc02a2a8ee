"""Train many configs: the store first, then this process or any ``concurrent.futures`` executor.

Configs that differ only in regularizer, penalty and learning rate share a batch. While a run
trains, its lock is held, so that two processes asking for the same run do the work once;
checkpoints let a run that was killed go on from where it was.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout
from torch import Tensor

from leancluster_core.checks import check_flag, check_integer
from leancluster_core.embeddings import code_width
from leancluster_core.experiments.config import NUMERICS_VERSION, TrainingConfig
from leancluster_core.experiments.store import Run, Store, read_checkpoint
from leancluster_core.experiments.training import (
    Trainer,
    TrainingState,
    batch_key,
    resolve_device,
    run_to_end,
)

# Models in one batched step: beyond this a CPU gains nothing more, and a GPU is full.
MODELS_PER_BATCH = {"cpu": 6, "cuda": 60}

CHECKPOINT_SECONDS = 30.0


# Operations (see :func:`operations`) a second, of one core or of a GPU: for estimates before a run.
SPEED = {"cpu": 1.3e10, "cuda": 4e12}

# Reports that a share of some configs' steps is done, and what was done last.
Report = Callable[[Sequence[TrainingConfig], float, str], None]

# Set when a worker was told to stop: it must not begin what its pool hands it next.
_stopping = threading.Event()


class OutOfTime(Exception):
    """The time budget is spent; what was begun is checkpointed."""


class Stopped(Exception):
    """A worker was told to stop by a signal; what it had begun is checkpointed."""


def missing(
    configs: Iterable[TrainingConfig], store: Store, *, weights: bool = False
) -> list[TrainingConfig]:
    """The configs, each once, that the store lacks (or whose ``weights`` it lacks)."""
    stored = store.has_weights if weights else store.__contains__
    return [config for config in dict.fromkeys(configs) if not stored(config)]


def plan_batches(
    configs: Iterable[TrainingConfig], models_per_batch: int
) -> list[tuple[TrainingConfig, ...]]:
    """Batches of configs that train together, the most expensive first."""
    alike: dict[TrainingConfig, list[TrainingConfig]] = {}
    for config in dict.fromkeys(configs):
        alike.setdefault(batch_key(config), []).append(config)
    batches = []
    for group in alike.values():
        size = max(1, models_per_batch // len(group[0].seeds))
        batches += [tuple(group[i : i + size]) for i in range(0, len(group), size)]
    return sorted(batches, key=lambda batch: -sum(map(operations, batch)))


def operations(config: TrainingConfig) -> float:
    """Multiply-adds of training a config, roughly: what batches are ordered and estimated by.

    The attention among points does five products of n*n*d and the other attentions and projections
    of a step about three times n*e*(2e + 4k), counted forward and backward.
    """
    task = config.task
    width = task.n_features + code_width(task.n_clusters, config.embedding)
    # An exponential and the passes over a score take as long as some 60 multiply-adds.
    among_points = task.n_points**2 * (5 * task.n_features + 60)
    others = 3 * task.n_points * (width + 8) * (2 * width + 4 * task.n_clusters)
    tasks = config.n_steps * config.batch_size * len(config.seeds)
    return tasks * float(among_points + others)


def train_all(
    configs: Sequence[TrainingConfig],
    *,
    store: Store,
    executor: Executor | None = None,
    device: str = "auto",
    weights: bool = False,
    progress: bool = True,
    models_per_batch: int | None = None,
    minutes: float = math.inf,
) -> list[Run]:
    """The runs of all configs, in their order: from the store, or trained now and stored.

    executor: any ``concurrent.futures.Executor`` whose workers see the store's folder (a process
    pool, Dask's ``Client.get_executor()``); None trains in this process. Workers use one torch
    thread each. weights: train again where the store kept the history alone. minutes: stop with
    OutOfTime after so long, at a checkpoint. SIGTERM and Ctrl-C stop at a checkpoint too; the next
    call goes on from there.

    Raises CorruptRunError for a stored file that is not as it was written. A worker's exception is
    raised when all others are done.
    """
    check_flag("weights", weights)
    for config in configs:
        if not isinstance(config, TrainingConfig):
            raise TypeError(f"configs must hold TrainingConfig only, got {config!r}")
    # Workers may have the device that this process lacks.
    local = executor is None or device == "auto"
    kind = resolve_device(device).type if local else torch.device(device).type
    size = MODELS_PER_BATCH[kind]
    if models_per_batch is not None:
        size = check_integer("models_per_batch", models_per_batch, 1)
    # Batches are planned before what is stored is left out, so that they are always the same.
    lacking = set(missing(configs, store, weights=weights))
    planned = (tuple(c for c in batch if c in lacking) for batch in plan_batches(configs, size))
    batches = [batch for batch in planned if batch]
    deadline = time.time() + 60 * minutes
    report = progress_of_all([c for batch in batches for c in batch]) if progress else _no_report
    if executor is None:
        for batch in batches:
            train_batch(batch, store, device, weights=weights, report=report, deadline=deadline)
    else:
        _train_on(executor, batches, store, device, weights, report, deadline)
    runs = [store.load(config) for config in configs]
    lost = [c.key for c, run in zip(configs, runs, strict=True) if run is None]
    if lost:
        raise RuntimeError(f"runs {', '.join(lost)} were trained but are not in {store.root}")
    return [run for run in runs if run is not None]


def expected_time(
    configs: Iterable[TrainingConfig],
    store: Store,
    *,
    weights: bool = False,
    device: str = "auto",
    workers: int = 1,
) -> str:
    """What :func:`train_all` would do, in a line (:func:`time_for`)."""
    configs = list(configs)
    left = missing(configs, store, weights=weights)
    return time_for(left, configs, device=device, workers=workers)


def time_for(
    left: Sequence[TrainingConfig],
    configs: Iterable[TrainingConfig],
    *,
    device: str = "auto",
    workers: int = 1,
) -> str:
    """One line before a long run: how many configs are stored, how many will train, for how long.

    left: those of the configs, each once, that will train. An estimate from :data:`SPEED`, good to
    a factor of two; ``workers`` share the work.
    """
    configs = list(dict.fromkeys(configs))
    seconds = sum(map(operations, left)) / SPEED[resolve_device(device).type] / workers
    stored = f"{len(configs) - len(left)} of {len(configs)} configs are stored"
    return f"{stored}; {len(left)} to train, about {duration(seconds)}" if left else f"{stored}"


def duration(seconds: float) -> str:
    """Seconds in words, to two digits: "45 s", "12 min", "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36_000 else f"{seconds / 3600:.0f} h"


def progress_of_all(configs: Sequence[TrainingConfig]) -> Report:
    """Reports on stderr the share of all work that is done and the time left.

    Each second on one line of a terminal; else each minute, as lines of a log.
    """
    work = {config: operations(config) for config in configs}
    total, begun = sum(work.values()), time.monotonic()
    shares: dict[TrainingConfig, float] = {}
    resumed: dict[TrainingConfig, float] = {}
    terminal, shown = sys.stderr.isatty(), -math.inf

    def report(batch: Sequence[TrainingConfig], share: float, what: str) -> None:
        nonlocal shown
        for config in batch:
            resumed.setdefault(config, share)
            shares[config] = share
        now = time.monotonic()
        finished = all(shares.get(config) == 1 for config in work)
        if now - shown < (1 if terminal else 60) and share < 1:
            return
        shown = now
        done = sum(work[config] * share for config, share in shares.items() if config in work)
        new = done - sum(work[config] * share for config, share in resumed.items())
        left = (total - done) / new * (now - begun) if new > 0 else math.nan
        line = f"{what}; {done / total:.0%} of all"
        line += "" if finished or math.isnan(left) else f", {duration(left)} left"
        end = "\n" if finished or not terminal else "\r"
        print(f"{line:<99}", end=end, file=sys.stderr, flush=True)

    return report


def _no_report(batch: Sequence[TrainingConfig], share: float, what: str) -> None:
    pass


def _name(batch: Sequence[TrainingConfig]) -> str:
    more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
    return f"{batch[0].key} ({batch[0].label}){more}"


def _train_on(
    executor: Executor,
    batches: Sequence[Sequence[TrainingConfig]],
    store: Store,
    device: str,
    weights: bool,
    report: Report,
    deadline: float,
) -> None:
    """Submit all batches and wait; nothing that has not begun is begun after an interruption."""
    futures: dict[Future[float], Sequence[TrainingConfig]] = {}
    errors: list[BaseException] = []
    try:
        for batch in batches:
            values = [config.to_dict() for config in batch]
            root = str(store.root.absolute())
            arguments = (values, root, device, weights, deadline, NUMERICS_VERSION)
            futures[executor.submit(_train_in_worker, *arguments)] = batch
            report(batch, 0.0, "waiting for the workers")
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                batch, seconds = futures[future], future.result()
                report(batch, 1.0, f"{_name(batch)}: done in {duration(seconds)}")
            else:
                errors.append(error)
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    # A fault says more than a stop that was asked for.
    errors.sort(key=lambda error: isinstance(error, (OutOfTime, Stopped)))
    if errors:
        raise errors[0]


@contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """Worker processes of this machine for :func:`train_all`, one torch thread each.

    Workers stop at a checkpoint when an exception leaves the block, and when this process dies.
    """
    workers = check_integer("workers", workers, 1)
    # Spawned, not forked: a fork of a process that has used torch's threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_end_with_parent) as executor:
        try:
            yield executor
        except BaseException:
            # The caller may have children of its own; only the executor knows which are workers.
            for worker in list((executor._processes or {}).values()):
                worker.terminate()  # a request: the worker saves a checkpoint first
            raise


def _end_with_parent() -> None:
    """Let this worker stop, at a checkpoint, when the process that started it is gone."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            while True:  # the first signal stops the training, the next the idle worker
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)

    threading.Thread(target=watch, daemon=True).start()


def _train_in_worker(
    configs: list[dict[str, Any]],
    root: str,
    device: str,
    weights: bool,
    deadline: float,
    numerics: int,
) -> float:
    """What a worker runs: plain values in, seconds out; results go through the store."""
    if numerics != NUMERICS_VERSION:
        raise RuntimeError(
            f"numerics must be version {numerics} on every worker, got {NUMERICS_VERSION}: "
            "install the same leancluster_core there"
        )
    if _stopping.is_set():
        raise Stopped
    started = time.monotonic()
    torch.set_num_threads(1)
    batch = [TrainingConfig.from_dict(values) for values in configs]
    try:
        train_batch(batch, Store(root), device, weights=weights, deadline=deadline)  # type: ignore[arg-type]
    except (KeyboardInterrupt, SystemExit):
        _stopping.set()
        raise Stopped from None
    return time.monotonic() - started


def train_batch(
    configs: Sequence[TrainingConfig],
    store: Store,
    device: str = "auto",
    *,
    weights: bool = False,
    report: Report = _no_report,
    deadline: float = math.inf,
) -> None:
    """Train and store configs of one batch, except what another process is training: wait for that.

    Raises OutOfTime past ``deadline`` (``time.time`` seconds, which machines share), SystemExit on
    SIGTERM and KeyboardInterrupt on Ctrl-C, each after a checkpoint.
    """
    if time.time() > deadline:
        raise OutOfTime
    elsewhere = []
    with ExitStack() as locks:
        mine = []
        for config in configs:
            try:
                locks.enter_context(store.lock(config).acquire(blocking=False))
                mine.append(config)
            except Timeout:
                elsewhere.append(config)
        _train_locked(missing(mine, store, weights=weights), store, device, report, deadline)
    for config in elsewhere:
        with wait_for_lock(config, store, deadline):
            alone = missing([config], store, weights=weights)
            _train_locked(alone, store, device, report, deadline)
    report(configs, 1.0, f"{_name(configs)}: stored")


def wait_for_lock(
    config: TrainingConfig, store: Store, deadline: float
) -> AbstractContextManager[object]:
    """The config's lock, when no other process holds it any more; OutOfTime at the deadline."""
    left = -1 if math.isinf(deadline) else max(0.0, deadline - time.time())
    try:
        return store.lock(config).acquire(timeout=left)
    except Timeout:
        raise OutOfTime from None


def _train_locked(
    configs: Sequence[TrainingConfig],
    store: Store,
    device: str,
    report: Report,
    deadline: float,
) -> None:
    # What was interrupted together goes on together: in other company a model's numbers would
    # differ in the last bits.
    together: dict[Path | None, list[TrainingConfig]] = {}
    for config in configs:
        found = store.find_checkpoint(config)
        together.setdefault(found and found[0], []).append(config)
    for path, batch in together.items():
        state = None if path is None else load_state(path, batch)
        trainer = Trainer(batch, device, state)
        with stop_signals() as stopped:
            _train_and_checkpoint(trainer, store, report, deadline, stopped)
            for run in trainer.runs():
                store.save(run)
            store.discard_checkpoints(batch)
            reason = stopped()
            if reason is not None:
                raise reason


def _train_and_checkpoint(
    trainer: Trainer,
    store: Store,
    report: Report,
    deadline: float,
    stopped: Callable[[], BaseException | None],
) -> None:
    saved = started = time.monotonic()
    first = trainer.state.step

    def after_block(trainer: Trainer) -> None:
        nonlocal saved
        step, n_steps = trainer.state.step, trainer.config.n_steps
        rate = (step - first) / (time.monotonic() - started)
        what = f"{_name(trainer.configs)}: step {step}/{n_steps}, {rate:.1f} steps/s"
        # The last step counts as the whole once the run is stored.
        report(trainer.configs, min(step / n_steps, 0.999), what)
        reason = stopped() or (OutOfTime() if time.time() > deadline else None)
        # The last one lets a process that dies between two runs store the rest as they are.
        due = trainer.done or time.monotonic() > saved + CHECKPOINT_SECONDS
        if reason is not None or due:
            store.save_checkpoint(trainer.configs, *dump_state(trainer.state))
            saved = time.monotonic()
        if reason is not None and not trainer.done:
            raise reason

    run_to_end(trainer, after_block=after_block)


@contextmanager
def stop_signals() -> Iterator[Callable[[], BaseException | None]]:
    """Turns SIGTERM and the first Ctrl-C into a request to stop at the next checkpoint."""
    received: list[int] = []

    def stopped() -> BaseException | None:
        if not received:
            return None
        if received[0] == signal.SIGINT:
            return KeyboardInterrupt()
        return SystemExit(128 + received[0])

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def note(number: int, _frame: object) -> None:
        received.append(number)
        if number == signal.SIGINT and len(received) > 1:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def dump_state(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state as what a checkpoint holds: tensors whose rows are models, and plain values."""
    tensors = dict(state.tensors)
    if state.history:
        tensors["history"] = torch.stack(state.history, 1)
    return tensors, {"step": state.step, "elapsed": state.elapsed, "evaluated": state.evaluated}


def dump_apart(trainers: Sequence[Trainer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of trainers of one config each, all at one step, as what one checkpoint holds.

    Shapes differ between them, so each has tensors of its own, named after its config's key.
    """
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {"step": trainers[0].state.step, "apart": {}}
    for trainer in trainers:
        key = trainer.config.key
        own, facts_of_own = dump_state(trainer.state)
        tensors |= {f"{key}.{name}": tensor for name, tensor in own.items()}
        facts["apart"][key] = facts_of_own | {"keys": [key]}
    return tensors, facts


def load_state(path: Path, configs: Sequence[TrainingConfig]) -> TrainingState:
    """Inverse of :func:`dump_state` and :func:`dump_apart`: the state of some of a checkpoint's
    configs (one, of those that were apart).

    Raises CorruptRunError for a checkpoint that is not as it was written.
    """
    tensors, facts = read_checkpoint(path)
    if "apart" in facts:
        (config,) = configs
        own = f"{config.key}."
        tensors = {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}
        facts = facts["apart"][config.key]
    rows = [facts["keys"].index(config.key) for config in configs]
    tensors = {
        name: torch.cat([tensor.chunk(len(facts["keys"]))[row] for row in rows])
        for name, tensor in tensors.items()
    }
    history = list(tensors.pop("history").unbind(1)) if "history" in tensors else []
    evaluated = [(int(step), float(seconds)) for step, seconds in facts["evaluated"]]
    return TrainingState(tensors, facts["step"], facts["elapsed"], history, evaluated)
