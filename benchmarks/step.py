"""Our training step against the literal definition, alternating in one run.

    python benchmarks/step.py            some minutes on one core
    python benchmarks/step.py --quick    one repetition of each, to see that it works
    python benchmarks/step.py --compiled the literal one compiled by torch (needs a C++ compiler)

Ours is the step that ``train`` takes: all trials in one batch, attention without the n x n matrix,
absorbed projections, tasks drawn in blocks. The literal one trains one model at a time with
pairwise distances, softmax, product, torch's autograd and Adam, and draws its tasks one by one.
Both draw their tasks in the time that is measured. A ratio compares the time of one step of one
trial. On one thread, time is CPU time of this process, which other programs disturb least; on
more (--threads), it is wall time.

share_of_peak: the products that a step cannot do without, at the speed of a large matrix product,
against the time it took. share_of_floor: the same, with the n x n exponentials of one softmax
at the speed of a softmax in cache added, since these are no products but must be done too.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from machine import describe, peak_operations, save, seconds, softmax_entries
from torch import Tensor, nn

from leancluster_core import TaskDistribution, cluster_codes
from leancluster_core.embeddings import code_width
from leancluster_core.experiments import PAPER_SEEDS, TrainingConfig
from leancluster_core.experiments.training import TASK_BLOCK, Trainer

SETTINGS = [(4, 6), (32, 10), (32, 25)]
N_TASKS = 32


class Literal(nn.Module):
    """Equation 4 as it is written, for one model (4, e, e) and a batch of tasks."""

    def __init__(self, n_features: int, n_clusters: int, embedding: str) -> None:
        super().__init__()
        self.codes = cluster_codes(n_clusters, embedding)
        width = n_features + self.codes.shape[1]
        bound = 1 / math.sqrt(width)
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Parameter(torch.empty(4, width, width).uniform_(-bound, bound)))

    def attend(self, index: int, queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = queries @ self.query[index], keys @ self.key[index], keys @ self.value[index]
        distances = q.square().sum(-1, keepdim=True) + k.square().sum(-1).unsqueeze(-2)
        distances = distances - 2 * q @ k.mT
        return torch.softmax(-distances / math.sqrt(q.shape[-1]), -1) @ v

    def forward(self, points: Tensor, centers: Tensor) -> Tensor:
        width = self.query.shape[-1]
        x = nn.functional.pad(points, (0, width - points.shape[-1]))
        c = torch.cat([centers, self.codes.expand(*centers.shape[:-1], -1)], -1)
        x = x + self.attend(0, x, c) + self.attend(1, x, x)
        c = c + self.attend(2, c, x) + self.attend(3, c, c)
        return c[..., : points.shape[-1]]


def literal_loss(points: Tensor, centers: Tensor, penalty: float) -> Tensor:
    """Smoothed loss with sparsemax by sort and threshold (Section 3)."""
    distances = points.square().sum(-1, keepdim=True) + centers.square().sum(-1).unsqueeze(-2)
    distances = distances - 2 * points @ centers.mT
    scores = -distances / penalty
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    sizes = torch.arange(1, scores.shape[-1] + 1)
    size = (1 + sizes * ordered > sums).sum(-1, keepdim=True)
    weights = (scores - (sums.gather(-1, size - 1) - 1) / size).clamp_min(0)
    return (weights * distances).sum((-1, -2)).mean()


def literal_stepper(task: TaskDistribution, embedding: str, compiled: bool) -> Callable[[], None]:
    model = Literal(task.n_features, task.n_clusters, embedding)
    objective = lambda points, centers: literal_loss(points, model(points, centers), 0.1)  # noqa: E731
    if compiled:
        objective = torch.compile(objective, dynamic=False)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        tasks = [task.sample((), generator=generator) for _ in range(N_TASKS)]
        points, centers = (torch.stack(tensors) for tensors in zip(*tasks, strict=True))
        loss = objective(points, centers)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def our_stepper(task: TaskDistribution, embedding: str, n_trials: int) -> Callable[[], None]:
    """Each call is TASK_BLOCK steps."""
    config = TrainingConfig(
        task, embedding, penalty=0.1, batch_size=N_TASKS, seeds=PAPER_SEEDS[:n_trials],
        n_steps=10**6, evaluate_every=10**6,
    )  # fmt: skip
    return Trainer([config], "cpu").advance


def operations(task: TaskDistribution, embedding: str) -> float:
    """Floating-point operations (two a multiply-add) of the products in a step of one trial.

    Only what cannot be left out, whatever we do: among points two products forward and two backward
    at width d (weights computed again count as nothing); the other attentions and projections
    forward and twice that backward.
    """
    n, d, k = task.n_points, task.n_features, task.n_clusters
    e = d + code_width(k, embedding)
    among_points = n * n * 4 * d
    others = 3 * (2 * n * d * d + n * e * d + n * k * (d + e) + n * e * e + 2 * n * k * e)
    return 2.0 * N_TASKS * (among_points + others + 3 * n * k * d)


def measure(
    task: TaskDistribution, embedding: str, repetitions: int, compiled: bool
) -> list[dict[str, object]]:
    literal = literal_stepper(task, embedding, compiled)
    started = time.perf_counter()
    literal()
    start_up = time.perf_counter() - started
    ours = {trials: our_stepper(task, embedding, trials) for trials in (1, 10)}
    literal_steps = 1 if task.n_points >= 512 else 4
    times: dict[int, list[tuple[float, float]]] = {1: [], 10: []}
    for repetition in range(repetitions + 1):
        slow = seconds(literal, literal_steps) / literal_steps
        for trials, advance in ours.items():
            fast = seconds(advance, 1) / TASK_BLOCK / trials
            slow_again = seconds(literal, literal_steps) / literal_steps
            if repetition:  # the first one warms up
                times[trials].append((fast, (slow + slow_again) / 2))
            slow = slow_again
    products = operations(task, embedding) / peak_operations()
    floor = products + N_TASKS * task.n_points**2 / softmax_entries()
    rows = []
    for trials, pairs in times.items():
        fast, slow = torch.tensor(pairs, dtype=torch.float64).T
        low, middle, high = (
            (slow / fast).quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
        )
        ours = float(fast.median())
        rows.append({
            "n": task.n_points, "d": task.n_features, "k": task.n_clusters,
            "embedding": {"onehot": "OH", "binary": "BN"}[embedding], "trials": trials,
            "literal_ms": round(1e3 * float(slow.median()), 2),
            "ours_ms": round(1e3 * ours, 2),
            "ratio": round(middle, 1), "ratio_low": round(low, 1), "ratio_high": round(high, 1),
            "share_of_peak": round(products / ours, 2), "share_of_floor": round(floor / ours, 2),
        })  # fmt: skip
        if compiled:
            rows[-1] = {name.replace("literal", "compiled"): v for name, v in rows[-1].items()}
            rows[-1]["start_up_s"] = round(start_up, 1)
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    print(describe())
    embeddings = ("binary",) if chosen.compiled else ("onehot", "binary")  # compiling takes long
    rows = [
        row
        for n in (512, 128)
        for d, k in SETTINGS
        for embedding in embeddings
        for row in measure(
            TaskDistribution(n_points=n, n_features=d, n_clusters=k),
            embedding,
            1 if chosen.quick else chosen.repetitions,
            chosen.compiled,
        )
    ]
    if not chosen.quick:
        name = "step_compiled" if chosen.compiled else "step"
        save(name if chosen.threads == 1 else f"{name}_{chosen.threads}_threads", rows)


if __name__ == "__main__":
    main()
