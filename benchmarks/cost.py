"""What the whole plan of the paper costs on this device: seconds a model, hours in all.

    python benchmarks/cost.py                    both scales, some minutes on a CPU
    python benchmarks/cost.py --scale laptop

Times ten steps and one evaluation of every distinct shape (n, d, k, embedding) among the configs of
all figures, and multiplies by the steps and models that have this shape. On a CPU, one thread: N
workers take an N-th. On a GPU, batches are as large as ``train_all`` makes them.

Without a GPU the last line projects one, from the operations that the plan cannot do without and a
vendor's figure for the peak. It is arithmetic, not a measurement, and says so. A run of both scales
enters what it measured into the ledger (claim E-cost), beside the authors' hours.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from machine import describe, save
from step import N_TASKS, operations

from leancluster_core.experiments.claims import (
    NOT_RUN,
    Verdict,
    published_folder,
    write_verdicts,
)
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.grids import GRIDS, figure_configs
from leancluster_core.experiments.provenance import device_name
from leancluster_core.experiments.sweep import MODELS_PER_BATCH
from leancluster_core.experiments.training import TASK_BLOCK, Trainer

PAPER_HOURS = 1000  # the paper's report, on V100s
GPU_PEAK = 67e12  # float32 operations a second of an H200 (SXM), by its data sheet
GPU_SHARE = 0.2  # assumed share of it that a step reaches


def shape(config: TrainingConfig) -> tuple[int, int, int, str]:
    task = config.task
    return task.n_points, task.n_features, task.n_clusters, config.embedding


def all_configs(scale: str) -> list[TrainingConfig]:
    """Every config of every figure, each once."""
    return list(dict.fromkeys(c for figure in GRIDS for c in figure_configs(figure, scale)))


def seconds_a_model(config: TrainingConfig, n_models: int, device: torch.device) -> float:
    """Seconds of training one model of a config, if n_models train together."""
    # Only the shape matters here: the trials of one config stand for all models of a batch.
    config = replace(config, seeds=tuple(range(n_models)), gradient_clipping=None)
    trainer = Trainer([config], device)
    clock = time.process_time if device.type == "cpu" else trainer._clock

    def timed(work: Callable[[], object]) -> float:
        started = clock()
        work()
        return clock() - started

    timed(trainer.advance)  # warms up
    block = timed(trainer.advance)
    timed(trainer._relative_loss)  # draws the validation tasks
    evaluation = timed(trainer._relative_loss)
    blocks, evaluations = config.n_steps / TASK_BLOCK, config.n_steps / config.evaluate_every
    return (blocks * block + evaluations * evaluation) / n_models


def measure(scale: str, device: torch.device) -> list[dict[str, object]]:
    groups: dict[tuple, list[TrainingConfig]] = defaultdict(list)
    for config in all_configs(scale):
        groups[shape(config)].append(config)
    rows = []
    for (n, d, k, embedding), configs in sorted(groups.items()):
        models = sum(len(config.seeds) for config in configs)
        longest = max(configs, key=lambda config: config.n_steps)
        # On a CPU a large model costs the same in any company, a small one as in a batch of six.
        small = MODELS_PER_BATCH["cpu"] if n <= 128 else 1
        together = min(models, MODELS_PER_BATCH["cuda"]) if device.type == "cuda" else small
        one = seconds_a_model(longest, together, device)
        steps = sum(c.n_steps * len(c.seeds) for c in configs)
        rows.append({
            "scale": scale, "n": n, "d": d, "k": k, "embedding": embedding, "models": models,
            "steps": longest.n_steps, "seconds_a_model": round(one, 2),
            "hours": round(one * steps / longest.n_steps / 3600, 3),
        })  # fmt: skip
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    return rows


def plan_operations(scale: str) -> float:
    """Operations of all products that the plan cannot do without."""
    return sum(
        operations(c.task, c.embedding) * c.batch_size / N_TASKS * c.n_steps * len(c.seeds)
        for c in all_configs(scale)
    )


def cost_verdict(measured: dict[str, object], device: str) -> Verdict:
    """Claim E-cost: hours of other code on other machines stand beside the authors', no more."""
    return Verdict(
        "E-cost",
        NOT_RUN,
        "paper",
        "the authors' hours are those of their code on V100s, which we don't have; ours, projected "
        f"from measured steps: {measured['seconds_a_model']} s a model, "
        f"{measured['hours']:.0f} h for {measured['models']} models on {device}",
    )


def speed_up(hours: float) -> str:
    """The paper's hours over ours, to two digits."""
    return f"{float(f'{PAPER_HOURS / hours:.2g}'):g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=("laptop", "paper"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(describe(device.type))
    scales = (chosen.scale,) if chosen.scale else ("laptop", "paper")
    rows = [row for scale in scales for row in measure(scale, device)]
    summary = []
    for scale in scales:
        own = [row for row in rows if row["scale"] == scale]
        models = sum(row["models"] for row in own)
        hours = sum(row["hours"] for row in own)
        summary.append({
            "scale": scale, "device": device.type, "measured": "yes", "models": models,
            "seconds_a_model": round(3600 * hours / models, 1), "hours": round(hours, 2),
            "paper_hours_over_ours": speed_up(hours) if scale == "paper" else "",
        })  # fmt: skip
    if device.type == "cpu" and "paper" in scales:
        total = plan_operations("paper")
        hours = total / (GPU_PEAK * GPU_SHARE) / 3600
        print(
            f"an H200 by arithmetic (not measured): {total:.3g} operations / "
            f"({GPU_PEAK:.3g} a second * {GPU_SHARE}) = {hours:.2f} h"
        )
        summary.append({
            "scale": "paper", "device": "H200", "measured": "no, arithmetic", "models": models,
            "seconds_a_model": round(3600 * hours / models, 2), "hours": round(hours, 2),
            "paper_hours_over_ours": speed_up(hours),
        })  # fmt: skip
    for row in summary:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    if not chosen.scale:
        save("cost", rows)
        save("cost_total", summary)
        where = device_name(device) + (", one core" if device.type == "cpu" else "")
        paper = next(row for row in summary if row["scale"] == "paper")
        write_verdicts([cost_verdict(paper, where)], published_folder() / "intro.json")


if __name__ == "__main__":
    main()
