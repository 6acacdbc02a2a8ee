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
# # A notebook that starts quickly and can be told to fail

# %% tags=["parameters"]
scale = "laptop"
output_dir = ""
number = 1
fail = False
die = False

# %%
from leancluster_core.experiments.parameters import check_parameters

check_parameters(
    globals(),
    scale=["smoke", "laptop", "paper"],
    output_dir=str,
    number=(0, 100),
    fail=bool,
    die=bool,
)

# %%
from pathlib import Path

if output_dir:
    Path(output_dir, "number.txt").write_text(str(number))
print(scale, "number", number)

# %%
if fail:
    raise RuntimeError(f"told to fail at {number}")

# %%
if die:
    import os

    os._exit(1)
print("the end")
