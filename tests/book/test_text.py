"""What the pages say about the code is true of the code."""

import re
from pathlib import Path

import pytest
import yaml

from leancluster_core.experiments.notebooks import run_notebook
from leancluster_core.experiments.parameters import read_parameters

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "book").glob("*.md"))]


def code_blocks(path):
    return re.findall(r"^```(?:bash|text)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_name_notebooks_parameters_and_targets_that_there_are(path):
    for block in code_blocks(path):
        for command in block.replace("\\\n", " ").splitlines():
            command = command.partition(" #")[0]
            if command.startswith("$"):
                continue  # shows what goes wrong
            for source in re.findall(r"\b((?:notebooks|book)/\w+\.py)\b", command):
                declared = read_parameters(ROOT / source)
                assert set(re.findall(r" -p (\w+)", command)) <= set(declared), command
            if match := re.match(r"make (?:READY=1 )?(\w+)", command):
                targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                stems = [source.stem for source in (ROOT / "notebooks").glob("*.py")]
                assert match[1] in [*targets, *stems], command


def test_the_introduction_describes_the_scales_as_they_are():
    from leancluster_core.experiments.config import SCALES

    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "book" / "intro.md").read_text(), re.M)
    assert [name for name, _ in rows] == list(SCALES)
    words = {1 / 8: "an eighth", 1 / 4: "a quarter", 1: "512 points"}
    for name, work in rows:
        scale = SCALES[name]
        steps = round(10_000 * scale.n_steps)
        assert words[scale.n_points] in work
        assert f"{steps} steps" in work.replace(",", "")
        assert f"{scale.n_trials} trials" in work


def test_the_bibliography_lists_every_work_once():
    keys = re.findall(r"^@\w+\{(\w+),", (ROOT / "book" / "references.bib").read_text(), re.M)
    assert len(keys) == len(set(keys))
    cited = {
        key
        for path in TEXTS
        for group in re.findall(r"\{cite:\w+\}`([^`]*)`", path.read_text())
        for key in group.split(",")
    }
    assert cited <= set(keys)


def test_every_page_of_the_contents_is_there():
    """S4.2: in a second, without a build."""
    tree = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    names = [tree["root"]]
    names += [chapter["file"] for part in tree["parts"] for chapter in part["chapters"]]
    for name in names:
        notebook = ROOT / "notebooks" / f"{Path(name).name}.py"
        assert (ROOT / f"{name}.md").is_file() or notebook.is_file(), name
    pages = {path.stem for path in (ROOT / "book").glob("*.md")}
    assert pages <= {Path(name).name for name in names}


def test_the_example_to_copy_runs(tmp_path):
    page = run_notebook(
        ROOT / "book" / "example_ablation.py",
        tmp_path / "ablation.ipynb",
        scale="smoke",
        parameters={"inverse_temperatures": [1.0]},
    )
    assert (page.parent / "ablation" / "inverse_temperature.svg").is_file()
