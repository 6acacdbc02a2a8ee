"""What a notebook shows and saves: figures, tables, and the card that says how a page was made.

Each of these returns an object to end a cell with. Given the notebook's ``output_dir`` it is saved
too, as the same bytes in every run; with ``output_dir=""`` (a copy, plain papermill) it is shown.
"""

import html
import io
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from leancluster_core.experiments.paths import project_root


@dataclass(frozen=True)
class Shown:
    """A display object: data by mime type, and metadata that the notebook runner reads."""

    data: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, str], dict[str, Any]]:
        return dict(self.data), {"leancluster": dict(self.metadata)}


def show_text(markdown: str) -> Shown:
    """A paragraph whose numbers a cell computed, as Markdown on the page."""
    return Shown({"text/markdown": markdown, "text/plain": markdown})


def save_figure(figure: Any, output_dir: str, name: str, *, caption: str, alt: str) -> Shown:
    """Save a matplotlib figure as ``<output_dir>/<name>.svg`` and return it for display.

    One figure a cell: in the book it is numbered and can be referred to as ``fig-<name>``, with
    dashes for underscores. ``caption`` may hold Markdown and mathematics and says what is drawn,
    the statistic and the number of trials; ``alt`` says in words what is to be seen.
    """
    import matplotlib
    from matplotlib import pyplot

    for what, text in (("caption", caption), ("alt", alt)):
        if not text.strip():
            raise ValueError(f"{what} must say what the figure shows, got {text!r}")
    drawing = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawing, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)  # else the notebook shows it a second time, as a bitmap
    svg = drawing.getvalue()
    _save(output_dir, f"{name}.svg", svg)
    label = f"fig-{name.replace('_', '-')}"
    mystnb = {"image": {"alt": alt}, "figure": {"name": label, "caption": caption}}
    return Shown({"image/svg+xml": svg, "text/plain": alt}, {"mystnb": mystnb})


def save_table(frame: Any, output_dir: str, name: str, *, caption: str, digits: int = 3) -> Shown:
    """Save a pandas frame as ``<output_dir>/<name>.csv`` and return it for display.

    Numbers are rounded to ``digits`` decimals. The index is left out: columns name a table's rows.
    """
    if not caption.strip():
        raise ValueError(f"caption must say what the table shows, got {caption!r}")
    rounded = frame.round(digits)
    _save(output_dir, f"{name}.csv", rounded.to_csv(index=False, lineterminator="\n"))
    table = html_table(rounded, caption)
    return Shown({"text/html": table, "text/plain": rounded.to_string(index=False)})


def html_table(frame: Any, caption: str) -> str:
    """A pandas frame as a table of the book; a range in a cell ("0.9–1.1") stays on one line."""
    table = frame.to_html(
        index=False, classes="table results", border=0, na_rep="–", justify="left"
    )
    table = re.sub(r"(?<=\d)–(?=\d)", "&NoBreak;–&NoBreak;", table)
    start = table.index(">") + 1
    return f"{table[:start]}\n  <caption>{html.escape(caption)}</caption>{table[start:]}"


def provenance_card(
    scale: str,
    runs: Iterable[Any] = (),
    *,
    seeds: Sequence[int] | None = None,
    device: str | None = None,
) -> Shown:
    """The card at the end of a page: scale, seeds, device, versions, commit and run keys.

    Seeds and devices are those of ``runs``; a page that trains nothing gives its own. The commit is
    the last one that changed the notebooks, the package or the results, so that a page stays the
    same, to the byte, when other files change; "modified" means that these differ from the commit.
    """
    runs = list(runs)
    keys = list(dict.fromkeys(run.config.key for run in runs))
    if seeds is None:
        seeds = list(dict.fromkeys(seed for run in runs for seed in run.config.seeds))
    made_by = [run.provenance for run in runs]
    trained = {f"torch {facts['torch']}, commit {facts['commit']}" for facts in made_by}
    devices = {facts["device"] for facts in made_by} or {device or _this_device()}
    rows = {
        "Scale": scale,
        "Seeds": ", ".join(map(str, seeds)) or "none",
        "Device": device or "; ".join(sorted(devices)),
        "Versions": f"Python {platform.python_version()}, torch {version('torch')}, "
        f"numpy {version('numpy')}",
        "Commit": page_commit(),
    }
    if runs:
        rows |= {"Trained with": "; ".join(sorted(trained)), "Runs": ", ".join(keys)}
    shown = {name: html.escape(text) for name, text in rows.items()}
    if len(keys) > 3:
        shown["Runs"] = f"<details><summary>{len(keys)}</summary>{shown['Runs']}</details>"
    body = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in shown.items())
    card = (
        '<table class="dataframe table provenance"><caption>How this page was made</caption>'
        f"{body}</table>"
    )
    plain = "\n".join(f"{name}: {text}" for name, text in rows.items())
    return Shown({"text/html": card, "text/plain": plain}, {"runs": keys})


def _this_device() -> str:
    import torch

    from leancluster_core.experiments.provenance import device_name

    return device_name(torch.device("cpu"))


def page_commit() -> str:
    """Short name of the commit that last changed what pages are made of; "unknown" outside git."""
    root = project_root()
    if not (root / ".git").exists():
        return "unknown"
    made_of = ["--", "notebooks", "leancluster_core", "results", ":!results/verdicts"]
    try:
        name = _git(root, "log", "-1", "--format=%h", "--abbrev=10", *made_of)
        changed = _git(root, "status", "--porcelain", *made_of)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (name or "unknown") + (", modified" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _save(output_dir: str, name: str, text: str) -> None:
    if output_dir:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
