"""The run store: one folder a run, written whole or not at all, checked when read.

    <root>/<key>/config.json  history.parquet  weights.safetensors  provenance.json
    <root>/.checkpoints/  .locks/  .writing/     while runs train

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
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
            generator=torch.Generator(),  # overwritten below; the global one is left alone
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
        folder, scratch = self.folder(run.config), self._hidden("writing")
        new = Path(tempfile.mkdtemp(dir=scratch, prefix=f"{run.config.key}-"))
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
            folder.rename(Path(tempfile.mkdtemp(dir=scratch, prefix=f"{run.config.key}-")) / "old")
        new.rename(folder)
        for leftover in scratch.glob(f"{run.config.key}-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def lock(self, config: TrainingConfig) -> FileLock:
        """Held by the process that trains this config; freed by the system if that process dies."""
        return FileLock(self._hidden("locks") / config.key)

    def _hidden(self, name: str) -> Path:
        folder = self.root / f".{name}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def save_checkpoint(
        self, configs: Sequence[TrainingConfig], tensors: dict[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Replace the checkpoint of configs that train together; one file, so that they stay at
        one step. A save that is killed leaves the old one readable.

        tensors: name -> (configs * trials, ...); facts: plain values, with "step".
        """
        facts = facts | {"keys": [config.key for config in configs]}
        name = _sha256(" ".join(facts["keys"]).encode())[:16]
        folder = self._hidden("checkpoints")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        facts_text = json.dumps(facts)
        digest = _sha256(save(tensors) + facts_text.encode())
        new = folder / f"{name}.{os.getpid()}.tmp"
        with new.open("wb") as file:
            file.write(save(tensors, {"facts": facts_text, "sha256": digest}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / f"{name}.safetensors")

    def find_checkpoint(self, config: TrainingConfig) -> tuple[Path, int] | None:
        """File and step of the checkpoint that has most steps of this config, or None."""
        found = [
            (facts["step"], path)
            for path, facts in self._checkpoints()
            if config.key in facts["keys"]
        ]
        return max(found)[::-1] if found else None

    def _checkpoints(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for path in sorted(self.root.glob(".checkpoints/*.safetensors")):
            try:
                yield path, read_checkpoint(path, header_only=True)[1]
            except FileNotFoundError:
                continue  # its runs have been stored meanwhile

    def discard_checkpoints(self, configs: Iterable[TrainingConfig]) -> None:
        """Remove the checkpoints of configs that have just been stored, unless others need them."""
        keys = {config.key for config in configs}
        for path, facts in self._checkpoints():
            stored = all((self.root / key).is_dir() for key in facts["keys"])
            if stored and not keys.isdisjoint(facts["keys"]):
                for leftover in path.parent.glob(f"{path.stem}.*"):
                    leftover.unlink(missing_ok=True)


def read_checkpoint(
    path: Path, *, header_only: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint. Raises CorruptRunError if the file was changed."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if not header_only:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts_text = metadata["facts"]
        facts = json.loads(facts_text)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CorruptRunError(f"{path} cannot be read ({error}); delete it to start over") from None
    if not header_only and _sha256(save(tensors) + facts_text.encode()) != metadata.get("sha256"):
        raise CorruptRunError(
            f"{path} is not as it was written (checksum); delete it to start over"
        )
    return tensors, facts


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
    results.mkdir(parents=True, exist_ok=True)
    new = old = 0
    with tempfile.TemporaryDirectory(dir=results, prefix=".unpacking-") as scratch:
        _extract(archive, Path(scratch))
        for folder in sorted(Path(scratch).glob("*/*")):
            run = _read_unpacked(folder, archive)
            target = Store(results / folder.parent.name)
            with target.lock(run.config):
                if run.config in target and (target.has_weights(run.config) or not run.weights):
                    old += 1
                else:
                    target.save(run)
                    new += 1
    return new, old


def _extract(archive: Path, target: Path) -> None:
    name = re.compile(rf"[a-z]+/[0-9a-f]{{16}}/({'|'.join(map(re.escape, RUN_FILES))})")
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if not member.isfile() or not name.fullmatch(member.name):
                    raise ValueError(
                        f"{archive} must hold runs of a store only, got {member.name!r}"
                    )
                tar.extract(member, target, filter="data")
    except tarfile.TarError as error:
        raise CorruptRunError(f"{archive} cannot be read ({error}); copy it again") from None


def _read_unpacked(folder: Path, archive: Path) -> Run:
    try:
        config = TrainingConfig.from_dict(_read_json(folder / "config.json"))
        run = Store(folder.parent).load(config) if config.key == folder.name else None
    except CorruptRunError as error:
        raise CorruptRunError(f"{archive} is damaged: {error}") from None
    if run is None:
        raise CorruptRunError(
            f"{archive} is damaged: {folder.name}/config.json has the key {config.key}"
        )
    return run


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
