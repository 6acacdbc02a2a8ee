"""The ledger as a page: every claim of ``book/claims.yml`` with its verdict, or "not run".

``python -m leancluster_core.experiments.claims_page book/generated/claims.md`` collects what the
executed notebooks saved; book/claims.md and book/intro.md include what it writes.
"""

import html
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from leancluster_core.experiments.paths import project_root

VERDICTS = ("reproduced", "reproduced at reduced scale", "not reproduced", "not run")

SCORE_ENDS = "<!-- the score ends here -->"
"""Pages that show the score alone include the text up to this line."""


def collect_verdicts(
    claims: Sequence[Mapping[str, str]], folder: Path
) -> dict[str, Mapping[str, Any]]:
    """Verdicts by claim id, from every ``<folder>/<notebook>/verdicts.json``.

    Raises ValueError, naming the file, for a claim that claims.yml does not have, a verdict in
    other words than its own, or a claim with two verdicts.
    """
    known = {claim["id"] for claim in claims}
    verdicts: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.glob("*/verdicts.json")):
        for found in json.loads(path.read_text(encoding="utf-8")):
            name, verdict = found["id"], found["verdict"]
            if name not in known:
                raise ValueError(f"{path}: claims.yml has no claim {name!r}")
            if verdict not in VERDICTS:
                allowed = ", ".join(map(repr, VERDICTS))
                raise ValueError(
                    f"{path}: verdict of {name} must be one of {allowed}, got {verdict!r}"
                )
            if name in verdicts:
                raise ValueError(f"{path}: {name} has a verdict already, from another notebook")
            verdicts[name] = found
    return verdicts


def render(
    claims: Sequence[Mapping[str, str]],
    assets: Mapping[str, Mapping[str, str]],
    verdicts: Mapping[str, Mapping[str, Any]],
    pages: Sequence[str],
) -> str:
    """The page's Markdown: the score, then the claims by section and asset, in assets' order.

    ``pages`` are the documents of the book: an asset among them is linked. Raises ValueError for a
    claim whose asset is not in ``assets``.
    """
    counts = Counter(verdicts.get(claim["id"], {}).get("verdict", "not run") for claim in claims)
    score = " ".join(_badge(verdict, f"{counts[verdict]} ") for verdict in VERDICTS)
    lines = [f'<p class="score">{len(claims)} claims: {score}</p>', "", SCORE_ENDS, ""]
    for claim in claims:
        if claim["asset"] not in assets:
            raise ValueError(f"claim {claim['id']}: assets.yml has no asset {claim['asset']!r}")
    section = None
    for asset, about in assets.items():
        of_asset = [claim for claim in claims if claim["asset"] == asset]
        if not of_asset:
            continue
        if about["section"] != section:
            section = about["section"]
            lines += [f"## {section}", ""]
        title = about["title"]
        lines += [f"### [{title}]({asset}.ipynb)" if asset in pages else f"### {title}", ""]
        lines += ['<table class="table claims">', "<tr><th>Claim</th><th>Verdict</th></tr>"]
        lines += [_row(claim, verdicts.get(claim["id"], {})) for claim in of_asset]
        lines += ["</table>", ""]
    return "\n".join(lines)


def _row(claim: Mapping[str, str], found: Mapping[str, Any]) -> str:
    name, text = html.escape(claim["id"]), claim["claim"][:1].upper() + claim["claim"][1:]
    measured = html.escape(found.get("figures", ""))
    if found:
        measured += f" <em>({html.escape(str(found.get('scale', 'no')))} scale)</em>"
    return (
        f'<tr id="{name}"><td>{html.escape(text)} <code>{name}</code>'
        f'<span class="criterion">Criterion: {html.escape(claim["criterion"])}</span></td>'
        f"<td>{_badge(found.get('verdict', 'not run'))}"
        f'<span class="measured">{measured}</span></td></tr>'
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
    claims = yaml.safe_load((root / "book" / "claims.yml").read_text(encoding="utf-8"))
    assets = yaml.safe_load((root / "notebooks" / "assets.yml").read_text(encoding="utf-8"))
    verdicts = collect_verdicts(claims, root / "book" / "generated")
    page = render(claims, assets, verdicts, pages_in_contents(root / "book" / "_toc.yml"))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
