"""What curves end at: as a frame, as a table, in words, and as a figure's alt text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from leancluster_core.experiments.config import EMBEDDING_LABELS, REGULARIZER_LABELS
from leancluster_core.experiments.pages import Shown, show_text

# Column headings of settings in tables, and their names in sentences.
SHORT_NAMES = {
    "penalty": "tau",
    "n_points": "n",
    "n_features": "d",
    "n_clusters": "k",
    "initial_learning_rate": "eta",
    "gradient_clipping": "clipping",
}

# A fall of the relative loss in the last tenth of training by which a curve has not settled yet.
LATE_FALL = 0.02

# A rise of the relative loss from one evaluation to the next by which a trial has blown up. Set
# after Figure 15 was seen, to describe it; no criterion of a claim uses it.
BLOW_UP = 1.0


def final_losses(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Relative loss at the end of training: one row a setting (columns ``by``) and curve.

    frame: of :func:`grids.curve_frame`. Columns median, lower, upper (quartiles over the trials
    that end with a finite loss; NaN without one), n_trials, n_finite, n_steps and seconds (spent in
    the training steps of the run's whole batch). A trial that ends early counts as not finite.
    """
    rows = []
    keys = [*by, "embedding", "regularizer", "key"]
    for names, run in frame.groupby(keys, sort=False):
        ends = run[run["step"] == run["n_steps"]]["relative_loss"].to_numpy(dtype=float)
        finite = ends[np.isfinite(ends)]
        quartiles = np.quantile(finite, [0.5, 0.25, 0.75]) if finite.size else [math.nan] * 3
        rows.append(
            dict(zip(keys, names, strict=True))
            | dict(zip(("median", "lower", "upper"), map(float, quartiles), strict=True))
            | {
                "n_trials": int(run["n_trials"].iloc[0]),
                "n_finite": len(finite),
                "n_steps": int(run["n_steps"].iloc[0]),
                "seconds": float(run["elapsed"].max()),
            }
        )
    return pd.DataFrame(rows)


def final_table(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """:func:`final_losses` to read: a row a setting, a column a curve, "median (quartiles)".

    A cell says how many trials have no finite loss at the end; a curve that there is not is "–".
    """
    losses = final_losses(frame, by)
    table: dict[tuple[object, ...], dict[str, str]] = {}
    for row in losses.to_dict("records"):
        setting = tuple(row[name] for name in by)
        cells = table.setdefault(setting, {SHORT_NAMES.get(n, n): plain(row[n]) for n in by})
        cells[_label(row)] = _cell(row)
    curves = [
        f"{embedding}:{regularizer}"
        for embedding in EMBEDDING_LABELS.values()
        for regularizer in REGULARIZER_LABELS.values()
    ]
    columns = [SHORT_NAMES.get(name, name) for name in by]
    present = [curve for curve in curves if any(curve in cells for cells in table.values())]
    return pd.DataFrame(list(table.values()), columns=[*columns, *present]).fillna("–")


def _label(row: Mapping[str, str] | pd.Series) -> str:
    return f"{EMBEDDING_LABELS[row['embedding']]}:{REGULARIZER_LABELS[row['regularizer']]}"


def _cell(row: dict[str, float]) -> str:
    lost = int(row["n_trials"] - row["n_finite"])
    note = f", {lost} of {int(row['n_trials'])} lost" if lost else ""
    if math.isnan(row["median"]):
        return f"none{note}"
    median, lower, upper = (_number(row[name]) for name in ("median", "lower", "upper"))
    return f"{median} ({lower}–{upper}{note})"


def _number(value: float) -> str:
    """Three decimals; fewer of a large number, for which they say nothing and take room."""
    return f"{value:.3f}" if value < 10 else f"{value:.3g}" if value < 1000 else f"{value:.2g}"


def describe_ends(frame: pd.DataFrame, by: Sequence[str]) -> Shown:
    """Where the curves end, in words: how many below Lloyd's step, the best, the worst, and which
    had not settled yet."""
    losses = final_losses(frame, by)
    losses["curve"] = [_label(row) for row in losses.to_dict("records")]
    n_settings = len(losses.drop_duplicates(list(by))) if by else 1
    below = losses["median"] < 1
    counts = [
        f"{curve} in {n}" for curve, n in below.groupby(losses["curve"], sort=False).sum().items()
    ]
    text = (
        f"At the end of training {below.sum()} of {len(losses)} curves lie below one step of "
        f"Lloyd's algorithm: of {n_settings} settings, {', '.join(counts)}. "
    )
    for name in by:
        groups = below.groupby(losses[name], sort=False).agg(["sum", "size"])
        if len(groups) > 1:
            parts = [f"{plain(value)}: {n} of {size}" for value, (n, size) in groups.iterrows()]
            text += f"By {SHORT_NAMES.get(name, name)}: {', '.join(parts)}. "
    finite = losses.dropna(subset=["median"])
    if len(finite):
        best, worst = finite.loc[finite["median"].idxmin()], finite.loc[finite["median"].idxmax()]
        text += (
            f"The lowest relative loss is {best['median']:.3f} ({_name(best, by)}), the highest "
            f"{_number(worst['median'])} ({_name(worst, by)})."
        )
    text += _describe_late_falls(frame, by)
    lost = losses[losses["n_finite"] < losses["n_trials"]]
    if len(lost):
        names = "; ".join(
            f"{row['n_trials'] - row['n_finite']} of {row['n_trials']} of {_name(row, by)}"
            for _, row in lost.iterrows()
        )
        text += f" Trials without a finite loss at the end: {names}."
    return show_text(text)


def _describe_late_falls(frame: pd.DataFrame, by: Sequence[str]) -> str:
    """Which curves had not settled when training ended: a smaller scale cuts them short."""
    falls = {}
    for names, run in frame.groupby([*by, "embedding", "regularizer"], sort=False):
        path = run.groupby("step")["relative_loss"].median()
        before = path[path.index <= 0.9 * run["n_steps"].iloc[0]]
        if len(before):
            falls[names] = float(before.iloc[-1] - path.iloc[-1])
    late = {names: fall for names, fall in falls.items() if fall > LATE_FALL}
    if not late:
        return ""
    most = max(late, key=lambda names: late[names])
    row = pd.Series(dict(zip([*by, "embedding", "regularizer"], most, strict=True)))
    row["curve"] = _label(row)
    return (
        f" In the last tenth of the steps {len(late)} of {len(falls)} curves still fell by more "
        f"than {LATE_FALL:g}, {_name(row, by)} the most ({late[most]:.3f}): they had not settled "
        "when training ended."
    )


def describe_rises(frame: pd.DataFrame, by: Sequence[str]) -> Shown:
    """How many trials of each group (columns ``by``) blew up on their way, in words.

    A trial blows up where its relative loss rises by more than BLOW_UP from one evaluation to the
    next; a loss that is not finite is a rise as well.
    """

    def largest_rise(losses: pd.Series) -> float:
        return float(losses.diff().max()) if np.isfinite(losses).all() else math.inf

    trials = frame.sort_values("step").groupby([*by, "key", "trial"], sort=False)["relative_loss"]
    rises = trials.agg(largest_rise)
    parts = [
        f"{', '.join(plain(name) for name in names)}: {int((group > BLOW_UP).sum())} of "
        f"{len(group)} trials (largest rise {_number(group.max())})"
        for names, group in rises.groupby(list(by), sort=False)
    ]
    return show_text(
        f"Trials whose relative loss rose by more than {BLOW_UP:g} from one evaluation to the "
        f"next: {'; '.join(parts)}."
    )


def convergence_alt(frame: pd.DataFrame, by: Sequence[str]) -> str:
    """Alt text of a convergence figure: what is drawn, and what is to be seen."""
    what = "Smoothed training loss (above) and relative validation loss (below) of "
    n_settings = len(frame[list(by)].drop_duplicates()) if by else 1
    what += f"{'one setting' if n_settings == 1 else f'{n_settings} settings'}. "
    return what + describe_ends(frame, by).data["text/plain"]


def _name(row: pd.Series, by: Sequence[str]) -> str:
    setting = ", ".join(f"{SHORT_NAMES.get(n, n)} = {plain(row[n])}" for n in by)
    return f"{row['curve']} at {setting}" if setting else str(row["curve"])


def plain(value: object) -> str:
    """A setting as people write it: 0.1, 1, 512, normal."""
    return f"{value:g}" if isinstance(value, float) else str(value)
