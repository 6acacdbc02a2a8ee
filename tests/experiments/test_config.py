"""Configs: validated when made, the same through JSON, named by what they ask for."""

import dataclasses
import json
import math

import pytest

from leancluster_core import TaskDistribution
from leancluster_core.experiments import PAPER_SEEDS, SCALES, TrainingConfig
from leancluster_core.experiments import config as config_module
from leancluster_core.experiments.grids import GRIDS, figure_configs

TASK = TaskDistribution(n_points=32, n_features=4, n_clusters=6)


@pytest.mark.parametrize("field,value,message", [
    ("embedding", "one-hot", "embedding must be one of 'onehot', 'binary', 'none', got 'one-hot'"),
    ("regularizer", "L2", "regularizer must be one of 'entropy', 'l2', got 'L2'"),
    ("penalty", 0.0, r"penalty must be in \(0, inf\), got 0"),
    ("penalty", math.inf, "penalty must be in"),
    ("learning_rate", -1, "learning_rate must be in"),
    ("learning_rate", math.nan, "learning_rate must be in"),
    ("n_steps", 0, r"n_steps must be in \[1, inf\), got 0"),
    ("batch_size", 0, "batch_size must be in"),
    ("inverse_temperature", -0.5, "inverse_temperature must be in"),
    ("inverse_temperature", math.inf, "inverse_temperature must be in"),
    ("gradient_clipping", 0.0, "gradient_clipping must be in"),
    ("evaluate_every", 0, "evaluate_every must be in"),
    ("n_validation_batches", 0, "n_validation_batches must be in"),
    ("plateau_factor", 1.5, r"plateau_factor must be in \(0, 1\], got 1.5"),
    ("plateau_patience", -1, "plateau_patience must be in"),
    ("seeds", (), "seeds must be distinct and at least one"),
    ("seeds", (3, 3), "seeds must be distinct"),
    ("seeds", (-1,), "seeds must be in"),
])  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(TASK, **{field: value})


@pytest.mark.parametrize("field,value", [
    ("n_steps", 10.0), ("n_steps", True), ("penalty", "0.1"), ("bias", 1), ("seeds", "12"),
    ("seeds", 12), ("seeds", (1.5,)), ("task", {"n_points": 32}),
])  # fmt: skip
def test_other_types_are_refused_by_name(field, value):
    with pytest.raises(TypeError, match=field):
        TrainingConfig(**({"task": TASK} | {field: value}))


def test_json_round_trip_keeps_the_key():
    config = TrainingConfig(TASK, gradient_clipping=1, seeds=[5, 7], penalty=1)
    text = json.dumps(config.to_dict())
    assert TrainingConfig.from_dict(json.loads(text)) == config
    assert TrainingConfig.from_dict(json.loads(text)).key == config.key


def test_equal_settings_have_equal_keys_whatever_their_number_types():
    assert TrainingConfig(TASK, penalty=1).key == TrainingConfig(TASK, penalty=1.0).key
    assert TrainingConfig(TASK, penalty=1) == TrainingConfig(TASK, penalty=1.0)


def test_every_field_and_the_version_of_the_numerics_change_the_key(monkeypatch):
    config = TrainingConfig(TASK)
    others = {
        "task": dataclasses.replace(TASK, scale=0.2), "embedding": "none",
        "regularizer": "entropy", "penalty": 0.2, "learning_rate": 0.1, "n_steps": 7,
        "batch_size": 7, "seeds": (1,), "inverse_temperature": 2.0, "bias": True,
        "gradient_clipping": 1.0, "n_validation_batches": 7, "evaluate_every": 7,
        "plateau_factor": 0.7, "plateau_patience": 7,
    }  # fmt: skip
    assert set(others) == {field.name for field in dataclasses.fields(config)}
    keys = {dataclasses.replace(config, **{name: value}).key for name, value in others.items()}
    assert len(keys | {config.key}) == len(others) + 1
    before = config.key
    monkeypatch.setattr(config_module, "NUMERICS_VERSION", config_module.NUMERICS_VERSION + 1)
    assert config.key != before


def test_the_key_is_the_same_in_every_process_and_release():
    """A change of this value throws away all stored runs: do it knowingly."""
    assert TrainingConfig(TaskDistribution()).key == "697f15d75c59cb61"


def test_unknown_fields_are_refused_by_name():
    values = TrainingConfig(TASK).to_dict()
    with pytest.raises(ValueError, match="TrainingConfig has no field 'gama'"):
        TrainingConfig.from_dict(values | {"gama": 1.0})
    with pytest.raises(ValueError, match="TaskDistribution has no field 'n'"):
        TrainingConfig.from_dict(values | {"task": values["task"] | {"n": 1}})
    with pytest.raises(ValueError, match=r"needs the field 'task', got only \['penalty'\]"):
        TrainingConfig.from_dict({"penalty": 0.1})


def test_labels_are_the_papers():
    labels = [TrainingConfig(TASK, e, r).label for e in ("onehot", "binary", "none")
              for r in ("entropy", "l2")]  # fmt: skip
    assert labels == ["OH:NE", "OH:L2", "BN:NE", "BN:L2", "NA:NE", "NA:L2"]


def test_scales_shrink_the_work_and_keep_the_setting():
    paper = TrainingConfig(TaskDistribution(n_features=32, n_clusters=10), penalty=0.25)
    assert paper.at_scale("paper") == paper
    laptop = paper.at_scale("laptop")
    assert (laptop.task.n_points, laptop.n_steps, laptop.batch_size) == (128, 3000, 32)
    assert laptop.seeds == PAPER_SEEDS[:3]
    for scale in SCALES:
        config = paper.at_scale(scale)
        assert (config.task.n_features, config.task.n_clusters) == (32, 10)
        assert (config.penalty, config.label) == (0.25, paper.label)
    with pytest.raises(ValueError, match="scale must be one of 'smoke', 'laptop', 'paper'"):
        paper.at_scale("tiny")


def test_scales_never_ask_for_fewer_points_than_clusters():
    task = TaskDistribution(n_points=64, n_clusters=25)
    assert TrainingConfig(task).at_scale("smoke").task.n_points == 25


def test_figures_cover_the_papers_settings_and_share_what_is_equal():
    grids = {figure: figure_configs(figure, "laptop") for figure in GRIDS}
    assert all(len(set(configs)) == len(configs) for configs in grids.values())
    settings = {
        (c.task, c.penalty, c.learning_rate, c.n_steps)
        for configs in grids.values()
        for c in configs
        if c.gradient_clipping is None
    }
    assert len(settings) == 54  # the specification's count
    assert len(set(grids["fig02"]) & set(grids["fig10"])) == 18
