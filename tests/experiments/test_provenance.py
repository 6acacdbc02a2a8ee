"""The commit that a run names is that of the code that trained it."""

import dataclasses
import subprocess

import pytest

from leancluster_core import TaskDistribution
from leancluster_core.experiments import TrainingConfig, provenance
from leancluster_core.experiments.provenance import commit
from leancluster_core.experiments.training import Trainer


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a package that provenance takes for its own."""
    inner = tmp_path / "package" / "experiments"
    inner.mkdir(parents=True)
    for file in (tmp_path / "README.md", inner.parent / "models.py", inner / "provenance.py"):
        file.write_text("first")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.setattr(provenance, "__file__", str(inner / "provenance.py"))
    commit.cache_clear()
    yield tmp_path
    commit.cache_clear()


@pytest.mark.parametrize(
    ("file", "mark"),
    [("package/experiments/provenance.py", "+"), ("package/models.py", "+"), ("README.md", "")],
)
def test_an_edit_anywhere_in_the_package_is_marked(checkout, file, mark):
    name = git(checkout, "rev-parse", "--short", "HEAD")
    assert commit() == name
    commit.cache_clear()
    (checkout / file).write_text("second")
    assert commit() == name + mark


def test_a_run_names_the_commit_that_it_began_with(checkout):
    task = TaskDistribution(n_points=12, n_features=2, n_clusters=3)
    config = TrainingConfig(task, n_steps=4, batch_size=2, seeds=(1,), n_validation_batches=1)
    began = git(checkout, "rev-parse", "--short", "HEAD")
    trainer = Trainer([dataclasses.replace(config, evaluate_every=2)], "cpu")
    (checkout / "package" / "models.py").write_text("second")
    git(checkout, "commit", "-a", "-m", "second")
    trainer.advance()
    (run,) = trainer.runs()
    assert run.provenance["commit"] == began != git(checkout, "rev-parse", "--short", "HEAD")
