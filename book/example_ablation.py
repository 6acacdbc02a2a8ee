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
# The paper trains with inverse temperature $\gamma = 1$, and Lloyd's algorithm needs
# $\gamma = \infty$. Here the binary codes are trained with values in between.

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
# A config is written with the paper's values and then brought to the scale. What the store has is
# not trained again.

# %%
import pandas as pd

from leancluster_core import TaskDistribution
from leancluster_core.experiments import Store, TrainingConfig, train_all
from leancluster_core.experiments.paths import results_root

configs = [
    TrainingConfig(
        TaskDistribution(n_features=n_features), penalty=penalty, inverse_temperature=gamma
    ).at_scale(scale)
    for gamma in inverse_temperatures
]
runs = train_all(configs, store=Store(results_root() / scale))

# %%
frame = pd.concat(
    run.history.assign(
        embedding=run.config.embedding,
        regularizer=run.config.regularizer,
        inverse_temperature=run.config.inverse_temperature,
    )
    for run in runs
)
frame.groupby("inverse_temperature")["relative_loss"].last()

# %%
from leancluster_core.experiments.pages import provenance_card, save_figure
from leancluster_core.experiments.plots import curve_caption, plot_convergence

save_figure(
    plot_convergence(frame, columns="inverse_temperature", scale=scale),
    output_dir,
    "inverse_temperature",
    caption="Training with a sharper attention. "
    + curve_caption(frame, ["relative_loss"], by=["inverse_temperature"], scale=scale),
    alt="Training and relative loss against the step, one column for each inverse temperature",
)

# %%
provenance_card(scale, runs)
