"""The page of all results: from the store, at the largest scale, and what is missing is said."""

import re

import pandas as pd
import pytest

from leancluster_core.experiments import results_page
from leancluster_core.experiments.grids import GRIDS, curve_configs, grid
from leancluster_core.experiments.results_page import main, render, shown_scale, stored_runs
from leancluster_core.experiments.store import Run, Store

CONFIGS = curve_configs(grid(n_features=[4, 16], penalty=0.25), scale="laptop")


def run(config, end=0.9, models_in_batch=6):
    rows = [
        (trial, config.n_steps, 60.0, 10.0, end + trial / 100, 0.01)
        for trial in range(len(config.seeds))
    ]
    columns = ["trial", "step", "elapsed", "training_loss", "relative_loss", "learning_rate"]
    history = pd.DataFrame(rows, columns=columns)
    return Run(config, history, None, {"models_in_batch": models_in_batch})


def test_a_row_has_the_six_curves_the_steps_and_the_seconds():
    page = render({"fig02": ("laptop", [run(c) for c in CONFIGS])}, {"fig02": "Figure 2"})
    assert page.startswith("## [Figure 2](fig02.ipynb)")
    assert "Scale laptop, 3 trials; family = normal, k = 6, n = 128, tau = 0.25, eta = 0.01" in page
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    assert len(rows) == 2
    cells = re.findall(r"<td>(.*?)</td>", rows[1])
    assert cells[0] == "16"
    assert cells[1].replace("&NoBreak;", "") == "0.910 (0.905–0.915)"
    # Six curves, each with half of the sixty seconds that its batch of two took.
    assert cells[-2:] == ["3000", "180"]


def test_missing_runs_are_counted_not_hidden():
    found = [run(CONFIGS[0]), *[None] * (len(CONFIGS) - 1)]
    page = render({"fig02": ("laptop", found)}, {"fig02": "Figure 2"})
    assert "11 of 12 runs are not stored yet." in page
    assert "<td>0.910" in page
    empty = render({"fig02": ("laptop", [None, None])}, {"fig02": "Figure 2"})
    assert "2 of 2 runs" in empty
    assert "<table" not in empty


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"paper": 2, "laptop": 2}, "paper"),
        ({"paper": 1, "laptop": 2}, "laptop"),
        ({"paper": 1, "laptop": 0}, "paper"),
        ({"paper": 0, "laptop": 0}, "paper"),
    ],
)
def test_the_largest_complete_scale_is_shown(stored, expected):
    configs = curve_configs(grid(penalty=[1.0]), embeddings=["onehot"])
    assert len(configs) == 2

    def is_stored(config, scale):
        return [c.at_scale(scale) for c in configs].index(config) < stored[scale]

    assert shown_scale(configs, is_stored) == expected


def test_the_page_comes_from_the_store_and_names_every_figure(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANCLUSTER_RESULTS", str(tmp_path))
    monkeypatch.setattr(results_page, "GRIDS", {"fig02": GRIDS["fig02"], "fig10": GRIDS["fig10"]})
    store = Store(tmp_path / "laptop")
    for config in CONFIGS[:6]:
        store.save(run(config))
    assert sum(found is not None for found in stored_runs()["fig02"][1]) == 6
    main(tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.count("\n## ") + page.startswith("## ") == 2
    assert "18 of 24 runs are not stored yet." in page
    assert "](fig10.ipynb)" in page
