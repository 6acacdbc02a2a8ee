"""The ledger: every checkable claim of the paper, and a verdict that its notebook computed.

``book/claims.yml`` holds the claims and their criteria, fixed before any result was seen;
``criteria.py`` evaluates them from the frames that a notebook computes. The notebook saves its
verdicts; those of its own parameters are published in ``results/verdicts``, which the claims page
and ``python -m leancluster_core.experiments claims`` read.
"""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from leancluster_core.checks import check_choice
from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.criteria import (
    ON_CURVES,
    ON_TABLES,
    SCALE_FREE,
    Curves,
    Finding,
    Missing,
)
from leancluster_core.experiments.pages import Shown
from leancluster_core.experiments.paths import project_root

REPRODUCED = "reproduced"
REDUCED = "reproduced at reduced scale"
NOT_REPRODUCED = "not reproduced"
NOT_RUN = "not run"
VERDICTS = (REPRODUCED, REDUCED, NOT_REPRODUCED, NOT_RUN)


@dataclass(frozen=True)
class Claim:
    """A claim as ``book/claims.yml`` words it."""

    id: str
    asset: str
    claim: str
    criterion: str

    @property
    def sentence(self) -> str:
        """The claim as a page begins a sentence with it; "tau=1" stays as it is."""
        first, _, _ = self.claim.partition(" ")
        return self.claim if "=" in first else self.claim[:1].upper() + self.claim[1:]


@dataclass(frozen=True)
class Verdict:
    """What came out: one of VERDICTS, the figures (or why it was not run), scale and run keys."""

    id: str
    verdict: str
    scale: str
    figures: str
    runs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("verdict", self.verdict, VERDICTS)
        if not self.figures.strip() or "\n" in self.figures:
            raise ValueError(f"figures of {self.id} must be one line of text, got {self.figures!r}")


def load_claims(path: Path | None = None) -> list[Claim]:
    """The claims in the file's order (default: ``book/claims.yml``).

    A criterion "same" is that of the last claim before it with one of its own.

    Raises ValueError for an id that stands twice, TypeError for an entry with other fields.
    """
    import yaml

    source = path or project_root() / "book" / "claims.yml"
    claims: dict[str, Claim] = {}
    spelt_out: Claim | None = None
    for entry in yaml.safe_load(source.read_text(encoding="utf-8")):
        claim = Claim(**entry)
        if claim.id in claims:
            raise ValueError(f"{source}: claim {claim.id} stands twice")
        if claim.criterion != "same":
            spelt_out = claim
        elif spelt_out is not None:  # pages show claims in another order
            claim = replace(claim, criterion=f"as for {spelt_out.id}: {spelt_out.criterion}")
        claims[claim.id] = claim
    return list(claims.values())


def evaluate_claims(
    asset: str,
    frames: pd.DataFrame | Mapping[str, pd.DataFrame],
    *,
    scale: str,
    run_keys: Sequence[str] = (),
) -> list[Verdict]:
    """A verdict for each claim of an asset, in the ledger's order.

    frames: the frame of a convergence figure (:func:`grids.curve_frame`), or tables by the names
    that the evaluators in ``criteria.py`` ask for. A criterion that holds is "reproduced" at scale
    "paper" and "reproduced at reduced scale" below, except where it says itself how much is enough.
    run_keys: the runs behind the frames; a convergence frame knows its own.

    Raises ValueError for an asset without claims and for an unknown scale.
    """
    check_choice("scale", scale, SCALES)
    claims = [claim for claim in load_claims() if claim.asset == asset]
    if not claims:
        raise ValueError(f"asset must be one that claims.yml has claims of, got {asset!r}")
    if isinstance(frames, pd.DataFrame):
        run_keys = run_keys or frames["key"].drop_duplicates().tolist()
    return [_evaluate(claim.id, frames, scale, list(run_keys)) for claim in claims]


def _evaluate(
    claim: str, frames: pd.DataFrame | Mapping[str, pd.DataFrame], scale: str, runs: list[str]
) -> Verdict:
    try:
        finding = _find(claim, frames)
    except Missing as reason:
        return Verdict(claim, NOT_RUN, scale, str(reason.args[0]), runs)
    held = REPRODUCED if scale == "paper" or claim in SCALE_FREE else REDUCED
    return Verdict(claim, held if finding.holds else NOT_REPRODUCED, scale, finding.figures, runs)


def _find(claim: str, frames: pd.DataFrame | Mapping[str, pd.DataFrame]) -> Finding:
    if isinstance(frames, pd.DataFrame):
        if claim not in ON_CURVES:
            raise Missing("no evaluator reads this from training curves")
        curves = Curves(frames)
        finding = ON_CURVES[claim](curves)
        if curves.diverged:
            notes = "; ".join(curves.diverged)
            return Finding(finding.holds, f"{finding.figures} [{notes}]")
        return finding
    if claim not in ON_TABLES:
        raise Missing("no evaluator reads this from tables")
    return ON_TABLES[claim](frames)


def save_verdicts(verdicts: Iterable[Verdict], output_dir: str) -> Shown:
    """Write ``<output_dir>/verdicts.json`` ("" saves nothing) and return the table for display."""
    verdicts = list(verdicts)
    if output_dir:
        write_verdicts(verdicts, Path(output_dir) / "verdicts.json")
    wording = {claim.id: claim for claim in load_claims()}
    rows = "".join(_row(wording[verdict.id], verdict) for verdict in verdicts)
    table = f'<table class="table claims"><tr><th>Claim</th><th>Verdict</th></tr>{rows}</table>'
    return Shown({"text/html": table, "text/plain": "\n".join(map(one_line, verdicts))})


def _row(claim: Claim, verdict: Verdict) -> str:
    kind = verdict.verdict.replace(" ", "-")
    return (
        f"<tr><td>{html.escape(claim.sentence)} <code>{html.escape(claim.id)}</code>"
        f'<span class="criterion">Criterion: {html.escape(claim.criterion)}</span></td>'
        f'<td><span class="verdict verdict-{kind}">{verdict.verdict}</span>'
        f'<span class="measured">{html.escape(verdict.figures)}</span></td></tr>'
    )


def one_line(verdict: Verdict) -> str:
    """``ID verdict scale figures``."""
    return f"{verdict.id} {verdict.verdict} {verdict.scale} {verdict.figures}"


def write_verdicts(verdicts: Iterable[Verdict], path: Path) -> None:
    """Write verdicts as JSON, the same bytes for the same verdicts, whole or not at all."""
    text = json.dumps([asdict(verdict) for verdict in verdicts], indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)


def read_verdicts(path: Path, claims: Sequence[Claim]) -> list[Verdict]:
    """Verdicts of a file. Raises ValueError, naming it, for unknown ids, words and fields."""
    known = {claim.id for claim in claims}
    verdicts = []
    try:
        for entry in json.loads(path.read_text(encoding="utf-8")):
            if entry["id"] not in known:
                raise ValueError(f"claims.yml has no claim {entry['id']!r}")
            verdicts.append(Verdict(**entry))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None
    return verdicts


def published_folder() -> Path:
    """Where the tracked verdicts are: ``results/verdicts/<asset>.json``."""
    return project_root() / "results" / "verdicts"


def publish_verdicts(asset: str, saved: Path, folder: Path | None = None) -> bool:
    """Put the verdicts of a notebook's run into the ledger; False if they don't belong there.

    Runs at scale "smoke" mean nothing, and a run at a smaller scale doesn't replace a larger one.
    """
    target = (folder or published_folder()) / f"{asset}.json"
    claims = [claim for claim in load_claims() if claim.asset == asset]
    if not saved.exists() or not claims:
        return False
    verdicts = read_verdicts(saved, claims)
    sizes = list(SCALES)
    size = min(sizes.index(verdict.scale) for verdict in verdicts)
    if sizes[size] == "smoke":
        return False
    if target.exists():
        old = [verdict.scale for verdict in read_verdicts(target, claims)]
        if size < max(map(sizes.index, old)):
            return False
    write_verdicts(verdicts, target)
    return True


def ledger(folder: Path | None = None) -> list[tuple[Claim, Verdict]]:
    """Every claim with its published verdict, or "not run" and why, in the order of claims.yml.

    Raises ValueError, naming the file, for verdicts that don't fit the claims.
    """
    folder = folder or published_folder()
    claims = load_claims()
    found: dict[str, Verdict] = {}
    for path in sorted(folder.glob("*.json")):
        for verdict in read_verdicts(path, [c for c in claims if c.asset == path.stem]):
            if verdict.id in found:
                raise ValueError(f"{path}: {verdict.id} has a verdict already")
            found[verdict.id] = verdict
    return [(claim, found.get(claim.id) or _not_run(claim)) for claim in claims]


def _not_run(claim: Claim) -> Verdict:
    source = project_root() / "notebooks" / f"{claim.asset}.py"
    reason = (
        f"notebook {claim.asset} has not been run at laptop or paper scale"
        if source.exists()
        else "no notebook of this book computes it yet"
    )
    return Verdict(claim.id, NOT_RUN, "-", reason)


def print_claims() -> None:
    """One line a claim: ``ID verdict scale figures``."""
    for _, verdict in ledger():
        print(one_line(verdict))


def score(pairs: Iterable[tuple[Any, Verdict]]) -> dict[str, int]:
    """How many claims have each verdict."""
    counts = dict.fromkeys(VERDICTS, 0)
    for _, verdict in pairs:
        counts[verdict.verdict] += 1
    return counts
