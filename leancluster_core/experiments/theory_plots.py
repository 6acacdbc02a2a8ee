"""Figures of the theory pages, in the house style: they read frames and return figures."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from leancluster_core.experiments.config import EMBEDDING_LABELS, REGULARIZER_LABELS
from leancluster_core.experiments.plots import (
    EMBEDDING_COLORS,
    REGULARIZER_DASHES,
    in_house_style,
)

# The paper's constants in black; ours in a color that no embedding has.
_STATED = {"color": "black", "marker": "o", "markersize": 3.5}
_SHARP = {"color": "#B0307A", "marker": "s", "markersize": 3.5, "linestyle": (0, (4, 1.5))}

_AXIS_LABELS = {
    "n_features": "dimensions $d$",
    "n_clusters": "clusters $k$",
    "inverse_temperature": r"inverse temperature $\gamma$",
    "penalty": r"penalty $\tau$",
}


@in_house_style
def plot_worst_ratios(frame: pd.DataFrame) -> Figure:
    """Worst ratio of measured to bound against the dispersion, a panel for each lemma.

    frame: columns lemma, dispersion, worst_ratio, sharp (False: the paper's constant, True: ours).
    """
    lemmas = list(dict.fromkeys(frame["lemma"]))
    n_columns = 3
    n_rows = -(-len(lemmas) // n_columns)
    figure = Figure(figsize=(8.4, 2.0 * n_rows + 0.7), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True)
    for ax in axes.flat[len(lemmas) :]:
        ax.set_visible(False)
    for ax, lemma in zip(axes.flat, lemmas, strict=False):
        for sharp, style in ((False, _STATED), (True, _SHARP)):
            rows = frame[(frame["lemma"] == lemma) & (frame["sharp"] == sharp)]
            rows = rows.groupby("dispersion")["worst_ratio"].max()
            if len(rows):
                ax.plot(rows.index, rows, **style)
        ax.axhline(1.0, color="black", linestyle=":", linewidth=1.2, zorder=1.5)
        ax.set_xscale("log")
        found = frame[frame["lemma"] == lemma]["worst_ratio"]
        if found.min() < 0.2:
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, 1.12 * found.max())
        ax.set_title(lemma)
    for ax in axes[-1]:
        ax.set_xlabel(r"dispersion $\delta$")
    for ax in axes[:, 0]:
        ax.set_ylabel("worst ratio")
    handles = [
        Line2D([], [], label="the paper's constant", **_STATED),  # type: ignore[arg-type]
        Line2D([], [], label="ours", **_SHARP),  # type: ignore[arg-type]
        Line2D([], [], color="black", linestyle=":", linewidth=1.2, label="refuted above"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


@in_house_style
def plot_smoothing(frame: pd.DataFrame) -> Figure:
    """Appendix H for two centers, in units of the penalty: the gap, the farther center's weight.

    frame: columns margin, regularizer, gap, weight.
    """
    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    labels = (
        ("gap", r"smoothed minus exact, in $\tau$"),
        ("weight", "weight of the farther centre"),
    )
    for ax, (value, label) in zip(figure.subplots(1, 2), labels, strict=True):
        for regularizer, dash in REGULARIZER_DASHES.items():
            rows = frame[frame["regularizer"] == regularizer]
            ax.plot(rows["margin"], rows[value], color="black", linestyle=dash)
        ax.set_xlabel(r"margin between the two squared distances, in $\tau$")
        ax.set_ylabel(label)
        ax.set_ylim(0, None)
        ax.margins(x=0.02)
    handles = [
        Line2D([], [], color="black", linestyle=dash, label=REGULARIZER_LABELS[regularizer])
        for regularizer, dash in REGULARIZER_DASHES.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


@in_house_style
def plot_sensitivity(frame: pd.DataFrame, *, columns: Sequence[str]) -> Figure:
    """Sensitivity against each setting of ``columns``: the paper's bound, ours, and what is
    measured, all as powers of ten.

    frame: columns axis (one of ``columns``), value, embedding, regularizer, log10_bound,
    log10_sharp, log10_measured; several rows of a value (seeds) are shown by their median and their
    range. The regularizer may be "" (a solid line).
    """
    rows = (
        ("log10_bound", r"$\log_{10}$ of the" "\npaper's bound"),
        ("log10_sharp", r"$\log_{10}$ of" "\nour bound"),
        ("log10_measured", r"$\log_{10}$ of the" "\nmeasured"),
    )
    figure = Figure(figsize=(2.4 * len(columns) + 0.4, 5.4), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex="col")
    curves = list(dict.fromkeys(zip(frame["embedding"], frame["regularizer"], strict=True)))
    for column, name in enumerate(columns):
        of_axis = frame[frame["axis"] == name]
        for (value, _), ax in zip(rows, axes[:, column], strict=True):
            for embedding, regularizer in curves:
                chosen = of_axis["embedding"].eq(embedding) & of_axis["regularizer"].eq(regularizer)
                found = of_axis[chosen].groupby("value")[value]
                style = {
                    "color": EMBEDDING_COLORS[embedding],
                    "linestyle": REGULARIZER_DASHES.get(regularizer, "solid"),
                }
                ax.fill_between(
                    found.min().index,
                    found.min(),
                    found.max(),
                    color=style["color"],
                    alpha=0.15,
                    lw=0,
                )
                ax.plot(found.median(), marker="o", markersize=3, **style)
            ax.set_xscale("log")
            ax.yaxis.set_major_locator(MaxNLocator(4))
        values = sorted(of_axis["value"].unique())
        axes[-1, column].xaxis.set_major_locator(FixedLocator(values))
        axes[-1, column].xaxis.set_minor_locator(NullLocator())
        axes[-1, column].xaxis.set_minor_formatter(NullFormatter())
        axes[-1, column].set_xticks(values, [f"{value:g}" for value in values])
        axes[-1, column].set_xlabel(_AXIS_LABELS.get(name, name))
    for (_, label), ax in zip(rows, axes[:, 0], strict=True):
        ax.set_ylabel(label)
    handles = [
        Line2D(
            [],
            [],
            color=EMBEDDING_COLORS[embedding],
            linestyle=REGULARIZER_DASHES.get(regularizer, "solid"),
            label=":".join(
                label
                for label in (EMBEDDING_LABELS[embedding], REGULARIZER_LABELS.get(regularizer, ""))
                if label
            ),
        )
        for embedding, regularizer in curves
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure
