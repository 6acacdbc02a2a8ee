"""What notebooks save and show: the same bytes each time, a caption always, where it came from."""

import subprocess
from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from leancluster_core.experiments import pages
from leancluster_core.experiments.pages import (
    page_commit,
    provenance_card,
    save_figure,
    save_table,
)


def line():
    figure = Figure()
    figure.subplots().plot([0, 1], label="a")
    figure.legend()
    return figure


def run(key="abc", seeds=(7, 3), torch="2.13.0", device="a CPU", commit="1234567"):
    facts = {"torch": torch, "device": device, "commit": commit}
    return SimpleNamespace(config=SimpleNamespace(key=key, seeds=seeds), provenance=facts)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


def test_a_figure_is_saved_as_the_same_bytes_each_time(tmp_path):
    for folder in ("one", "two"):
        shown = save_figure(line(), tmp_path / folder, "a_line", caption="$x$", alt="A line")
    one, two = (tmp_path / folder / "a_line.svg" for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    data, metadata = shown._repr_mimebundle_()
    assert data["image/svg+xml"] == one.read_text()
    assert metadata["leancluster"]["mystnb"]["figure"] == {"name": "fig-a-line", "caption": "$x$"}


def test_a_figure_of_pyplot_is_closed_so_that_it_shows_once():
    figure, _ = plt.subplots()
    save_figure(figure, "", "x", caption="c", alt="a")
    assert not plt.fignum_exists(figure.number)


def test_without_a_folder_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_figure(line(), "", "x", caption="c", alt="a")
    save_table(pd.DataFrame({"a": [1]}), "", "x", caption="c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [({"caption": " ", "alt": "a"}, "caption must say"), ({"caption": "c", "alt": ""}, "alt must")],
)
def test_a_figure_needs_its_words(words, says):
    with pytest.raises(ValueError, match=says):
        save_figure(line(), "", "x", **words)


def test_a_table_is_saved_rounded_and_shown_with_its_caption(tmp_path):
    frame = pd.DataFrame({"name": ["a<b", "c"], "value": [1 / 3, float("nan")]}, index=[5, 6])
    shown = save_table(frame, str(tmp_path), "t", caption="Thirds & gaps")
    assert (tmp_path / "t.csv").read_text() == "name,value\na<b,0.333\nc,\n"
    html = shown.data["text/html"]
    assert "<caption>Thirds &amp; gaps</caption>" in html
    assert "a&lt;b" in html
    assert "<td>–</td>" in html
    assert "<td>5</td>" not in html
    with pytest.raises(ValueError, match="caption must say"):
        save_table(frame, "", "t", caption="")


def test_the_card_collects_the_runs():
    shown = provenance_card("laptop", [run(), run("def", (7, 9)), run("abc")])
    rows = dict(line.split(": ", 1) for line in shown.data["text/plain"].splitlines())
    assert rows["Scale"] == "laptop"
    assert rows["Seeds"] == "7, 3, 9"
    assert rows["Device"] == "a CPU"
    assert rows["Trained with"] == "torch 2.13.0, commit 1234567"
    assert rows["Runs"] == "abc, def"
    assert shown.metadata == {"runs": ["abc", "def"]}


def test_runs_of_several_machines_are_all_named():
    shown = provenance_card("paper", [run(), run("def", torch="2.11.0", device="an H200")])
    text = shown.data["text/plain"]
    assert "Device: a CPU; an H200\n" in text
    assert "Trained with: torch 2.11.0, commit 1234567; torch 2.13.0, commit 1234567\n" in text


def test_the_commit_is_that_of_what_pages_are_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "project_root", lambda: tmp_path)
    assert page_commit() == "unknown"
    (tmp_path / "notebooks").mkdir()
    source, other = tmp_path / "notebooks" / "x.py", tmp_path / "README.md"
    git(tmp_path, "init")
    source.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    first = page_commit()
    assert len(first) >= 7
    other.write_text("text")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "second")
    assert page_commit() == first
    source.write_text("2")
    assert page_commit() == f"{first}, modified"
    git(tmp_path, "commit", "-a", "-m", "third")
    assert page_commit() not in (first, f"{first}, modified")
