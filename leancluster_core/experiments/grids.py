"""The grids of the convergence figures: from lists of plain values to configs to one tidy frame.

A notebook turns its parameters into settings with :func:`grid`, these into configs with
:func:`curve_configs`, the configs into runs with :func:`figure_runs`, and the runs into the frame
that figures and claims read with :func:`curve_frame`. ``GRIDS`` holds the same grids for machines
that have no notebooks.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pandas as pd

from leancluster_core.checks import check_choice, check_flag
from leancluster_core.experiments.config import SCALES, TrainingConfig
from leancluster_core.experiments.paths import results_root
from leancluster_core.experiments.store import Run, Store
from leancluster_core.experiments.sweep import missing, time_for, train_all
from leancluster_core.experiments.timing import not_alternated, train_alternating
from leancluster_core.experiments.training import resolve_device
from leancluster_core.samplers import FAMILIES, TaskDistribution

Setting = dict[str, Any]

EMBEDDINGS = ("onehot", "binary", "none")
REGULARIZERS = ("entropy", "l2")

# The norm at which gradients are clipped where the paper clips them; it doesn't say which.
CLIPPING_NORM = 1.0

_TASK_FIELDS = {field.name for field in dataclasses.fields(TaskDistribution)}


def grid(**axes: Any) -> list[Setting]:
    """Every combination of the values: ``grid(penalty=[1.0, 0.1], n_features=4)`` has two.

    A list or tuple is an axis, anything else is the same in all settings; the last axis varies
    fastest. Names are the fields of TaskDistribution and TrainingConfig.
    """
    values = [list(v) if isinstance(v, (list, tuple)) else [v] for v in axes.values()]
    return [dict(zip(axes, combination, strict=True)) for combination in product(*values)]


def curve_configs(
    settings: Iterable[Setting],
    *,
    embeddings: Sequence[str] = EMBEDDINGS,
    regularizers: Sequence[str] = REGULARIZERS,
    scale: str = "paper",
) -> list[TrainingConfig]:
    """The curves of every setting (OH/BN/NA x NE/L2 by default) as configs at a scale, each once.

    Settings hold the paper's values. Raises ValueError for a name that is no field of
    TaskDistribution or TrainingConfig, and for values out of range.
    """
    check_choice("scale", scale, SCALES)
    configs = [
        _config({**setting, "embedding": embedding, "regularizer": regularizer}).at_scale(scale)
        for setting in settings
        for embedding in embeddings
        for regularizer in regularizers
    ]
    return list(dict.fromkeys(configs))


def _config(values: Setting) -> TrainingConfig:
    task = {name: value for name, value in values.items() if name in _TASK_FIELDS}
    others = {name: value for name, value in values.items() if name not in _TASK_FIELDS}
    return TrainingConfig.from_dict({**others, "task": task})


class NotTrainedYet(RuntimeError):
    """Runs of a figure are not stored, and ``LEANCLUSTER_TRAIN=never`` forbids to train them."""


def figure_runs(
    configs: Sequence[TrainingConfig],
    scale: str,
    *,
    paper_on_cpu: bool = False,
    weights: bool = False,
    taking_turns: bool = False,
) -> list[Run]:
    """The runs of configs, each once, from ``results/<scale>``; what is not there is trained now.

    Before that, a line on stderr says how many are stored, how many train, and about how long.
    weights: runs kept for their history alone are trained again. taking_turns: train so that
    elapsed times compare (:func:`timing.train_alternating`), again where stored runs' do not.

    Raises ValueError where training at scale "paper" would fall to a CPU, unless ``paper_on_cpu``,
    and NotTrainedYet where anything would have to train in an environment with
    ``LEANCLUSTER_TRAIN=never`` (as ``make book`` sets it).
    """
    check_choice("scale", scale, SCALES)
    check_flag("paper_on_cpu", paper_on_cpu)
    configs = list(dict.fromkeys(configs))
    store = Store(results_root() / scale)
    left = (not_alternated if taking_turns else missing)(configs, store, weights=weights)
    if left:
        expected = time_for(left, configs)
        if os.environ.get("LEANCLUSTER_TRAIN") == "never":
            raise NotTrainedYet(expected)
        if scale == "paper" and resolve_device("auto").type == "cpu" and not paper_on_cpu:
            raise ValueError(
                f"paper_on_cpu must be True to train at scale 'paper' without a GPU ({expected}), "
                "got False"
            )
        print(expected, file=sys.stderr, flush=True)
    train = train_alternating if taking_turns else train_all
    return train(configs, store=store, weights=weights)


def curve_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """All histories in one tidy frame: a row a config, trial and evaluation.

    Columns: the fields of the config and its task that a figure may vary ("initial_learning_rate"
    for the config's, since the history's "learning_rate" falls), the run's "key", the history.
    """
    return pd.concat([_labelled(run) for run in runs], ignore_index=True)


def _labelled(run: Run) -> pd.DataFrame:
    config = run.config
    labels = {
        **dataclasses.asdict(config.task),
        "embedding": config.embedding,
        "regularizer": config.regularizer,
        "penalty": config.penalty,
        "initial_learning_rate": config.learning_rate,
        "inverse_temperature": config.inverse_temperature,
        "bias": config.bias,
        "clipped": config.gradient_clipping is not None,
        "n_steps": config.n_steps,
        "n_trials": len(config.seeds),
        "key": config.key,
    }
    return run.history.assign(**labels)[[*labels, *run.history.columns]]


def _fig02(scale: str) -> list[TrainingConfig]:
    penalties = grid(n_features=4, penalty=[1.0, 0.1])
    dimensions = grid(n_features=[4, 16], penalty=0.25)
    return curve_configs(penalties + dimensions, scale=scale)


def _fig15(scale: str) -> list[TrainingConfig]:
    clusters = grid(n_features=[4, 32], penalty=[1.0, 0.1], n_clusters=[6, 10, 16, 25])
    clipped = grid(n_features=[4, 32], penalty=0.1, n_clusters=25, gradient_clipping=CLIPPING_NORM)
    return curve_configs(clusters, scale=scale) + curve_configs(
        clipped, embeddings=["onehot"], scale=scale
    )


def _fig17(scale: str) -> list[TrainingConfig]:
    settings = [
        setting
        for k, d in ((16, 16), (25, 32))
        for setting in grid(
            n_clusters=k,
            n_features=d,
            n_points=[256, 512, 1024],
            penalty=1.0,
            gradient_clipping=CLIPPING_NORM,
        )
    ]
    return curve_configs(
        settings, embeddings=["onehot", "binary"], regularizers=["l2"], scale=scale
    )


def _of(**axes: Any) -> Callable[[str], list[TrainingConfig]]:
    return lambda scale: curve_configs(grid(**axes), scale=scale)


# Section 6 of the specification: what each figure trains.
GRIDS: dict[str, Callable[[str], list[TrainingConfig]]] = {
    "fig02": _fig02,
    "fig04": _of(n_features=32, n_clusters=10, penalty=[1.0, 0.1], family=FAMILIES),
    "fig10": _of(n_features=[4, 32], penalty=[1.0, 0.25, 0.14, 0.1]),
    "fig11": _of(
        n_features=[4, 32], penalty=0.1, learning_rate=[0.001, 0.01, 0.1, 1.0], n_steps=5000
    ),
    "fig13": _of(n_features=[4, 32], penalty=0.1, n_points=[128, 256, 512, 1024]),
    "fig14": _of(penalty=[0.25, 0.1], n_features=[4, 8, 16, 32]),
    "fig15": _fig15,
    "fig16": _of(n_features=32, n_clusters=[6, 10], penalty=[1.0, 0.1], family=FAMILIES),
    "fig17": _fig17,
}


# Figures whose curves are drawn against elapsed time: train them with timing.train_alternating.
TIMED_FIGURES = ("fig17",)


def figure_configs(figure: str, scale: str = "paper") -> list[TrainingConfig]:
    """What a figure trains, at a scale, as its notebook does with its own parameters.

    Configs that figures share are equal, with the same key. Raises ValueError for a figure that
    trains nothing and for an unknown scale.
    """
    check_choice("figure", figure, GRIDS)
    check_choice("scale", scale, SCALES)
    return GRIDS[figure](scale)
