"""The claims page: every claim once, its verdict or "not run", nothing typed by hand."""

import json
import re
from pathlib import Path

import pytest
import yaml

from leancluster_core.experiments.claims_page import (
    SCORE_ENDS,
    collect_verdicts,
    pages_in_contents,
    render,
)

ROOT = Path(__file__).parents[2]
CLAIMS = yaml.safe_load((ROOT / "book" / "claims.yml").read_text())
ASSETS = yaml.safe_load((ROOT / "notebooks" / "assets.yml").read_text())


def verdict(claim="F2-beats", verdict="reproduced", **others):
    return {"id": claim, "verdict": verdict, "scale": "paper", "figures": "rel 0.93 < 1"} | others


def saved(folder, notebook, *verdicts):
    (folder / notebook).mkdir()
    (folder / notebook / "verdicts.json").write_text(json.dumps(verdicts))


def row(page, claim):
    return re.search(rf'<tr id="{claim}">.*?</tr>', page, re.DOTALL)[0]


def test_every_claim_stands_once_with_its_criterion():
    page = render(CLAIMS, ASSETS, {}, [])
    assert re.findall(r'<tr id="([^"]+)">', page).sort() == [c["id"] for c in CLAIMS].sort()
    assert page.count("<tr id=") == len(CLAIMS) == 72
    assert all("not run</span>" in row(page, claim["id"]) for claim in CLAIMS)
    assert "|rel_OH - rel_BN| &lt; 0.05 at tau=0.1" in row(page, "F2-same-end")


def test_a_verdict_is_shown_with_its_figures_and_counted(tmp_path):
    saved(tmp_path, "fig02", verdict(), verdict("F2-na", "not reproduced", figures="rel 0.99"))
    page = render(CLAIMS, ASSETS, collect_verdicts(CLAIMS, tmp_path), [])
    assert "verdict-reproduced" in row(page, "F2-beats")
    assert "rel 0.93 &lt; 1 <em>(paper scale)</em>" in row(page, "F2-beats")
    assert "verdict-not-reproduced" in row(page, "F2-na")
    assert "rel 0.99" in row(page, "F2-na")
    score = page.partition(SCORE_ENDS)[0]
    counts = re.findall(r">(\d+) ([a-z ]+)</span>", score)
    assert counts == [
        ("1", "reproduced"),
        ("0", "reproduced at reduced scale"),
        ("1", "not reproduced"),
        ("70", "not run"),
    ]


def test_claims_are_grouped_by_section_and_linked_to_pages_that_there_are():
    page = render(CLAIMS, ASSETS, {}, ["fig02"])
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert sections == list(dict.fromkeys(about["section"] for about in ASSETS.values()))
    assert f"### [{ASSETS['fig02']['title']}](fig02.ipynb)" in page
    assert f"### {ASSETS['fig03']['title']}\n" in page


@pytest.mark.parametrize(
    ("verdicts", "says"),
    [
        ([verdict("F99-x")], "claims.yml has no claim 'F99-x'"),
        ([verdict(verdict="works")], "verdict of F2-beats must be one of 'reproduced'"),
        ([verdict(), verdict()], "F2-beats has a verdict already"),
    ],
)
def test_a_wrong_ledger_is_refused_with_the_file(tmp_path, verdicts, says):
    saved(tmp_path, "fig02", *verdicts)
    with pytest.raises(ValueError, match=f"verdicts.json: {says}"):
        collect_verdicts(CLAIMS, tmp_path)


def test_a_claim_of_an_unknown_asset_is_refused():
    with pytest.raises(ValueError, match="no asset 'fig99'"):
        render([{"id": "X", "asset": "fig99", "claim": "", "criterion": ""}], ASSETS, {}, [])


def test_pages_are_those_of_the_contents(tmp_path):
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/intro\nparts:\n  - chapters: [{file: book/fig02}]\n"
    )
    assert pages_in_contents(tmp_path / "_toc.yml") == ["fig02"]
