"""``make book`` on a copy of the project with one small notebook: strict, complete, never stale."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "notebooks" / "sources" / "tiny.py"
STRAY = """{"cells": [{"cell_type": "code", "id": "a", "metadata": {}, "outputs": [],
 "execution_count": null, "source": "open('stray_ran.txt', 'w').write('x')"}],
 "metadata": {"kernelspec": {"name": "python3", "display_name": "p", "language": "python"}},
 "nbformat": 4, "nbformat_minor": 5}"""


INTRO = """# A book

(scales)=
## Scales
Mathematics: $x^2$.

```{include} generated/claims.md
:end-before: <!-- the score ends here -->
```
"""
CONTENTS = """format: jb-book
root: book/intro
chapters:
  - file: book/tiny
  - file: book/claims
"""
LONG_AGO = (1e9, 1e9)  # not 0, which make takes for a file that is not there


def make(project, *arguments):
    """The finished make, with both streams in ``stdout``; the copy's package, our environment."""
    command = ["make", "READY=1", f"BIN={Path(sys.executable).parent}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(project)}
    return subprocess.run(
        command,
        cwd=project,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def would_run(project, *arguments):
    """Names of the steps that make would take."""
    dry = make(project, "-n", *arguments).stdout
    steps = {
        "pages": r"notebooks run \S+",
        "claims": "claims_page",
        "book": "jupyter-book build",
    }
    return {step for step, pattern in steps.items() if re.search(pattern, dry)}


def touch(path):
    """As if edited now; file systems and make see whole ticks only."""
    later = time.time() + 2
    os.utime(path, (later, later))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the tiny notebook as its only one, built."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("_config.yml", "Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__", "*.ipynb", "generated")
    shutil.copytree(ROOT / "leancluster_core", copy / "leancluster_core", ignore=ignore)
    shutil.copytree(ROOT / "book", copy / "book", ignore=ignore)
    (copy / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "assets.yml", copy / "notebooks")
    shutil.copy(TINY, copy / "notebooks")
    with (copy / "notebooks" / "tiny.py").open("a") as notebook:
        notebook.write("\n# %% [markdown]\n# See {numref}`fig-tiny-line`.\n")
    # Its own front page: the real one may refer to notebooks that are not here.
    (copy / "book" / "intro.md").write_text(INTRO)
    (copy / "book" / "_toc.yml").write_text(CONTENTS)
    (copy / "book" / "out").mkdir()
    (copy / "book" / "out" / "stray.ipynb").write_text(STRAY)
    (copy / ".pytest_cache").mkdir()
    (copy / ".pytest_cache" / "README.md").write_text("# not a page\n")
    built = make(copy, "book")
    assert built.returncode == 0, built.stdout
    assert "WARNING" not in built.stdout
    return copy


def test_the_pages_are_there_and_figures_resolve(project):
    """S4.6: the number of a notebook's figure, and its picture, on the page."""
    page = (project / "_build" / "html" / "book" / "tiny.html").read_text()
    assert "Plot 1" in page.partition("See ")[2]
    assert 'alt="A rising line"' in page
    assert "output_dir = &quot;book" not in page
    claims = (project / "_build" / "html" / "book" / "claims.html").read_text()
    assert claims.count('<tr id="') == 72


def test_mathematics_works_offline(project):
    page = (project / "_build" / "html" / "book" / "intro.html").read_text()
    assert re.search(r'src="\.\./_static/mathjax/tex-svg\.js[^"]*"', page)
    assert (project / "_build" / "html" / "_static" / "mathjax" / "tex-svg.js").is_file()


def test_only_listed_pages_are_built_and_no_stray_notebook_runs(project):
    """S4.4"""
    assert not list(project.rglob("stray_ran.txt"))
    assert not list((project / "_build" / "html").rglob("stray*"))


def test_a_second_make_does_nothing(project):
    assert would_run(project, "book") == set()


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("notebooks/tiny.py", {"pages", "claims", "book"}),
        ("leancluster_core/experiments/pages.py", {"pages", "claims", "book"}),
        ("leancluster_core/losses.py", {"pages", "claims", "book"}),
        ("constraints.txt", {"pages", "claims", "book"}),
        ("book/claims.yml", {"claims", "book"}),
        ("book/intro.md", {"book"}),
        ("book/_toc.yml", {"book"}),
        ("_config.yml", {"book"}),
    ],
)
def test_an_edit_makes_what_depends_on_it(project, path, steps):
    """S4.3: a change in the package leaves no old number in a page."""
    before = (project / path).stat()
    touch(project / path)
    try:
        assert would_run(project, "book") == steps
    finally:
        os.utime(project / path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["tiny_line.svg", "tiny_values.csv", "run.json", "."])
def test_a_missing_side_output_makes_its_page_again(project, name):
    """S4.3"""
    generated = project / "book" / "generated" / "tiny"
    missing = generated / name
    aside = project / "aside"
    missing.rename(aside) if name != "." else generated.rename(aside)
    try:
        assert would_run(project, "book") == {"pages", "claims", "book"}
    finally:
        aside.rename(missing if name != "." else generated)
    assert would_run(project, "book") == set()


def test_a_scale_runs_beside_the_book(project):
    dry = make(project, "-n", "tiny", "SCALE=smoke").stdout
    assert "run notebooks/tiny.py --scale smoke" in dry
    assert would_run(project, "tiny") == set()
    assert make(project, "-n", "fig99").returncode != 0


def test_a_new_run_in_the_store_makes_its_page_again(project):
    """S4.3: what make is told about the runs of a page."""
    from leancluster_core.experiments import notebooks

    history = project / "results" / "laptop" / "abc" / "history.parquet"
    history.parent.mkdir(parents=True)
    history.touch()
    page = project / "book" / "tiny.ipynb"
    saved = project / "book" / "generated" / "tiny"
    kept = (saved / "page.d").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, "project_root", lambda: project)
        rules = notebooks._make_rules(saved, saved, page, {"runs": ["abc"]})
    (saved / "page.d").write_text(rules)
    try:
        touch(history)
        assert "pages" in would_run(project, "book")
        os.utime(history, LONG_AGO)
        assert would_run(project, "book") == set()
        shutil.rmtree(project / "results")
        assert "pages" in would_run(project, "book")
    finally:
        (saved / "page.d").write_bytes(kept)


def test_a_failing_notebook_fails_the_build(project):
    """S4.2: and the page of the last good run is not touched, nor is the failed one shown."""
    source = project / "notebooks" / "tiny.py"
    good, page = source.read_text(), (project / "book" / "tiny.ipynb").read_bytes()
    source.write_text(good + '\n# %%\nraise RuntimeError("x")\n')
    touch(source)
    try:
        failed = make(project, "book")
    finally:
        source.write_text(good)
        os.utime(source, LONG_AGO)
    assert failed.returncode != 0
    assert "RuntimeError: x" in failed.stdout
    assert "which starts with 'raise RuntimeError(\"x\")'" in failed.stdout
    assert (project / "book" / "tiny.ipynb").read_bytes() == page
    assert would_run(project, "book") == set()


def test_a_page_that_is_not_there_fails_the_build(project):
    """S4.2: also where a source of that name lies beside the pages, and again the next time."""
    contents = project / "book" / "_toc.yml"
    good = contents.read_text()
    contents.write_text(good + "  - file: book/b\n")
    (project / "book" / "b.py").write_text("# %%\nprint(1)\n")
    touch(contents)
    try:
        failed = make(project, "book")
        again = would_run(project, "book")
    finally:
        contents.write_text(good)
    assert failed.returncode != 0
    assert "book/b" in failed.stdout
    assert again == {"book"}
