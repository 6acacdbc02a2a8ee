"""Training whose elapsed time can be compared: the configs take turns, one block of steps each.

Whatever else slows the machine down for a while then slows all of them down alike. ``elapsed`` of
the history counts training steps only, for all configs: drawing tasks and validation are left out.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from leancluster_core.checks import check_flag
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.store import Run, Store
from leancluster_core.experiments.sweep import (
    CHECKPOINT_SECONDS,
    OutOfTime,
    dump_state,
    load_state,
)
from leancluster_core.experiments.training import Trainer

# In provenance: keys of the runs that took turns with this one.
ALTERNATED = "alternated_with"


def train_alternating(
    configs: Sequence[TrainingConfig],
    *,
    store: Store,
    device: str = "auto",
    progress: bool = True,
    minutes: float = math.inf,
) -> list[Run]:
    """The runs of all configs, in their order, from the store or trained so that times compare.

    Configs of one setting (all but the embedding equal) take turns, each alone in its batch. A
    stored run counts only if it was trained like that, beside the same others; else all of its
    setting are trained again. minutes: stop with OutOfTime after so long, at a checkpoint; the next
    call goes on from there.

    Raises CorruptRunError for a stored file that is not as it was written.
    """
    check_flag("progress", progress)
    deadline = time.time() + 60 * minutes
    for group in _settings(configs):
        _train_group(group, store, device, progress, deadline)
    runs = [store.load(config) for config in configs]
    return [run for run in runs if run is not None]


def alternated(run: Run) -> list[str]:
    """Keys of the runs whose elapsed time compares with this one's; empty if it trained alone."""
    return list(run.provenance.get(ALTERNATED, []))


def _settings(configs: Iterable[TrainingConfig]) -> list[list[TrainingConfig]]:
    groups: dict[TrainingConfig, list[TrainingConfig]] = {}
    for config in dict.fromkeys(configs):
        groups.setdefault(replace(config, embedding="binary"), []).append(config)
    return list(groups.values())


def _train_group(
    group: list[TrainingConfig], store: Store, device: str, progress: bool, deadline: float
) -> None:
    keys = {config.key for config in group}
    with ExitStack() as locks:
        # In the order of keys, or two processes could wait for each other.
        for config in sorted(group, key=lambda config: config.key):
            locks.enter_context(store.lock(config).acquire())
        found = [store.load(config) for config in group]
        others = [keys - {config.key} for config in group]
        if all(
            run is not None and set(alternated(run)) == wanted
            for run, wanted in zip(found, others, strict=True)
        ):
            return
        trainers = _trainers(group, store, device)
        _take_turns(trainers, store, progress, deadline)
        for trainer, wanted in zip(trainers, others, strict=True):
            (run,) = trainer.runs()
            store.save(replace(run, provenance=run.provenance | {ALTERNATED: sorted(wanted)}))
        store.discard_checkpoints(group)


def _trainers(group: Sequence[TrainingConfig], store: Store, device: str) -> list[Trainer]:
    """From checkpoints at one step, or all from the start: only then have they taken turns."""
    found = [store.find_checkpoint(config) for config in group]
    level = len({part and part[1] for part in found}) == 1
    states = [
        load_state(part[0], [config]) if part and level else None
        for config, part in zip(group, found, strict=True)
    ]
    return [Trainer([c], device, state) for c, state in zip(group, states, strict=True)]


def _take_turns(trainers: Sequence[Trainer], store: Store, progress: bool, deadline: float) -> None:
    for trainer in trainers:  # start-up costs go to a trainer that is thrown away
        Trainer(trainer.configs, trainer.device).advance()
    saved = shown = time.monotonic()
    order = list(trainers)
    while not order[0].done:
        for trainer in order:
            trainer.advance()
        order.reverse()  # or one would always follow the other, and find its memory in the cache
        late, now = time.time() > deadline, time.monotonic()
        if late or now > saved + CHECKPOINT_SECONDS:
            for trainer in trainers:
                store.save_checkpoint(trainer.configs, *dump_state(trainer.state))
            saved = now
        if progress and now > shown + 60:
            print(_progress(trainers), file=sys.stderr, flush=True)
            shown = now
        if late and not order[0].done:
            raise OutOfTime


def _progress(trainers: Sequence[Trainer]) -> str:
    names = " and ".join(trainer.config.label for trainer in trainers)
    step, n_steps = trainers[0].state.step, trainers[0].config.n_steps
    return f"{names} in turns: step {step}/{n_steps}, {step / n_steps:.0%} of all"
