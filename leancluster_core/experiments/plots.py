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
from matplotlib.colors import LogNorm, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from leancluster_core.experiments.config import EMBEDDING_LABELS, REGULARIZER_LABELS

# Told apart with every kind of color vision, from each other and from black (a test simulates it).
EMBEDDING_COLORS = {"onehot": "#1F5FAA", "binary": "#D55E00", "none": "#00A878"}
REGULARIZER_DASHES: dict[str, Any] = {"entropy": (0, (4, 1.5)), "l2": "solid"}
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
    "clipping": "{}",
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
PANEL_WIDTHS = {1: 4.8, 2: 3.6, 3: 2.8, 4: 2.3}  # inches, by number of panels in a row; else 2

LEGEND_ENTRY_WIDTH = 1.3  # inches
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
    rows: str | Sequence[str] = (),
    x: str = "step",
    scale: str = "",
    log_y: bool | None = None,
) -> Figure:
    """The convergence figure (Figures 2, 4, 10-17): training and relative loss against the step.

    frame: columns embedding, regularizer, trial, step, training_loss, relative_loss and the varied
    setting(s) named by ``columns``; one column of panels for each of their values, in the order in
    which they appear. ``rows`` stacks such a pair of rows for each value of further settings.
    Median lines with inter-quartile ribbons; a cross marks where a curve loses its first trial
    (missing or not finite).

    x: "step", or "elapsed" (the median over trials at a step). scale: for the legend's title.
    log_y: None makes a row logarithmic where a panel spans a factor of 10 or more. The relative
    losses share their y axis unless they differ by such a factor.
    """
    columns, rows = _as_names(columns), _as_names(rows)
    by = [*rows, *columns, "embedding", "regularizer"]
    _check_curves(frame)
    blocks, panels = _combinations(frame, rows), _combinations(frame, columns)
    figure, axes = _grid(2 * len(blocks), len(panels), height=2.1 if len(blocks) < 3 else 1.7)
    lost = False
    for row, value in enumerate(("training_loss", "relative_loss")):
        statistics = curve_statistics(frame, value, by=by)
        if x != "step":
            position = curve_statistics(frame, x, by=by)[[*by, "step", "median"]]
            statistics = statistics.merge(position.rename(columns={"median": x}), on=[*by, "step"])
        shared = row == 1 and _span(statistics) < LOG_AXIS_FROM
        for block, below in enumerate(blocks):
            of_block, its_axes = _select(statistics, rows, below), axes[2 * block + row]
            spans = []
            for ax, panel in zip(its_axes, panels, strict=True):
                drawn = _select(of_block, columns, panel)
                spans.append(_span(drawn))
                lost |= _draw_models(ax, drawn, x)
            log = max(spans) >= LOG_AXIS_FROM if log_y is None else log_y
            _scale_row(its_axes, log=log, shared=shared)
            its_axes[0].set_ylabel(VALUE_LABELS[value])
    for ax in axes[1::2].flat:
        ax.axhline(1.0, color="black", linestyle=":", linewidth=1.2, zorder=1.5)
    for pair, below in zip(axes[::2], blocks, strict=True):
        for ax, panel in zip(pair, panels, strict=True):
            ax.set_title(_title([*columns, *rows], [*panel, *below]))
    # Steps are the same in all rows; times are not.
    _finish_x(axes, VALUE_LABELS.get(x, x), every=len(axes) if x == "step" else 2)
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
    figure.supylabel(VALUE_LABELS.get(value, value), fontsize=STYLE["axes.labelsize"])
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
    if "marker" in line:
        line = {**line, "markevery": max(1, len(steps) // 10)}
    elif known.sum() == 1:
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


def _span(statistics: pd.DataFrame) -> float:
    """Largest over smallest of what is drawn; 1 where not all is positive: no log axis then."""
    drawn = statistics[["median", "lower", "upper"]].to_numpy()
    drawn = drawn[np.isfinite(drawn)]
    return float(drawn.max() / drawn.min()) if drawn.size and drawn.min() > 0 else 1.0


def _scale_row(axes: Sequence[Axes], *, log: bool, shared: bool) -> None:
    """Make a row of panels logarithmic or linear; ``shared`` gives all the same limits."""
    if log:
        for ax in axes:
            ax.set_yscale("log")
    limits = [ax.get_ylim() for ax in axes]
    if shared:
        limits = [(min(low for low, _ in limits), max(high for _, high in limits))] * len(axes)
        for ax in axes[1:]:
            ax.tick_params(labelleft=False)
    for ax, (low, high) in zip(axes, limits, strict=True):
        ax.set_ylim(low, high)
        if log:
            _label_log_axis(ax, low, high)
        elif high >= 1e5:  # matplotlib would write a common factor into the title
            ax.yaxis.set_major_formatter(FuncFormatter(_log_tick))


def _label_log_axis(ax: Axes, low: float, high: float) -> None:
    """Readable ticks: on a short axis powers of ten alone would be too few, or none."""
    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades < 2.5 else (1,)
    ax.yaxis.set_major_locator(
        MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
        if decades < 1
        else LogLocator(subs=steps, numticks=6)
    )
    ax.yaxis.set_major_formatter(FuncFormatter(_log_tick))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _log_tick(value: float, position: int | None = None) -> str:
    if 1e-3 <= value < 1e5:
        return f"{value:g}"
    if value <= 0:  # a locator may offer ticks outside of the axis
        return ""
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = f"{value / 10.0**exponent:.3g}"
    times = "" if factor == "1" else rf"{factor}\cdot"
    return rf"${times}10^{{{exponent}}}$"


def _finish_x(axes: np.ndarray, label: str, every: int | None = None) -> None:
    """Labels on the bottom row only, or below ``every`` so many; and few enough ticks to read."""
    n_columns = axes.shape[1]
    for ax in axes.flat:
        ax.xaxis.set_major_locator(MaxNLocator(6 if n_columns < 4 else 4, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(_thousands))
        ax.margins(x=0.02)
    labelled = range((every or len(axes)) - 1, len(axes), every or len(axes))
    for row, its_axes in enumerate(axes):
        for ax in its_axes:
            ax.tick_params(labelbottom=row in labelled)
            if row in labelled:
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
    trials = "1 trial" if n_trials == 1 else f"{n_trials} trials"
    fits = len(handles) < 6 and len(handles) * LEGEND_ENTRY_WIDTH <= figure.get_figwidth()
    n_rows = 1 if fits else 2
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / n_rows),
        title=f"{scale} scale, {trials}" if scale else trials,
        title_fontsize=8,
    )


# --- frames --------------------------------------------------------------------------------------

# Columns that no setting decides alone.
MEASURED = ["key", "elapsed", "training_loss", "relative_loss", "learning_rate", "log_loss"]


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
        first = {name: repeated[name].iloc[0] for name in keys}
        alike = repeated[(repeated[keys] == pd.Series(first)).all(axis=1)]
        row = ", ".join(f"{name}={value}" for name, value in first.items())
        differing = alike.drop(columns=MEASURED, errors="ignore").nunique(dropna=False)
        names = ", ".join(differing.index[differing > 1])
        hint = f"; they differ in {names}, which rows or columns must name" if names else ""
        raise ValueError(
            f"each (setting, step, trial) must have one row, got {len(alike)} rows with {row}{hint}"
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
    """A curve in words: "BN:NE ($\\tau$ = 0.1)"."""
    values = dict(zip(by, setting, strict=True))
    curve = ":".join(
        labels.get(values.pop(name), "?")
        for name, labels in (("embedding", EMBEDDING_LABELS), ("regularizer", REGULARIZER_LABELS))
        if name in values
    )
    curve = curve or str(values.pop("method", "curve"))
    return f"{curve} ({_title(list(values), list(values.values()))})" if values else curve


# --- heatmaps ------------------------------------------------------------------------------------


@in_house_style
def plot_heatmap(
    tables: pd.DataFrame | Mapping[str, pd.DataFrame],
    *,
    label: str,
    x_label: str = "",
    y_label: str = "",
    text: Mapping[str, pd.DataFrame] | pd.DataFrame | None = None,
    cell_text: bool = True,
    log: bool = False,
    floor: float | None = None,
    center: float | None = None,
    shared: bool = False,
) -> Figure:
    """Tables as colored cells, side by side; every cell keeps its number (Figures 1, 9, 19).

    tables: one frame, or panel title -> frame; index and columns label the axes. label: what the
    colors mean. text: frames of strings that replace the numbers in the cells; ``cell_text=False``
    leaves the cells empty (large tables). center: this value is neutral in a diverging scale.
    log: logarithmic colors; values up to ``floor`` (default: the smallest positive value) have the
    color of the floor, and the color bar says so. shared: one range of colors for all panels.
    NaN is grey and infinity hatched, both with their name in the cell; neither changes the colors.
    """
    panels = {"": tables} if isinstance(tables, pd.DataFrame) else dict(tables)
    texts = {"": text} if isinstance(text, pd.DataFrame) else dict(text or {})
    if log and center is not None:
        raise ValueError(f"center must be None on a logarithmic scale, got {center!r}")
    if floor is not None and not (log and 0 < floor < math.inf):
        raise ValueError(f"floor must be in (0, inf) and needs log=True, got {floor!r}")
    for title, table in panels.items():
        if table.empty:
            raise ValueError(f"table {title!r} must have at least one cell, got {table.shape}")
    n_rows, n_columns = np.max([table.shape for table in panels.values()], axis=0)
    cell = (0.62, 0.36) if cell_text else (min(0.4, 3.2 / n_columns), min(0.4, 3.2 / n_rows))
    width = max(2.0, cell[0] * n_columns) + 1.5
    figure = Figure(
        figsize=(width * len(panels), max(1.4, cell[1] * n_rows) + 0.9), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    arrays = {title: table.to_numpy(dtype=float) for title, table in panels.items()}
    everything = np.concatenate([array.ravel() for array in arrays.values()])
    for ax, (title, array) in zip(axes, arrays.items(), strict=True):
        norm, lowest = _color_norm(everything if shared else array, log, floor, center)
        drawn = np.where(np.isfinite(array), array, np.nan)
        image = ax.imshow(
            drawn if lowest is None else np.maximum(drawn, lowest),
            norm=norm,
            cmap="viridis" if center is None else "PuOr",
            aspect="auto",
            interpolation="nearest",
        )
        _draw_cells(ax, array, image, texts.get(title), cell_text)
        _label_cells(ax, panels[title])
        ax.set(title=title, xlabel=x_label)
        if not shared or ax is axes[-1]:
            bar = figure.colorbar(image, ax=axes if shared else ax, fraction=0.08, pad=0.02)
            bar.outline.set_visible(False)
            floored = lowest is not None and bool(
                ((everything if shared else array) < lowest).any()
            )
            note = f" (up to {_plain(lowest)}: one color)" if lowest is not None and floored else ""
            bar.set_label(label + note)
    axes[0].set_ylabel(y_label)
    return figure


def _color_norm(
    values: np.ndarray, log: bool, floor: float | None, center: float | None
) -> tuple[Normalize, float | None]:
    """Range of colors from the finite values, never empty; and the floor of a logarithmic one."""
    finite = values[np.isfinite(values)]
    if log:
        positive = finite[finite > 0]
        lowest = floor if floor is not None else float(positive.min(initial=math.inf))
        lowest = lowest if math.isfinite(lowest) else 1.0
        highest = float(positive.max(initial=lowest))
        return LogNorm(lowest, highest if highest > lowest else 10 * lowest), lowest
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if center is not None:
        reach = max(abs(low - center), abs(high - center)) or 1.0
        return Normalize(center - reach, center + reach), None
    return Normalize(low, high if high > low else low + (abs(low) or 1.0)), None


def _draw_cells(
    ax: Axes, array: np.ndarray, image: Any, text: pd.DataFrame | None, cell_text: bool
) -> None:
    """Mark cells that are not finite, and write into each cell, light on dark and dark on light."""
    for (i, j), value in np.ndenumerate(array):
        if math.isfinite(value):
            color = image.cmap(image.norm(max(value, image.norm.vmin)))
        else:
            color = to_rgba("#bdbdbd" if math.isnan(value) else "white")
            hatch = None if math.isnan(value) else "////"
            corner = (j - 0.5, i - 0.5)
            ax.add_patch(
                Rectangle(corner, 1, 1, facecolor=color, edgecolor="#9a9a9a", hatch=hatch, lw=0)
            )
        if cell_text:
            written = _plain(value) if text is None else str(text.iloc[i, j])
            ink = "white" if _luminance(color) < 0.18 else "black"
            box = (
                None
                if math.isfinite(value)
                else {"facecolor": color, "edgecolor": "none", "pad": 1}
            )
            ax.text(j, i, written, ha="center", va="center", fontsize=8, color=ink, bbox=box)


def _label_cells(ax: Axes, table: pd.DataFrame) -> None:
    ax.grid(False)
    for axis, names in ((ax.xaxis, table.columns), (ax.yaxis, table.index)):
        skip = math.ceil(len(names) / 25)  # large tables: not every row can be named
        axis.set_ticks(range(0, len(names), skip), [_number(name) for name in names[::skip]])
        axis.set_tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _luminance(color: Sequence[float]) -> float:
    """Relative luminance (WCAG); below 0.18 white text has more contrast than black text."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _plain(value: float) -> str:
    """Three digits without an exponent where that is readable: 0.00123, 50000, nan, inf."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return rf"${mantissa}\cdot10^{{{int(exponent)}}}$"
