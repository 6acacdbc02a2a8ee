"""Peak memory of a training step against the number of points: ours and the literal definition's.

    python benchmarks/memory.py

Each measurement is a process of its own: the peak of its resident memory over what it was before
the step. The largest n that fits in 4 GiB is extrapolated from the last two measurements (a
straight line for ours, a parabola's leading term for the literal one), and said to be so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from machine import describe, save

SIZES = {"ours": (512, 1024, 2048, 4096, 8192, 16384), "literal": (512, 1024, 2048, 4096)}
N_FEATURES, N_CLUSTERS, N_TASKS = 32, 10, 4
LIMIT = 4 * 1024  # MiB


def resident(field: str) -> float:
    """MiB of this process: "VmRSS" now, "VmHWM" at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def step_once(kind: str, n_points: int) -> None:
    """One step; prints the MiB that it took at most. Only tasks and weights are there before it."""
    from step import Literal, literal_loss

    from leancluster_core import TaskDistribution
    from leancluster_core.experiments import PAPER_SEEDS, TrainingConfig
    from leancluster_core.experiments.training import Trainer

    torch.set_num_threads(1)

    def work(n: int) -> None:
        task = TaskDistribution(n_points=n, n_features=N_FEATURES, n_clusters=N_CLUSTERS)
        points, centers = task.sample((N_TASKS,), generator=torch.Generator().manual_seed(0))
        if kind == "ours":
            config = TrainingConfig(task, "onehot", batch_size=N_TASKS, seeds=PAPER_SEEDS[:1])
            trainer = Trainer([config], "cpu")
            x, c = (t.mT.contiguous()[None] for t in (points, centers))
            run = lambda: trainer._step(x, c)  # noqa: E731
        else:
            model = Literal(N_FEATURES, N_CLUSTERS, "onehot")
            run = lambda: literal_loss(points, model(points, centers), 0.1).backward()  # noqa: E731
        before = resident("VmRSS")
        run()
        print(max(resident("VmHWM") - before, 0.0))

    work(64)  # what is loaded on first use
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work(n_points)


def measured(kind: str, n_points: int) -> float:
    command = [sys.executable, __file__, "--kind", kind, "--points", str(n_points)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


def largest(kind: str, points: list[tuple[int, float]]) -> int:
    """The n at which the peak passes LIMIT, from the last two measurements."""
    (n1, m1), (n2, m2) = points[-2:]
    if kind == "ours":
        return int(n2 + (LIMIT - m2) * (n2 - n1) / (m2 - m1))
    square = (m2 - m1) / (n2**2 - n1**2)
    return int(((LIMIT - m2) / square + n2**2) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--points", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.kind:
        step_once(chosen.kind, chosen.points)
        return
    torch.set_num_threads(1)
    print(f"{describe()}; {N_TASKS} tasks, d={N_FEATURES}, k={N_CLUSTERS}, OH, one trial")
    found = {kind: [(n, measured(kind, n)) for n in sizes] for kind, sizes in SIZES.items()}
    rows = []
    for n, ours in found["ours"]:
        literal = dict(found["literal"]).get(n)
        rows.append({
            "n": n, "ours_MiB": round(ours, 1),
            "ours_MiB_per_1000_points": round(1000 * ours / n, 2),
            "literal_MiB": "" if literal is None else round(literal, 1),
            "ours_share": "" if literal is None else round(ours / literal, 3),
        })  # fmt: skip
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()))
    save("memory", rows)
    limits = [{"limit_MiB": LIMIT, **{f"{k}_largest_n": largest(k, p) for k, p in found.items()}}]
    print("  ".join(f"{name}={value}" for name, value in limits[0].items()), "(extrapolated)")
    save("memory_limit", limits)


if __name__ == "__main__":
    main()
