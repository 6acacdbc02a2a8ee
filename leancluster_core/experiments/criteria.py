"""The criteria of ``book/claims.yml``, one function each: does it hold, and what was measured.

A criterion is evaluated as it is worded. Where the wording leaves open which curves it means, the
reading is in the function's docstring, and ``REMARKS`` has a better wording for those that are
ill-posed. "rel" is the relative validation loss at the end of training, median over trials.

Nothing is dropped in silence. A trial that diverged counts as an infinite loss, and the figures say
so; a curve, trial or last step that is not there raises :class:`Missing`: the claim is "not run".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pandas as pd

from leancluster_core.embeddings import code_width
from leancluster_core.experiments.config import EMBEDDING_LABELS, REGULARIZER_LABELS

# A measured value may exceed an exact bound by this share: rounding in float64.
ROUNDING = 1e-9

OTHER_FAMILIES = ("normal", "gumbel", "laplace", "lognormal")
CODES = ("onehot", "binary")
ALL_EMBEDDINGS = ("onehot", "binary", "none")
BOTH = ("entropy", "l2")


class Missing(LookupError):
    """What a criterion needs is not in the frames; the message says what."""


@dataclass(frozen=True)
class Finding:
    """Does the criterion hold, and the figures that say so, in one line."""

    holds: bool
    figures: str


@dataclass(frozen=True)
class Curves:
    """A frame of :func:`grids.curve_frame`, asked for medians over trials by criteria.

    ``diverged`` collects, for the figures, those asked for that have trials with a loss that is not
    finite.
    """

    frame: pd.DataFrame
    diverged: dict[str, None] = field(default_factory=dict)

    def path(self, value: str, embedding: str, regularizer: str, **setting: Any) -> pd.Series:
        """Median over trials at each step (a trial that is not finite there counts as inf)."""
        name = curve_name(embedding, regularizer, setting)
        table = self.trials(value, embedding, regularizer, **setting)
        bad = ~np.isfinite(table.to_numpy())
        if bad.any():
            first = table.index[bad.any(axis=1)][0]
            count = int(bad.any(axis=0).sum())
            note = f"{name}: {count} of {table.shape[1]} trials not finite from step {first}"
            self.diverged[note] = None
        return pd.Series(np.median(np.where(bad, np.inf, table), axis=1), index=table.index)

    def trials(self, value: str, embedding: str, regularizer: str, **setting: Any) -> pd.DataFrame:
        """Values by step (rows) and trial (columns) of one curve, complete or :class:`Missing`.

        A setting that says nothing of clipping means the curve without.
        """
        name = curve_name(embedding, regularizer, setting)
        rows = self.select(
            **({"clipped": False} | setting), embedding=embedding, regularizer=regularizer
        )
        if rows.empty:
            raise Missing(f"there is no curve {name}")
        if rows["key"].nunique() > 1:
            raise ValueError(f"several runs are {name}: {', '.join(sorted(set(rows['key'])))}")
        table = rows.pivot(index="step", columns="trial", values=value)
        wanted, n_steps = int(rows["n_trials"].iloc[0]), int(rows["n_steps"].iloc[0])
        if table.shape[1] != wanted:
            raise Missing(f"{name} has {table.shape[1]} of {wanted} trials")
        if table.index[-1] != n_steps:
            raise Missing(f"{name} ends at step {table.index[-1]} of {n_steps}")
        if len(rows) != table.size:
            raise Missing(f"{name} has trials without a value at some steps")
        return table

    def select(self, **setting: Any) -> pd.DataFrame:
        """The rows of a setting; numbers match to rounding."""
        keep = np.ones(len(self.frame), dtype=bool)
        for name, wanted in setting.items():
            column = self.frame[name].to_numpy()
            same = np.isclose(column, wanted) if isinstance(wanted, float) else column == wanted
            keep &= same
        return self.frame[keep]

    def values(self, name: str, count: int, **setting: Any) -> list[Any]:
        """The sorted values of one column in a setting; Missing unless there are ``count``."""
        found = sorted(self.select(**setting)[name].unique().tolist())
        if len(found) != count:
            where = ", ".join(f"{key}={value}" for key, value in setting.items())
            raise Missing(f"needs {count} values of {name} at {where}, got {found}")
        return found

    def rel(self, embedding: str, regularizer: str, **setting: Any) -> float:
        """Relative loss at the end of training, median over trials."""
        return float(self.path("relative_loss", embedding, regularizer, **setting).iloc[-1])

    def loss(self, embedding: str, regularizer: str, **setting: Any) -> float:
        """Smoothed training loss at the end of training, median over trials."""
        return float(self.path("training_loss", embedding, regularizer, **setting).iloc[-1])

    def beats_lloyd_at(self, embedding: str, regularizer: str, **setting: Any) -> float:
        """First step with rel < 1; inf if there is none."""
        path = self.path("relative_loss", embedding, regularizer, **setting)
        below = path.index[path < 1]
        return float(below[0]) if len(below) else math.inf


Tables = Mapping[str, pd.DataFrame]

# Evaluators by claim id: of a convergence figure, and of notebooks that give tables by name.
ON_CURVES: dict[str, Callable[[Curves], Finding]] = {}
ON_TABLES: dict[str, Callable[[Tables], Finding]] = {}

# Claims whose criterion itself says how much is enough: they hold at any scale or not at all.
SCALE_FREE: set[str] = set()

# Criteria that are ill-posed: why, and what we would write. They are evaluated as they stand.
REMARKS: dict[str, tuple[str, str]] = {
    "S2-params": (
        "for d = 1 and 2 the saving at k = 4d is 64% and 75%, whatever is trained",
        "... ; > 75% at k=4d for every d >= 3",
    ),
    "F2-monotone": (
        "a curve that converges early ranks the noise of its plateau: fast learning fails it",
        "Spearman(step, median loss) < -0.9 over the steps up to the first within 5% of the final "
        "loss, for all OH/BN curves",
    ),
    "F15a-bn": (
        "four values of k allow the rank correlations 1, 0.8, 0.6, ... only, so > 0.8 means "
        "strictly increasing, however little, and one exchange of neighbours decides",
        "rel at k=25 above rel at k=6 by > 0.05 for BN and by < 0.05 for OH (L2)",
    ),
    "F15d-clip": (
        "a trial that is merely slow ends above 1 as well, with and without clipping",
        "a trial blows up if rel rises by > 1 between two evaluations; at least one of OH does so "
        "without clipping, none with it",
    ),
}


def on_curves(claim: str) -> Callable[[Callable[[Curves], Finding]], Callable[[Curves], Finding]]:
    """Register an evaluator that reads curves."""

    def register(evaluator: Callable[[Curves], Finding]) -> Callable[[Curves], Finding]:
        ON_CURVES[claim] = evaluator
        return evaluator

    return register


def on_tables(
    claim: str, *, scale_free: bool = False
) -> Callable[[Callable[[Tables], Finding]], Callable[[Tables], Finding]]:
    """Register an evaluator that reads tables by name."""

    def register(evaluator: Callable[[Tables], Finding]) -> Callable[[Tables], Finding]:
        ON_TABLES[claim] = evaluator
        if scale_free:
            SCALE_FREE.add(claim)
        return evaluator

    return register


def curve_name(embedding: str, regularizer: str, setting: Mapping[str, Any]) -> str:
    """A curve in words: "BN:NE at penalty=0.1, n_features=4"."""
    label = f"{EMBEDDING_LABELS[embedding]}:{REGULARIZER_LABELS[regularizer]}"
    return f"{label}{_at(setting)}"


def _at(setting: Mapping[str, Any]) -> str:
    short = {"penalty": "tau", "n_features": "d", "n_clusters": "k", "n_points": "n"}
    short |= {"initial_learning_rate": "eta"}
    words = [
        str(value)
        if name == "family"
        else ("clipped" if value else "unclipped")
        if name == "clipped"
        else f"{short.get(name, name)}={_number(value)}"
        for name, value in setting.items()
    ]
    return f" at {', '.join(words)}" if words else ""


def _number(value: Any) -> str:
    """Three decimals, and no more digits than are needed: 0.93, 1200, inf."""
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _moment(value: float) -> str:
    """A step or a time, or "never"."""
    return f"{value:.4g}" if math.isfinite(value) else "never"


def judge(values: Mapping[str, float], holds: Callable[[float], bool], what: str) -> Finding:
    """Does every value pass? The figures list up to eight, else the range and what fails."""
    failing = [name for name, value in values.items() if not holds(value)]
    if len(values) <= 8:
        listed = ", ".join(f"{name} {_number(float(value))}" for name, value in values.items())
    else:
        low, high = min(values, key=lambda n: values[n]), max(values, key=lambda n: values[n])
        listed = (
            f"{len(values)} values from {_number(float(values[low]))} ({low}) to "
            f"{_number(float(values[high]))} ({high})"
        )
    text = f"{what}: {listed}"
    if failing:
        named = ", ".join(f"{name} ({_number(float(values[name]))})" for name in failing[:6])
        more = f" and {len(failing) - 6} more" if len(failing) > 6 else ""
        text += f"; fails in {len(failing)} of {len(values)}"
        text += f": {named}{more}" if len(values) > 8 else ""
    return Finding(not failing, text)


def both(*findings: Finding) -> Finding:
    """All must hold."""
    return Finding(all(f.holds for f in findings), "; ".join(f.figures for f in findings))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where one of the two is constant."""
    ranks = [pd.Series(v, dtype=float).rank().to_numpy() for v in (x, y)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _below(threshold: float) -> Callable[[float], bool]:
    return lambda value: value < threshold


def _above(threshold: float) -> Callable[[float], bool]:
    return lambda value: value > threshold


def _rels(
    curves: Curves,
    embeddings: Iterable[str],
    regularizers: Iterable[str],
    settings: Iterable[Mapping[str, Any]],
    fixed: Mapping[str, Any],
) -> dict[str, float]:
    """rel of every curve of every setting; names leave out what is ``fixed``."""
    return {
        curve_name(e, r, setting): curves.rel(e, r, **fixed, **setting)
        for setting, e, r in product(list(settings), embeddings, regularizers)
    }


def _over(name: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def _panels(curves: Curves, *columns: str) -> list[dict[str, Any]]:
    found = curves.frame[list(columns)].drop_duplicates()
    return [dict(zip(columns, row, strict=True)) for row in found.itertuples(index=False)]


def _changes(
    curves: Curves, chosen: Iterable[tuple[str, str]], settings: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """rel at the end minus rel at the first evaluation: negative where it falls."""
    result = {}
    for setting, (e, r) in product(list(settings), list(chosen)):
        path = curves.path("relative_loss", e, r, **setting)
        # inf - inf: a curve that diverged at once does not fall
        first, last = float(path.iloc[0]), float(path.iloc[-1])
        result[curve_name(e, r, setting)] = last if math.isinf(last) else last - first
    return result


def _slopes(sequences: Mapping[str, Sequence[float]], *, rising: bool, what: str) -> Finding:
    """Is every sequence strictly increasing (or decreasing)?"""
    sign = 1 if rising else -1
    failing = [
        name for name, s in sequences.items() if not all(sign * (b - a) > 0 for a, b in pairwise(s))
    ]
    listed = ", ".join(f"{n} {' '.join(map(_number, s))}" for n, s in sequences.items())
    verb = "increasing" if rising else "decreasing"
    text = f"{what}: {listed}"
    return Finding(not failing, text + (f"; not {verb}: {', '.join(failing)}" if failing else ""))


# --- Figure 2 ------------------------------------------------------------------------------------

_FOUR = [*product(CODES, BOTH)]  # OH and BN with NE and L2
_TAU1 = {"penalty": 1.0, "n_features": 4}
_SMALL_TAU = {"penalty": 0.1, "n_features": 4}


@on_curves("F2-monotone")
def _(curves: Curves) -> Finding:
    values = {}
    for panel, (e, r) in product(_panels(curves, "penalty", "n_features"), _FOUR):
        path = curves.path("training_loss", e, r, **panel)
        values[curve_name(e, r, panel)] = rank_correlation(list(path.index), list(path))
    return judge(values, _below(-0.9), "Spearman(step, median loss)")


@on_curves("F2-l2-tighter")
def _(curves: Curves) -> Finding:
    values = {}
    for panel, e in product(_panels(curves, "penalty", "n_features"), ALL_EMBEDDINGS):
        ratio = curves.loss(e, "l2", **panel) / curves.loss(e, "entropy", **panel)
        values[f"{EMBEDDING_LABELS[e]}{_at(panel)}"] = ratio
    return judge(values, _below(1), "final smoothed loss, L2 over NE")


@on_curves("F2-ne-fails")
def _(curves: Curves) -> Finding:
    rels = _rels(curves, ALL_EMBEDDINGS, ["entropy"], [{}], _TAU1)
    rises = {}
    for e in ALL_EMBEDDINGS:
        path = curves.path("relative_loss", e, "entropy", **_TAU1)
        rises[curve_name(e, "entropy", {})] = float(path.iloc[-1]) - float(path.min())
    return both(
        judge(rels, _above(1), "rel"), judge(rises, _above(0), "rel at the end minus its minimum")
    )


def _falls_but_ends_above_lloyd(
    curves: Curves, chosen: Sequence[tuple[str, str]], settings: Sequence[Mapping[str, Any]]
) -> Finding:
    ends = {curve_name(e, r, s): curves.rel(e, r, **s) for s, (e, r) in product(settings, chosen)}
    changes = _changes(curves, chosen, settings)
    return both(judge(ends, _above(1), "rel"), judge(changes, _below(0), "change in training"))


@on_curves("F2-l2-tau1")
def _(curves: Curves) -> Finding:
    return _falls_but_ends_above_lloyd(curves, [(e, "l2") for e in CODES], [_TAU1])


@on_curves("F2-beats")
def _(curves: Curves) -> Finding:
    return judge(_rels(curves, CODES, BOTH, [{}], _SMALL_TAU), _below(1), "rel")


@on_curves("F2-na")
def _(curves: Curves) -> Finding:
    return _falls_but_ends_above_lloyd(curves, [("none", r) for r in BOTH], [_SMALL_TAU])


@on_curves("F2-tau-speed")
def _(curves: Curves) -> Finding:
    """All six curves; converged is the first step with at most 1.05 times the final loss."""
    steps, rels = {}, {}
    for e, r in product(ALL_EMBEDDINGS, BOTH):
        converged = []
        for setting in (_TAU1, _SMALL_TAU):
            path = curves.path("training_loss", e, r, **setting)
            converged.append(float(path.index[(path <= 1.05 * path.iloc[-1]).to_numpy()][0]))
        name = curve_name(e, r, {})
        steps[name] = converged[1] - converged[0]
        rels[name] = curves.rel(e, r, **_TAU1) - curves.rel(e, r, **_SMALL_TAU)
    return both(
        judge(steps, _above(0), "steps more at tau=0.1 than at tau=1"),
        judge(rels, _above(0), "rel at tau=1 minus rel at tau=0.1"),
    )


@on_curves("F2-oh-faster")
def _(curves: Curves) -> Finding:
    texts, holds = [], True
    for r in BOTH:
        oh, bn = (curves.beats_lloyd_at(e, r, **_SMALL_TAU) for e in CODES)
        holds &= oh < bn
        texts.append(f"{REGULARIZER_LABELS[r]} OH {_moment(oh)}, BN {_moment(bn)}")
    return Finding(holds, f"first step with rel < 1: {'; '.join(texts)}")


@on_curves("F2-same-end")
def _(curves: Curves) -> Finding:
    gaps = {
        REGULARIZER_LABELS[r]: _distance(*(curves.rel(e, r, **_SMALL_TAU) for e in CODES))
        for r in BOTH
    }
    return judge(gaps, _below(0.05), "|rel_OH - rel_BN|")


def _distance(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


@on_curves("F2-d-gap")
def _(curves: Curves) -> Finding:
    means = []
    for d in (4, 16):
        oh, bn = (curves.path("relative_loss", e, "l2", penalty=0.25, n_features=d) for e in CODES)
        means.append(float(np.mean([_distance(a, b) for a, b in zip(oh, bn, strict=True)])))
    text = f"mean |rel_OH - rel_BN|: d=4 {_number(means[0])}, d=16 {_number(means[1])}"
    return Finding(means[1] < means[0], text)


# --- Figure 4 ------------------------------------------------------------------------------------


@on_curves("F4-cauchy")
def _(curves: Curves) -> Finding:
    settings = _over("penalty", [1.0, 0.1])
    rels = _rels(curves, ALL_EMBEDDINGS, BOTH, settings, {"family": "cauchy"})
    return judge(rels, _above(1), "rel")


@on_curves("F4-l2")
def _(curves: Curves) -> Finding:
    rels = _rels(curves, CODES, ["l2"], _over("family", OTHER_FAMILIES), {"penalty": 1.0})
    return judge(rels, _below(1), "rel")


@on_curves("F4-ne")
def _(curves: Curves) -> Finding:
    """All three embeddings."""
    settings = _over("family", OTHER_FAMILIES)
    rels = _rels(curves, ALL_EMBEDDINGS, ["entropy"], settings, {"penalty": 1.0})
    return judge(rels, _above(1), "rel")


@on_curves("F4-both")
def _(curves: Curves) -> Finding:
    """OH and BN, as in F4-l2."""
    settings = _over("family", OTHER_FAMILIES)
    rels = _rels(curves, CODES, BOTH, settings, {"penalty": 0.1})
    gaps = {}
    for setting, e in product(settings, CODES):
        ne, l2 = (curves.rel(e, r, penalty=0.1, **setting) for r in BOTH)
        gaps[f"{EMBEDDING_LABELS[e]}{_at(setting)}"] = _distance(ne, l2)
    return both(judge(rels, _below(1), "rel"), judge(gaps, _below(0.05), "|rel_NE - rel_L2|"))


# --- Figure 10 -----------------------------------------------------------------------------------

_PENALTIES = (1.0, 0.25, 0.14, 0.1)


@on_curves("F10-tau")
def _(curves: Curves) -> Finding:
    findings = []
    for what, measure in (("final loss", curves.loss), ("rel", curves.rel)):
        sequences = {
            curve_name(e, r, {}): [measure(e, r, penalty=p, n_features=4) for p in _PENALTIES]
            for e, r in _FOUR
        }
        findings.append(_slopes(sequences, rising=False, what=what))
    return both(*findings)


@on_curves("F10-d32")
def _(curves: Curves) -> Finding:
    rels = _rels(curves, CODES, ["l2"], [{}], {"penalty": 1.0, "n_features": 32})
    return judge(rels, _below(1), "rel")


@on_curves("F10-l2")
def _(curves: Curves) -> Finding:
    """For OH and for BN."""
    texts, holds = [], True
    for e in CODES:
        advantage = {}
        for p, d in product(_PENALTIES, (4, 32)):
            ne, l2 = (curves.rel(e, r, penalty=p, n_features=d) for r in BOTH)
            advantage[p, d] = ne - l2
        others = {setting: gain for setting, gain in advantage.items() if setting != (1.0, 4)}
        next_best = max(others, key=lambda setting: others[setting])
        holds &= advantage[1.0, 4] > others[next_best]
        texts.append(
            f"{EMBEDDING_LABELS[e]} {_number(advantage[1.0, 4])} at tau=1, d=4, then "
            f"{_number(others[next_best])} at tau={_number(next_best[0])}, d={next_best[1]}"
        )
    return Finding(holds, f"rel_NE - rel_L2: {'; '.join(texts)}")


# --- Figure 11 -----------------------------------------------------------------------------------


@on_curves("F11-slow")
def _(curves: Curves) -> Finding:
    """OH and BN with both regularizers, at both d."""
    correlations, steps, texts = {}, True, []
    for d, (e, r) in product((4, 32), _FOUR):
        slow = {"initial_learning_rate": 0.001, "n_features": d}
        path = curves.path("training_loss", e, r, **slow)
        name = curve_name(e, r, {"n_features": d})
        correlations[name] = rank_correlation(list(path.index), list(path))
        first = [
            curves.beats_lloyd_at(e, r, **slow | {"initial_learning_rate": rate})
            for rate in (0.001, 0.01)
        ]
        steps &= first[0] > first[1]
        texts.append(f"{name} {_moment(first[0])} after {_moment(first[1])}")
    return both(
        judge(correlations, _below(-0.9), "Spearman(step, median loss) at eta=0.001"),
        Finding(steps, f"first step with rel < 1, eta=0.001 after eta=0.01: {', '.join(texts)}"),
    )


@on_curves("F11-large")
def _(curves: Curves) -> Finding:
    """OH and BN with both regularizers, in each of the three settings."""
    worse = {}
    for (rate, d), (e, r) in product(((1.0, 4), (1.0, 32), (0.1, 32)), _FOUR):
        setting = {"initial_learning_rate": rate, "n_features": d}
        usual = curves.rel(e, r, initial_learning_rate=0.01, n_features=d)
        worse[curve_name(e, r, setting)] = curves.rel(e, r, **setting) - usual
    return judge(worse, _above(0.05), "rel minus rel at eta=0.01")


# --- Figures 13 and 14 ---------------------------------------------------------------------------


@on_curves("F13-n")
def _(curves: Curves) -> Finding:
    ranges = {}
    for d, (e, r) in product((4, 32), _FOUR):
        sizes = curves.values("n_points", 4, n_features=d)
        rels = [curves.rel(e, r, n_features=d, n_points=n) for n in sizes]
        ranges[curve_name(e, r, {"n_features": d})] = _distance(max(rels), min(rels))
    return judge(ranges, _below(0.05), "range of rel over n")


@on_curves("F14-l2")
def _(curves: Curves) -> Finding:
    advantage = {}
    for e in CODES:
        pairs = [
            [curves.rel(e, r, penalty=0.25, n_features=d) for r in BOTH] for d in (4, 8, 16, 32)
        ]
        advantage[EMBEDDING_LABELS[e]] = [ne - l2 for ne, l2 in pairs]
    last = {f"{name} at d=32": gains[-1] for name, gains in advantage.items()}
    return both(
        _slopes(advantage, rising=False, what="rel_NE - rel_L2 at d=4, 8, 16, 32"),
        judge(last, _below(0.02), "the last"),
    )


# --- Figure 15 -----------------------------------------------------------------------------------

_CLUSTERS = (6, 10, 16, 25)


def _by_clusters(curves: Curves, e: str, r: str, d: int, penalty: float) -> list[float]:
    setting = {"n_features": d, "penalty": penalty}
    return [curves.rel(e, r, **setting, n_clusters=k) for k in _CLUSTERS]


@on_curves("F15a-l2")
def _(curves: Curves) -> Finding:
    settings = [_TAU1 | {"n_clusters": k} for k in _CLUSTERS]
    learns = _falls_but_ends_above_lloyd(curves, [(e, "l2") for e in CODES], settings)
    gaps = {}
    for e, setting in product(CODES, settings):
        ne, l2 = (curves.rel(e, r, **setting) for r in BOTH)
        gaps[f"{EMBEDDING_LABELS[e]} at k={setting['n_clusters']}"] = ne - l2
    return both(learns, judge(gaps, _above(0), "rel_NE - rel_L2"))


@on_curves("F15a-bn")
def _(curves: Curves) -> Finding:
    """With L2: F15a-l2 says that NE doesn't learn here."""
    oh, bn = (_by_clusters(curves, e, "l2", 4, 1.0) for e in CODES)
    correlations = [rank_correlation(_CLUSTERS, rels) for rels in (oh, bn)]
    texts = [
        f"{name} {' '.join(map(_number, rels))} (Spearman {_number(c)})"
        for name, rels, c in zip(("OH", "BN"), (oh, bn), correlations, strict=True)
    ]
    limit = 0.8 + ROUNDING  # four values: 0.8 exactly is common, and is not above 0.8
    return Finding(
        correlations[1] > limit and not correlations[0] > limit,
        f"rel at k=6, 10, 16, 25: {'; '.join(texts)}",
    )


@on_curves("F15b-oh")
def _(curves: Curves) -> Finding:
    l2, ne = (_by_clusters(curves, "onehot", r, 4, 0.1) for r in ("l2", "entropy"))
    named = {f"k={k}": rel for k, rel in zip(_CLUSTERS, l2, strict=True)}
    return both(
        judge(named, _below(1), "rel of OH:L2"),
        _slopes({"OH:NE": ne}, rising=True, what="rel at k=6, 10, 16, 25"),
    )


@on_curves("F15b-bn")
def _(curves: Curves) -> Finding:
    """With both regularizers."""
    setting = _SMALL_TAU | {"n_clusters": 25}
    gaps = {
        REGULARIZER_LABELS[r]: curves.rel("binary", r, **setting) - curves.rel("none", r, **setting)
        for r in BOTH
    }
    return judge(gaps, _above(0), "rel_BN - rel_NA at k=25")


@on_curves("F15c")
def _(curves: Curves) -> Finding:
    """NE worsens with k for OH and for BN."""
    fixed = {"n_features": 32, "penalty": 1.0}
    rels = _rels(curves, CODES, ["l2"], _over("n_clusters", _CLUSTERS), fixed)
    ne = {f"{EMBEDDING_LABELS[e]}:NE": _by_clusters(curves, e, "entropy", 32, 1.0) for e in CODES}
    return both(
        judge(rels, _below(1), "rel"), _slopes(ne, rising=True, what="rel at k=6, 10, 16, 25")
    )


@on_curves("F15d")
def _(curves: Curves) -> Finding:
    fixed = {"n_features": 32, "penalty": 0.1}
    rels = _rels(curves, CODES, BOTH, _over("n_clusters", _CLUSTERS), fixed)
    return judge(rels, _below(1), "rel")


@on_curves("F15d-clip")
def _(curves: Curves) -> Finding:
    """At d = 32 and tau = 0.1; a trial blows up if it ends above 1 or not finite."""
    counts, texts = [], []
    for clipped in (False, True):
        blown = total = 0
        for r in BOTH:
            setting = {"n_features": 32, "penalty": 0.1, "n_clusters": 25, "clipped": clipped}
            ends = curves.trials("relative_loss", "onehot", r, **setting).iloc[-1]
            blown += int((~(ends <= 1)).sum())
            total += len(ends)
        counts.append(blown)
        texts.append(f"{blown} of {total} {'with' if clipped else 'without'} clipping")
    return Finding(counts[0] > 0 and counts[1] == 0, f"trials with rel > 1: {', '.join(texts)}")


# --- Figure 16 -----------------------------------------------------------------------------------


@on_curves("F16-ne")
def _(curves: Curves) -> Finding:
    """All three embeddings; not falling: at the end not below the first evaluation."""
    settings = [
        {"family": family, "n_clusters": k, "penalty": 1.0}
        for family, k in product(("gumbel", "laplace"), (6, 10))
    ]
    chosen = [(e, "entropy") for e in ALL_EMBEDDINGS]
    rels = {curve_name(e, r, s): curves.rel(e, r, **s) for s, (e, r) in product(settings, chosen)}
    changes = _changes(curves, chosen, settings)
    return both(
        judge(rels, _above(1), "rel"),
        judge(changes, lambda change: change >= 0, "change in training"),
    )


@on_curves("F16-both")
def _(curves: Curves) -> Finding:
    settings = [
        {"family": family, "n_clusters": k} for family, k in product(OTHER_FAMILIES, (6, 10))
    ]
    return judge(_rels(curves, CODES, BOTH, settings, {"penalty": 0.1}), _below(1), "rel")


# --- Figure 17: elapsed time ---------------------------------------------------------------------


def _timed(curves: Curves, embedding: str, **setting: Any) -> pd.Series:
    """Median relative loss by median elapsed seconds."""
    path = curves.path("relative_loss", embedding, "l2", clipped=True, **setting)
    seconds = curves.trials("elapsed", embedding, "l2", clipped=True, **setting).median(axis=1)
    return pd.Series(path.to_numpy(), index=seconds.to_numpy())


@on_curves("F17-small")
def _(curves: Curves) -> Finding:
    texts, holds = [], True
    size = {"n_clusters": 16, "n_features": 16}
    for n in curves.values("n_points", 3, **size):
        times, ends = [], []
        for e in CODES:
            timed = _timed(curves, e, n_points=n, **size)
            below = timed.index[(timed < 1).to_numpy()]
            times.append(float(below[0]) if len(below) else math.inf)
            ends.append(float(timed.iloc[-1]))
        holds &= times[1] > times[0] and max(ends) < 1
        texts.append(
            f"n={n} OH {_moment(times[0])}, BN {_moment(times[1])} (rel {_number(ends[0])}, "
            f"{_number(ends[1])})"
        )
    return Finding(holds, f"seconds to rel < 1: {'; '.join(texts)}")


@on_curves("F17-large")
def _(curves: Curves) -> Finding:
    """The last evaluation of each within 25% of OH's total time."""
    texts, holds = [], True
    size = {"n_clusters": 25, "n_features": 32}
    for n in curves.values("n_points", 3, **size):
        oh, bn = (_timed(curves, e, n_points=n, **size) for e in CODES)
        moment = 0.25 * oh.index[-1]
        early = [s[s.index <= moment] for s in (oh, bn)]
        if any(s.empty for s in early):
            raise Missing(f"no evaluation before {moment:.1f} s at n={n}")
        rel_oh, rel_bn = (float(s.iloc[-1]) for s in early)
        holds &= rel_bn < rel_oh
        texts.append(f"n={n} OH {_number(rel_oh)}, BN {_number(rel_bn)} at {moment:.1f} s")
    return Finding(holds, f"rel at 25% of OH's time: {'; '.join(texts)}")


# --- Theorem 2.1 ---------------------------------------------------------------------------------


def _table(tables: Tables, name: str, *columns: str) -> pd.DataFrame:
    if name not in tables or tables[name].empty:
        raise Missing(f"there is no table {name!r}")
    absent = [column for column in columns if column not in tables[name].columns]
    if absent:
        raise Missing(f"table {name!r} has no column {absent[0]!r}")
    return tables[name]


def _equals_lloyd(tables: Tables, embedding: str) -> Finding:
    """Table "exact": one row a shape (n_features, n_clusters) and iteration, in float64.

    Columns embedding, n_features, n_clusters, iteration, n_tasks, max_difference, labels_equal.
    """
    columns = ["n_features", "n_clusters", "iteration", "n_tasks", "max_difference", "labels_equal"]
    table = _table(tables, "exact", "embedding", *columns)
    rows = table[table["embedding"] == embedding]
    shapes = rows.drop_duplicates(["n_features", "n_clusters"])
    n_tasks = int(shapes["n_tasks"].sum())
    if rows.empty or n_tasks < 1000 or not set(range(1, 21)) <= set(rows["iteration"]):
        raise Missing(f"needs 1000 tasks and t = 1..20, got {n_tasks} tasks")
    spans = {name: (int(shapes[name].min()), int(shapes[name].max())) for name in columns[:2]}
    if spans != {"n_features": (1, 64), "n_clusters": (2, 100)}:
        raise Missing(f"needs d over 1..64 and k over 2..100, got {list(spans.values())}")
    worst = float(rows["max_difference"].fillna(math.inf).max())
    unequal = int((~rows["labels_equal"].astype(bool)).sum())
    return Finding(
        worst <= 1e-12 and unequal == 0,
        f"largest centre difference {worst:.1e} over {n_tasks} tasks and t=1..20; "
        + ("assignments equal" if not unequal else f"assignments differ in {unequal} rows"),
    )


@on_tables("S2-exact", scale_free=True)
def _(tables: Tables) -> Finding:
    return _equals_lloyd(tables, "binary")


@on_tables("S2-exact-oh", scale_free=True)
def _(tables: Tables) -> Finding:
    return _equals_lloyd(tables, "onehot")


@on_tables("S2-params", scale_free=True)
def _(tables: Tables) -> Finding:
    """Table "parameters": columns embedding, n_features, n_clusters, n_parameters.

    "-> 75% along k=d": the distance to 75% shrinks with d.
    """
    columns = ["n_features", "n_clusters"]
    table = _table(tables, "parameters", "embedding", *columns, "n_parameters")
    counts = table.pivot(index=columns, columns="embedding", values="n_parameters")
    if not {"onehot", "binary"} <= set(counts.columns):
        raise Missing("needs the counts of OH and BN")
    saving = {key: float(1 - row["binary"] / row["onehot"]) for key, row in counts.iterrows()}
    formula = {(d, k): 1 - ((d + code_width(k, "binary")) / (d + k)) ** 2 for d, k in saving}
    error = max(abs(saving[key] - formula[key]) for key in saving)
    diagonal = [abs(saving[d, k] - 0.75) for d, k in sorted(saving) if k == d]
    wide = {f"d={d}": saving[d, k] for d, k in sorted(saving) if k == 4 * d}
    if len(diagonal) < 2 or not wide:
        raise Missing("needs counts at k=d for two values of d, and at k=4d")
    approaches = all(b < a for a, b in pairwise(diagonal))
    return both(
        Finding(error < ROUNDING, f"largest distance to the formula {error:.0e}"),
        Finding(
            approaches, f"saving at k=d within {_number(diagonal[-1])} of 75% at the largest d"
        ),
        judge(wide, _above(0.75), "saving at k=4d"),
    )


# --- Appendices H and I --------------------------------------------------------------------------


def _bound_holds(tables: Tables, claim: str) -> Finding:
    """Table "bounds": rows of an attack on a bound, with the worst ratio of measured to bound.

    Columns claim (the id), bound, reading (which norm, which constant), stated (True for the
    readings that decide: the paper's), worst_ratio, input (what gave it).
    """
    table = _table(tables, "bounds", "claim", "bound", "reading", "stated", "worst_ratio", "input")
    rows = table[(table["claim"] == claim) & table["stated"].astype(bool)]
    if rows.empty:
        raise Missing(f"table 'bounds' has no row of {claim} as stated")
    ratios = rows["worst_ratio"].astype(float).fillna(math.inf).tolist()
    worst = int(np.argmax(ratios))
    where = rows.iloc[worst]
    text = f"worst ratio to the bound {ratios[worst]:.6g} over {len(rows)} searches"
    text += f" ({where['bound']}, {where['reading']}: {where['input']})"
    return Finding(ratios[worst] <= 1 + ROUNDING, text)


for _name in ("H-bound", "H-tighter", "H-distance", *(f"I-{number}" for number in range(1, 9))):
    on_tables(_name, scale_free=True)(partial(_bound_holds, claim=_name))


@on_tables("I-phi", scale_free=True)
def _(tables: Tables) -> Finding:
    """Also table "phi": columns embedding, n_features, n_clusters, phi, on a grid of d and k."""
    columns = ["n_features", "n_clusters"]
    table = _table(tables, "phi", "embedding", *columns, "phi")
    phi = table.pivot(index=columns, columns="embedding", values="phi")
    if not {"onehot", "binary"} <= set(phi.columns) or phi[["onehot", "binary"]].isna().any(
        axis=None
    ):
        raise Missing("table 'phi' needs OH and BN in every cell of the grid")
    smaller = int((phi["onehot"] < phi["binary"]).sum())
    return both(
        _bound_holds(tables, "I-phi"),
        Finding(smaller == len(phi), f"phi(OH) < phi(BN) in {smaller} of {len(phi)} cells"),
    )


@on_tables("T2-directions", scale_free=True)
def _(tables: Tables) -> Finding:
    """Table "directions": columns bound, term, computed, stated; the signs "+", "-", "0"."""
    table = _table(tables, "directions", "bound", "term", "computed", "stated")
    wrong = table[table["computed"] != table["stated"]]
    text = f"{len(table) - len(wrong)} of {len(table)} directions as stated"
    cells = [f"{r.term} on {r.bound} ({r.computed}, not {r.stated})" for r in wrong.itertuples()]
    return Finding(wrong.empty, text + (f"; not {', '.join(cells)}" if cells else ""))
