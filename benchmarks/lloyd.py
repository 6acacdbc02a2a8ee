"""Exact mode, our Lloyd and scikit-learn's, side by side in one run.

    python benchmarks/lloyd.py            some minutes
    python benchmarks/lloyd.py --quick    a hundredth of the points, to see that it works

A million points in 16 dimensions, 100 clusters, ten iterations (ten layers), on one thread and on
all. The three take turns, in an order that rotates, so that whatever else the machine does meets
all of them; a ratio compares times of the same turn. All start from the same centers.
scikit-learn also labels the points once more at the end, for its labels and inertia: its time holds
one assignment more. Peak memory is that of a process which runs exact mode and nothing else,
interpreter and data included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import sklearn
import torch
from machine import describe, save
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

from leancluster_core import lloyd, lloyd_transformer

N_POINTS, N_FEATURES, N_CLUSTERS, N_ITERATIONS = 1_000_000, 16, 100, 10
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def task(n_points: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Points uniform in the unit cube; the first of them are the centers."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(n_points, N_FEATURES, generator=generator, dtype=DTYPES[dtype])
    return points, points[:N_CLUSTERS].clone()


def exact_mode(points: Tensor, centers: Tensor) -> Tensor:
    options = {"n_layers": N_ITERATIONS, "dtype": points.dtype}
    return lloyd_transformer(N_FEATURES, N_CLUSTERS, **options)(points, centers)


def our_lloyd(points: Tensor, centers: Tensor) -> Tensor:
    return lloyd(points, centers, N_ITERATIONS)


def scikit_learn(points: Tensor, centers: Tensor) -> Tensor:
    estimator = KMeans(
        N_CLUSTERS, init=centers.numpy(), n_init=1, algorithm="lloyd", max_iter=N_ITERATIONS, tol=0
    ).fit(points.numpy())
    if estimator.n_iter_ < N_ITERATIONS:
        print(f"note: scikit-learn converged after {estimator.n_iter_} iterations")
    return torch.from_numpy(estimator.cluster_centers_)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exact": exact_mode, "lloyd": our_lloyd, "scikit_learn": scikit_learn,
}  # fmt: skip


def measure(n_points: int, dtype: str, repetitions: int) -> dict[str, object]:
    points, centers = task(n_points, dtype)
    results = {name: run(points, centers) for name, run in METHODS.items()}  # warms up
    names, seconds = list(METHODS), {name: [] for name in METHODS}
    for _ in range(repetitions):
        for name in names:
            started = time.perf_counter()
            METHODS[name](points, centers)
            seconds[name].append(time.perf_counter() - started)
        names = [*names[1:], names[0]]
    times = {name: torch.tensor(values).double() for name, values in seconds.items()}
    row: dict[str, object] = {
        f"{name}_s": round(float(values.median()), 2) for name, values in times.items()
    }
    for name, judge in (("exact", "lloyd"), ("lloyd", "scikit_learn")):
        ratio = times[name] / times[judge]
        low, high = float(ratio.min()), float(ratio.max())
        row[f"{name}_over_{judge}"] = f"{float(ratio.median()):.2f} ({low:.2f}–{high:.2f})"
    others = (results["exact"], results["scikit_learn"])
    difference = max(float((other - results["lloyd"]).abs().max()) for other in others)
    return row | {"largest_difference": f"{difference:.0e}"}


def peak_of_exact_mode(n_points: int, dtype: str, threads: int) -> float:
    """Peak resident GiB of this process, which does nothing else."""
    torch.set_num_threads(threads)
    exact_mode(*task(n_points, dtype))
    kibibytes = 1024 if platform.system() == "Darwin" else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / kibibytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    chosen = parser.parse_args()
    n_points = N_POINTS // 100 if chosen.quick else N_POINTS
    rows = []
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        print(f"{describe()}, load {os.getloadavg()[0]:.1f}")
        for dtype in DTYPES:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
                peak = executor.submit(peak_of_exact_mode, n_points, dtype, threads).result()
            with threadpool_limits(threads):
                row = measure(n_points, dtype, 1 if chosen.quick else chosen.repetitions)
            rows.append({"dtype": dtype, "threads": threads} | row | {"peak_GiB": round(peak, 2)})
            print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if not chosen.quick:
        save("lloyd", rows, f"scikit-learn {sklearn.__version__}")


if __name__ == "__main__":
    main()
