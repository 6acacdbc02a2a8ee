"""The experiments from a command line: no Jupyter, no book.

python -m leancluster_core.experiments list fig02 --scale laptop
python -m leancluster_core.experiments train fig02 fig04 --scale laptop --minutes 60
python -m leancluster_core.experiments pack fig02 -o results.tar
python -m leancluster_core.experiments unpack results.tar
python -m leancluster_core.experiments claims

A training that was stopped (Ctrl-C, SIGTERM, the time budget, a crash) goes on from its last
checkpoint when the same command is given again. Exit codes: 0 all done, 1 a damaged file,
2 wrong arguments, 3 out of time, 128 + signal stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from leancluster_core.experiments.config import SCALES, TrainingConfig
from leancluster_core.experiments.grids import GRIDS, TIMED_FIGURES, figure_configs
from leancluster_core.experiments.paths import results_root
from leancluster_core.experiments.store import CorruptRunError, Store, pack, unpack
from leancluster_core.experiments.sweep import (
    MODELS_PER_BATCH,
    OutOfTime,
    Stopped,
    expected_time,
    missing,
    plan_batches,
    process_pool,
    time_for,
    train_all,
)
from leancluster_core.experiments.timing import not_alternated, settings, train_alternating
from leancluster_core.experiments.training import resolve_device

OUT_OF_TIME = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen) or 0
    except ValueError as error:
        parser.error(str(error))
    except (CorruptRunError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m leancluster_core.experiments",
        description="Train the paper's figures without Jupyter; carry results between machines.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int | None], summary: str
    ) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=summary, description=summary)
        subparser.set_defaults(run=run)
        return subparser

    listing = command("list", _list, "show the configs of figures and their status in the store")
    training = command("train", _train, "train what the store does not have yet")
    packing = command("pack", _pack, "write stored runs into one file, to carry elsewhere")
    for subparser in (listing, training, packing):
        subparser.add_argument(
            "figures", nargs="*", metavar="FIGURE", help=f"{', '.join(GRIDS)} (default: all)"
        )
        subparser.add_argument("--scale", choices=SCALES, default="laptop")
        subparser.add_argument(
            "--store", type=Path, metavar="DIR", help="folder of runs (default: results/SCALE)"
        )
    training.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    training.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one a core; 1 on a GPU)"
    )
    training.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    training.add_argument(
        "--shard", metavar="I/N", default="1/1", help="only the I-th of N parts: 1/4 ... 4/4"
    )
    training.add_argument(
        "--weights", action="store_true", help="train again where only the history was kept"
    )
    training.add_argument(
        "--paper-on-cpu", action="store_true", help="allow the paper's scale without a GPU"
    )
    packing.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    unpacking = command("unpack", _unpack, "take over the runs of a packed file")
    unpacking.add_argument("archive", type=Path, metavar="FILE")
    unpacking.add_argument(
        "--results", type=Path, metavar="DIR", help="folder of all scales (default: results)"
    )
    command("claims", _claims, "print each claim of the paper with its verdict")
    return parser


def _store(chosen: argparse.Namespace) -> Store:
    return Store(chosen.store or results_root() / chosen.scale)


def _figures(chosen: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(chosen.figures)) or list(GRIDS)


def _configs(figures: Iterable[str], scale: str) -> list[TrainingConfig]:
    """What figures train, each config once, in the figures' order."""
    return list(dict.fromkeys(c for figure in figures for c in figure_configs(figure, scale)))


def _list(chosen: argparse.Namespace) -> None:
    store, configs = _store(chosen), _configs(_figures(chosen), chosen.scale)
    for config in configs:
        print(f"{config.key}  {_setting(config)}  {_status(config, store)}")
    print(expected_time(configs, store))


def _setting(config: TrainingConfig) -> str:
    task = config.task
    clipped = "" if config.gradient_clipping is None else f" clip={config.gradient_clipping:g}"
    return (
        f"{config.label} {task.family:<9} n={task.n_points:<4} d={task.n_features:<2} "
        f"k={task.n_clusters:<2} tau={config.penalty:<4g} eta={config.learning_rate:<5g}{clipped}"
    )


def _status(config: TrainingConfig, store: Store) -> str:
    if config in store:
        return "stored" if store.has_weights(config) else "stored, history only"
    checkpoint = store.find_checkpoint(config)
    return "-" if checkpoint is None else f"step {checkpoint[1]} of {config.n_steps}"


def _train(chosen: argparse.Namespace) -> int:
    device, store = resolve_device(chosen.device), _store(chosen)
    batched, timed = _share(chosen, device)

    def left() -> list[TrainingConfig]:
        return [
            *missing(batched, store, weights=chosen.weights),
            *not_alternated(timed, store, weights=chosen.weights),
        ]

    if chosen.scale == "paper" and device.type == "cpu" and not chosen.paper_on_cpu:
        needed = time_for(left(), batched + timed, device=chosen.device)
        raise ValueError(f"the paper's scale on a CPU needs --paper-on-cpu ({needed} on one core)")
    if not chosen.minutes > 0:
        raise ValueError(f"--minutes must be in (0, inf], got {chosen.minutes:g}")
    workers = chosen.workers
    if workers is None:
        workers = 1 if device.type == "cuda" else os.cpu_count() or 1
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    started = time.monotonic()
    options: dict[str, Any] = {"store": store, "device": chosen.device, "weights": chosen.weights}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if batched:
            print(expected_time(batched, workers=workers, **options), flush=True)
            if workers == 1:
                if device.type == "cpu":
                    torch.set_num_threads(1)
                train_all(batched, minutes=chosen.minutes, **options)
            else:
                with process_pool(workers) as executor:
                    train_all(batched, executor=executor, minutes=chosen.minutes, **options)
        if timed:
            # In this process, with nothing beside them: their times are their result.
            untimed = not_alternated(timed, store, weights=chosen.weights)
            print(time_for(untimed, timed, device=chosen.device), flush=True)
            minutes = chosen.minutes - (time.monotonic() - started) / 60
            train_alternating(timed, minutes=minutes, **options)
    except (OutOfTime, Stopped) as stop:
        why = "out of time" if isinstance(stop, OutOfTime) else "stopped"
        what = f"{why}: {len(left())} configs left"
        print(f"{what}; the same command goes on from here", file=sys.stderr)
        return OUT_OF_TIME
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _share(
    chosen: argparse.Namespace, device: torch.device
) -> tuple[list[TrainingConfig], list[TrainingConfig]]:
    """The configs of one machine: those that train in batches, and those that take turns.

    Every N-th batch and every N-th setting, stored or not, so that shards never meet.
    """
    index, count = _shard(chosen.shard)
    figures = _figures(chosen)
    plain = _configs([name for name in figures if name not in TIMED_FIGURES], chosen.scale)
    timed = _configs([name for name in figures if name in TIMED_FIGURES], chosen.scale)
    batches = plan_batches(plain, MODELS_PER_BATCH[device.type])[index - 1 :: count]
    # Counted from the last shard, since the first ones have the longest batches.
    turns = settings(timed)[count - index :: count]
    return [c for batch in batches for c in batch], [c for group in turns for c in group]


def _shard(text: str) -> tuple[int, int]:
    """I and N of "I/N"."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard must be I/N with I in [1, N], got {text!r}")
    return int(index), int(count)


def _pack(chosen: argparse.Namespace) -> None:
    configs = _configs(_figures(chosen), chosen.scale)
    count = pack(configs, _store(chosen), chosen.scale, chosen.output)
    print(f"{chosen.output}: {count} of {len(configs)} configs")


def _unpack(chosen: argparse.Namespace) -> None:
    new, old = unpack(chosen.archive, chosen.results or results_root())
    print(f"{new} runs taken over, {old} were there already")


def _claims(chosen: argparse.Namespace) -> None:
    try:
        from leancluster_core.experiments.claims import print_claims

        print_claims()
    except ModuleNotFoundError as error:
        raise ValueError(f"claims are kept in YAML: pip install pyyaml ({error})") from None


if __name__ == "__main__":
    sys.exit(main())
