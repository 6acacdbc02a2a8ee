"""Statistics come from raw finite values, gaps are reported, and figures lose no content."""

import io
import itertools
import math

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from leancluster_core.experiments.plots import (
    BASELINES,
    EMBEDDING_COLORS,
    REGULARIZER_DASHES,
    curve_caption,
    curve_statistics,
    plot_convergence,
    plot_heatmap,
    plot_rollouts,
)

EMBEDDINGS, REGULARIZERS = ("onehot", "binary", "none"), ("entropy", "l2")
BY = ("penalty", "embedding", "regularizer")


def histories(penalties=(1.0, 0.1), trials=3, steps=(50, 100, 150), seed=0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    keys = itertools.product(penalties, EMBEDDINGS, REGULARIZERS, range(trials), steps)
    frame = pd.DataFrame(keys, columns=["penalty", "embedding", "regularizer", "trial", "step"])
    frame["elapsed"] = frame["step"] * (1.0 + 0.5 * frame["trial"])
    frame["training_loss"] = rng.uniform(100, 200, len(frame))
    frame["relative_loss"] = rng.uniform(0.8, 1.8, len(frame))
    return frame


def rollouts(trials=2, n_iterations=4) -> tuple[pd.DataFrame, pd.DataFrame]:
    rng = np.random.default_rng(1)
    families = ("normal", "cauchy")
    tasks = list(itertools.product(families, families, range(trials), range(n_iterations + 1)))
    names = ["train_family", "test_family", "trial", "step"]
    frame = pd.DataFrame(
        [(*task, e) for task in tasks for e in EMBEDDINGS], columns=[*names, "embedding"]
    ).assign(regularizer="l2")
    baselines = pd.DataFrame(
        [(*task, m) for task in tasks for m in BASELINES], columns=[*names, "method"]
    )
    for table in (frame, baselines):
        table["log_loss"] = rng.normal(size=len(table))
    return frame, baselines


def svg(figure) -> str:
    drawing = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "test"}):
        figure.savefig(drawing, format="svg", bbox_inches="tight", metadata={"Date": None})
    return drawing.getvalue()


def lines_at(ax, color, dash) -> list:
    """The drawn curves of this color and dash (markers and reference lines excluded)."""
    wanted = mpl.lines.Line2D([], [], linestyle=dash)
    return [
        line
        for line in ax.lines
        if line.get_color() == color
        and line.get_linestyle() == wanted.get_linestyle()
        and line._unscaled_dash_pattern == wanted._unscaled_dash_pattern
    ]


# --- statistics --------------------------------------------------------------------------------


def test_statistics_equal_numpys_on_every_group():
    frame = histories(trials=4).sample(frac=1, random_state=0)
    got = curve_statistics(frame, "training_loss", by=BY)
    assert len(got) == 2 * 6 * 3
    for row in got.itertuples():
        values = frame.query(
            f"penalty == {row.penalty} and embedding == '{row.embedding}' "
            f"and regularizer == '{row.regularizer}' and step == {row.step}"
        )["training_loss"]
        expected = np.quantile(values, [0.25, 0.5, 0.75])
        np.testing.assert_allclose([row.lower, row.median, row.upper], expected, rtol=1e-14)
        assert (row.n_trials, row.n_finite, row.n_missing, row.n_diverged) == (4, 4, 0, 0)


def test_public_case_s5_1_missing_and_single_trials():
    frame = pd.DataFrame(
        {
            "step": [1, 1, 1, 2, 2, 2, 3, 4, 4],
            "loss": [1.0, 2.0, np.nan, 1.0, 2.0, 3.0, 9.0, np.nan, np.inf],
            "seed": [0, 1, 2, 0, 1, 2, 0, 0, 1],
        }
    )
    got = curve_statistics(frame, "loss", trial="seed").set_index("step")
    assert got["median"].tolist()[:3] == [1.5, 2.0, 9.0]
    assert got["lower"].tolist()[:3] == [1.25, 1.5, 9.0]
    assert got["upper"].tolist()[:3] == [1.75, 2.5, 9.0]
    assert got.loc[4, ["median", "lower", "upper"]].isna().all()  # not 0, and no crash
    assert got["n_finite"].tolist() == [2, 3, 1, 0]
    assert got["n_missing"].tolist() == [0, 0, 2, 1]
    assert got["n_diverged"].tolist() == [1, 0, 0, 2]
    assert (got["n_trials"] == 3).all()


def test_public_case_s5_2_axis_scale_does_not_change_the_numbers():
    """The median of an even group, and the line that is drawn, with log axes forced on and off."""
    frame = histories(penalties=(1.0,), trials=4, steps=(1,))
    values = [1e-4, 1e-2, 1.0, 100.0]
    frame["training_loss"] = frame["relative_loss"] = [values[t] for t in frame["trial"]]
    assert (curve_statistics(frame, "training_loss", by=BY)["median"] == 0.505).all()
    drawn = []
    for log_y in (None, True, False):
        figure = plot_convergence(frame, columns="penalty", log_y=log_y)
        axes = figure.axes[:2]
        assert [ax.get_yscale() for ax in axes] == ["linear" if log_y is False else "log"] * 2
        drawn.append([line.get_xydata() for ax in axes for line in ax.lines])
        assert any((line[:, 1] == 0.505).any() for line in drawn[-1])
    for other in drawn[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(drawn[0], other, strict=True))


def test_public_case_s5_3_repeated_rows_are_refused():
    frame = pd.DataFrame({"step": [1] * 4, "seed": [0, 0, 0, 1], "y": [1.0, 1.0, 1.0, 5.0]})
    with pytest.raises(ValueError, match=r"got 3 rows with step=1, seed=0"):
        curve_statistics(frame, "y", trial="seed")
    assert curve_statistics(frame.iloc[2:], "y", trial="seed")["median"].tolist() == [3.0]
    with pytest.raises(
        ValueError, match=r"got 2 rows with penalty=1\.0, embedding=onehot, step=50"
    ):
        curve_statistics(histories(), "training_loss", by=["penalty", "embedding"])


def test_index_and_row_order_do_not_matter():
    parts = [histories((penalty,)) for penalty in (1.0, 0.1, 0.25)]
    joined = pd.concat(parts)  # the index repeats
    expected = curve_statistics(joined.reset_index(drop=True), "relative_loss", by=BY)
    pd.testing.assert_frame_equal(curve_statistics(joined, "relative_loss", by=BY), expected)
    shuffled = joined.sample(frac=1, random_state=1)
    got = curve_statistics(shuffled, "relative_loss", by=BY).sort_values([*BY, "step"])
    pd.testing.assert_frame_equal(
        got.reset_index(drop=True), expected.sort_values([*BY, "step"]).reset_index(drop=True)
    )


def test_settings_keep_their_order_of_appearance():
    frame = histories((1.0, 0.1, 0.25))
    got = curve_statistics(frame, "training_loss", by=BY)
    assert got["penalty"].drop_duplicates().tolist() == [1.0, 0.1, 0.25]
    assert got["step"].tolist() == [50, 100, 150] * 18
    as_category = frame.astype({"embedding": pd.CategoricalDtype([*EMBEDDINGS, "other"])})
    assert len(curve_statistics(as_category, "training_loss", by=BY)) == len(got)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="trial"), r"must have the columns \['trial'\]"),
        (lambda f: f.iloc[:0], "at least one row"),
        (lambda f: f.assign(step=np.where(f.index == 3, np.nan, f["step"])), "'step' must have"),
        (lambda f: f.assign(embedding=None), "'embedding' must have"),
    ],
)
def test_statistics_refuse(change, message):
    with pytest.raises(ValueError, match=message):
        curve_statistics(change(histories()), "training_loss", by=BY)


def test_a_setting_that_no_panel_shows_is_named():
    both = pd.concat([histories().assign(gamma=1.0), histories().assign(gamma=4.0)])
    with pytest.raises(ValueError, match="they differ in gamma, which rows or columns must name"):
        curve_statistics(both, "relative_loss", by=BY)
    assert len(curve_statistics(both, "relative_loss", by=[*BY, "gamma"]))


# --- captions ----------------------------------------------------------------------------------


def with_gaps() -> pd.DataFrame:
    """BN:NE at 0.1 diverges in one trial from 100 on; OH:L2 at 1 has no third trial at 150."""
    frame = histories()
    bn = (frame[list(BY)] == [0.1, "binary", "entropy"]).all(axis=1)
    frame.loc[bn & (frame["trial"] == 1) & (frame["step"] >= 100), "relative_loss"] = np.inf
    oh = (frame[list(BY)] == [1.0, "onehot", "l2"]).all(axis=1)
    return frame[~(oh & (frame["trial"] == 2) & (frame["step"] == 150))]


def test_caption_says_statistic_trials_gaps_and_scale():
    values = ["training_loss", "relative_loss"]
    whole = curve_caption(histories(), values, by=BY, scale="laptop")
    assert whole == (
        "Lines: median over 3 trials; ribbons: first to third quartile. "
        "No trial is missing or diverged. Scale: laptop."
    )
    gaps = curve_caption(with_gaps(), values, by=BY, scale="smoke")
    assert r"OH:L2 ($\tau$ = 1): 1 of 3 missing from step 150" in gaps
    assert r"BN:NE ($\tau$ = 0.1): 1 of 3 not finite from step 100" in gaps
    assert gaps.count(" of 3 ") == 2 and gaps.endswith("Scale: smoke.")
    single = curve_caption(histories(trials=1), values, by=BY, scale="paper")
    assert single.startswith("Lines: a single trial, so no ribbons.")


def test_caption_of_baselines():
    _, baselines = rollouts()
    baselines = baselines.drop(index=baselines.index[0])
    text = curve_caption(
        baselines, ["log_loss"], by=["train_family", "test_family", "method"], scale="laptop"
    )
    assert "Lloyd (trained on normal, tested on normal): 1 of 2 missing from step 0" in text


# --- curves ------------------------------------------------------------------------------------


def test_convergence_draws_every_curve_and_the_reference():
    frame = histories()
    figure = plot_convergence(frame, columns="penalty", scale="laptop")
    panels = figure.axes
    assert len(panels) == 4
    assert [ax.get_title() for ax in panels[:2]] == [r"$\tau$ = 1", r"$\tau$ = 0.1"]
    assert panels[0].get_ylabel() == "smoothed training loss"
    assert panels[2].get_ylabel() == "relative validation loss"
    for ax, (value, penalty) in zip(
        panels, itertools.product(["training_loss", "relative_loss"], [1.0, 0.1]), strict=True
    ):
        statistics = curve_statistics(frame, value, by=BY)
        for embedding, regularizer in itertools.product(EMBEDDINGS, REGULARIZERS):
            dash = REGULARIZER_DASHES[regularizer]
            (line,) = lines_at(ax, EMBEDDING_COLORS[embedding], dash)
            curve = statistics[
                (statistics[list(BY)] == [penalty, embedding, regularizer]).all(axis=1)
            ]
            np.testing.assert_array_equal(line.get_xdata(), curve["step"])
            np.testing.assert_array_equal(line.get_ydata(), curve["median"])
        assert len(ax.collections) == 6  # ribbons
    for ax in panels[2:]:
        assert any(
            line.get_linestyle() == ":" and set(line.get_ydata()) == {1} for line in ax.lines
        )
    legend = figure.legends[0]
    labels = ["OH:NE", "OH:L2", "BN:NE", "BN:L2", "NA:NE", "NA:L2", "one Lloyd step"]
    assert [text.get_text() for text in legend.get_texts()] == labels
    assert legend.get_title().get_text() == "laptop scale, 3 trials"


def test_ribbons_span_the_quartiles():
    frame = histories(penalties=(1.0,), steps=(50, 100))
    frame = frame[(frame["embedding"] == "binary") & (frame["regularizer"] == "l2")]
    figure = plot_convergence(frame)
    (ribbon,) = figure.axes[0].collections
    corners = ribbon.get_paths()[0].vertices
    statistics = curve_statistics(frame, "training_loss")
    for row in statistics.itertuples():
        at_step = corners[corners[:, 0] == row.step, 1]
        assert (at_step.min(), at_step.max()) == (row.lower, row.upper)


def test_lost_trials_are_marked_and_named():
    figure = plot_convergence(with_gaps(), columns="penalty")
    crosses = [
        (index, line.get_color(), line.get_xdata()[0])
        for index, ax in enumerate(figure.axes)
        for line in ax.lines
        if line.get_marker() == "x"
    ]
    oh, bn = EMBEDDING_COLORS["onehot"], EMBEDDING_COLORS["binary"]
    assert crosses == [(0, oh, 150), (2, oh, 150), (3, bn, 100)]
    assert "a trial is lost" in [text.get_text() for text in figure.legends[0].get_texts()]
    whole = plot_convergence(histories(), columns="penalty").legends[0]
    assert "a trial is lost" not in [text.get_text() for text in whole.get_texts()]


def test_a_curve_without_any_finite_value_is_not_drawn_at_zero():
    frame = histories()
    na = frame["embedding"] == "none"
    frame.loc[na, ["training_loss", "relative_loss"]] = np.nan
    figure = plot_convergence(frame, columns="penalty")
    for ax in figure.axes:
        for line in ax.lines:
            if line.get_color() == EMBEDDING_COLORS["none"]:
                assert not np.isfinite(line.get_ydata()).any()
    svg(figure)


def test_a_single_step_shows_as_a_point():
    figure = plot_convergence(histories(steps=(50,)), columns="penalty")
    for embedding, regularizer in itertools.product(EMBEDDINGS, REGULARIZERS):
        (line,) = lines_at(
            figure.axes[0], EMBEDDING_COLORS[embedding], REGULARIZER_DASHES[regularizer]
        )
        assert line.get_marker() == "o"


def test_elapsed_time_is_the_median_over_trials():
    figure = plot_convergence(histories(), columns="penalty", x="elapsed")
    assert figure.axes[-1].get_xlabel() == "training time (s)"
    (line,) = lines_at(figure.axes[0], EMBEDDING_COLORS["binary"], "solid")
    assert line.get_xdata().tolist() == [75.0, 150.0, 225.0]  # trial 1 of three


def test_log_axis_only_where_a_panel_needs_it():
    frame = histories()
    figure = plot_convergence(frame, columns="penalty")
    assert {ax.get_yscale() for ax in figure.axes} == {"linear"}
    shared = [ax.get_ylim() for ax in figure.axes[2:]]
    assert shared[0] == shared[1]
    diverging = frame["embedding"].eq("binary") & frame["penalty"].eq(0.1)
    frame.loc[diverging, "relative_loss"] *= 1e6
    top_left, top_right, left, right = plot_convergence(frame, columns="penalty").axes
    assert top_left.get_yscale() == top_right.get_yscale() == "linear"
    assert left.get_yscale() == right.get_yscale() == "log"
    assert left.get_ylim()[1] < 10 < right.get_ylim()[1]  # one panel does not flatten the other


@pytest.mark.parametrize("low, high", [(0.9, 2.1), (0.8, 30.0), (1e-3, 5.0), (1e-8, 1e9)])
def test_log_axes_have_readable_labels(low, high):
    frame = histories(penalties=(1.0,))
    frame["relative_loss"] = np.geomspace(low, high, len(frame))
    ax = plot_convergence(frame, columns="penalty", log_y=True).axes[1]
    bottom, top = ax.get_ylim()
    shown = [
        tick.label1.get_text()
        for tick in ax.yaxis.get_major_ticks()
        if bottom <= tick.get_loc() <= top
    ]
    assert 2 <= len(shown) <= 8 and all(shown) and len(set(shown)) == len(shown)


def test_several_columns_make_one_panel_each():
    frame = pd.concat([histories().assign(n_features=d) for d in (4, 32)])
    figure = plot_convergence(frame, columns=["n_features", "penalty"])
    assert [ax.get_title() for ax in figure.axes[:4]] == [
        rf"$d$ = {d}, $\tau$ = {t}" for d in (4, 32) for t in (1, 0.1)
    ]


def test_rollouts_draw_models_and_baselines():
    frame, baselines = rollouts()
    figure = plot_rollouts(
        frame, columns="test_family", rows="train_family", baselines=baselines, scale="smoke"
    )
    assert len(figure.axes) == 4
    by = ["train_family", "test_family", "method"]
    statistics = curve_statistics(baselines, "log_loss", by=by)
    for ax, setting in zip(
        figure.axes, itertools.product(("normal", "cauchy"), repeat=2), strict=True
    ):
        for method, style in BASELINES.items():
            curve = statistics[(statistics[by] == [*setting, method]).all(axis=1)]
            assert any(
                line.get_color() == style["color"]
                and line.get_marker() == style.get("marker", "None")
                and np.array_equal(line.get_ydata(), curve["median"])
                for line in ax.lines
            )
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["OH:L2", "BN:L2", "NA:L2", "Lloyd", "scikit-learn"]
    rows = [t.get_text() for ax in figure.axes for t in ax.texts]
    assert rows == ["trained on normal", "trained on cauchy"]
    assert figure.axes[0].get_ylim() == figure.axes[2].get_ylim()  # one column, one axis


def test_rollouts_without_settings_or_baselines():
    frame, _ = rollouts()
    one = frame[(frame["train_family"] == "normal") & (frame["test_family"] == "cauchy")]
    figure = plot_rollouts(one)
    assert len(figure.axes) == 1 and len(figure.axes[0].lines) == 3


def test_curves_refuse_unknown_names():
    frame = histories()
    with pytest.raises(ValueError, match=r"embedding must be one of onehot, .* got \['OH'\]"):
        plot_convergence(frame.assign(embedding="OH"))
    with pytest.raises(ValueError, match=r"must have the columns \['penalti'\]"):
        plot_convergence(frame, columns="penalti")
    models, baselines = rollouts()
    with pytest.raises(ValueError, match=r"method must be one of Lloyd, .* got \['lloyd'\]"):
        plot_rollouts(
            models,
            columns=["train_family", "test_family"],
            baselines=baselines.assign(method="lloyd"),
        )


# --- the house style ---------------------------------------------------------------------------


def test_figures_are_the_same_bytes_each_time_and_leave_settings_alone():
    before = dict(mpl.rcParams)
    frame = histories()
    first = svg(plot_convergence(frame, columns="penalty", scale="laptop"))
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 7, "axes.grid": False}):
        figure = plot_convergence(frame, columns="penalty", scale="laptop")
    assert svg(figure) == first
    assert dict(mpl.rcParams) == before


def boxes(figure) -> dict:
    """Pixel boxes of titles, axis labels and the legend."""
    figure.draw_without_rendering()
    found = {"legend": figure.legends[0].get_window_extent()}
    for index, ax in enumerate(figure.axes):
        for name, text in (("title", ax.title), ("x", ax.xaxis.label), ("y", ax.yaxis.label)):
            if text.get_text():
                found[f"{name}{index}"] = text.get_window_extent()
    return found


@pytest.mark.parametrize("n_panels", [1, 2, 3, 5])
def test_texts_do_not_overlap_and_stay_inside(n_panels):
    figure = plot_convergence(
        histories(penalties=(1.0, 0.5, 0.25, 0.14, 0.1)[:n_panels]),
        columns="penalty",
        scale="laptop",
    )
    extents = boxes(figure)
    for (name, box), (other, with_box) in itertools.combinations(extents.items(), 2):
        assert not box.overlaps(with_box), f"{name} overlaps {other}"
    for ax in figure.axes:
        assert not extents["legend"].overlaps(ax.get_window_extent())
    page = figure.bbox
    for name, box in extents.items():
        assert box.x0 >= page.x0 - 1 and box.x1 <= page.x1 + 1, f"{name} is cut off"
        assert box.y0 >= page.y0 - 1 and box.y1 <= page.y1 + 1, f"{name} is cut off"


# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
COLOR_VISION = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(color: str, vision: str) -> np.ndarray:
    """CIELAB (D65) of a color as seen with this kind of color vision."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(COLOR_VISION[vision]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", COLOR_VISION)
def test_colors_are_told_apart_with_every_color_vision(vision):
    colors = [*EMBEDDING_COLORS.values(), "black"]
    for first, second in itertools.combinations(colors, 2):
        distance = np.linalg.norm(lab(first, vision) - lab(second, vision))
        assert distance > 20, (first, second, distance)


# --- heatmaps ----------------------------------------------------------------------------------


def cell_texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        ([[5e4, 5e4], [1.0, 5e4]], ["50000", "50000", "1", "50000"]),
        ([[np.nan, 1.0], [2.0, 3.0]], ["nan", "1", "2", "3"]),
        ([[np.inf, 1.0], [2.0, -np.inf]], ["inf", "1", "2", "-inf"]),
        ([[1.2e-9, 0.00123], [123456.0, 3e7]], None),
    ],
)
def test_public_case_s5_6_every_cell_is_labelled(cells, texts):
    figure = plot_heatmap(pd.DataFrame(cells), label="loss")
    ax = figure.axes[0]
    shown = cell_texts(ax)
    if texts is None:
        texts = [r"$1.2\cdot10^{-9}$", "0.00123", "123456", r"$3.0\cdot10^{7}$"]
    assert shown == texts
    finite = np.array(cells)[np.isfinite(cells)]
    norm = ax.images[0].norm
    assert (norm.vmin, norm.vmax) == (finite.min(), finite.max())  # infinity leaves them alone
    svg(figure)


def test_text_contrasts_with_its_cell():
    figure = plot_heatmap(pd.DataFrame(np.arange(30.0).reshape(5, 6)), label="loss")
    ax = figure.axes[0]
    image = ax.images[0]
    for text, value in zip(ax.texts, range(30), strict=True):
        background = lab(mpl.colors.to_hex(image.cmap(image.norm(value))), "usual")[0]
        ink = lab(text.get_color(), "usual")[0]
        assert abs(background - ink) > 45, value
    assert {text.get_color() for text in ax.texts} == {"white", "black"}


def test_public_case_s5_5_zeros_on_a_logarithmic_scale():
    figure = plot_heatmap(pd.DataFrame([[0.0, 1e-3], [1.0, 10.0]]), label="loss", log=True)
    ax, bar = figure.axes
    image = ax.images[0]
    assert not np.ma.getmaskarray(image.get_array()).any()
    assert image.get_array()[0, 0] == 1e-3 == image.norm.vmin
    assert bar.get_ylabel() == "loss (up to 0.001: one color)"
    assert cell_texts(ax) == ["0", "0.001", "1", "10"]
    chosen = plot_heatmap(pd.DataFrame([[0.0, 1.0]]), label="loss", log=True, floor=1e-6)
    assert chosen.axes[0].images[0].get_array()[0, 0] == 1e-6
    plain = plot_heatmap(pd.DataFrame([[1.0, 10.0]]), label="loss", log=True)
    assert plain.axes[1].get_ylabel() == "loss"


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    "cells",
    [
        np.zeros((3, 3)),
        np.full((2, 2), 7.0),
        np.full((2, 2), np.nan),
        [[np.nan, np.inf], [0.0, 2.0]],
        [[-1.0, 3.0]],
    ],
)
def test_degenerate_tables_draw(cells, log):
    figure = plot_heatmap(pd.DataFrame(cells), label="loss", log=log)
    norm = figure.axes[0].images[0].norm
    assert norm.vmin < norm.vmax and math.isfinite(norm.vmax)
    assert len(cell_texts(figure.axes[0])) == np.size(cells)
    svg(figure)


def test_panels_share_colors_on_request_and_take_their_own_text():
    tables = {
        "forward": pd.DataFrame([[1.0, -2.0]], index=[4], columns=[10, 16]),
        "backward": pd.DataFrame([[30.0, 5.0]], index=[4], columns=[10, 16]),
    }
    own = plot_heatmap(tables, label="gain (%)", center=0)
    ranges = [(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in own.axes[:2]]
    assert ranges == [(-2, 2), (-30, 30)]
    text = {name: table.map(lambda v: f"{v:+.0f}%") for name, table in tables.items()}
    shared = plot_heatmap(tables, label="gain (%)", center=0, shared=True, text=text)
    assert len(shared.axes) == 3  # one color bar
    assert {ax.images[0].norm.vmax for ax in shared.axes[:2]} == {30}
    assert cell_texts(shared.axes[0]) == ["+1%", "-2%"]
    assert [tick.get_text() for tick in shared.axes[0].get_xticklabels()] == ["10", "16"]


def test_large_tables_name_some_rows_only():
    ax = plot_heatmap(pd.DataFrame(np.eye(80)), label="distance", cell_text=False).axes[0]
    assert len(ax.get_xticks()) == 20 and not ax.texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log": True, "center": 0.0}, "center must be None"),
        ({"floor": 1.0}, "floor must be"),
        ({"log": True, "floor": 0.0}, "floor must be"),
    ],
)
def test_heatmap_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_heatmap(pd.DataFrame([[1.0]]), label="loss", **arguments)
    with pytest.raises(ValueError, match="at least one cell"):
        plot_heatmap(pd.DataFrame(), label="loss")
