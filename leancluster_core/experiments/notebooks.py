"""Run the book's notebooks: checked parameters in, a whole and reproducible page out, or nothing.

    python -m leancluster_core.experiments.notebooks run notebooks/fig02.py --scale smoke

papermill executes; this module adds what it leaves open. It refuses a name that the notebook does
not declare and a value of another type, keeps a failed run away from where the book looks, and
removes whatever differs from one run to the next.
"""

import argparse
import copy
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leancluster_core.experiments.claims import publish_verdicts
from leancluster_core.experiments.parameters import convert_parameters, read_parameters
from leancluster_core.experiments.paths import project_root

KERNEL_STARTS = 3
"""How often a kernel may fail to start, as happens when two of them are given the same port."""

_PROGRESS = re.compile(
    r"^.*(: step \d+/\d+, |; \d+% of all|\d+ of \d+ configs are stored).*\n?", re.MULTILINE
)
"""What training says of its progress, which a page doesn't keep."""

_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def run_notebook(
    source: str | Path,
    output: str | Path | None = None,
    *,
    scale: str | None = None,
    parameters: Mapping[str, object] | None = None,
    stored_only: bool = False,
) -> Path:
    """Execute a notebook and return the path of the executed ``.ipynb``.

    ``notebooks/X.py`` becomes ``book/X.ipynb`` and saves into ``book/generated/X``; at scale
    "smoke" both go to ``_build/smoke``. With ``output``, and for a source elsewhere, it saves into
    the folder of the same name beside the ``.ipynb``. Nothing changes at either place before the
    last cell has run. Verdicts of a run into the book, with no other parameter changed than the
    scale, go into the ledger.

    stored_only: train nothing. Where a run is not in the store, the page is the notebook as it
    stands, with a note that says what is missing.

    Raises ValueError for an unknown parameter or a value of another type, before anything runs, and
    RuntimeError naming the cell that failed; what ran until then lies in ``_build/failed``.
    """
    import jupytext

    source = Path(source).resolve()
    if not source.is_file():
        raise ValueError(f"source must be the .py file of a notebook, got {source}")
    defaults = read_parameters(source)
    given = dict(parameters or {}) | ({} if scale is None else {"scale": scale})
    values = convert_parameters(given, defaults)
    scale_shown = values.get("scale", defaults.get("scale"))
    page, own_folder = _destinations(source, output, scale_shown)
    saved: Path | None = own_folder
    if "output_dir" in values:
        saved = Path(values["output_dir"]).resolve() if values["output_dir"] else None
    elif "output_dir" not in defaults:
        saved = None

    # The ledger is about the paper's parameters: an ablation says nothing of a claim.
    changed = any(values[name] != defaults[name] for name in values if name != "scale")
    for_ledger = own_folder.parent == project_root() / "book" / "generated" and not changed

    page.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{source.stem}-", dir=page.parent))
    try:
        if saved is not None:
            values["output_dir"] = _from_project(draft / "saved")
            (draft / "saved").mkdir()
        notebook, pending = jupytext.read(source), ""
        try:
            with _training_allowed(not stored_only):
                notebook = _execute(notebook, draft / page.name, values)
        except _NotTrainedYet as error:
            pending = str(error)
            _say_pending(notebook, source.stem, pending)
            shutil.rmtree(draft / "saved", ignore_errors=True)
            (draft / "saved").mkdir()
        runs = _reproducible(notebook)
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        if saved is not None:
            text = text.replace(str(values.pop("output_dir")), _from_project(saved))
            shown = {
                key: value for key, value in (defaults | values).items() if key != "output_dir"
            }
            record = {"notebook": source.stem, "parameters": shown, "runs": runs}
            if pending:
                record["pending"] = pending
            _keep(draft / "saved", saved, page, record)
        (draft / page.name).write_text(text, encoding="utf-8")
        os.replace(draft / page.name, page)
        if for_ledger and not pending:
            publish_verdicts(source.stem, own_folder / "verdicts.json")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return page


def _destinations(source: Path, output: str | Path | None, scale: object) -> tuple[Path, Path]:
    root = project_root()
    if output is not None:
        page = Path(output).resolve()
        if page.suffix != ".ipynb":
            raise ValueError(f"output must end in .ipynb, got {output}")
    elif source.parent != root / "notebooks":
        page = source.with_suffix(".ipynb")
    elif scale == "smoke":
        page = root / "_build" / "smoke" / f"{source.stem}.ipynb"
    else:
        return root / "book" / f"{source.stem}.ipynb", root / "book" / "generated" / source.stem
    return page, page.with_suffix("")


def _from_project(path: Path) -> str:
    return Path(os.path.relpath(path, project_root())).as_posix()


class _NotTrainedYet(Exception):
    """A run is not in the store; the message says how many, and how long they would take."""


def _say_pending(notebook: Any, asset: str, what: str) -> None:
    """Put a note below the title of a notebook that was not executed."""
    note = (
        "```{admonition} Not run yet\n:class: warning\n"
        f"The runs behind this page are not all stored: {what}. `make {asset}` trains what is "
        "missing; then the page has its figures, and its claims their verdicts. Below is the "
        "notebook as it will be executed.\n```"
    )
    title = notebook.cells[0]
    heading, _, rest = title.source.partition("\n")
    title.source = f"{heading}\n\n{note}\n{rest}"


@contextmanager
def _training_allowed(allowed: bool) -> Iterator[None]:
    """Kernels started within inherit whether they may train (see ``grids.figure_runs``)."""
    before = os.environ.get("LEANCLUSTER_TRAIN")
    if not allowed:
        os.environ["LEANCLUSTER_TRAIN"] = "never"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("LEANCLUSTER_TRAIN", None)
        else:
            os.environ["LEANCLUSTER_TRAIN"] = before


def _execute(notebook: Any, page: Path, values: Mapping[str, object]) -> Any:
    """The executed notebook. A kernel that does not start is tried again, a failed cell is not."""
    import papermill
    import zmq
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    # The kernel inherits these: no progress bars in pages, one order in every set of names.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    notebook.metadata["kernelspec"] = dict(_KERNEL)
    for attempt in range(1, KERNEL_STARTS + 1):
        try:
            return papermill.execute_notebook(
                copy.deepcopy(notebook),
                str(page).replace("{", "{{").replace("}", "}}"),  # papermill formats its paths
                parameters=values,
                kernel_name=_KERNEL["name"],
                progress_bar=False,
                stderr_file=sys.stderr,  # warnings, and how far a long training is
                start_timeout=120,
                cwd=project_root(),
            )
        except PapermillExecutionError as error:
            if error.ename == "NotTrainedYet":
                raise _NotTrainedYet(error.evalue) from None
            what = f"{error.ename}: {error.evalue}"
            raise _failure(page, error.exec_count, error.source, what) from None
        except DeadKernelError:
            cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
            begun = [cell for cell in cells if cell["metadata"]["papermill"].get("start_time")]
            cell = begun[-1]
            what = "its Python process ended (out of memory?)"
            raise _failure(page, cell["execution_count"], "".join(cell["source"]), what) from None
        except (RuntimeError, zmq.ZMQError) as error:
            if attempt == KERNEL_STARTS:
                raise RuntimeError(
                    f"{page.stem}: no kernel started in {KERNEL_STARTS} attempts: {error}"
                ) from None
    raise AssertionError("unreachable")


def _failure(page: Path, count: int | None, code: str, what: str) -> RuntimeError:
    """Put the half-executed page where no book build looks, and say what happened."""
    kept = project_root() / "_build" / "failed" / page.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(page, kept)
    first = next((line for line in code.splitlines() if line.strip()), "")
    return RuntimeError(
        f"{page.stem} failed in cell [{count or '?'}], which starts with {first!r}:\n"
        f"{what}\nThe notebook up to there is {_from_project(kept)}"
    )


def _reproducible(notebook: Any) -> list[str]:
    """Strip what differs between two runs; return the keys of the runs that the page shows.

    What ``save_figure`` left with its output, caption and alt text, goes where MyST-NB reads it.
    """
    notebook.metadata.clear()
    notebook.metadata.update(kernelspec=dict(_KERNEL), language_info={"name": "python"})
    runs: list[str] = []
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
        for key in ("papermill", "execution", "lines_to_next_cell"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            cell.metadata.pop("tags")
        if cell.cell_type != "code":
            continue
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.metadata["tags"] = ["injected-parameters", "remove-cell"]
        cell["outputs"] = _merge_streams(cell.outputs)
        for shown in cell.outputs:
            if "data" in shown and "text/plain" in shown.data:
                shown.data["text/plain"] = re.sub(
                    r"\bat 0x[0-9a-f]+", "at 0x...", shown.data["text/plain"]
                )
            ours = shown.get("metadata", {}).pop("leancluster", {})
            runs += [key for key in ours.get("runs", []) if key not in runs]
            if "mystnb" in ours:
                cell.metadata["mystnb"] = ours["mystnb"]
    return runs


def _merge_streams(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of text as one (the pieces depend on timing), a rewritten line once."""
    merged: list[Any] = []
    for shown in outputs:
        if shown.output_type != "stream":
            merged.append(shown)
        elif merged and merged[-1].output_type == "stream" and merged[-1].name == shown.name:
            merged[-1].text += shown.text
        else:
            merged.append(shown)
    for shown in merged:
        if shown.output_type == "stream":
            shown.text = re.sub(r"[^\n]*\r(?=[^\n])", "", shown.text)
            if shown.name == "stderr":
                shown.text = _PROGRESS.sub("", shown.text)
    return [shown for shown in merged if shown.output_type != "stream" or shown.text.strip()]


def _keep(draft: Path, saved: Path, page: Path, record: Mapping[str, Any]) -> None:
    """Move what the notebook saved to its place, with a record of the run.

    The project's own folders are replaced as a whole, so that no file of an earlier run stays; any
    other folder may hold a reader's files and is added to.
    """
    (draft / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    root = project_root()
    if saved.parent not in (root / "book" / "generated", root / "_build" / "smoke"):
        shutil.copytree(draft, saved, dirs_exist_ok=True)
        return
    if saved.parent.name == "generated":
        (draft / "page.d").write_text(_make_rules(draft, saved, page, record), encoding="utf-8")
    saved.parent.mkdir(exist_ok=True)
    shutil.rmtree(saved, ignore_errors=True)
    os.replace(draft, saved)


def _make_rules(draft: Path, saved: Path, page: Path, record: Mapping[str, Any]) -> str:
    """Rules for make: the page needs the runs it shows and the files it saved."""
    root = project_root()
    needs = [saved / path.relative_to(draft) for path in draft.rglob("*") if path.is_file()]
    needs = [path for path in needs if path.name not in ("run.json", "page.d")]
    for key in record["runs"]:
        needs += [path for path in root.glob(f"results/*/{key}/*") if path.is_file()]
    listed = " ".join(sorted(_from_project(path) for path in needs))
    made = f"{_from_project(page)} {_from_project(saved / 'run.json')}"
    if "pending" in record:
        # New runs may complete the page; asked for by name, it is made (and trained) in any case.
        return (
            f"{made}: $(wildcard results/*/*/provenance.json)\n"
            f"ifneq ($(filter {record['notebook']} figures,$(MAKECMDGOALS)),)\n"
            f"{made}: FORCE\nendif\n"
        )
    if not listed:
        return ""
    # A rule without commands makes a file that is gone count as new, not as an error.
    return f"{made}: {listed}\n{listed}:\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1 if the notebook failed, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="python -m leancluster_core.experiments.notebooks",
        description="Execute a notebook of the book, or a copy of one, with other parameters.",
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="execute one notebook")
    run.add_argument("source", type=Path, help="the notebook's .py file")
    run.add_argument("--scale", help="smoke, laptop or paper (default: the notebook's own)")
    run.add_argument("-o", "--output", type=Path, help="where the executed .ipynb goes")
    run.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter"
    )
    run.add_argument(
        "--stored-only", action="store_true", help="train nothing: a page without its runs says so"
    )
    arguments, pairs = _take_parameters(list(sys.argv[1:] if arguments is None else arguments))
    options = parser.parse_args(arguments)

    started = time.perf_counter()
    try:
        page = run_notebook(
            options.source,
            options.output,
            scale=options.scale,
            parameters=dict(pairs),
            stored_only=options.stored_only,
        )
    except ValueError as error:
        print(f"{options.source}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{os.path.relpath(page)} ({time.perf_counter() - started:.0f} s)")
    return 0


def _take_parameters(arguments: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take ``-p name value`` out: argparse would read the value ``-inf`` as an option."""
    rest, pairs = [], []
    position = 0
    while position < len(arguments):
        if arguments[position] == "-p" and position + 2 < len(arguments):
            pairs.append((arguments[position + 1], arguments[position + 2]))
            position += 3
        else:
            rest.append(arguments[position])
            position += 1
    return rest, pairs


if __name__ == "__main__":
    sys.exit(main())
