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
# # A tiny notebook
# It has everything that a page of the book has, and takes a moment.

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
slope = 2.0
n_points = 5
bias = False
gamma = None
families = ["normal", "cauchy"]

# %% tags=["hide-input"]
from leancluster_core.experiments.parameters import check_parameters

check_parameters(
    globals(),
    scale=["smoke", "laptop", "paper"],
    output_dir=str,
    slope=(0.0, float("inf")),
    n_points=(1, 100),
    bias=bool,
    gamma=float | None,
    families=[{"normal", "cauchy", "gumbel"}],
)

# %%
from matplotlib import pyplot as plt
from tqdm import tqdm

from leancluster_core.experiments.pages import provenance_card, save_figure, save_table

for step in tqdm(range(300), mininterval=0):
    print("step", step, end="\r", flush=True)
print("ends with", repr((scale, slope, n_points, bias, gamma, families)))

# %%
figure, axes = plt.subplots(figsize=(4, 2.5))
axes.plot(range(n_points), [slope * x for x in range(n_points)], label="line")
axes.legend()
save_figure(
    figure, output_dir, "tiny_line", caption=f"A line of slope $s = {slope}$.", alt="A rising line"
)

# %%
import pandas as pd

frame = pd.DataFrame({"x": range(n_points), "y": [slope * x / 3 for x in range(n_points)]})
save_table(frame, output_dir, "tiny_values", caption="The line's points.")

# %%
object()

# %% tags=["hide-input"]
provenance_card(scale, seeds=[0])
