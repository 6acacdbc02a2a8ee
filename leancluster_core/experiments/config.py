"""What a run is: ``TrainingConfig`` holds every setting of Algorithm 1; its key names the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from leancluster_core.checks import check_choice, check_flag, check_integer, check_number
from leancluster_core.embeddings import EMBEDDINGS
from leancluster_core.losses import REGULARIZERS
from leancluster_core.samplers import TaskDistribution

# Raised by hand when results of the same config would change by more than rounding.
NUMERICS_VERSION = 1

# The ten seeds of the authors' released code for the preceding paper (CTC).
PAPER_SEEDS = (
    153476998,
    235510766,
    205084180,
    129959864,
    149896109,
    140439608,
    145017219,
    162518970,
    245293503,
    152674004,
)

EMBEDDING_LABELS = {"onehot": "OH", "binary": "BN", "none": "NA"}
REGULARIZER_LABELS = {"entropy": "NE", "l2": "L2"}


@dataclass(frozen=True)
class Scale:
    """How much of the paper's work a scale does: the grids stay, tasks, steps and trials shrink.

    ``n_points`` and ``n_steps`` are shares of the paper's values, the others replace them.
    """

    n_points: float
    n_steps: float
    n_trials: int
    batch_size: int
    n_validation_batches: int
    evaluate_every: int
    summary: str


SCALES = {
    "smoke": Scale(1 / 8, 1 / 500, 2, 8, 2, 5, "n/8, 20 steps of 8 tasks, 2 trials: for tests"),
    "laptop": Scale(1 / 4, 0.3, 3, 32, 10, 50, "n/4, 3000 steps, 3 trials: two CPU cores"),
    "paper": Scale(1, 1, 10, 32, 10, 50, "the paper's n = 512, 10000 steps, 10 trials: a GPU"),
}


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of one run: Algorithm 1 on one task distribution, all its trials (Section 5).

    Write it with the paper's values and shrink it with :meth:`at_scale`.

    task: the distribution of training and validation tasks. embedding: "onehot", "binary", "none".
    regularizer: "entropy" or "l2"; penalty: tau > 0. learning_rate: Adam's initial one; it is
    multiplied by plateau_factor when the relative validation loss has not improved for more than
    plateau_patience evaluations (1.0 switches that off). n_steps: Adam steps, each on batch_size
    fresh tasks. seeds: one trial each. inverse_temperature: gamma. bias: biases in Q, K, V.
    gradient_clipping: largest gradient norm of a model, or None. n_validation_batches: batches of
    batch_size tasks that the relative loss is taken over, every evaluate_every steps.

    Raises ValueError or TypeError that name the field, the value and what is allowed.
    """

    task: TaskDistribution
    embedding: str = "binary"
    regularizer: str = "l2"
    penalty: float = 0.1
    learning_rate: float = 0.01
    n_steps: int = 10_000
    batch_size: int = 32
    seeds: tuple[int, ...] = PAPER_SEEDS
    inverse_temperature: float = 1.0
    bias: bool = False
    gradient_clipping: float | None = None
    n_validation_batches: int = 10
    evaluate_every: int = 50
    plateau_factor: float = 0.5
    plateau_patience: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.task, TaskDistribution):
            raise TypeError(f"task must be a TaskDistribution, got {self.task!r}")
        check_choice("embedding", self.embedding, EMBEDDINGS)
        check_choice("regularizer", self.regularizer, REGULARIZERS)
        check_flag("bias", self.bias)
        values: dict[str, Any] = {
            name: check_number(name, getattr(self, name), 0.0, above=True)
            for name in ("penalty", "learning_rate", "plateau_factor")
        }
        values["inverse_temperature"] = check_number(
            "inverse_temperature", self.inverse_temperature, 0.0
        )
        if self.gradient_clipping is not None:
            values["gradient_clipping"] = check_number(
                "gradient_clipping", self.gradient_clipping, 0.0, above=True
            )
        for name in ("n_steps", "batch_size", "n_validation_batches", "evaluate_every"):
            values[name] = check_integer(name, getattr(self, name), 1)
        values["plateau_patience"] = check_integer("plateau_patience", self.plateau_patience, 0)
        if self.plateau_factor > 1:
            raise ValueError(f"plateau_factor must be in (0, 1], got {self.plateau_factor}")
        if not isinstance(self.seeds, (tuple, list)):
            raise TypeError(f"seeds must be a tuple or list of integers, got {self.seeds!r}")
        seeds = tuple(check_integer("seeds", seed, 0) for seed in self.seeds)
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds must be distinct and at least one, got {self.seeds!r}")
        values["seeds"] = seeds
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def label(self) -> str:
        """The paper's name of the curve, as "BN:L2"."""
        return f"{EMBEDDING_LABELS[self.embedding]}:{REGULARIZER_LABELS[self.regularizer]}"

    @property
    def key(self) -> str:
        """Name of the run: a hash of the settings and of the version of the numerics."""
        content = {"config": self.to_dict(), "numerics": NUMERICS_VERSION}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self) | {"seeds": list(self.seeds)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingConfig:
        """Inverse of :meth:`to_dict`; ValueError for unknown fields and for a missing task."""
        _check_fields(cls, values)
        if "task" not in values:
            raise ValueError(f"{cls.__name__} needs the field 'task', got only {sorted(values)}")
        task = values["task"]
        if isinstance(task, dict):
            _check_fields(TaskDistribution, task)
            task = TaskDistribution(**task)
        return cls(**(values | {"task": task, "seeds": tuple(values.get("seeds", PAPER_SEEDS))}))

    def at_scale(self, scale: str) -> TrainingConfig:
        """This run at a scale of :data:`SCALES`: same setting, less work.

        Raises ValueError for an unknown scale.
        """
        check_choice("scale", scale, SCALES)
        if scale == "paper":
            return self
        share = SCALES[scale]
        n_points = max(self.task.n_clusters, round(self.task.n_points * share.n_points))
        return dataclasses.replace(
            self,
            task=dataclasses.replace(self.task, n_points=n_points),
            n_steps=max(1, round(self.n_steps * share.n_steps)),
            seeds=self.seeds[: share.n_trials],
            batch_size=min(self.batch_size, share.batch_size),
            n_validation_batches=min(self.n_validation_batches, share.n_validation_batches),
            evaluate_every=min(self.evaluate_every, share.evaluate_every),
        )


def _check_fields(cls: type, values: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        allowed = ", ".join(sorted(known))
        raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}; its fields are {allowed}")
