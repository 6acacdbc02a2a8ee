"""The results as a page: where every setting of the convergence figures ends, from the run store.

``python -m leancluster_core.experiments.results_page book/generated/results.md`` writes what
book/results.md includes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.grids import GRIDS, curve_frame, figure_configs
from leancluster_core.experiments.pages import html_table
from leancluster_core.experiments.paths import project_root, results_root
from leancluster_core.experiments.store import Run, Store
from leancluster_core.experiments.summary import SHORT_NAMES, final_losses, final_table, plain

# The largest scale first: a page shows the best that there is.
SHOWN_SCALES = ("paper", "laptop")

_BY = ["family", "n_features", "n_clusters", "n_points", "penalty", "initial_learning_rate"]


def shown_scale(
    configs: Sequence[TrainingConfig], stored: Callable[[TrainingConfig, str], bool]
) -> str:
    """The largest scale at which every config is stored, else the one with the most."""
    counts = {s: sum(stored(config.at_scale(s), s) for config in configs) for s in SHOWN_SCALES}
    complete = [scale for scale, count in counts.items() if count == len(configs)]
    return complete[0] if complete else max(SHOWN_SCALES, key=lambda scale: counts[scale])


def render(runs: Mapping[str, tuple[str, Sequence[Run | None]]], titles: Mapping[str, str]) -> str:
    """Markdown: for each figure its scale and a table of its settings; None is a missing run."""
    lines = []
    for figure, (scale, found) in runs.items():
        stored = [run for run in found if run is not None]
        lines += [f"## [{titles[figure]}]({figure}.ipynb)", ""]
        if len(stored) < len(found):
            lines += [f"{len(found) - len(stored)} of {len(found)} runs are not stored yet.", ""]
        if stored:
            lines += [_table(stored, scale), ""]
    return "\n".join(lines)


def _table(runs: Sequence[Run], scale: str) -> str:
    frame = curve_frame(runs)
    by = [*_BY, *(["clipped"] if frame["clipped"].any() else [])]
    varied = [name for name in by if frame[name].nunique() > 1] or ["n_features"]
    fixed = ", ".join(
        f"{SHORT_NAMES.get(name, name)} = {plain(frame[name].iloc[0])}"
        for name in by
        if name not in varied
    )
    table, losses = final_table(frame, varied), final_losses(frame, varied)
    losses["seconds"] *= losses["key"].map({run.config.key: _share(run) for run in runs})
    settings = losses.groupby(varied, sort=False)
    table["steps"] = settings["n_steps"].first().to_numpy()
    table["seconds"] = settings["seconds"].sum().round().astype(int).to_numpy()
    trials = sorted(frame["n_trials"].unique())
    caption = (
        f"Scale {scale}, {' or '.join(map(str, trials))} trials; {fixed}. Relative loss at the "
        "end: median (first to third quartile). Seconds of training steps, all curves and trials."
    )
    return html_table(table, caption)


def _share(run: Run) -> float:
    """Share of the seconds of its batch that is this run's own."""
    return len(run.config.seeds) / run.provenance.get("models_in_batch", len(run.config.seeds))


def stored_runs() -> dict[str, tuple[str, list[Run | None]]]:
    """Per figure the scale shown, and the runs of its grid at that scale."""
    stores = {scale: Store(results_root() / scale) for scale in SHOWN_SCALES}
    found: dict[str, tuple[str, list[Run | None]]] = {}
    for figure in GRIDS:
        configs = figure_configs(figure)
        scale = shown_scale(configs, lambda config, scale: config in stores[scale])
        found[figure] = scale, [stores[scale].load(config.at_scale(scale)) for config in configs]
    return found


def main(output: Path) -> None:
    """Write the page from the files of the project."""
    assets = yaml.safe_load((project_root() / "notebooks" / "assets.yml").read_text("utf-8"))
    titles = {figure: assets[figure]["title"] for figure in GRIDS}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(stored_runs(), titles), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
