"""The house style, and one function a kind of figure: they read frames and return figures.

Statistics are computed first, from the raw values, and then drawn: an axis' scale never changes a
number. Color names the embedding and dash the regularizer, the same through the whole book.
Figures are plain ``matplotlib.figure.Figure`` objects: nothing here touches pyplot's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import product
from typing import Any, Literal, ParamSpec

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from leancluster_core.experiments.config import EMBEDDING_LABELS, REGULARIZER_LABELS

# Okabe and Ito's colors: told apart with every kind of color vision (a test simulates three).
EMBEDDING_COLORS = {"onehot": "#0072B2", "binary": "#D55E00", "none": "#009E73"}
REGULARIZER_DASHES: dict[str, Any] = {"entropy": "solid", "l2": (0, (4, 1.5))}
BASELINES: dict[str, dict[str, Any]] = {
    "Lloyd": {"color": "black", "linestyle": "solid", "linewidth": 1.2},
    "scikit-learn": {
        "color": "black",
        "linestyle": "none",
        "marker": "o",
        "markersize": 4,
        "markerfacecolor": "none",
        "markeredgewidth": 0.8,
    },
}

_CROSS: dict[str, Any] = {
    "marker": "x",
    "markersize": 7,
    "markeredgewidth": 1.6,
    "linestyle": "none",
    "zorder": 4,
}

# How a panel's title shows a setting; other columns show as "name = value".
SETTING_TITLES = {
    "penalty": r"$\tau$ = {}",
    "n_points": "$n$ = {}",
    "n_features": "$d$ = {}",
    "n_clusters": "$k$ = {}",
    "learning_rate": r"$\eta$ = {}",
    "initial_learning_rate": r"$\eta$ = {}",
    "inverse_temperature": r"$\gamma$ = {}",
    "family": "{}",
    "train_family": "trained on {}",
    "test_family": "tested on {}",
    "panel": "{}",
}

VALUE_LABELS = {
    "training_loss": "smoothed training loss",
    "relative_loss": "relative validation loss",
    "log_loss": "mean log k-means loss",
    "step": "training step",
    "elapsed": "training time (s)",
}

STYLE: dict[str, Any] = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "svg.hashsalt": "leancluster",  # element names in SVG files would differ from run to run
}
PANEL_WIDTHS = {1: 4.4, 2: 3.6, 3: 2.8, 4: 2.3}  # inches, by number of panels in a row; else 2

LOG_AXIS_FROM = 10.0  # largest over smallest value from which an axis is logarithmic

_Arguments = ParamSpec("_Arguments")


def in_house_style(draw: Callable[_Arguments, Figure]) -> Callable[_Arguments, Figure]:
    """Run a drawing function in the house style; the caller's settings stay as they are."""

    @wraps(draw)
    def styled(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Figure:
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(STYLE)  # type: ignore[arg-type]
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()  # ticks are made here, with the style of the moment
            return figure

    return styled


# --- statistics ----------------------------------------------------------------------------------


def curve_statistics(
    frame: pd.DataFrame,
    value: str,
    *,
    by: Sequence[str] = (),
    step: str = "step",
    trial: str = "trial",
) -> pd.DataFrame:
    """Median and quartiles over trials at every step of every setting, on the finite values.

    frame: one row per setting (the columns ``by``), step and trial; its index does not matter.
    Returns the columns ``by`` and ``step`` and
      median, lower, upper: numpy's quantiles 0.5, 0.25, 0.75 of the finite values (NaN if none);
      n_trials: the trials of the frame, n_finite: those with a finite value here,
      n_missing: those without a row, n_diverged: those with a NaN or infinite value;
    so n_trials = n_finite + n_missing + n_diverged. Settings keep their order of appearance, steps
    are sorted.

    Raises ValueError for repeated (setting, step, trial), missing columns and missing keys.
    """
    by = list(by)
    keys = [*by, step, trial]
    _check_columns(frame, [*keys, value])
    _check_unique(frame, keys)
    values = pd.to_numeric(frame[value]).to_numpy(dtype=float)
    cells = [*by, step]
    groups = frame.groupby(cells, sort=False, observed=True)
    cell = groups.ngroup().to_numpy()
    result = frame.iloc[np.unique(cell, return_index=True)[1]][cells].reset_index(drop=True)
    trials, column = np.unique(frame[trial].to_numpy(), return_inverse=True)

    table = np.full((len(result), len(trials)), np.nan)
    table[cell, column] = np.where(np.isfinite(values), values, np.nan)
    finite = np.isfinite(table).sum(axis=1)
    quartiles = np.full((3, len(result)), np.nan)
    if (finite > 0).any():
        quartiles[:, finite > 0] = np.nanquantile(table[finite > 0], [0.5, 0.25, 0.75], axis=1)
    rows = np.bincount(cell, minlength=len(result))

    result["median"], result["lower"], result["upper"] = quartiles
    result["n_trials"] = len(trials)
    result["n_finite"] = finite
    result["n_missing"] = len(trials) - rows
    result["n_diverged"] = rows - finite
    if not by:
        return result.sort_values(step, ignore_index=True)
    setting = frame.groupby(by, sort=False, observed=True).ngroup().to_numpy()
    order = np.lexsort([result[step], setting[np.unique(cell, return_index=True)[1]]])
    return result.iloc[order].reset_index(drop=True)


def curve_caption(
    frame: pd.DataFrame, values: Sequence[str], *, by: Sequence[str], scale: str
) -> str:
    """What every curve figure has to say: statistic, trials, what is missing or diverged, scale.

    frame and by as for :func:`curve_statistics`; ``by`` names the panels' columns and, where the
    frame has them, "embedding" and "regularizer" (or "method"). A trial of the frame is diverged
    where one of the ``values`` is not finite, and missing where it has no row at a step that others
    have in the same setting. A setting without any row is not known here.
    """
    gaps: dict[tuple[Any, ...], list[str]] = {}
    n_trials = 0
    for value in values:
        statistics = curve_statistics(frame, value, by=by)
        n_trials = int(statistics["n_trials"].max())
        for setting, curve in _settings(statistics, by):
            for kind, verb in (("n_missing", "missing"), ("n_diverged", "not finite")):
                hit = curve[curve[kind] > 0]
                if hit.empty:
                    continue
                count, first = int(hit[kind].max()), hit["step"].iloc[0]
                text = f"{count} of {n_trials} {verb} from step {_number(first)}"
                if text not in gaps.setdefault(setting, []):
                    gaps[setting].append(text)
    trials = "1 trial" if n_trials == 1 else f"{n_trials} trials"
    statistic = (
        f"Lines: median over {trials}; ribbons: first to third quartile."
        if n_trials > 1
        else "Lines: a single trial, so no ribbons."
    )
    if gaps:
        listed = "; ".join(
            f"{_setting_name(setting, by)}: {', '.join(texts)}" for setting, texts in gaps.items()
        )
        fate = f"Trials left out where they have no finite value: {listed}."
    else:
        fate = "No trial is missing or diverged."
    return f"{statistic} {fate} Scale: {scale}."


# --- curves --------------------------------------------------------------------------------------


@in_house_style
def plot_convergence(
    frame: pd.DataFrame,
    *,
    columns: str | Sequence[str] = (),
    x: str = "step",
    scale: str = "",
    log_y: bool | None = None,
    share_relative: bool = True,
) -> Figure:
    """The convergence figure (Figures 2, 4, 10-17): training and relative loss against the step.

    frame: columns embedding, regularizer, trial, step, training_loss, relative_loss and the varied
    setting(s) named by ``columns``; one column of panels for each of their values, in the order in
    which they appear. Median lines with inter-quartile ribbons; a cross marks where a curve loses
    its first trial (missing or not finite).

    x: "step", or "elapsed" (the median over trials at a step). scale: for the legend's title.
    log_y: None makes a row logarithmic where its curves span a factor of 10.
    share_relative: one y axis for all relative losses.
    """
    columns = _as_names(columns)
    by = [*columns, "embedding", "regularizer"]
    _check_curves(frame)
    panels = _combinations(frame, columns)
    figure, axes = _grid(2, len(panels), height=2.1)
    lost = False
    for row, value in enumerate(("training_loss", "relative_loss")):
        statistics = curve_statistics(frame, value, by=by)
        if x != "step":
            position = curve_statistics(frame, x, by=by)[[*by, "step", "median"]]
            statistics = statistics.merge(position.rename(columns={"median": x}), on=[*by, "step"])
        for ax, panel in zip(axes[row], panels, strict=True):
            lost |= _draw_models(ax, _select(statistics, columns, panel), x)
        _scale_row(axes[row], statistics, log_y, shared=row == 1 and share_relative)
        axes[row, 0].set_ylabel(VALUE_LABELS[value])
    for ax in axes[1]:
        ax.axhline(1.0, color="black", linestyle=":", linewidth=1.2, zorder=1.5)
    for ax, panel in zip(axes[0], panels, strict=True):
        ax.set_title(_title(columns, panel))
    _finish_x(axes, VALUE_LABELS.get(x, x))
    extra = [Line2D([], [], color="black", linestyle=":", linewidth=1.2, label="one Lloyd step")]
    _add_legend(figure, _model_handles(frame) + extra, lost, frame["trial"].nunique(), scale)
    return figure


@in_house_style
def plot_rollouts(
    frame: pd.DataFrame,
    *,
    columns: str | Sequence[str] = (),
    rows: str | Sequence[str] = (),
    baselines: pd.DataFrame | None = None,
    value: str = "log_loss",
    scale: str = "",
) -> Figure:
    """Multi-step evaluation (Figures 6-8, 12, 18): a loss after each of the steps 0 to T.

    frame: columns embedding, regularizer, trial, step, ``value`` (by default the mean over tasks of
    the log k-means loss) and the settings named by ``columns`` and ``rows``, a panel for each pair.
    baselines: the same settings, trial, step and value, with a column ``method`` in place of the
    embedding and regularizer: "Lloyd" (black line) or "scikit-learn" (open circles).
    Medians and inter-quartile ribbons over trials; panels of one column share their y axis.
    """
    columns, rows = _as_names(columns), _as_names(rows)
    by = [*rows, *columns]
    _check_curves(frame)
    statistics = curve_statistics(frame, value, by=[*by, "embedding", "regularizer"])
    references = None
    if baselines is not None:
        unknown = sorted(set(baselines["method"]) - set(BASELINES))
        if unknown:
            raise ValueError(f"method must be one of {', '.join(BASELINES)}, got {unknown}")
        references = curve_statistics(baselines, value, by=[*by, "method"])
    across, down = _combinations(frame, columns), _combinations(frame, rows)
    height = 2.4 if len(down) == 1 else 1.6
    figure, axes = _grid(len(down), len(across), height=height, sharey="col")
    lost = False
    for (i, below), (j, panel) in product(enumerate(down), enumerate(across)):
        ax, setting = axes[i, j], (*below, *panel)
        lost |= _draw_models(ax, _select(statistics, by, setting), "step")
        if references is not None:
            lost |= _draw_baselines(ax, _select(references, by, setting))
        if j == 0:
            ax.set_ylabel(VALUE_LABELS.get(value, value))
        if i == 0:
            ax.set_title(_title(columns, panel))
        if rows and j == len(across) - 1:
            ax.annotate(
                _title(rows, below),
                (1.04, 0.5),
                xycoords="axes fraction",
                rotation=270,
                va="center",
                fontsize=STYLE["axes.titlesize"],
            )
    _finish_x(axes, "clustering step")
    handles = _model_handles(frame)
    if baselines is not None:
        present = set(baselines["method"])
        handles += [Line2D([], [], label=m, **BASELINES[m]) for m in BASELINES if m in present]
    _add_legend(figure, handles, lost, frame["trial"].nunique(), scale)
    return figure


def _draw_models(ax: Axes, statistics: pd.DataFrame, x: str) -> bool:
    """Draw the curves of one panel; True if one of them loses a trial."""
    lost = False
    for embedding, regularizer in product(EMBEDDING_COLORS, REGULARIZER_DASHES):
        curve = _select(statistics, ("embedding", "regularizer"), (embedding, regularizer))
        line = {
            "color": EMBEDDING_COLORS[embedding],
            "linestyle": REGULARIZER_DASHES[regularizer],
        }
        lost |= _draw_curve(ax, curve, x, line)
    return lost


def _draw_baselines(ax: Axes, statistics: pd.DataFrame) -> bool:
    lost = False
    for method, line in BASELINES.items():
        curve = _select(statistics, ("method",), (method,))
        lost |= _draw_curve(ax, curve, "step", line, ribbon=line["linestyle"] != "none")
    return lost


def _draw_curve(
    ax: Axes, curve: pd.DataFrame, x: str, line: Mapping[str, Any], *, ribbon: bool = True
) -> bool:
    """Median line, ribbon, and a cross where the first trial is lost (then the result is True)."""
    if curve.empty:
        return False
    steps, median = curve[x].to_numpy(dtype=float), curve["median"].to_numpy()
    known = np.isfinite(median)
    if known.sum() == 1 and "marker" not in line:
        line = {**line, "marker": "o", "markersize": 4}  # a line through one point would not show
    ax.plot(steps, median, **line)
    if ribbon:
        lower, upper = curve["lower"].to_numpy(), curve["upper"].to_numpy()
        ax.fill_between(steps, lower, upper, color=line["color"], alpha=0.18, linewidth=0)
    thin = np.flatnonzero(curve["n_finite"] < curve["n_trials"])
    if not thin.size:
        return False
    before = np.flatnonzero(known[: thin[0] + 1])
    if before.size:  # otherwise the curve has no point up to there; the caption still names it
        ax.plot(steps[before[-1]], median[before[-1]], **_CROSS, color=line["color"])
    return True


# --- panels, axes, legends -----------------------------------------------------------------------


def _grid(
    n_rows: int, n_columns: int, *, height: float, sharey: Literal["none", "col"] = "none"
) -> tuple[Figure, np.ndarray]:
    width = PANEL_WIDTHS.get(n_columns, 2.0) * n_columns
    figure = Figure(figsize=(width, height * n_rows + 0.8), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, sharey=sharey, squeeze=False)


def _scale_row(
    axes: Sequence[Axes], statistics: pd.DataFrame, log_y: bool | None, *, shared: bool
) -> None:
    """Choose linear or logarithmic for a row of panels; ``shared`` gives all the same limits."""
    if log_y is None:
        drawn = statistics[["median", "lower", "upper"]].to_numpy()
        drawn = drawn[np.isfinite(drawn)]
        log_y = bool(drawn.size and drawn.min() > 0 and drawn.max() / drawn.min() >= LOG_AXIS_FROM)
    for ax in axes:
        if log_y:
            ax.set_yscale("log")
    limits = [ax.get_ylim() for ax in axes]
    if shared:
        limits = [(min(low for low, _ in limits), max(high for _, high in limits))] * len(axes)
    for ax, (low, high) in zip(axes, limits, strict=True):
        ax.set_ylim(low, high)
        if log_y:
            _label_log_axis(ax, low, high)
    if shared:
        for ax in axes[1:]:
            ax.tick_params(labelleft=False)


def _label_log_axis(ax: Axes, low: float, high: float) -> None:
    """Readable ticks: 1, 2, 5 steps on a short axis, where powers of ten alone would be too few."""
    decades = math.log10(high / low)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=6))
    ax.yaxis.set_major_formatter(FuncFormatter(_log_tick))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _log_tick(value: float, position: int | None = None) -> str:
    if 1e-3 <= value < 1e5:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = round(value / 10.0**exponent)
    times = "" if factor == 1 else rf"{factor}\cdot"
    return rf"${times}10^{{{exponent}}}$"


def _finish_x(axes: np.ndarray, label: str) -> None:
    """Label the bottom row, keep tick labels off the rows above, few enough ticks to read."""
    n_columns = axes.shape[1]
    for ax in axes.flat:
        ax.xaxis.set_major_locator(MaxNLocator(5 if n_columns < 4 else 3, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(_thousands))
        ax.margins(x=0.02)
    for ax in axes[:-1].flat:
        ax.tick_params(labelbottom=False)
    for ax in axes[-1]:
        ax.set_xlabel(label)


def _thousands(value: float, position: int | None = None) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _model_handles(frame: pd.DataFrame) -> list[Line2D]:
    """Legend entries of the curves that the frame has, in the book's order."""
    present = set(zip(frame["embedding"], frame["regularizer"], strict=True))
    return [
        Line2D(
            [],
            [],
            color=EMBEDDING_COLORS[embedding],
            linestyle=REGULARIZER_DASHES[regularizer],
            label=f"{EMBEDDING_LABELS[embedding]}:{REGULARIZER_LABELS[regularizer]}",
        )
        for embedding, regularizer in product(EMBEDDING_COLORS, REGULARIZER_DASHES)
        if (embedding, regularizer) in present
    ]


def _add_legend(
    figure: Figure, handles: list[Line2D], lost: bool, n_trials: int, scale: str
) -> None:
    """One legend below the panels, an embedding a column; its title says scale and trials."""
    if lost:
        handles = [*handles, Line2D([], [], color="#555555", label="a trial is lost", **_CROSS)]
    dashes = {handle.get_linestyle() for handle in handles}
    trials = "1 trial" if n_trials == 1 else f"{n_trials} trials"
    n_rows = 1 if len(handles) <= 4 or len(dashes) == 1 else 2
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / n_rows),
        title=f"{scale} scale, {trials}" if scale else trials,
        title_fontsize=8,
    )


# --- frames --------------------------------------------------------------------------------------


def _check_columns(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Refuse anything but a frame with these columns and at least one row."""
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"frame must be a pandas DataFrame, got {type(frame).__name__}")
    absent = [name for name in columns if name not in frame.columns]
    if absent:
        raise ValueError(f"frame must have the columns {absent}, got {list(frame.columns)}")
    if frame.empty:
        raise ValueError("frame must have at least one row, got none")


def _check_unique(frame: pd.DataFrame, keys: list[str]) -> None:
    """Refuse rows without a key, and rows with the same keys (they would count twice)."""
    for name in keys:
        if frame[name].isna().any():
            raise ValueError(f"column {name!r} must have a value in every row, got a missing one")
    repeated = frame[frame.duplicated(keys, keep=False).to_numpy()]
    if len(repeated):
        first = repeated.iloc[0]
        count = int((repeated[keys] == first[keys]).all(axis=1).sum())
        row = ", ".join(f"{name}={first[name]}" for name in keys)
        raise ValueError(
            f"each (setting, step, trial) must have one row, got {count} rows with {row}"
        )


def _check_curves(frame: pd.DataFrame) -> None:
    _check_columns(frame, ["embedding", "regularizer", "trial", "step"])
    for name, known in (("embedding", EMBEDDING_LABELS), ("regularizer", REGULARIZER_LABELS)):
        unknown = sorted(set(frame[name]) - set(known), key=str)
        if unknown:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {unknown}")


def _as_names(columns: str | Sequence[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def _combinations(frame: pd.DataFrame, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Distinct settings in order of appearance; one empty setting without columns."""
    if not columns:
        return [()]
    _check_columns(frame, columns)
    return list(frame[list(columns)].drop_duplicates().itertuples(index=False, name=None))


def _select(
    statistics: pd.DataFrame, columns: Sequence[str], setting: Sequence[Any]
) -> pd.DataFrame:
    for name, wanted in zip(columns, setting, strict=True):
        statistics = statistics[statistics[name] == wanted]
    return statistics


def _settings(
    statistics: pd.DataFrame, by: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    for setting in _combinations(statistics, by):
        yield setting, _select(statistics, by, setting)


def _number(value: Any) -> str:
    """Settings as people write them: 0.1, 10000, normal."""
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < 1e7 else f"{number:g}"
    return str(value)


def _title(columns: Sequence[str], setting: Sequence[Any]) -> str:
    return ", ".join(
        SETTING_TITLES.get(name, name.replace("_", " ") + " = {}").format(_number(value))
        for name, value in zip(columns, setting, strict=True)
    )


def _setting_name(setting: Sequence[Any], by: Sequence[str]) -> str:
    """A curve in words: "BN:NE at $\\tau$ = 0.1"."""
    values = dict(zip(by, setting, strict=True))
    curve = ":".join(
        labels.get(values.pop(name), "?")
        for name, labels in (("embedding", EMBEDDING_LABELS), ("regularizer", REGULARIZER_LABELS))
        if name in values
    )
    curve = curve or str(values.pop("method", "curve"))
    return f"{curve} at {_title(list(values), list(values.values()))}" if values else curve
