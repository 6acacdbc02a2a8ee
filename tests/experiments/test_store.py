"""The run store: what is read is what was written, or an error that names the file."""

import dataclasses
import io
import json
import tarfile

import pandas as pd
import pytest
import torch

from leancluster_core import TaskDistribution
from leancluster_core.experiments import Run, Store, TrainingConfig, train
from leancluster_core.experiments.store import (
    RUN_FILES,
    CorruptRunError,
    pack,
    read_checkpoint,
    unpack,
)

CONFIG = TrainingConfig(
    TaskDistribution(n_points=12, n_features=2, n_clusters=3),
    n_steps=4, batch_size=2, seeds=(1, 2), n_validation_batches=1, evaluate_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return train(CONFIG, device="cpu", progress=False)


@pytest.fixture
def store(tmp_path, run):
    store = Store(tmp_path / "laptop")
    store.save(run)
    return store


def test_a_run_comes_back_as_it_was(store, run):
    found = store.load(CONFIG)
    assert found.config == CONFIG and found.provenance == run.provenance
    pd.testing.assert_frame_equal(found.history, run.history, check_exact=True)
    assert found.weights.keys() == run.weights.keys()
    assert all(torch.equal(found.weights[name], run.weights[name]) for name in run.weights)
    assert sorted(path.name for path in store.folder(CONFIG).iterdir()) == sorted(RUN_FILES)


def test_what_is_not_there_is_none(store):
    other = dataclasses.replace(CONFIG, n_steps=5)
    assert CONFIG in store and other not in store
    assert store.load(other) is None and store.find_checkpoint(other) is None


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("damage", ["torn", "edited", "missing"])
def test_a_damaged_file_is_named_and_never_read(store, name, damage):
    path = store.folder(CONFIG) / name
    content = path.read_bytes()
    if damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "edited":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.unlink()
    if (name, damage) == ("weights.safetensors", "missing"):  # kept for its history
        assert store.load(CONFIG).weights is None and not store.has_weights(CONFIG)
        with pytest.raises(LookupError, match=f"weights of run {CONFIG.key}"):
            store.load(CONFIG).model()
        return
    with pytest.raises(CorruptRunError, match=rf"{name} .*; delete .* to train this run again"):
        store.load(CONFIG)


def test_weights_of_which_nothing_is_known_are_never_read(store, run):
    """Put back beside a run that was stored without them: they may be any."""
    weights = store.folder(CONFIG) / "weights.safetensors"
    content = weights.read_bytes()
    store.save(dataclasses.replace(run, weights=None))
    assert store.load(CONFIG).weights is None
    weights.write_bytes(content)
    with pytest.raises(CorruptRunError, match=r"weights\.safetensors has no checksum; delete"):
        store.load(CONFIG)


def test_a_plausible_edit_of_each_text_is_seen(store):
    """Valid JSON with another number in it."""
    for name, old, new in (
        ("config.json", '"penalty": 0.1', '"penalty": 0.2'),
        ("provenance.json", '"numerics": 1', '"numerics": 0'),
    ):
        path = store.folder(CONFIG) / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(CorruptRunError, match=f"{name} is not as it was written"):
            store.load(CONFIG)
        path.write_text(text)
    assert store.load(CONFIG) is not None


def test_a_folder_of_another_config_is_not_taken(store):
    other = dataclasses.replace(CONFIG, penalty=0.2)
    store.folder(CONFIG).rename(store.folder(other))
    with pytest.raises(CorruptRunError, match=f"config.json is not the config of key {other.key}"):
        store.load(other)


def test_saving_again_replaces_the_run(store, run):
    again = dataclasses.replace(run, provenance=run.provenance | {"note": "second"})
    store.save(again)
    assert store.load(CONFIG).provenance["note"] == "second"
    assert not list((store.root / ".writing").iterdir())


def test_a_save_that_dies_leaves_the_old_run(store, run, monkeypatch):
    def die(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("leancluster_core.experiments.store.save_file", die)
    with pytest.raises(KeyboardInterrupt):
        store.save(run)
    monkeypatch.undo()
    assert store.load(CONFIG) is not None
    store.save(run)
    assert not list((store.root / ".writing").iterdir())


def test_non_finite_losses_are_stored_as_they_are(tmp_path, run):
    history = run.history.assign(training_loss=[float("nan")] * 2 + [float("inf")] * 2)
    Store(tmp_path).save(dataclasses.replace(run, history=history))
    pd.testing.assert_frame_equal(Store(tmp_path).load(CONFIG).history, history)


def test_a_history_with_repeated_or_missing_columns_or_rows_is_refused(run):
    """S5.3: a step that stands twice would count twice."""
    twice = pd.concat([run.history, run.history.iloc[[1]]])
    with pytest.raises(ValueError, match="each step once, got step 4 of trial 0 twice"):
        Run(CONFIG, twice, None, {})
    with pytest.raises(ValueError, match="history must have the columns"):
        Run(CONFIG, run.history.drop(columns="elapsed"), None, {})


def test_models_of_one_and_of_all_trials_agree(run):
    points, centers = CONFIG.task.sample((2, 3), generator=torch.Generator().manual_seed(0))
    together = run.model()(points, centers)
    for trial in range(2):
        alone = run.model(trial)
        torch.testing.assert_close(alone(points[trial], centers[trial]), together[trial])
        assert not any(p.requires_grad for p in alone.parameters())
    with pytest.raises(ValueError, match=r"trial must be in \[0, 1\], got 2"):
        run.model(2)


# ---- checkpoints


def state(value):
    return {"query": torch.full((4, 3), float(value)), "best": torch.tensor([1.0, 2.0, 3.0, 4.0])}


def test_checkpoints_come_back_and_the_newest_is_found(tmp_path):
    store, other = Store(tmp_path), dataclasses.replace(CONFIG, penalty=0.2)
    store.save_checkpoint([CONFIG, other], state(1), {"step": 10, "evaluated": [(2, 0.5)]})
    store.save_checkpoint([CONFIG], state(2), {"step": 20})
    path, step = store.find_checkpoint(CONFIG)
    assert step == 20
    assert torch.equal(read_checkpoint(path)[0]["query"], state(2)["query"])
    path, step = store.find_checkpoint(other)
    tensors, facts = read_checkpoint(path)
    assert step == facts["step"] == 10 and facts["evaluated"] == [[2, 0.5]]
    assert facts["keys"] == [CONFIG.key, other.key]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(1).items())


def test_checkpoints_go_when_all_their_runs_are_stored(store):
    other = dataclasses.replace(CONFIG, penalty=0.2)
    store.save_checkpoint([CONFIG, other], state(1), {"step": 10})
    store.save_checkpoint([CONFIG], state(1), {"step": 10})
    store.discard_checkpoints([CONFIG])
    assert store.find_checkpoint(CONFIG)[0] == store.find_checkpoint(other)[0]
    assert len(list((store.root / ".checkpoints").iterdir())) == 1


def test_a_checkpoint_whose_save_dies_stays_readable(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.save_checkpoint([CONFIG], state(1), {"step": 10})

    def die(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("leancluster_core.experiments.store.os.fsync", die)
    with pytest.raises(KeyboardInterrupt):
        store.save_checkpoint([CONFIG], state(2), {"step": 20})
    path, step = store.find_checkpoint(CONFIG)
    assert step == 10 and torch.equal(read_checkpoint(path)[0]["query"], state(1)["query"])


@pytest.mark.parametrize("damage", ["torn", "edited", "empty", "facts"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    store = Store(tmp_path)
    store.save_checkpoint([CONFIG], state(1), {"step": 10})
    path, _ = store.find_checkpoint(CONFIG)
    content = path.read_bytes()
    path.write_bytes({
        "torn": content[:-5], "empty": b"", "edited": content[:-1] + b"\x01",
        "facts": content.replace(rb'\"step\": 10', rb'\"step\": 11'),
    }[damage])  # fmt: skip
    assert path.read_bytes() != content
    with pytest.raises(CorruptRunError, match=rf"{path.name} .*; delete it to start over"):
        read_checkpoint(path)


def test_the_checkpoint_of_configs_is_one_file_in_whatever_order(tmp_path):
    store, other = Store(tmp_path), dataclasses.replace(CONFIG, penalty=0.2)
    store.save_checkpoint([CONFIG, other], state(1), {"step": 10})
    assert store.find_checkpoint(other)[0] == store.checkpoint([other, CONFIG])
    assert not store.checkpoint([other]).exists()


@pytest.mark.parametrize("content", [
    b"", b"short", b"\xff" * 40, b"\2" + b"\0" * 7 + b"{}", b"\2" + b"\0" * 7 + b"[]",
    (33).to_bytes(8, "little") + b'{"__metadata__": {"facts": "[1]"}}',
])  # fmt: skip
def test_a_file_that_does_not_say_whose_it_is_stops_nothing(store, content):
    store.save_checkpoint([CONFIG], state(1), {"step": 10})
    nobodys = store.root / ".checkpoints" / "0.safetensors"
    nobodys.write_bytes(content)
    with pytest.warns(UserWarning, match=rf"{nobodys} cannot be read .*; delete it"):
        assert store.find_checkpoint(CONFIG)[1] == 10
    with pytest.warns(UserWarning, match=rf"{nobodys} cannot be read"):
        store.discard_checkpoints([CONFIG])
    assert list(nobodys.parent.iterdir()) == [nobodys]


def test_checkpoints_hold_tensors_and_plain_values_only(tmp_path):
    """S2.7: nothing that a later version could refuse to read."""
    store = Store(tmp_path)
    with pytest.raises(TypeError):
        store.save_checkpoint([CONFIG], state(1), {"step": 10, "generator": torch.Generator()})
    assert store.find_checkpoint(CONFIG) is None


# ---- archives


def test_runs_travel_in_one_file(store, run, tmp_path):
    other = dataclasses.replace(CONFIG, penalty=0.2)
    assert pack([CONFIG, other], store, "laptop", tmp_path / "runs.tar") == 1
    assert unpack(tmp_path / "runs.tar", tmp_path / "elsewhere") == (1, 0)
    assert unpack(tmp_path / "runs.tar", tmp_path / "elsewhere") == (0, 1)
    found = Store(tmp_path / "elsewhere" / "laptop").load(CONFIG)
    pd.testing.assert_frame_equal(found.history, run.history, check_exact=True)
    assert found.provenance == run.provenance


def test_weights_that_were_not_kept_are_filled_in(store, run, tmp_path):
    """And nothing else: times and provenance stay those of the run that is here."""
    pack([CONFIG], store, "laptop", tmp_path / "runs.tar")
    slower = run.history.assign(elapsed=run.history.elapsed * 2)
    facts = run.provenance | {"device": "ours", "alternated_with": ["0123456789abcdef"]}
    ours = dataclasses.replace(run, history=slower, weights=None, provenance=facts)
    store.save(ours)
    assert unpack(tmp_path / "runs.tar", tmp_path) == (1, 0)
    found = store.load(CONFIG)
    pd.testing.assert_frame_equal(found.history, slower, check_exact=True)
    assert found.provenance == facts
    assert all(torch.equal(found.weights[name], run.weights[name]) for name in run.weights)
    assert unpack(tmp_path / "runs.tar", tmp_path) == (0, 1)


def test_weights_of_another_training_are_not_filled_in(store, run, tmp_path):
    pack([CONFIG], store, "laptop", tmp_path / "runs.tar")
    other = run.history.assign(training_loss=run.history.training_loss + 1e-9)
    store.save(dataclasses.replace(run, history=other, weights=None))
    assert unpack(tmp_path / "runs.tar", tmp_path) == (0, 1)
    found = store.load(CONFIG)
    pd.testing.assert_frame_equal(found.history, other, check_exact=True)
    assert found.weights is None


def test_an_archive_is_named_by_scale_whatever_the_store_is_called(run, tmp_path):
    store = Store(tmp_path / "run_store_1")
    store.save(run)
    (store.folder(CONFIG) / ".DS_Store").write_bytes(b"no file of a run")
    assert pack([CONFIG], store, "paper", tmp_path / "runs.tar") == 1
    assert unpack(tmp_path / "runs.tar", tmp_path) == (1, 0)
    assert CONFIG in Store(tmp_path / "paper")
    with pytest.raises(ValueError, match="scale must be one of 'smoke', 'laptop', 'paper', got"):
        pack([CONFIG], store, "run_store_1", tmp_path / "runs.tar")


def test_a_damaged_run_leaves_the_archive_that_was_there(store, run, tmp_path):
    other = dataclasses.replace(CONFIG, penalty=0.2)
    store.save(dataclasses.replace(run, config=other))
    archive = tmp_path / "archives" / "runs.tar"
    archive.parent.mkdir()
    assert pack([CONFIG, other], store, "laptop", archive) == 2
    content = archive.read_bytes()
    (store.folder(other) / "history.parquet").write_bytes(b"")
    with pytest.raises(CorruptRunError, match=r"history\.parquet"):
        pack([CONFIG, other], store, "laptop", archive)
    assert archive.read_bytes() == content and list(archive.parent.iterdir()) == [archive]


def test_a_damaged_run_is_neither_packed_nor_unpacked(store, tmp_path):
    pack([CONFIG], store, "laptop", tmp_path / "runs.tar")
    content = (tmp_path / "runs.tar").read_bytes()
    (tmp_path / "edited.tar").write_bytes(content.replace(b'"penalty": 0.1', b'"penalty": 0.2'))
    with pytest.raises(CorruptRunError, match=r"edited.tar is damaged: .*config.json has the key"):
        unpack(tmp_path / "edited.tar", tmp_path / "elsewhere")
    with tarfile.open(tmp_path / "edited.tar", "w") as tar:
        for path in store.folder(CONFIG).iterdir():
            cut = path.read_bytes()[: -1 if path.suffix == ".parquet" else None]
            member = tarfile.TarInfo(f"laptop/{CONFIG.key}/{path.name}")
            member.size = len(cut)
            tar.addfile(member, io.BytesIO(cut))
    with pytest.raises(CorruptRunError, match=r"edited.tar is damaged: .*history.parquet is not"):
        unpack(tmp_path / "edited.tar", tmp_path / "elsewhere")
    (tmp_path / "torn.tar").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptRunError, match=r"torn.tar"):
        unpack(tmp_path / "torn.tar", tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").glob("*/*"))
    (store.folder(CONFIG) / "history.parquet").write_bytes(b"")
    with pytest.raises(CorruptRunError, match=r"history\.parquet"):
        pack([CONFIG], store, "laptop", tmp_path / "again.tar")


@pytest.mark.parametrize("name", [
    "../evil.txt", "/etc/evil", "laptop/short/config.json", "laptop/0123456789abcdef/evil.py",
    "laptop/0123456789abcdef", "config.json", "runs/0123456789abcdef/config.json",
])  # fmt: skip
def test_archives_with_anything_else_are_refused(tmp_path, name):
    with tarfile.open(tmp_path / "runs.tar", "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 2
        tar.addfile(member, io.BytesIO(b"{}"))
    with pytest.raises(ValueError, match=r"runs.tar must hold runs of a store only, got"):
        unpack(tmp_path / "runs.tar", tmp_path / "elsewhere")
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "runs.tar"]


@pytest.mark.parametrize("values,message", [
    ({"penalty": 0.1}, "TrainingConfig needs the field 'task', got only .'penalty'."),
    ({"task": {}, "gama": 1.0}, "TrainingConfig has no field 'gama'"),
    ({"task": {}, "penalty": "0.1"}, "penalty must be a number, got '0.1'"),
])  # fmt: skip
def test_a_config_that_is_none_is_a_damaged_run(tmp_path, values, message):
    with tarfile.open(tmp_path / "runs.tar", "w") as tar:
        text = json.dumps(values).encode()
        member = tarfile.TarInfo("laptop/0123456789abcdef/config.json")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    message = f"runs.tar is damaged: 0123456789abcdef: {message}"
    with pytest.raises(CorruptRunError, match=message):
        unpack(tmp_path / "runs.tar", tmp_path / "elsewhere")


def test_key_folder_and_content_must_agree(store, tmp_path):
    """A run under another's name, with checksums that are right in themselves."""
    wrong = store.root / "0123456789abcdef"
    store.folder(CONFIG).rename(wrong)
    with tarfile.open(tmp_path / "runs.tar", "w") as tar:
        for path in sorted(wrong.iterdir()):
            tar.add(path, f"laptop/{wrong.name}/{path.name}")
    with pytest.raises(
        CorruptRunError, match=f"0123456789abcdef/config.json has the key {CONFIG.key}"
    ):
        unpack(tmp_path / "runs.tar", tmp_path / "elsewhere")


def test_files_of_a_run_are_small_and_plain(store):
    values = json.loads((store.folder(CONFIG) / "config.json").read_text())
    assert TrainingConfig.from_dict(values) == CONFIG
    assert sum(p.stat().st_size for p in store.folder(CONFIG).iterdir()) < 20_000
