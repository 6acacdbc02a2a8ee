"""Train many configs: the store first, then this process or any ``concurrent.futures`` executor.

Configs that differ only in regularizer, penalty and learning rate share a batch. While a run trains,
its lock is held, so that two processes asking for the same run do the work once; checkpoints let a
run that was killed go on from where it was.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from filelock import Timeout
from torch import Tensor

from leancluster_core.checks import check_flag, check_integer
from leancluster_core.embeddings import code_width
from leancluster_core.experiments.config import NUMERICS_VERSION, TrainingConfig
from leancluster_core.experiments.store import Run, Store
from leancluster_core.experiments.training import (
    Trainer,
    TrainingState,
    batch_key,
    progress_line,
    resolve_device,
    run_to_end,
)

logger = logging.getLogger(__name__)

# Models in one batched step: beyond this a CPU gains nothing more, and a GPU is full.
MODELS_PER_BATCH = {"cpu": 6, "cuda": 60}

CHECKPOINT_SECONDS = 30.0


class OutOfTime(Exception):
    """The time budget is spent; what was begun is checkpointed."""


def missing(
    configs: Iterable[TrainingConfig], store: Store, *, weights: bool = False
) -> list[TrainingConfig]:
    """The configs, each once, that the store doesn't have (or, with ``weights``, not their weights)."""
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
    # The exponentials of a block of scores take as long as some 24 multiply-adds each.
    among_points = task.n_points**2 * (5 * task.n_features + 24)
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
    size = MODELS_PER_BATCH[resolve_device(device).type]
    if models_per_batch is not None:
        size = check_integer("models_per_batch", models_per_batch, 1)
    batches = plan_batches(missing(configs, store, weights=weights), size)
    deadline = time.monotonic() + 60 * minutes
    if executor is None:
        for index, batch in enumerate(batches):
            title = f"batch {index + 1}/{len(batches)} ({batch[0].label} and {len(batch) - 1} more)"
            report = progress_line(title) if progress else None
            train_batch(batch, store, device, weights=weights, report=report, deadline=deadline)
    else:
        _train_on(executor, batches, store, device, weights, progress, minutes)
    runs = [store.load(config) for config in configs]
    lost = [c.key for c, run in zip(configs, runs, strict=True) if run is None]
    if lost:
        raise RuntimeError(f"runs {', '.join(lost)} were trained but are not in {store.root}")
    return [run for run in runs if run is not None]


def _train_on(
    executor: Executor,
    batches: Sequence[Sequence[TrainingConfig]],
    store: Store,
    device: str,
    weights: bool,
    progress: bool,
    minutes: float,
) -> None:
    futures: list[Future[float]] = [
        executor.submit(
            _train_in_worker,
            [config.to_dict() for config in batch],
            str(store.root.absolute()),
            device,
            weights,
            minutes,
            NUMERICS_VERSION,
        )
        for batch in batches
    ]
    errors = []
    for done, future in enumerate(as_completed(futures), start=1):
        error = future.exception()
        if error is not None:
            errors.append(error)
        elif progress:
            logger.info("batch %d/%d done in %.0f s", done, len(batches), future.result())
    if errors:
        raise errors[0]


def _train_in_worker(
    configs: list[dict[str, Any]],
    root: str,
    device: str,
    weights: bool,
    minutes: float,
    numerics: int,
) -> float:
    """What a worker runs: plain values in, seconds out; results go through the store."""
    if numerics != NUMERICS_VERSION:
        raise RuntimeError(
            f"numerics must be version {numerics} on every worker, got {NUMERICS_VERSION}: "
            "install the same leancluster_core there"
        )
    started = time.monotonic()
    torch.set_num_threads(1)
    batch = [TrainingConfig.from_dict(values) for values in configs]
    deadline = started + 60 * minutes
    train_batch(batch, Store(root), device, weights=weights, deadline=deadline)  # type: ignore[arg-type]
    return time.monotonic() - started


def train_batch(
    configs: Sequence[TrainingConfig],
    store: Store,
    device: str = "auto",
    *,
    weights: bool = False,
    report: Callable[[Trainer], None] | None = None,
    deadline: float = math.inf,
) -> None:
    """Train and store configs of one batch, except what another process is training: wait for that.

    Raises OutOfTime past ``deadline`` (``time.monotonic`` seconds), SystemExit on SIGTERM and
    KeyboardInterrupt on Ctrl-C, each after a checkpoint.
    """
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
        left = -1 if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        try:
            with store.lock(config).acquire(timeout=left):
                alone = missing([config], store, weights=weights)
                _train_locked(alone, store, device, report, deadline)
        except Timeout:
            raise OutOfTime from None


def _train_locked(
    configs: Sequence[TrainingConfig],
    store: Store,
    device: str,
    report: Callable[[Trainer], None] | None,
    deadline: float,
) -> None:
    # Configs that were stopped at different steps can't share a batch any more.
    checkpoints = {config: store.load_checkpoint(config) for config in configs}
    steps = {c: 0 if found is None else found[1]["step"] for c, found in checkpoints.items()}
    for step in sorted(set(steps.values()), reverse=True):
        batch = [config for config in configs if steps[config] == step]
        found = [checkpoints[config] for config in batch]
        state = join_states([f for f in found if f is not None]) if step else None
        trainer = Trainer(batch, device, state)
        with _stop_signals() as stopped:
            _train_and_checkpoint(trainer, store, report, deadline, stopped)
        for run in trainer.runs():
            store.save(run)


def _train_and_checkpoint(
    trainer: Trainer,
    store: Store,
    report: Callable[[Trainer], None] | None,
    deadline: float,
    stopped: Callable[[], BaseException | None],
) -> None:
    saved = time.monotonic()

    def after_block(trainer: Trainer) -> None:
        nonlocal saved
        reason = stopped() or (OutOfTime() if time.monotonic() > deadline else None)
        if reason is not None or time.monotonic() > saved + CHECKPOINT_SECONDS:
            parts = split_state(trainer.state, len(trainer.configs))
            for config, (tensors, facts) in zip(trainer.configs, parts, strict=True):
                store.save_checkpoint(config, tensors, facts)
            saved = time.monotonic()
        if reason is not None and not trainer.done:
            raise reason

    run_to_end(trainer, report=report, after_block=after_block)


@contextmanager
def _stop_signals():
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
            signal.signal(number, handler)


def split_state(
    state: TrainingState, n_configs: int
) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """A batch's state as one checkpoint a config: tensors and plain values."""
    tensors = dict(state.tensors)
    if state.history:
        tensors["history"] = torch.stack(state.history, 1)
    facts = {"step": state.step, "elapsed": state.elapsed, "evaluated": state.evaluated}
    chunks = {name: tensor.chunk(n_configs) for name, tensor in tensors.items()}
    return [({name: c[i] for name, c in chunks.items()}, facts) for i in range(n_configs)]


def join_states(parts: Sequence[tuple[dict[str, Tensor], dict[str, Any]]]) -> TrainingState:
    """Inverse of :func:`split_state`, for configs at the same step."""
    facts = parts[0][1]
    tensors = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
    history = list(tensors.pop("history").unbind(1)) if "history" in tensors else []
    evaluated = [(int(step), float(seconds)) for step, seconds in facts["evaluated"]]
    return TrainingState(tensors, facts["step"], facts["elapsed"], history, evaluated)
