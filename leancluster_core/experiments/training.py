"""Algorithm 1: Adam on fresh random tasks, for all trials of one or several configs at once.

Every parameter carries a leading axis of models (configs x trials), and one batched step serves
them all. Gradients, Adam's moments, learning rates and non-finite losses stay per model, so a
trial's numbers depend on its seed alone (to float tolerance), whatever runs beside it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from leancluster_core.embeddings import code_width
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.provenance import commit, provenance
from leancluster_core.experiments.store import Run
from leancluster_core.experiments.streams import random_stream
from leancluster_core.kmeans import _lloyd
from leancluster_core.losses import REGULARIZERS, _SmoothedMinimum
from leancluster_core.models import ClusteringTransformer

# Steps whose tasks are drawn together, from one generator a trial. Part of the numerics.
TASK_BLOCK = 10

# Adam's defaults (Kingma and Ba, 2015).
BETAS, EPSILON = (0.9, 0.999), 1e-8

# An evaluation improves on the best one if it is lower by this share (as in ReduceLROnPlateau).
PLATEAU_THRESHOLD = 1e-4

# Entries of the point tokens that a CPU works on at once (4 MB in float32): they stay in its cache.
GROUP_ENTRIES = 2**20

# What configs may differ in and still train in one batch: these enter per model.
PER_MODEL = ("regularizer", "penalty", "learning_rate")


def batch_key(config: TrainingConfig) -> TrainingConfig:
    """Configs with equal batch keys can train together: they differ in PER_MODEL fields only."""
    return replace(config, regularizer="l2", penalty=1.0, learning_rate=1.0)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that "auto" stands for: CUDA where there is one, else the CPU.

    Raises ValueError for any other kind of device, and for CUDA where there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {str(device)!r}")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be 'auto' or 'cpu' on this machine, got {device!r}")
    return resolved


@dataclass
class TrainingState:
    """All that changes while a batch of M models trains; rows of every tensor are models.

    ``tensors`` has the parameters ("query", ...), Adam's moments ("query.mean", "query.square"),
    the learning rates, the plateau counters and the losses summed since the last evaluation.
    ``history`` has one (M, 3) tensor per evaluation: training loss, relative loss, learning rate.
    """

    tensors: dict[str, Tensor]
    step: int = 0
    elapsed: float = 0.0
    history: list[Tensor] = field(default_factory=list)
    evaluated: list[tuple[int, float]] = field(default_factory=list)


def initial_state(configs: Sequence[TrainingConfig], device: torch.device) -> TrainingState:
    """Fresh weights of all models; a trial's weights depend on its seed and its shape alone."""
    config = configs[0]
    tensors: dict[str, Tensor] = {}
    models = [
        _model(config, generator=random_stream(seed, "initialisation")) for seed in config.seeds
    ]
    for name, _ in models[0].named_parameters():
        trials = torch.stack([model.get_parameter(name).detach() for model in models])
        tensors[name] = trials.repeat(len(configs), *[1] * (trials.dim() - 1)).to(device)
        tensors[f"{name}.mean"] = torch.zeros_like(tensors[name])
        tensors[f"{name}.square"] = torch.zeros_like(tensors[name])
    rates = [c.learning_rate for c in configs for _ in c.seeds]
    tensors["learning_rate"] = torch.tensor(rates, device=device)
    tensors["best"] = torch.full_like(tensors["learning_rate"], math.inf)
    tensors["bad_evaluations"] = torch.zeros_like(tensors["learning_rate"])
    tensors["summed_loss"] = torch.zeros_like(tensors["learning_rate"])
    tensors["summed_steps"] = torch.zeros_like(tensors["learning_rate"])
    return TrainingState(tensors)


def _model(
    config: TrainingConfig,
    n_trials: int | None = None,
    generator: torch.Generator | None = None,
) -> ClusteringTransformer:
    return ClusteringTransformer(
        config.task.n_features,
        config.task.n_clusters,
        embedding=config.embedding,
        inverse_temperature=config.inverse_temperature,
        n_trials=n_trials,
        bias=config.bias,
        generator=generator,
    )


def _draw(
    config: TrainingConfig, purpose: str, index: int, shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Task columns of all trials: points (R, *shape, d, n), centers (R, *shape, d, k)."""
    draws = [
        config.task._sample(shape, random_stream(seed, purpose, index, device))
        for seed in config.seeds
    ]
    points, centers = (torch.stack(tensors).mT.contiguous() for tensors in zip(*draws, strict=True))
    return points, centers


def _column_distances(points: Tensor, centers: Tensor) -> Tensor:
    """Squared distances (..., k, n) of columns (..., d, n) and (..., d, k) in the unit cube.

    The product form: exact to a few eps * d there, and n*k*d numbers are never stored.
    """
    norms = centers.square().sum(-2).unsqueeze(-1) + points.square().sum(-2, keepdim=True)
    return norms - 2 * centers.mT @ points


class _Objective:
    """Smoothed loss of each model (Section 3): mean over its tasks of the sum over points."""

    def __init__(self, configs: Sequence[TrainingConfig], device: torch.device) -> None:
        """configs: one for each model."""
        penalties = torch.tensor([config.penalty for config in configs], device=device)
        self._parts = []
        for regularizer in REGULARIZERS:
            rows = [i for i, config in enumerate(configs) if config.regularizer == regularizer]
            if rows:
                models = torch.tensor(rows, device=device)
                self._parts.append((regularizer, models, penalties[models].view(-1, 1, 1, 1)))

    def __call__(self, distances: Tensor) -> Tensor:
        """distances: (M, tasks, k, n) -> (M,)."""
        if len(self._parts) == 1:
            ((regularizer, _, penalty),) = self._parts
            return _SmoothedMinimum.apply(distances, penalty, regularizer, -2).sum(-1).mean(-1)
        losses = distances.new_zeros(distances.shape[0])
        for regularizer, models, penalty in self._parts:
            minima = _SmoothedMinimum.apply(distances[models], penalty, regularizer, -2)
            losses = losses.index_copy(0, models, minima.sum(-1).mean(-1))
        return losses


@dataclass(frozen=True)
class _Group:
    """Models that a step computes at once: their rows of the state, and the tasks' rows."""

    models: slice
    trials: slice | Tensor
    model: ClusteringTransformer
    objective: _Objective

    def tasks(self, tensor: Tensor) -> Tensor:
        """Trials (R, ...) -> this group's models (M, ...): all configs see the same tasks."""
        return tensor[self.trials].contiguous()

    def predict(self, points: Tensor, centers: Tensor) -> Tensor:
        """Predicted centers as columns (M, tasks, d, k)."""
        codes = self.model.codes.mT.expand(*centers.shape[:-2], -1, -1)
        _, tokens = self.model.layer(points, torch.cat([centers, codes], -2))
        return tokens[..., : self.model.n_features, :]


class Trainer:
    """Trains a batch of configs from a state; :meth:`advance` goes to the next block of steps."""

    def __init__(
        self,
        configs: Sequence[TrainingConfig],
        device: str | torch.device = "auto",
        state: TrainingState | None = None,
    ) -> None:
        if len({batch_key(config) for config in configs}) != 1:
            raise ValueError(f"configs trained together may differ only in {', '.join(PER_MODEL)}")
        self.configs = list(configs)
        self.config = configs[0]
        self.device = resolve_device(device)
        self.state = state or initial_state(configs, self.device)
        self.state.tensors = {n: t.to(self.device) for n, t in self.state.tensors.items()}
        self.state.history = [rows.to(self.device) for rows in self.state.history]
        self.n_models = len(configs) * len(self.config.seeds)
        self._groups = list(self._make_groups())
        self._parameters = [name for name, _ in self._groups[0].model.named_parameters()]
        self._validation: list[tuple[Tensor, Tensor, Tensor]] | None = None
        commit()  # asked now and remembered: when training ends, the files may be others

    @property
    def done(self) -> bool:
        return self.state.step >= self.config.n_steps

    def _make_groups(self) -> Iterator[_Group]:
        """All models at once on a GPU; on a CPU, as many as its cache holds the tokens of."""
        task, n_trials = self.config.task, len(self.config.seeds)
        size = self.n_models
        if self.device.type == "cpu":
            width = task.n_features + code_width(task.n_clusters, self.config.embedding)
            size = max(1, GROUP_ENTRIES // (self.config.batch_size * task.n_points * width))
        for first in range(0, self.n_models, size):
            models = range(first, min(first + size, self.n_models))
            # Its random weights are overwritten below; the global generator is left alone.
            model = _model(self.config, len(models), torch.Generator()).to(self.device)
            for name, _ in list(model.named_parameters()):
                own = self.state.tensors[name][models.start : models.stop]
                setattr(model, name, torch.nn.Parameter(own))  # shares memory with the state
            rows = [m % n_trials for m in models]
            trials: slice | Tensor = slice(rows[0], rows[-1] + 1)
            if rows != list(range(rows[0], rows[-1] + 1)):
                trials = torch.tensor(rows, device=self.device)
            configs = [self.configs[m // n_trials] for m in models]
            objective = _Objective(configs, self.device)
            yield _Group(slice(models.start, models.stop), trials, model, objective)

    def advance(self) -> None:
        """Steps to the end of the current block of tasks, evaluating where it is due."""
        block, done = divmod(self.state.step, TASK_BLOCK)
        shape = (TASK_BLOCK, self.config.batch_size)
        points, centers = _draw(self.config, "training", block, shape, self.device)
        started = self._clock()
        for index in range(done, min(TASK_BLOCK, self.config.n_steps - block * TASK_BLOCK)):
            self._step(points[:, index], centers[:, index])
            self.state.step += 1
            if self.state.step % self.config.evaluate_every == 0 or self.done:
                self.state.elapsed += self._clock() - started
                self._evaluate()
                started = self._clock()
        self.state.elapsed += self._clock() - started

    def _clock(self) -> float:
        """Seconds, read when the device has done all that it was asked for until now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _step(self, points: Tensor, centers: Tensor) -> None:
        tensors = self.state.tensors
        gradients = {name: torch.empty_like(tensors[name]) for name in self._parameters}
        for group in self._groups:
            x, c = group.tasks(points), group.tasks(centers)
            losses = group.objective(_column_distances(x, group.predict(x, c)))
            own = torch.autograd.grad(losses.sum(), list(group.model.parameters()))
            for gradient, part in zip(gradients.values(), own, strict=True):
                gradient[group.models] = part
            tensors["summed_loss"][group.models] += losses.detach()
        tensors["summed_steps"] += 1
        with torch.no_grad():
            self._adam(gradients)

    def _adam(self, gradients: dict[str, Tensor]) -> None:
        """Adam with a learning rate and, if asked for, a clipped gradient for each model."""
        tensors = self.state.tensors
        if self.config.gradient_clipping is not None:
            squares = torch.stack([g.square().flatten(1).sum(1) for g in gradients.values()]).sum(0)
            shrink = (self.config.gradient_clipping / (squares.sqrt() + 1e-6)).clamp_max(1)
            gradients = {n: g * _per_model(shrink, g) for n, g in gradients.items()}
        step = self.state.step + 1
        corrections = 1 - BETAS[0] ** step, math.sqrt(1 - BETAS[1] ** step)
        rate = tensors["learning_rate"] / corrections[0]
        for name, gradient in gradients.items():
            mean, square = tensors[f"{name}.mean"], tensors[f"{name}.square"]
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            move = mean / (square.sqrt() / corrections[1]).add_(EPSILON)
            tensors[name].sub_(move.mul_(_per_model(rate, move)))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """One row of history, and the plateau rule of the learning rate (per model)."""
        tensors, config = self.state.tensors, self.config
        relative = self._relative_loss()
        training = tensors["summed_loss"] / tensors["summed_steps"]
        self.state.history.append(torch.stack([training, relative, tensors["learning_rate"]], 1))
        self.state.evaluated.append((self.state.step, self.state.elapsed))
        tensors["summed_loss"].zero_()
        tensors["summed_steps"].zero_()
        better = relative < tensors["best"] * (1 - PLATEAU_THRESHOLD)
        tensors["best"] = torch.where(better, relative, tensors["best"])
        bad = torch.where(better, 0, tensors["bad_evaluations"] + 1)
        reduce = bad > config.plateau_patience
        tensors["bad_evaluations"] = torch.where(reduce, 0, bad)
        rates = tensors["learning_rate"]
        tensors["learning_rate"] = torch.where(reduce, rates * config.plateau_factor, rates)

    def _relative_loss(self) -> Tensor:
        """Equation 20 for each model: (M,)."""
        if self._validation is None:
            self._validation = list(self._validation_tasks())
        ratios = torch.zeros(self.n_models, device=self.device)
        for points, centers, lloyd_loss in self._validation:
            for group in self._groups:
                x, c = group.tasks(points), group.tasks(centers)
                loss = _column_distances(x, group.predict(x, c)).amin(-2).sum(-1)
                ratios[group.models] += (loss / group.tasks(lloyd_loss)).mean(-1)
        return ratios / len(self._validation)

    def _validation_tasks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for index in range(self.config.n_validation_batches):
            shape = (self.config.batch_size,)
            points, centers = _draw(self.config, "validation", index, shape, self.device)
            lloyd = _lloyd(points.mT, centers.mT).mT
            yield points, centers, _column_distances(points, lloyd).amin(-2).sum(-1)

    def runs(self) -> list[Run]:
        """The finished runs, one a config."""
        n_trials = len(self.config.seeds)
        rows = torch.stack(self.state.history, 1).cpu()
        weights = {name: self.state.tensors[name].cpu() for name in self._parameters}
        facts = provenance(self.device)
        facts["models_in_batch"] = self.n_models
        result = []
        for index, config in enumerate(self.configs):
            models = slice(index * n_trials, (index + 1) * n_trials)
            frames = [
                _history(trial, rows[models][trial], self.state.evaluated)
                for trial in range(n_trials)
            ]
            history = pd.concat(frames, ignore_index=True)
            own = {name: tensor[models].clone() for name, tensor in weights.items()}
            result.append(Run(config, history, own, facts))
        return result


def _per_model(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def _history(trial: int, rows: Tensor, evaluated: list[tuple[int, float]]) -> pd.DataFrame:
    steps, seconds = zip(*evaluated, strict=True)
    columns = rows.double().numpy().T
    return pd.DataFrame(
        {
            "trial": trial,
            "step": steps,
            "elapsed": seconds,
            "training_loss": columns[0],
            "relative_loss": columns[1],
            "learning_rate": columns[2],
        }
    )


def train(
    config: TrainingConfig, *, device: str | torch.device = "auto", progress: bool = True
) -> Run:
    """Train all trials of a config (Algorithm 1) and return the run, without storing it.

    device: "auto" (CUDA where there is one), or a torch device. progress: show steps, rate and time
    left on stderr. History has one row a trial and evaluation: training_loss is the mean over the
    steps since the last evaluation of the smoothed loss of a task (a sum over its points);
    relative_loss is Equation 20 on the validation tasks; elapsed is seconds spent in training steps
    of the whole batch, without sampling and validation. A non-finite loss is stored as it is.

    Raises ValueError for a device that is not there.
    """
    trainer = Trainer([config], device)
    run_to_end(trainer, report=progress_line(config.label) if progress else None)
    return trainer.runs()[0]


def run_to_end(
    trainer: Trainer,
    *,
    report: Callable[[Trainer], None] | None = None,
    after_block: Callable[[Trainer], None] | None = None,
) -> None:
    """Advance until the last step; ``after_block`` may save, and may raise to stop."""
    while not trainer.done:
        trainer.advance()
        if report is not None:
            report(trainer)
        if after_block is not None:
            after_block(trainer)


def progress_line(title: str) -> Callable[[Trainer], None]:
    """A report on stderr: each second on a terminal, each minute in a log."""
    terminal = sys.stderr.isatty()
    started = shown = time.monotonic()
    first: int | None = None

    def report(trainer: Trainer) -> None:
        nonlocal shown, first
        first = trainer.state.step if first is None else first
        now = time.monotonic()
        if now - shown < (1 if terminal else 60) and not (terminal and trainer.done):
            return
        shown = now
        step, n_steps = trainer.state.step, trainer.config.n_steps
        rate = max(step - first, 1) / (now - started)
        left = (n_steps - step) / rate
        line = f"{title}: step {step}/{n_steps}, {rate:.1f} steps/s, {left:.0f} s left"
        end = "\n" if trainer.done or not terminal else "\r"
        print(f"{line:<79}", end=end, file=sys.stderr, flush=True)

    return report
