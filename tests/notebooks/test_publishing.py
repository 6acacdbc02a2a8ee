"""Which runs reach the ledger: the paper's parameters, into the book, at laptop or paper scale."""

import json

import nbformat
import pytest

from leancluster_core.experiments import claims, notebooks
from leancluster_core.experiments.claims import Verdict, write_verdicts
from leancluster_core.experiments.notebooks import run_notebook

SOURCE = """# %% [markdown]
# # Stands in for Figure 2

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
penalties = [1.0, 0.1]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one notebook, whose cells are not run: only its verdict is saved."""

    def execute(notebook, page, values, *_):
        scale = values.get("scale", "laptop")
        saved = tmp_path / values["output_dir"] / "verdicts.json"
        write_verdicts([Verdict("F2-beats", "not reproduced", scale, "rel 1.1")], saved)
        return nbformat.v4.new_notebook()

    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "fig02.py").write_text(SOURCE)
    monkeypatch.setattr(notebooks, "_execute", execute)
    monkeypatch.setattr(notebooks, "project_root", lambda: tmp_path)
    monkeypatch.setattr(claims, "published_folder", lambda: tmp_path / "results" / "verdicts")
    return tmp_path


def published(project):
    path = project / "results" / "verdicts" / "fig02.json"
    return json.loads(path.read_text())[0]["scale"] if path.exists() else None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "laptop"),
        ({"scale": "paper"}, "paper"),
        ({"parameters": {"penalties": [1.0, 0.1]}}, "laptop"),
        ({"scale": "smoke"}, None),
        ({"parameters": {"penalties": [1.0]}}, None),
        ({"parameters": {"output_dir": "elsewhere"}}, None),
        ({"output": "mine/fig02.ipynb"}, None),
    ],
)
def test_only_the_paper_s_parameters_reach_the_ledger(project, monkeypatch, options, expected):
    monkeypatch.chdir(project)
    run_notebook(project / "notebooks" / "fig02.py", **options)
    assert published(project) == expected


def test_a_run_that_fails_changes_no_verdict(project, monkeypatch):
    run_notebook(project / "notebooks" / "fig02.py")
    before = (project / "results" / "verdicts" / "fig02.json").read_bytes()
    monkeypatch.setattr(notebooks, "_execute", lambda *_: (_ for _ in ()).throw(RuntimeError("x")))
    with pytest.raises(RuntimeError):
        run_notebook(project / "notebooks" / "fig02.py", scale="paper")
    assert (project / "results" / "verdicts" / "fig02.json").read_bytes() == before
