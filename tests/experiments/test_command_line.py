"""The command line: ``python -m leancluster_core.experiments``."""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from leancluster_core.experiments import Store
from leancluster_core.experiments.__main__ import main
from leancluster_core.experiments.grids import GRIDS, TIMED_FIGURES, figure_configs
from leancluster_core.experiments.sweep import missing
from leancluster_core.experiments.timing import not_alternated

ROOT = Path(__file__).parents[2]
FIG02 = figure_configs("fig02", "smoke")


@pytest.fixture(autouse=True)
def settings():
    """A command may set the number of threads and the handler of SIGTERM; tests put them back."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of results with fig02 at smoke scale."""
    results = tmp_path_factory.mktemp("results")
    where = ["--scale", "smoke", "--store", str(results / "smoke")]
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    assert main(["train", "fig02", *where, "--workers", "1", "--device", "cpu"]) == 0
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)
    return results


def where(results):
    return ["--scale", "smoke", "--store", str(results / "smoke")]


def test_training_a_figure_stores_all_its_configs(trained, capsys):
    assert missing(FIG02, Store(trained / "smoke")) == []
    assert main(["train", "fig02", *where(trained), "--workers", "1"]) == 0
    assert capsys.readouterr().out == "24 of 24 configs are stored\n"


def test_the_list_shows_each_config_and_its_status(trained, tmp_path, capsys):
    main(["list", "fig02", *where(trained)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 25 and lines[-1] == "24 of 24 configs are stored"
    for line, config in zip(lines, FIG02, strict=False):
        assert line.startswith(config.key) and config.label in line and line.endswith("  stored")
    main(["list", *where(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 341 and all(line.endswith("  -") for line in lines[:-1])
    assert lines[-1].startswith("0 of 340 configs are stored; 340 to train, about")


def test_results_are_packed_and_unpacked(trained, tmp_path, capsys):
    archive = str(tmp_path / "results.tar")
    assert main(["pack", "fig02", *where(trained), "-o", archive]) == 0
    assert main(["unpack", archive, "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{archive}: 24 of 24 configs\n24 runs taken over, 0 were there already\n"
    )
    assert missing(FIG02, Store(tmp_path / "smoke")) == []
    # A store of any name: runs go where their scale is read.
    (tmp_path / "smoke").rename(tmp_path / "Store_1")
    elsewhere = ["--scale", "smoke", "--store", str(tmp_path / "Store_1")]
    assert main(["pack", "fig02", *elsewhere, "-o", archive]) == 0
    assert main(["unpack", archive, "--results", str(tmp_path)]) == 0
    assert missing(FIG02, Store(tmp_path / "smoke")) == []
    capsys.readouterr()
    path = next((tmp_path / "smoke").glob("*/history.parquet"))
    path.write_bytes(b"")
    assert main(["pack", "fig02", *where(tmp_path), "-o", archive]) == 1
    assert str(path) in capsys.readouterr().err


def test_shards_are_disjoint_and_cover_everything(tmp_path):
    """Whatever each machine has stored already; what takes turns stays together."""
    wanted, seen = FIG02 + figure_configs("fig17", "smoke"), []
    for part in ("1/3", "2/3", "3/3"):
        store = Store(tmp_path / part.replace("/", "-") / "smoke")
        options = ["--scale", "smoke", "--store", str(store.root), "--workers", "1"]
        assert main(["train", "fig02", "fig17", *options, "--shard", part]) == 0
        here = [c for c in wanted if c in store]
        timed = [c for c in here if c not in FIG02]
        assert len(timed) == 4 and not_alternated(timed, store) == []
        seen += here
    assert sorted(c.key for c in seen) == sorted(c.key for c in wanted)


@pytest.mark.parametrize(
    ("figures", "left"), [(["fig02"], 24), (["fig17"], 12), (["fig02", "fig17"], 36)]
)
def test_the_time_budget_ends_with_a_code_of_its_own(tmp_path, capsys, figures, left):
    options = [*where(tmp_path), "--workers", "1", "--minutes", "1e-9"]
    assert main(["train", *figures, *options]) == 3
    assert f"out of time: {left} configs left" in capsys.readouterr().err


def test_what_lacks_its_weights_only_is_left_if_weights_are_asked_for(trained, tmp_path, capsys):
    shutil.copytree(trained / "smoke", tmp_path / "smoke")
    for path in tmp_path.glob("smoke/*/weights.safetensors"):
        path.unlink()
    options = [*where(tmp_path), "--workers", "1", "--minutes", "1e-9"]
    assert main(["train", "fig02", *options]) == 0
    assert capsys.readouterr().out == "24 of 24 configs are stored\n"
    assert main(["train", "fig02", *options, "--weights"]) == 3
    output, errors = capsys.readouterr()
    assert output.startswith("0 of 24 configs are stored; 24 to train, about")
    assert "out of time: 24 configs left" in errors


def test_the_papers_scale_on_a_cpu_needs_a_flag(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "fig02", "--scale", "paper", "--device", "cpu", "--store", str(tmp_path)])
    assert stop.value.code == 2
    assert "needs --paper-on-cpu (0 of 24 configs are stored" in capsys.readouterr().err
    options = ["--scale", "paper", "--device", "cpu", "--store", str(tmp_path), "--workers", "1"]
    assert main(["train", "fig02", *options, "--paper-on-cpu", "--minutes", "1e-9"]) == 3


@pytest.mark.parametrize("arguments,message", [
    (["train", "fig2"], "figure must be one of 'fig02'"),
    (["train", "fig02", "--minutes", "0"], "--minutes must be in (0, inf], got 0"),
    (["train", "fig02", "--minutes", "nan"], "--minutes must be in (0, inf], got nan"),
    (["train", "fig02", "--workers", "-1"], "workers must be at least 1, got -1"),
    (["train", "fig02", "--workers", "0"], "workers must be at least 1, got 0"),
    (["train", "fig02", "--shard", "0/3"], "--shard must be I/N with I in [1, N], got '0/3'"),
    (["train", "fig02", "--shard", "4/3"], "--shard must be I/N"),
    (["train", "fig02", "--shard", "2"], "--shard must be I/N"),
    (["train", "fig17", "--shard", "x"], "--shard must be I/N with I in [1, N], got 'x'"),
    (["train", "fig02", "--device", "gpu"], "device must be 'auto', 'cpu'"),
    (["train", "fig02", "--scale", "tiny"], "invalid choice: 'tiny'"),
    (["pack", "fig02"], "-o"),
    ([], "COMMAND"),
])  # fmt: skip
def test_bad_arguments_are_refused_by_name(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if arguments and "--scale" not in arguments:
        arguments = [*arguments, "--scale", "smoke", "--store", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_archive_with_a_config_that_is_none_is_named(tmp_path, capsys):
    with tarfile.open(tmp_path / "runs.tar", "w") as tar:
        text = b'{"penalty": 0.1}'
        member = tarfile.TarInfo("smoke/0123456789abcdef/config.json")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    assert main(["unpack", str(tmp_path / "runs.tar"), "--results", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "runs.tar is damaged: 0123456789abcdef: TrainingConfig needs the field 'task'" in error


def test_a_missing_archive_is_named(tmp_path, capsys):
    assert main(["unpack", str(tmp_path / "none.tar")]) == 1
    assert "none.tar" in capsys.readouterr().err


def test_every_figure_has_configs_and_timed_ones_are_figures():
    assert set(TIMED_FIGURES) <= set(GRIDS)
    assert all(figure_configs(figure, "smoke") for figure in GRIDS)


def test_workers_save_a_checkpoint_when_the_command_is_told_to_stop(tmp_path):
    """SIGTERM to the command alone: no worker outlives it, and nothing is lost."""
    store = Store(tmp_path / "laptop")
    options = ["--scale", "laptop", "--store", str(store.root), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "leancluster_core.experiments", "train", "fig02", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    locks = store.root / ".locks"
    end = time.monotonic() + 60
    while not (locks.is_dir() and len(list(locks.iterdir())) >= 4):  # two batches of two
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    time.sleep(1)
    process.terminate()
    output, errors = process.communicate(timeout=60)  # workers hold the pipes: all have ended
    assert process.returncode == 128 + signal.SIGTERM
    assert output.startswith("0 of 24 configs are stored; 24 to train, about")
    assert "Traceback" not in errors
    found = [store.find_checkpoint(config) for config in figure_configs("fig02", "laptop")]
    assert sum(checkpoint is not None for checkpoint in found) == 4
