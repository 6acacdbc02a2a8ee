"""The runner: whole pages or none, the same bytes each time, from any folder, several at once."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import papermill
import pytest

from leancluster_core.experiments import notebooks
from leancluster_core.experiments.notebooks import KERNEL_STARTS, main, run_notebook

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "sources"
TINY, MINIMAL = SOURCES / "tiny.py", SOURCES / "minimal.py"
RUN = [sys.executable, "-m", "leancluster_core.experiments.notebooks", "run"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def printed(page):
    cells = nbformat.read(page, as_version=4).cells
    outputs = [shown for cell in cells for shown in cell.get("outputs", [])]
    return "".join(shown.text for shown in outputs if shown.output_type == "stream")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny notebook, executed with other values into a folder that was not there (S3.5)."""
    page = tmp_path_factory.mktemp("runner") / "not" / "yet" / "tiny.ipynb"
    given = {"slope": "1e-3", "n_points": 4.0, "gamma": "inf", "families": ("cauchy",)}
    return run_notebook(TINY, page, scale="smoke", parameters=given)


def test_parameters_arrive_as_they_were_meant(tiny):
    """S3.3"""
    assert "ends with ('smoke', 0.001, 4, False, inf, ['cauchy'])" in printed(tiny)
    record = json.loads((tiny.parent / "tiny" / "run.json").read_text())
    assert record["parameters"]["scale"] == "smoke"
    assert record["parameters"]["families"] == ["cauchy"]
    assert "output_dir" not in record["parameters"]


def test_what_the_notebook_saves_lies_beside_it(tiny):
    """S3.5: and nothing else is left there."""
    assert set(contents(tiny.parent / "tiny")) == {"run.json", "tiny_line.svg", "tiny_values.csv"}
    assert {path.name for path in tiny.parent.iterdir()} == {"tiny.ipynb", "tiny"}


def test_a_progress_bar_leaves_no_litter(tiny):
    """S3.7: 300 refreshes of a bar and of a rewritten line."""
    notebook = nbformat.read(tiny, as_version=4)
    streams = [
        [shown for shown in cell.get("outputs", []) if shown.output_type == "stream"]
        for cell in notebook.cells
    ]
    assert max(map(len, streams)) == 1
    assert "step 298" not in tiny.read_text()
    assert tiny.stat().st_size < 100_000


def test_a_figure_has_caption_label_and_alt_text_where_the_book_reads_them(tiny):
    cells = nbformat.read(tiny, as_version=4).cells
    found = [cell.metadata["mystnb"] for cell in cells if "mystnb" in cell.metadata]
    assert found == [
        {
            "image": {"alt": "A rising line"},
            "figure": {"name": "fig-tiny-line", "caption": "A line of slope $s = 0.001$."},
        }
    ]


def test_the_card_says_how_the_page_was_made(tiny):
    text = nbformat.read(tiny, as_version=4).cells[-1].outputs[0].data["text/plain"]
    names = [line.split(":")[0] for line in text.splitlines()]
    assert names == ["Scale", "Seeds", "Device", "Versions", "Commit"]
    assert "Scale: smoke\nSeeds: 0\n" in text


def test_a_second_run_gives_the_same_bytes_from_another_folder(tiny, tmp_path):
    """S4.5: started in a folder of its own, with the source named relative to it."""
    page = tiny.parent / "again" / "tiny.ipynb"
    given = ("-p slope 1e-3", "-p n_points 4", "-p gamma inf", "-p families ['cauchy']")
    source = os.path.relpath(TINY, tmp_path)
    command = [*RUN, source, "--scale", "smoke", "-o", str(page)]
    command += [word for one in given for word in one.split()]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert page.read_bytes().replace(b"/again/", b"/") == tiny.read_bytes()
    assert contents(page.parent / "tiny") == contents(tiny.parent / "tiny")


def test_plain_papermill_runs_it_from_an_empty_folder(tiny, tmp_path):
    """S4.5: and saves nothing there, for output_dir is empty."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", str(TINY), "out.ipynb"]
    given = ("-p scale smoke", "-p slope 1e-3", "-p n_points 4", "-p gamma inf")
    command += [word for one in given for word in one.split()]
    families = ["-y", "{families: [cauchy]}"]
    run = subprocess.run([*command, *families], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]
    assert printed(tiny).splitlines()[-1] in printed(tmp_path / "out.ipynb")


@pytest.mark.filterwarnings("ignore:The specified file .* does not end in one of")
def test_plain_papermill_refuses_an_unknown_name(tmp_path):
    """S3.1: the check in the notebook, not the runner's."""
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        papermill.execute_notebook(
            str(MINIMAL), str(tmp_path / "out.ipynb"), {"nunber": 3}, progress_bar=False
        )
    assert "unknown parameter 'nunber' (did you mean 'number'?)" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "nunber", "3"], "unknown parameter 'nunber' (did you mean 'number'?)"),
        (["-p", "number", "half"], "number must be a whole number"),
        (["-p", "fail", "1"], "fail must be True or False"),
        (["-o", "somewhere.html"], "output must end in .ipynb"),
    ],
)
def test_a_wrong_call_runs_nothing(arguments, says, capsys, monkeypatch):
    """S3.1, S3.3: before a kernel starts."""
    monkeypatch.setattr(notebooks, "_execute", None)
    assert main(["run", str(MINIMAL), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_value_may_look_like_an_option():
    rest, pairs = notebooks._take_parameters(
        ["run", "x.py", "-p", "gamma", "-inf", "-o", "y.ipynb"]
    )
    assert rest == ["run", "x.py", "-o", "y.ipynb"]
    assert pairs == [("gamma", "-inf")]


def test_a_failed_run_changes_nothing_and_names_the_cell(tmp_path, capsys):
    """S3.5, S4.2: the last good page stays, and after a repair there is no trace of the error."""
    page = tmp_path / "minimal.ipynb"
    arguments = ["run", str(MINIMAL), "-o", str(page)]
    assert main([*arguments, "-p", "number", "7", "-p", "fail", "true"]) == 1
    message = capsys.readouterr().err
    assert "failed in cell [5], which starts with 'if fail:'" in message
    assert "RuntimeError: told to fail at 7" in message
    kept = ROOT / re.search(r"_build/failed/\S+", message)[0]
    assert "told to fail at 7" in kept.read_text()
    kept.unlink()
    assert list(tmp_path.iterdir()) == []

    assert main([*arguments, "-p", "number", "8"]) == 0
    before = page.read_bytes()
    assert b"told to fail at" not in before.replace(b"told to fail at {number}", b"")
    assert (tmp_path / "minimal" / "number.txt").read_text() == "8"
    assert main([*arguments, "-p", "number", "9", "-p", "die", "true"]) == 1
    assert "its Python process ended" in capsys.readouterr().err
    assert page.read_bytes() == before
    assert (tmp_path / "minimal" / "number.txt").read_text() == "8"


def test_a_reader_s_folder_is_added_to_not_replaced(tmp_path):
    """A page's own folder is replaced as a whole; any other may hold what is not ours."""
    mine = tmp_path / "out"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "figure.svg").write_text("<svg/>")
    notebooks._keep(draft, mine, tmp_path / "out.ipynb", {"runs": []})
    assert set(contents(mine)) == {"thesis.txt", "figure.svg", "run.json"}


def test_eight_runs_at_once(tmp_path):
    """S3.6: with different parameters, into one folder."""
    runs = [
        subprocess.Popen(
            [*RUN, str(MINIMAL), "-p", "number", str(i), "-o", str(tmp_path / f"{i}.ipynb")],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for i in range(8)
    ]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors
    for i in range(8):
        assert f"laptop number {i}\n" in printed(tmp_path / f"{i}.ipynb")
        assert (tmp_path / str(i) / "number.txt").read_text() == str(i)


def test_a_kernel_that_does_not_start_is_tried_again_and_not_for_ever(tmp_path, monkeypatch):
    """S3.6: the race for a port, forced."""
    started = []

    def no_kernel(*arguments, **options):
        started.append(arguments)
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr(papermill, "execute_notebook", no_kernel)
    with pytest.raises(RuntimeError, match=f"no kernel started in {KERNEL_STARTS} attempts"):
        run_notebook(MINIMAL, tmp_path / "out.ipynb")
    assert len(started) == KERNEL_STARTS
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_starts_late_is_used(tmp_path, monkeypatch):
    """S3.6"""
    execute, attempts = papermill.execute_notebook, []

    def second_time(*arguments, **options):
        attempts.append(arguments)
        if len(attempts) < 2:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return execute(*arguments, **options)

    monkeypatch.setattr(papermill, "execute_notebook", second_time)
    page = run_notebook(MINIMAL, tmp_path / "out.ipynb", parameters={"number": 5})
    assert "number 5" in printed(page)


def test_a_source_without_a_kernel_runs(tmp_path):
    """S3.4: a bare percent script, and one with its author's private kernel."""
    bare = MINIMAL.read_text().partition("# %% [markdown]")[2]
    (tmp_path / "bare.py").write_text(f"# %% [markdown]{bare}")
    page = run_notebook(tmp_path / "bare.py")
    assert page == tmp_path / "bare.ipynb"
    assert nbformat.read(page, as_version=4).metadata["kernelspec"]["name"] == "python3"


def test_the_progress_of_a_training_is_not_kept(monkeypatch):
    """S3.7: lines that training writes into a log, as a page would record them."""
    from leancluster_core.experiments import training

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(clock)))
    report = training.progress_line("batch 1/2 (BN:L2 and 5 more)")
    for step in (50, 100):
        report(
            SimpleNamespace(
                state=SimpleNamespace(step=step),
                config=SimpleNamespace(n_steps=100),
                done=step == 100,
            )
        )
    written = sys.stderr.getvalue()
    assert "step 100/100" in written
    warning = "UserWarning: look here\n"
    outputs = [
        nbformat.v4.new_output("stream", name="stderr", text=text) for text in (written, warning)
    ]
    (kept,) = notebooks._merge_streams(outputs)
    assert kept.text == warning


def test_a_page_whose_runs_are_not_stored_says_so(tmp_path):
    """The book trains nothing: such a page is the notebook as it stands, with a note."""
    source = tmp_path / "fig99.py"
    source.write_text(
        "# %% [markdown]\n# # A figure\n# Its text.\n\n"
        '# %% tags=["parameters"]\noutput_dir = ""\n\n'
        "# %%\nimport os\n\nfrom leancluster_core.experiments.grids import NotTrainedYet\n\n"
        "if os.environ.get('LEANCLUSTER_TRAIN') == 'never':\n"
        "    raise NotTrainedYet('1 of 6 configs are stored; 5 to train')\n"
    )
    page = run_notebook(source, stored_only=True)
    title = nbformat.read(page, as_version=4).cells[0].source
    assert title.startswith("# A figure\n\n```{admonition} Not run yet")
    assert "1 of 6 configs are stored; 5 to train. `make fig99`" in title
    assert title.endswith("\nIts text.")
    record = tmp_path / "fig99" / "run.json"
    assert json.loads(record.read_text())["pending"].startswith("1 of 6")
    run_notebook(source)  # allowed to train again
    assert "pending" not in json.loads(record.read_text())
