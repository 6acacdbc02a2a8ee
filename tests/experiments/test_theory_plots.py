"""Figures of the theory pages: what is drawn is what the frames hold."""

import numpy as np
import pandas as pd

from leancluster_core.experiments.pages import save_figure
from leancluster_core.experiments.theory_plots import (
    plot_sensitivity,
    plot_smoothing,
    plot_worst_ratios,
)


def drawn(figure):
    """Every line of every visible panel as (x, y)."""
    return [
        (line.get_xdata(), line.get_ydata())
        for ax in figure.axes
        if ax.get_visible()
        for line in ax.lines
    ]


def test_worst_ratios_show_the_largest_of_each_dispersion():
    frame = pd.DataFrame(
        {
            "lemma": ["A"] * 4 + ["B"] * 2,
            "dispersion": [0.1, 0.1, 1.0, 1.0, 0.1, 1.0],
            "worst_ratio": [0.5, 0.9, 0.7, 0.6, 1.0, 1e-4],
            "sharp": [False] * 4 + [True] * 2,
        }
    )
    figure = plot_worst_ratios(frame)
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title() for ax in panels] == ["A", "B"]
    assert [ax.get_yscale() for ax in panels] == ["linear", "log"]
    np.testing.assert_allclose(panels[0].lines[0].get_ydata(), [0.9, 0.7])


def test_smoothing_draws_both_regularizers():
    margins = np.linspace(0, 2, 5)
    frame = pd.concat(
        pd.DataFrame(
            {"margin": margins, "regularizer": name, "gap": margins, "weight": 1 - margins}
        )
        for name in ("entropy", "l2")
    )
    assert len(drawn(plot_smoothing(frame))) == 4


def test_sensitivity_shows_medians_and_the_same_file_twice():
    rows = [
        {
            "axis": axis,
            "value": value,
            "embedding": embedding,
            "regularizer": "",
            "log10_bound": 30.0 + seed,
            "log10_sharp": 4.0,
            "log10_measured": seed,
        }
        for axis in ("n_features", "n_clusters")
        for value in (2, 4)
        for embedding in ("onehot", "binary")
        for seed in (0.0, 1.0, 5.0)
    ]
    frame = pd.DataFrame(rows)
    files = []
    for _ in range(2):
        figure = plot_sensitivity(frame, columns=["n_features", "n_clusters"])
        assert len(figure.axes) == 6
        np.testing.assert_allclose(figure.axes[-1].lines[0].get_ydata(), [1.0, 1.0])
        files.append(save_figure(figure, "", "name", caption="c", alt="a").data["image/svg+xml"])
    assert files[0] == files[1]
