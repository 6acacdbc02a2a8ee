"""Exact mode, our Lloyd and scikit-learn's, side by side in one run.

    python benchmarks/lloyd.py
    python benchmarks/lloyd.py --points 100000 --dtypes float64 --repetitions 9 --threads 1

The three take turns, in an order that rotates, so that whatever else the machine does meets all of
them; a ratio compares times of the same turn. All start from the same centers and do the same
number of iterations (layers). scikit-learn also labels the points once more at the end, for its
labels and inertia: its time holds one assignment more. Peak memory is that of a process which runs
exact mode and nothing else, interpreter and data included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd
import sklearn
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

from leancluster_core import lloyd, lloyd_transformer
from leancluster_core.experiments.provenance import provenance

RESULT = Path("results/benchmarks/lloyd.csv")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=1_000_000, help="n (default %(default)s)")
    parser.add_argument("--features", type=int, default=16, help="d (default %(default)s)")
    parser.add_argument("--clusters", type=int, default=100, help="k (default %(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=10, help="of Lloyd, and layers (default %(default)s)"
    )
    parser.add_argument("--embedding", choices=["binary", "onehot"], default="binary")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument(
        "--repetitions", type=int, default=5, help="after one to warm up (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT, help="default %(default)s")
    options = parser.parse_args(arguments)
    for name in ("points", "features", "clusters", "iterations", "repetitions", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.clusters > options.points:
        parser.error(f"--clusters must be at most {options.points}, got {options.clusters}")
    return options


def task(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Points uniform in the unit cube; the first of them are the centers."""
    generator = torch.Generator().manual_seed(options.seed)
    points = torch.rand(options.points, options.features, generator=generator, dtype=dtype)
    return points, points[: options.clusters].clone()


def exact_mode(options: argparse.Namespace, points: Tensor, centers: Tensor) -> Tensor:
    model = lloyd_transformer(
        options.features,
        options.clusters,
        embedding=options.embedding,
        n_layers=options.iterations,
        dtype=points.dtype,
    )
    return model(points, centers)


def our_lloyd(options: argparse.Namespace, points: Tensor, centers: Tensor) -> Tensor:
    return lloyd(points, centers, options.iterations)


def scikit_learn(options: argparse.Namespace, points: Tensor, centers: Tensor) -> Tensor:
    estimator = KMeans(
        options.clusters,
        init=centers.numpy(),
        n_init=1,
        algorithm="lloyd",
        max_iter=options.iterations,
        tol=0,
    )
    estimator.fit(points.numpy())
    if estimator.n_iter_ < options.iterations:
        print(f"note: scikit-learn converged after {estimator.n_iter_} iterations")
    return torch.from_numpy(estimator.cluster_centers_)


METHODS: dict[str, Callable[[argparse.Namespace, Tensor, Tensor], Tensor]] = {
    "exact_mode": exact_mode,
    "lloyd": our_lloyd,
    "scikit_learn": scikit_learn,
}


def measure(options: argparse.Namespace, dtype: str) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """Seconds of each method, one row a repetition; and the centers that each found."""
    points, centers = task(options, DTYPES[dtype])
    results = {name: run(options, points, centers) for name, run in METHODS.items()}
    names = list(METHODS)
    rows = []
    for repetition in range(options.repetitions):
        seconds = {}
        for name in names:
            start = time.perf_counter()
            METHODS[name](options, points, centers)
            seconds[name] = time.perf_counter() - start
        names = [*names[1:], names[0]]
        rows.append({"dtype": dtype, "repetition": repetition} | seconds)
    return pd.DataFrame(rows), results


def peak_of_exact_mode(options: argparse.Namespace, dtype: str) -> float:
    """Peak resident GiB of this process, which does nothing else."""
    torch.set_num_threads(options.threads)
    exact_mode(options, *task(options, DTYPES[dtype]))
    kibibytes = 1024 if platform.system() == "Darwin" else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / kibibytes / 2**20


def peak_in_own_process(options: argparse.Namespace, dtype: str) -> float:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(peak_of_exact_mode, options, dtype).result()


def spread(values: pd.Series) -> str:
    return f"{statistics.median(values):6.3f}   (from {values.min():.3f} to {values.max():.3f})"


def report(seconds: pd.DataFrame, results: dict[str, Tensor], peak: float) -> None:
    print(f"\n{seconds['dtype'].iloc[0]}: median (and range) of {len(seconds)} turns")
    for name in METHODS:
        print(f"  {name:28} {spread(seconds[name])} s")
    for name, judge in (("exact_mode", "lloyd"), ("lloyd", "scikit_learn")):
        print(f"  {f'{name} / {judge}':28} {spread(seconds[name] / seconds[judge])}")
    for name in ("exact_mode", "scikit_learn"):
        difference = float((results[name] - results["lloyd"]).abs().max())
        print(f"  largest difference of a center, {name} and lloyd: {difference:.1e}")
    print(f"  peak memory of exact mode: {peak:.2f} GiB")


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    facts = provenance(torch.device("cpu")) | {
        "scikit_learn_version": sklearn.__version__,
        "load_average": round(os.getloadavg()[0], 2),
        "points": options.points,
        "features": options.features,
        "clusters": options.clusters,
        "iterations": options.iterations,
        "embedding": options.embedding,
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    frames = []
    with threadpool_limits(options.threads):
        for dtype in options.dtypes:
            peak = peak_in_own_process(options, dtype)
            seconds, results = measure(options, dtype)
            report(seconds, results, peak)
            frames.append(seconds.assign(peak_gib=round(peak, 3)))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.concat(frames, ignore_index=True).round(4).assign(**facts)
    frame.to_csv(options.output, index=False)
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
