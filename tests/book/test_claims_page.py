"""The claims page: every claim once, its verdict or "not run", nothing typed by hand."""

import re
from pathlib import Path

import pytest
import yaml

from leancluster_core.experiments.claims import Claim, Verdict, ledger, write_verdicts
from leancluster_core.experiments.claims_page import SCORE_ENDS, pages_in_contents, render
from leancluster_core.experiments.criteria import REMARKS

ROOT = Path(__file__).parents[2]
ASSETS = yaml.safe_load((ROOT / "notebooks" / "assets.yml").read_text())


def row(page, claim):
    return re.search(rf'<tr id="{claim}">.*?</tr>', page, re.DOTALL)[0]


def test_every_claim_stands_once_with_its_criterion(tmp_path):
    claims = ledger(tmp_path)
    page = render(claims, ASSETS, [])
    assert sorted(re.findall(r'<tr id="([^"]+)">', page)) == sorted(c.id for c, _ in claims)
    assert page.count("<tr id=") == len(claims) == 72
    assert all("not run</span>" in row(page, claim.id) for claim, _ in claims)
    assert "|rel_OH - rel_BN| &lt; 0.05 at tau=0.1" in row(page, "F2-same-end")


def test_a_verdict_is_shown_with_its_figures_and_counted(tmp_path):
    beats = Verdict("F2-beats", "reproduced", "paper", "rel 0.93 < 1")
    fails = Verdict("F2-na", "not reproduced", "laptop", "rel 0.99")
    write_verdicts([beats, fails], tmp_path / "fig02.json")
    page = render(ledger(tmp_path), ASSETS, [])
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


def test_the_score_says_how_much_of_it_is_about_trained_models_and_at_which_scale(tmp_path):
    beats = Verdict("F2-beats", "reproduced", "paper", "rel 0.93 < 1")
    fails = Verdict("F10-tau", "not reproduced", "laptop", "rel 0.99")
    exact = Verdict("S2-exact", "reproduced", "laptop", "difference 0")
    for verdict, asset in ((beats, "fig02"), (fails, "fig10"), (exact, "thm21")):
        write_verdicts([verdict], tmp_path / f"{asset}.json")
    page = render(ledger(tmp_path), ASSETS, [])
    assert (
        "1 are on constructions, losses and lemmas, where no scale enters, and 2 on trained "
        "models: 1 at scale `laptop`, 1 at scale `paper`."
    ) in page.partition(SCORE_ENDS)[0]
    assert "scale)" not in row(page, "S2-exact")


def test_an_ill_posed_criterion_stands_unchanged_with_the_wording_we_propose(tmp_path):
    page = render(ledger(tmp_path), ASSETS, [])
    for claim, _ in ledger(tmp_path):
        assert ("Ill-posed:" in row(page, claim.id)) == (claim.id in REMARKS)
    assert "Spearman(k, rel) &gt; 0.8 for BN and not for OH" in row(page, "F15a-bn")
    assert "rel at k=25 above rel at k=6" in row(page, "F15a-bn")


def test_claims_are_grouped_by_section_and_linked_to_pages_that_there_are(tmp_path):
    page = render(ledger(tmp_path), ASSETS, ["fig02"])
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert sections == list(dict.fromkeys(about["section"] for about in ASSETS.values()))
    assert f"### [{ASSETS['fig02']['title']}](fig02.ipynb)" in page
    assert f"### {ASSETS['fig03']['title']}\n" in page


def test_a_claim_of_an_unknown_asset_is_refused():
    pair = Claim("X", "fig99", "", ""), Verdict("X", "not run", "-", "no notebook")
    with pytest.raises(ValueError, match="no asset 'fig99'"):
        render([pair], ASSETS, [])


def test_pages_are_those_of_the_contents(tmp_path):
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/intro\nparts:\n  - chapters: [{file: book/fig02}]\n"
    )
    assert pages_in_contents(tmp_path / "_toc.yml") == ["fig02"]
