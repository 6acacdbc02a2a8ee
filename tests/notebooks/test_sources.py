"""Rules for every notebook: those of the book, the example in it, and those of these tests."""

import ast
from pathlib import Path

import jupytext
import pytest
import yaml

from leancluster_core.experiments.claims_page import pages_in_contents
from leancluster_core.experiments.parameters import read_parameters

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "notebooks").glob("*.py"))
EXAMPLES = sorted((ROOT / "book").glob("example_*.py"))
SOURCES = [*PAGES, *EXAMPLES, *sorted((Path(__file__).parent / "sources").glob("*.py"))]


def code_cells(path):
    cells = jupytext.read(path).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def names(code, kind):
    nodes = ast.walk(ast.parse(code))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_kernel_is_python3(path):
    """S3.4: a source without a kernel, or with its author's own, runs on one machine only."""
    metadata = jupytext.read(path).metadata
    assert metadata["kernelspec"]["name"] == "python3"
    assert metadata["kernelspec"]["language"] == "python"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_parameters_come_first_are_checked_at_once_and_all_are_read(path):
    """S3.1, S3.2"""
    declared = read_parameters(path)
    assert {"scale", "output_dir"} <= set(declared)
    assert declared["output_dir"] == ""
    first, second, *others = code_cells(path)
    assert "parameters" in first.metadata.get("tags", [])
    checks = [
        node
        for node in ast.walk(ast.parse(second.source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_parameters"
    ]
    assert len(checks) == 1
    assert {keyword.arg for keyword in checks[0].keywords} == set(declared)
    read = set().union(*(names(cell.source, ast.Load) for cell in others))
    assert set(declared) <= read, "a parameter that nothing reads"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_starts_with_its_title(path):
    first = jupytext.read(path).cells[0]
    assert first.cell_type == "markdown"
    assert any(line.startswith("# ") for line in first.source.splitlines())


def test_every_notebook_is_an_asset_and_a_page():
    assets = yaml.safe_load((ROOT / "notebooks" / "assets.yml").read_text())
    stems = {path.stem for path in PAGES}
    assert stems <= set(assets)
    assert stems == set(pages_in_contents(ROOT / "book" / "_toc.yml")) & set(assets) - {"intro"}


def test_assets_cover_the_claims():
    assets = yaml.safe_load((ROOT / "notebooks" / "assets.yml").read_text())
    claims = yaml.safe_load((ROOT / "book" / "claims.yml").read_text())
    assert {claim["asset"] for claim in claims} <= set(assets)
    assert all(set(about) == {"title", "kind", "section"} for about in assets.values())
