"""Training whose elapsed time can be compared: the configs take turns, one block of steps each.

Whatever else slows the machine down for a while then slows all of them down alike. ``elapsed`` of
the history counts training steps only, for all configs: drawing tasks and validation are left out.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from leancluster_core.checks import check_flag
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.store import Run, Store
from leancluster_core.experiments.sweep import (
    CHECKPOINT_SECONDS,
    OutOfTime,
    dump_apart,
    load_state,
    stop_signals,
    wait_for_lock,
)
from leancluster_core.experiments.training import Trainer

# In provenance: keys of the runs that took turns with this one.
ALTERNATED = "alternated_with"


def train_alternating(
    configs: Sequence[TrainingConfig],
    *,
    store: Store,
    device: str = "auto",
    weights: bool = False,
    progress: bool = True,
    minutes: float = math.inf,
) -> list[Run]:
    """The runs of all configs, in their order, from the store or trained so that times compare.

    Configs of one setting (:func:`settings`) take turns, each alone in its batch. A stored run
    counts only if it was trained like that, beside the same others; else all of its setting are
    trained again. weights: train again where the store kept the history alone. minutes: stop with
    OutOfTime after so long, at a checkpoint. SIGTERM and Ctrl-C stop at a checkpoint too; the next
    call goes on from there.

    Raises CorruptRunError for a stored file that is not as it was written.
    """
    check_flag("weights", weights)
    check_flag("progress", progress)
    deadline = time.time() + 60 * minutes
    for group in settings(configs):
        _train_group(group, store, device, weights, progress, deadline)
    runs = [store.load(config) for config in configs]
    return [run for run in runs if run is not None]


def alternated(run: Run) -> list[str]:
    """Keys of the runs whose elapsed time compares with this one's; empty if it trained alone."""
    return list(run.provenance.get(ALTERNATED, []))


def not_alternated(
    configs: Iterable[TrainingConfig], store: Store, *, weights: bool = False
) -> list[TrainingConfig]:
    """The configs, each once, that :func:`train_alternating` would train: always whole settings.

    Raises CorruptRunError for a stored file that is not as it was written.
    """
    groups = [group for group in settings(configs) if not _took_turns(group, store, weights)]
    return [config for group in groups for config in group]


def settings(configs: Iterable[TrainingConfig]) -> list[list[TrainingConfig]]:
    """The configs, each once, in groups in which all but the embedding is equal."""
    groups: dict[TrainingConfig, list[TrainingConfig]] = {}
    for config in dict.fromkeys(configs):
        groups.setdefault(replace(config, embedding="binary"), []).append(config)
    return list(groups.values())


def _took_turns(group: Sequence[TrainingConfig], store: Store, weights: bool) -> bool:
    """Whether the store has all runs of a group, from a training beside each other."""
    keys = {config.key for config in group}
    return all(
        run is not None
        and {run.config.key, *alternated(run)} == keys
        and (run.weights is not None or not weights)
        for run in map(store.load, group)
    )


def _train_group(
    group: Sequence[TrainingConfig],
    store: Store,
    device: str,
    weights: bool,
    progress: bool,
    deadline: float,
) -> None:
    keys = {config.key for config in group}
    with ExitStack() as locks:
        # In the order of keys, or two processes could wait for each other.
        for config in sorted(group, key=lambda config: config.key):
            locks.enter_context(wait_for_lock(config, store, deadline))
        if _took_turns(group, store, weights):
            return
        if time.time() > deadline:
            raise OutOfTime
        trainers = _trainers(group, store, device)
        with stop_signals() as stopped:
            _take_turns(trainers, store, progress, deadline, stopped)
            for trainer in trainers:
                (run,) = trainer.runs()
                others = sorted(keys - {run.config.key})
                store.save(replace(run, provenance=run.provenance | {ALTERNATED: others}))
            store.discard_checkpoints(group)
            reason = stopped()
            if reason is not None:
                raise reason


def _trainers(group: Sequence[TrainingConfig], store: Store, device: str) -> list[Trainer]:
    """From the checkpoint of all of them, or all from the start: only so have they taken turns."""
    path = store.checkpoint(group)
    there = path in dict(store.checkpoints())
    states = [load_state(path, [config]) if there else None for config in group]
    return [Trainer([c], device, state) for c, state in zip(group, states, strict=True)]


def _take_turns(
    trainers: Sequence[Trainer],
    store: Store,
    progress: bool,
    deadline: float,
    stopped: Callable[[], BaseException | None],
) -> None:
    for trainer in trainers:  # start-up costs go to a trainer that is thrown away
        Trainer(trainer.configs, trainer.device).advance()
    saved = shown = time.monotonic()
    order = list(trainers)
    while not order[0].done:
        for trainer in order:
            trainer.advance()
        order.reverse()  # or one would always follow the other, and find its memory in the cache
        reason = stopped() or (OutOfTime() if time.time() > deadline else None)
        now, done = time.monotonic(), order[0].done
        # The last one lets a process that dies between two runs store the rest as they are.
        if reason is not None or done or now > saved + CHECKPOINT_SECONDS:
            store.save_checkpoint([t.config for t in trainers], *dump_apart(trainers))
            saved = now
        if progress and now > shown + 60:
            print(_progress(trainers), file=sys.stderr, flush=True)
            shown = now
        if reason is not None and not done:
            raise reason


def _progress(trainers: Sequence[Trainer]) -> str:
    names = " and ".join(trainer.config.label for trainer in trainers)
    step, n_steps = trainers[0].state.step, trainers[0].config.n_steps
    return f"{names} in turns: step {step}/{n_steps}, {step / n_steps:.0%} of all"
