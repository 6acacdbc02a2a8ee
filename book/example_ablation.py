# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does a sharper attention learn better?
#
# The paper trains with inverse temperature $\gamma = 1$, and Lloyd's algorithm
# needs $\gamma = \infty$. Here the binary codes are trained with values in
# between.

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
inverse_temperatures = [1.0, 4.0, 16.0]
n_features = 4
penalty = 0.1

# %%
from leancluster_core.experiments.config import SCALES
from leancluster_core.experiments.parameters import check_parameters

check_parameters(
    globals(),
    scale=list(SCALES),
    output_dir=str,
    inverse_temperatures=[(0.0, 1000.0)],
    n_features=(1, 256),
    penalty=(0.001, 1000.0),
)

# %% [markdown]
# Settings have the paper's values; `curve_configs` brings them to the scale.
# What the store has is not trained again. Any field of `TrainingConfig` and
# `TaskDistribution` may be varied like this.

# %%
from leancluster_core.experiments.grids import (
    curve_configs,
    curve_frame,
    figure_runs,
    grid,
)

settings = grid(
    inverse_temperature=inverse_temperatures,
    n_features=n_features,
    penalty=penalty,
)
configs = curve_configs(
    settings, embeddings=["binary"], regularizers=["l2"], scale=scale
)
runs = figure_runs(configs, scale)
frame = curve_frame(runs)

# %%
from leancluster_core.experiments.pages import (
    provenance_card,
    save_figure,
    save_table,
)
from leancluster_core.experiments.plots import curve_caption, plot_convergence
from leancluster_core.experiments.summary import (
    convergence_alt,
    describe_ends,
    final_table,
)

panels = ["inverse_temperature"]
save_figure(
    plot_convergence(frame, columns=panels, scale=scale),
    output_dir,
    "inverse_temperature",
    caption=r"Training with inverse temperatures $\gamma$. "
    rf"$d$ = {n_features}, $\tau$ = {penalty:g}, "
    f"$n$ = {frame['n_points'].max()}, normal clusters. "
    + curve_caption(
        frame, ["training_loss", "relative_loss"], by=panels, scale=scale
    ),
    alt=convergence_alt(frame, panels),
)

# %%
describe_ends(frame, panels)

# %%
save_table(
    final_table(frame, panels),
    output_dir,
    "inverse_temperature_final",
    caption="Relative loss at the end of training: median over trials "
    "(first to third quartile).",
)

# %%
provenance_card(scale, runs)
