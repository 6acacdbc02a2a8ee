"""All notebooks at scale smoke, from nothing: pages, verdicts, and the numbers they had before.

The golden numbers are made anew, after raising ``NUMERICS_VERSION``, with

    python tests/end_to_end/test_smoke.py
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import numpy as np
import pytest

from leancluster_core.experiments.claims import load_claims, read_verdicts
from leancluster_core.experiments.config import NUMERICS_VERSION
from leancluster_core.experiments.grids import GRIDS, curve_frame, figure_configs
from leancluster_core.experiments.store import Store

ROOT = Path(__file__).parents[2]
STEMS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
GOLDEN = Path(__file__).with_name("golden.json")
CLAIMS = load_claims()

# Other processors add up in another order, and training carries the difference on.
TOLERANCE = 2e-3


def execute(stem, folder):
    """Run one notebook as a reader would, with an empty run store of its own beside the pages."""
    command = [sys.executable, "-m", "leancluster_core.experiments.notebooks", "run"]
    command += [f"notebooks/{stem}.py", "--scale", "smoke", "-o", str(folder / f"{stem}.ipynb")]
    environment = os.environ | {"LEANCLUSTER_RESULTS": str(folder / "results")}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Folder of the pages, and what the runner said of each; two notebooks at a time."""
    folder = tmp_path_factory.mktemp("smoke")
    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(STEMS, pool.map(lambda stem: execute(stem, folder), STEMS), strict=True))
    return folder, done


@pytest.mark.parametrize("stem", STEMS)
def test_a_notebook_runs_from_nothing(smoke, stem):
    folder, done = smoke
    assert done[stem].returncode == 0, done[stem].stderr
    page = nbformat.read(folder / f"{stem}.ipynb", as_version=4)
    outputs = [shown for cell in page.cells for shown in cell.get("outputs", [])]
    assert not [shown for shown in outputs if shown.output_type in ("stream", "error")]
    assert any("How this page was made" in shown.data.get("text/html", "") for shown in outputs)


@pytest.mark.parametrize("stem", STEMS)
def test_a_notebook_evaluates_the_claims_of_its_asset(smoke, stem):
    folder, _ = smoke
    own = [claim for claim in CLAIMS if claim.asset == stem]
    path = folder / stem / "verdicts.json"
    if not own:
        assert not path.exists()
        return
    verdicts = read_verdicts(path, own)
    assert [verdict.id for verdict in verdicts] == [claim.id for claim in own]
    assert {verdict.scale for verdict in verdicts} == {"smoke"}
    if stem in GRIDS:
        reasons = [verdict.figures for verdict in verdicts if verdict.verdict == "not run"]
        # Of four evaluations, the first may come after a quarter of the time.
        reasons = [reason for reason in reasons if not reason.startswith("no evaluation before")]
        assert not reasons, "the notebook's own grid must have all that its claims need"
        assert set(verdicts[0].runs) == {c.key for c in figure_configs(stem, "smoke")}


def final_numbers(store):
    """Per figure and curve of its first and last setting: training and relative loss at the end."""
    numbers = {}
    for figure in GRIDS:
        configs = [c for c in figure_configs(figure, "smoke") if c.learning_rate < 0.1]
        ends = [c for c in configs if setting_of(c) in map(setting_of, (configs[0], configs[-1]))]
        for config in ends:
            frame = curve_frame([store.load(config)])
            last = frame[frame["step"] == config.n_steps]
            values = last[["training_loss", "relative_loss"]].mean().tolist()
            numbers.setdefault(figure, {})[name_of(config)] = [float(f"{v:.7g}") for v in values]
    return numbers


def setting_of(config):
    return config.task, config.penalty, config.learning_rate, config.gradient_clipping


def name_of(config):
    task = config.task
    clipped = "" if config.gradient_clipping is None else ", clipped"
    return (
        f"{config.label}, {task.family}, n={task.n_points}, d={task.n_features}, "
        f"k={task.n_clusters}, tau={config.penalty:g}, eta={config.learning_rate:g}{clipped}"
    )


def test_numbers_move_only_with_the_version_of_the_numerics(smoke):
    folder, _ = smoke
    golden = json.loads(GOLDEN.read_text())
    assert golden["numerics"] == NUMERICS_VERSION, "make the golden numbers anew: see above"
    found = final_numbers(Store(folder / "results" / "smoke"))
    assert {f: set(curves) for f, curves in found.items()} == {
        f: set(curves) for f, curves in golden["figures"].items()
    }
    for figure, curves in golden["figures"].items():
        for name, expected in curves.items():
            np.testing.assert_allclose(
                found[figure][name],
                expected,
                rtol=TOLERANCE,
                err_msg=f"{figure}, {name}: raise NUMERICS_VERSION if this is meant",
            )


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        for stem in GRIDS:
            assert execute(stem, Path(scratch)).returncode == 0, stem
        figures = final_numbers(Store(Path(scratch) / "results" / "smoke"))
    content = {"numerics": NUMERICS_VERSION, "figures": figures}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
