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
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from leancluster_core.checks import check_choice, check_integer
from leancluster_core.experiments.config import SCALES, TrainingConfig
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
        if not isinstance(checksums, dict):
            raise _corrupt(folder / "provenance.json", "holds no checksums")
        for name in RUN_FILES:
            path = folder / name
            if not path.exists():
                if name == "weights.safetensors":
                    continue
                raise _corrupt(path, "is missing")
            if name not in checksums:
                raise _corrupt(path, "has no checksum")
            content = _json(facts).encode() if name == "provenance.json" else path.read_bytes()
            if _sha256(content) != checksums[name]:
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

    def checkpoint(self, configs: Iterable[TrainingConfig]) -> Path:
        """The file of the checkpoint of configs that train together, in whatever order."""
        keys = sorted(config.key for config in configs)
        return self._hidden("checkpoints") / f"{_sha256(' '.join(keys).encode())[:16]}.safetensors"

    def save_checkpoint(
        self, configs: Sequence[TrainingConfig], tensors: dict[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Replace the checkpoint of configs that train together; one file, so that they stay at
        one step. A save that is killed leaves the old one readable.

        facts: plain values, with "step".
        """
        facts = facts | {"keys": [config.key for config in configs]}
        path = self.checkpoint(configs)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        facts_text = json.dumps(facts)
        digest = _sha256(save(tensors) + facts_text.encode())
        new = path.with_suffix(f".{os.getpid()}.tmp")
        with new.open("wb") as file:
            file.write(save(tensors, {"facts": facts_text, "sha256": digest}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)

    def find_checkpoint(self, config: TrainingConfig) -> tuple[Path, int] | None:
        """File and step of the checkpoint that has most steps of this config, or None.

        Warns of a file that does not say whose it is, and goes on as if it were not there.
        """
        found = [
            (facts["step"], path)
            for path, facts in self.checkpoints()
            if config.key in facts["keys"]
        ]
        return max(found)[::-1] if found else None

    def checkpoints(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Files of all checkpoints, with "step" and "keys" of their configs."""
        for path in sorted(self.root.glob(".checkpoints/*.safetensors")):
            try:
                facts = _checkpoint_facts(path)
            except FileNotFoundError:
                continue  # its runs have been stored meanwhile
            except (OSError, ValueError, KeyError, TypeError) as error:
                # Not an error: it would stop all the configs that don't need this file.
                warnings.warn(f"{path} cannot be read ({error!r}); delete it", stacklevel=2)
                continue
            yield path, facts

    def discard_checkpoints(self, configs: Iterable[TrainingConfig]) -> None:
        """Remove the checkpoints of configs that have just been stored, unless others need them."""
        keys = {config.key for config in configs}
        for path, facts in self.checkpoints():
            stored = all((self.root / key).is_dir() for key in facts["keys"])
            if stored and not keys.isdisjoint(facts["keys"]):
                for leftover in path.parent.glob(f"{path.stem}.*"):
                    leftover.unlink(missing_ok=True)


def _checkpoint_facts(path: Path) -> dict[str, Any]:
    """Facts of a checkpoint from its header alone, which can be read even if the rest is damaged.

    For looking around only: nothing is checked (:func:`read_checkpoint`). Raises OSError,
    ValueError, KeyError or TypeError for a file without such a header.
    """
    with path.open("rb") as file:
        # Eight bytes say how long the header is; what is no checkpoint may say anything.
        size = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
        facts = json.loads(json.loads(file.read(size))["__metadata__"]["facts"])
    return {"step": int(facts["step"]), "keys": list(facts["keys"])}


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint. Raises CorruptRunError if the file was changed."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts_text = metadata["facts"]
        facts = json.loads(facts_text)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CorruptRunError(f"{path} cannot be read ({error}); delete it to start over") from None
    if _sha256(save(tensors) + facts_text.encode()) != metadata.get("sha256"):
        raise CorruptRunError(
            f"{path} is not as it was written (checksum); delete it to start over"
        )
    return tensors, facts


def pack(configs: Iterable[TrainingConfig], store: Store, scale: str, archive: Path) -> int:
    """Write the stored runs of configs into a tar file, as <scale>/<key>/...; returns how many.

    Each is checked first: CorruptRunError as by :meth:`Store.load`, and an archive that was there
    before stays as it was.
    """
    check_choice("scale", scale, SCALES)
    count = 0
    new = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(new, "w") as tar:
            for config in configs:
                if store.load(config) is not None:
                    folder = store.folder(config)
                    for path in sorted(folder.iterdir()):
                        if path.name in RUN_FILES:
                            tar.add(path, f"{scale}/{config.key}/{path.name}")
                    count += 1
        os.replace(new, archive)
    finally:
        new.unlink(missing_ok=True)
    return count


def unpack(archive: Path, results: Path) -> tuple[int, int]:
    """Read runs from a tar file of :func:`pack` into the stores below ``results``.

    Returns how many are new and how many were there already. These stay as they are, except that
    weights that were not kept are filled in (and count as new) if the histories show that they are
    of the same training, times aside. Each run is checked before it is taken over.

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
                wanted = _wanted(run, target)
                if wanted is None:
                    old += 1
                else:
                    target.save(wanted)
                    new += 1
    return new, old


def _wanted(run: Run, target: Store) -> Run | None:
    """What a store lacks of an unpacked run: all of it, the weights of its own run, or nothing."""
    if run.config not in target:
        return run
    if run.weights is None or target.has_weights(run.config):
        return None
    own = target.load(run.config)
    if own is None or not _without_times(own).equals(_without_times(run)):
        return None
    return replace(own, weights=run.weights)


def _without_times(run: Run) -> pd.DataFrame:
    return run.history.drop(columns="elapsed")


def _extract(archive: Path, target: Path) -> None:
    scales, files = "|".join(SCALES), "|".join(map(re.escape, RUN_FILES))
    name = re.compile(rf"({scales})/[0-9a-f]{{16}}/({files})")
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
    except (CorruptRunError, ValueError, TypeError) as error:
        raise CorruptRunError(f"{archive} is damaged: {folder.name}: {error}") from None
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
