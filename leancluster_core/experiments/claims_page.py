"""The ledger as a page: every claim of ``book/claims.yml`` with its verdict, or "not run".

``python -m leancluster_core.experiments.claims_page book/generated/claims.md`` collects what the
notebooks published (:mod:`claims`); book/claims.md and book/intro.md include what it writes.
"""

import html
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from leancluster_core.experiments.claims import NOT_RUN, Claim, Verdict, ledger, score
from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.criteria import REMARKS, SCALE_FREE
from leancluster_core.experiments.paths import project_root

SCORE_ENDS = "<!-- the score ends here -->"
"""Pages that show the score alone include the text up to this line."""


def render(
    claims: Sequence[tuple[Claim, Verdict]],
    assets: Mapping[str, Mapping[str, str]],
    pages: Sequence[str],
) -> str:
    """The page's Markdown: the score, then the claims by section and asset, in assets' order.

    ``pages`` are the documents of the book: an asset among them is linked. Raises ValueError for a
    claim whose asset is not in ``assets``.
    """
    counts = " ".join(_badge(verdict, f"{n} ") for verdict, n in score(claims).items())
    lines = [f'<p class="score">{len(claims)} claims: {counts}</p>', "", _scales(claims), ""]
    lines += [SCORE_ENDS, ""]
    for claim, _ in claims:
        if claim.asset not in assets:
            raise ValueError(f"claim {claim.id}: assets.yml has no asset {claim.asset!r}")
    section = None
    for asset, about in assets.items():
        of_asset = [(claim, verdict) for claim, verdict in claims if claim.asset == asset]
        if not of_asset:
            continue
        if about["section"] != section:
            section = about["section"]
            lines += [f"## {section}", ""]
        title = about["title"]
        lines += [f"### [{title}]({asset}.ipynb)" if asset in pages else f"### {title}", ""]
        lines += ['<table class="table claims">', "<tr><th>Claim</th><th>Verdict</th></tr>"]
        lines += [_row(claim, verdict) for claim, verdict in of_asset]
        lines += ["</table>", ""]
    return "\n".join(lines)


def _scales(claims: Sequence[tuple[Claim, Verdict]]) -> str:
    """What the score hides: which verdicts are on trained models, and at which scale these are."""
    judged = [(claim, found) for claim, found in claims if found.verdict != NOT_RUN]
    at = Counter(found.scale for claim, found in judged if claim.id not in SCALE_FREE)
    scales = ", ".join(f"{at[scale]} at scale `{scale}`" for scale in SCALES if at[scale])
    free = sum(claim.id in SCALE_FREE for claim, _ in judged)
    return (
        f"Of the verdicts, {free} are on constructions, losses and lemmas, where no scale enters, "
        f"and {at.total()} on trained models: {scales or 'none'}."
    )


def _row(claim: Claim, found: Verdict) -> str:
    name = html.escape(claim.id)
    measured = html.escape(found.figures)
    if found.verdict != NOT_RUN and claim.id not in SCALE_FREE:
        measured += f" <em>({html.escape(found.scale)} scale)</em>"
    remark = ""
    if claim.id in REMARKS:
        problem, proposed = (html.escape(part) for part in REMARKS[claim.id])
        remark = (
            f'<span class="criterion">Ill-posed: {problem}. We would write: {proposed}. '
            "The verdict is by the criterion as it stands.</span>"
        )
    return (
        f'<tr id="{name}"><td>{html.escape(claim.sentence)} <code>{name}</code>'
        f'<span class="criterion">Criterion: {html.escape(claim.criterion)}</span>{remark}</td>'
        f'<td>{_badge(found.verdict)}<span class="measured">{measured}</span></td></tr>'
    )


def _badge(verdict: str, count: str = "") -> str:
    kind = verdict.replace(" ", "-")
    return f'<span class="verdict verdict-{kind}">{count}{verdict}</span>'


def pages_in_contents(contents: Path) -> list[str]:
    """Stems of the documents that a table of contents lists."""
    tree = yaml.safe_load(contents.read_text(encoding="utf-8"))
    chapters = [chapter for part in tree.get("parts", []) for chapter in part["chapters"]]
    chapters += tree.get("chapters", [])
    return [Path(chapter["file"]).name for chapter in chapters if "file" in chapter]


def main(output: Path) -> None:
    """Write the page from the files of the project."""
    root = project_root()
    assets = yaml.safe_load((root / "notebooks" / "assets.yml").read_text(encoding="utf-8"))
    page = render(ledger(), assets, pages_in_contents(root / "book" / "_toc.yml"))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
