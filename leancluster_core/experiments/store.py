"""The run store: one folder a run, written whole or not at all, checked when read.

    <root>/<key>/config.json  history.parquet  weights.safetensors  provenance.json
    <root>/<key>.partial/checkpoint.safetensors   while it trains

provenance.json holds checksums of all files, itself included: a torn, edited or missing file is
reported by name and never read as data. Only the weights may be left out, of a run that is kept for
its history.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from leancluster_core.checks import check_integer
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.models import ClusteringTransformer

HISTORY_COLUMNS = ("trial", "step", "elapsed", "training_loss", "relative_loss", "learning_rate")

RUN_FILES = ("config.json", "history.parquet", "provenance.json", "weights.safetensors")


class CorruptRunError(RuntimeError):
    """A file of the store is torn, edited or missing; the message names it and says what to do."""


@dataclass(frozen=True)
class Run:
    """A finished run: what was asked for, what came out, and how it was made.

    history: tidy frame with the columns of HISTORY_COLUMNS, one row a trial and evaluation.
    weights: parameter name -> (trials, ...), or None where the store keeps the history alone.

    Raises ValueError for a history with other columns, or with a trial's step more than once.
    """

    config: TrainingConfig
    history: pd.DataFrame
    weights: dict[str, Tensor] | None
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        columns = tuple(self.history.columns)
        if columns != HISTORY_COLUMNS:
            raise ValueError(f"history must have the columns {HISTORY_COLUMNS}, got {columns}")
        repeated = self.history.duplicated(["trial", "step"])
        if repeated.any():
            trial, step = self.history.loc[repeated, ["trial", "step"]].iloc[0]
            raise ValueError(
                f"history must hold each step once, got step {step} of trial {trial} twice"
            )

    def model(self, trial: int | None = None) -> ClusteringTransformer:
        """The trained model of one trial, or of all trials (with a leading trial axis).

        Raises ValueError for a trial that is not there, LookupError if the weights were not kept.
        """
        config, n_trials = self.config, len(self.config.seeds)
        if self.weights is None:
            raise LookupError(
                f"the weights of run {config.key} ({config.label}) were not kept; "
                "train it again with train(config)"
            )
        if trial is not None:
            trial = check_integer("trial", trial, 0, n_trials - 1)
        model = ClusteringTransformer(
            config.task.n_features,
            config.task.n_clusters,
            embedding=config.embedding,
            inverse_temperature=config.inverse_temperature,
            n_trials=n_trials if trial is None else None,
            bias=config.bias,
        )
        state = self.weights if trial is None else {n: w[trial] for n, w in self.weights.items()}
        model.load_state_dict(state)
        return model.requires_grad_(False)


@dataclass(frozen=True)
class Store:
    """Runs on disk below ``root`` (made when needed)."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))

    def folder(self, config: TrainingConfig) -> Path:
        return self.root / config.key

    def __contains__(self, config: TrainingConfig) -> bool:
        return self.folder(config).is_dir()

    def has_weights(self, config: TrainingConfig) -> bool:
        return (self.folder(config) / "weights.safetensors").exists()

    def load(self, config: TrainingConfig) -> Run | None:
        """The stored run, or None. Raises CorruptRunError for a file not as it was written."""
        if config not in self:
            return None
        folder = self.folder(config)
        facts = _read_json(folder / "provenance.json")
        checksums = facts.pop("sha256", None)
        if not isinstance(checksums, dict) or not set(RUN_FILES[:3]) <= set(checksums):
            raise _corrupt(folder / "provenance.json", "holds no checksums")
        for name, expected in checksums.items():
            path = folder / name
            if name == "weights.safetensors" and not path.exists():
                continue
            if name != "provenance.json" and not path.exists():
                raise _corrupt(path, "is missing")
            content = _json(facts).encode() if name == "provenance.json" else path.read_bytes()
            if _sha256(content) != expected:
                raise _corrupt(path, "is not as it was written (checksum)")
        if TrainingConfig.from_dict(_read_json(folder / "config.json")) != config:
            raise _corrupt(folder / "config.json", f"is not the config of key {config.key}")
        history = pd.read_parquet(folder / "history.parquet")
        weights = folder / "weights.safetensors"
        return Run(config, history, load_file(weights) if weights.exists() else None, facts)

    def save(self, run: Run) -> None:
        """Write a run; it is there whole or, if this process dies meanwhile, not at all."""
        folder = self.folder(run.config)
        # What a save that is killed leaves behind lies beside the checkpoint and goes with it.
        scratch = self._partial(run.config)
        scratch.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=scratch, prefix="new-"))
        new.chmod(0o755)
        _write(new / "config.json", _json(run.config.to_dict()))
        run.history.to_parquet(new / "history.parquet", index=False)
        if run.weights is not None:
            contiguous = {name: tensor.contiguous() for name, tensor in run.weights.items()}
            save_file(contiguous, new / "weights.safetensors")
        checksums = {path.name: _sha256(path.read_bytes()) for path in sorted(new.iterdir())}
        checksums["provenance.json"] = _sha256(_json(run.provenance).encode())
        _write(new / "provenance.json", _json(run.provenance | {"sha256": checksums}))
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(dir=scratch, prefix="old-")) / "run")
        new.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)

    def lock(self, config: TrainingConfig) -> FileLock:
        """Held by the process that trains this config; freed by the system if that process dies."""
        self.root.mkdir(parents=True, exist_ok=True)
        return FileLock(self.root / f".{config.key}.lock")

    def _partial(self, config: TrainingConfig) -> Path:
        return self.root / f"{config.key}.partial"

    def save_checkpoint(
        self, config: TrainingConfig, tensors: dict[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Replace the config's checkpoint; a save that is killed leaves the old one readable."""
        path = self._partial(config) / "checkpoint.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        facts_text = json.dumps(facts)
        digest = _sha256(save(tensors) + facts_text.encode())
        content = save(tensors, {"facts": facts_text, "sha256": digest})
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)

    def load_checkpoint(
        self, config: TrainingConfig
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The config's last checkpoint, or None. Raises CorruptRunError if it was changed."""
        path = self._partial(config) / "checkpoint.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _corrupt(path, f"cannot be read ({error})") from None
        facts_text = metadata.get("facts", "")
        if _sha256(save(tensors) + facts_text.encode()) != metadata.get("sha256"):
            raise _corrupt(path, "is not as it was written (checksum)")
        return tensors, json.loads(facts_text)


def pack(runs: Iterable[tuple[Store, TrainingConfig]], archive: Path) -> int:
    """Write the stored runs into a tar file, as <store's name>/<key>/...; returns how many.

    Each is checked first: CorruptRunError as by :meth:`Store.load`.
    """
    count = 0
    with tarfile.open(archive, "w") as tar:
        for store, config in runs:
            if store.load(config) is not None:
                folder = store.folder(config)
                for path in sorted(folder.iterdir()):
                    tar.add(path, f"{store.root.name}/{config.key}/{path.name}")
                count += 1
    return count


def unpack(archive: Path, results: Path) -> tuple[int, int]:
    """Read runs from a tar file of :func:`pack` into the stores below ``results``.

    Returns how many are new and how many were there already (these stay as they are, except that
    weights that were not kept are filled in). Each run is checked before it is taken over.

    Raises CorruptRunError for a run that is not as it was written, ValueError for other content.
    """
    name = re.compile(rf"[a-z]+/[0-9a-f]{{16}}/({'|'.join(map(re.escape, RUN_FILES))})")
    results.mkdir(parents=True, exist_ok=True)
    new = old = 0
    with (
        tarfile.open(archive) as tar,
        tempfile.TemporaryDirectory(dir=results, prefix=".unpacking-") as scratch,
    ):
        for member in tar:
            if not member.isfile() or not name.fullmatch(member.name):
                raise ValueError(f"{archive} must hold runs of a store only, got {member.name!r}")
            tar.extract(member, scratch, filter="data")
        for folder in sorted(Path(scratch).glob("*/*")):
            source, target = Store(folder.parent), Store(results / folder.parent.name)
            values = _read_json(folder / "config.json")
            config = TrainingConfig.from_dict(values)
            if config.key != folder.name:
                raise _corrupt(folder / "config.json", f"is not the config of key {folder.name}")
            run = source.load(config)
            assert run is not None  # its folder has its key
            with target.lock(config):
                if config in target and (target.has_weights(config) or run.weights is None):
                    old += 1
                    continue
                target.save(run)
                new += 1
    return new, old


def _corrupt(path: Path, what: str) -> CorruptRunError:
    return CorruptRunError(f"{path} {what}; delete {path.parent} to train this run again")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _json(content: object) -> str:
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _corrupt(path, f"cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise _corrupt(path, "is not a JSON object")
    return content
