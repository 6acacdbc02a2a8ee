"""What all benchmarks share: the machine in words, its peak, CPU time, where results go."""

from __future__ import annotations

import csv
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from leancluster_core.experiments.provenance import commit, device_name

RESULTS = Path(__file__).parents[1] / "results" / "benchmarks"


def describe(device: str = "cpu", threads: bool = True) -> str:
    """One line: device, threads (unless a table tells them), versions, commit."""
    used = f", {torch.get_num_threads()} thread(s)" if threads else ""
    return (
        f"{device_name(torch.device(device))}{used}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}"
    )


def seconds(work: Callable[[], object], times: int) -> float:
    """Seconds for some calls: CPU time of this process on one thread, else wall time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(times):
        work()
    return clock() - started


def peak_operations() -> float:
    """Floating-point operations a second of a large float32 product, the best of some."""
    a = torch.rand(1024, 1024)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    return 2 * 1024**3 * 4 / min(seconds(lambda: torch.mm(a, a, out=out), 4) for _ in range(5))


def softmax_entries() -> float:
    """Entries a second of a softmax over rows of 512 that stays in cache, the best of some."""
    scores = torch.rand(256, 512)
    out = torch.empty_like(scores)
    torch.softmax(scores, -1, out=out)
    work = 16 * scores.numel()
    return work / min(seconds(lambda: torch.softmax(scores, -1, out=out), 16) for _ in range(5))


def save(name: str, rows: Sequence[dict[str, Any]], compared_with: str = "") -> None:
    """Write rows of results, and the machine that they are from, beside the tracked results."""
    machine = describe(threads="threads" not in rows[0]) + (compared_with and f", {compared_with}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([name.replace("_", " ") for name in rows[0]])  # the book shows these
        writer.writerows(row.values() for row in rows)
    (RESULTS / f"{name}.txt").write_text(machine + "\n", encoding="utf-8")
    print(f"saved {name}.csv")
