"""Figures of Theorem 2.1: what one layer does to the tokens of a task in the plane."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from leancluster_core.experiments.plots import in_house_style

# Clusters are no embeddings: other colors than the curves', and a marker as a second cue.
CLUSTER_STYLES = (("#7B3294", "o"), ("#B8860B", "s"), ("#2B8CBE", "^"), ("#636363", "D"))
_GREY = "#bdbdbd"


@in_house_style
def plot_layer(
    points: Tensor, centers: Tensor, point_codes: Tensor, codes: Tensor, moved: Tensor
) -> Figure:
    """Tokens before and after a layer of the Lloyd transformer, data features as coordinates.

    points: (n, 2), centers and moved: (k, 2) before and after, point_codes: (n, c) the code
    features of the points after the layer, codes: (k, c) those of the centers, k at most 4.
    """
    figure = Figure(figsize=(7.4, 3.3), layout="constrained")
    before, after = figure.subplots(1, 2, sharex=True, sharey=True)
    names = ["".join(str(int(bit)) for bit in code) for code in codes]
    zeros = "0" * codes.shape[1]
    before.scatter(*points.T, s=14, color=_GREY, label=f"points, code {zeros}")
    for (color, marker), code, name, start, end in zip(
        CLUSTER_STYLES, codes, names, centers, moved, strict=False
    ):
        chosen = points[(point_codes == code).all(-1)]
        after.scatter(*chosen.T, s=14, marker=marker, color=color, alpha=0.75)
        arrow = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 5}
        after.annotate("", end.tolist(), start.tolist(), arrowprops=arrow)
        for ax, place in ((before, start), (after, end)):
            label = f"centre, code {name}" if ax is before else None
            style = {"marker": marker, "color": color, "edgecolors": "black", "label": label}
            ax.scatter(*place[:, None], s=90, zorder=3, **style)
    before.set(title="before: points carry no code", xlabel="$x_1$", ylabel="$x_2$")
    after.set(title="after: each carries its centre's, centres moved", xlabel="$x_1$")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


@in_house_style
def plot_attention_maps(maps: Sequence[Tensor], order: Tensor) -> Figure:
    """The four weight matrices of one layer, queries as rows; points are sorted by ``order`` (n,).

    maps: (n, k), (n, n), (k, n), (k, k). Dark is weight 1 (0 is white).
    """
    a1, a2, a3, a4 = (weights.numpy() for weights in maps)
    rows = order.numpy()
    panels = {
        "$A_1$: points to centres": (a1[rows], "centres", "points"),
        "$A_2$: points to points": (a2[np.ix_(rows, rows)], "points", "points"),
        "$A_3$: centres to points": (a3[:, rows] / a3.max(), "points", "centres"),
        "$A_4$: centres to centres": (a4, "centres", "centres"),
    }
    figure = Figure(figsize=(8.4, 2.5), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=[0.7, 1.6, 1.6, 0.7])
    for ax, (title, (weights, keys, queries)) in zip(axes, panels.items(), strict=True):
        ax.imshow(weights, cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        ax.set(title=title, xlabel=keys, ylabel=queries)
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set_visible(True)
    return figure
