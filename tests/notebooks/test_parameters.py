"""Parameters: what a source declares, what a reader gives, what a notebook accepts."""

import math
import pathlib

import numpy as np
import pytest

from leancluster_core.experiments.parameters import (
    check_parameters,
    convert_parameters,
    read_parameters,
)

HEADER = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

"""
DEFAULTS = {
    "scale": "laptop",
    "lr": 0.1,
    "n": 5,
    "gamma": None,
    "bias": False,
    "taus": [1.0, 0.1],
    "sizes": [[4, 1.0], [4, 0.1]],
}


def source(tmp_path, marker, body="lr = 0.1"):
    path = tmp_path / "case.py"
    path.write_text(f"{HEADER}{marker}\n{body}\n\n# %%\nprint(lr)\n")
    return path


def convert(**values):
    return convert_parameters(values, DEFAULTS)


@pytest.mark.parametrize(
    "marker", ["# %% [parameters]", "# %% parameters", '# + tags=["parameters"]']
)
def test_a_cell_that_is_not_tagged_is_refused(tmp_path, marker):
    """S3.2: three ways to miss the tag, after which papermill's values are overwritten."""
    with pytest.raises(ValueError, match="one code cell must be tagged 'parameters', got 0"):
        read_parameters(source(tmp_path, marker))


def test_a_tagged_cell_is_read(tmp_path):
    """S3.2: the right way."""
    path = source(tmp_path, '# %% tags=["parameters"]', 'lr: float = 0.1  # rate\nname = "a"')
    assert read_parameters(path) == {"lr": 0.1, "name": "a"}


def test_two_tagged_cells_are_refused(tmp_path):
    """S3.2"""
    path = source(tmp_path, '# %% tags=["parameters"]', 'lr = 1\n\n# %% tags=["parameters"]\nn = 2')
    with pytest.raises(ValueError, match="got 2"):
        read_parameters(path)


def test_computed_parameters_are_refused(tmp_path):
    path = source(tmp_path, '# %% tags=["parameters"]', "lr = 0.1\nn = len('abc')")
    with pytest.raises(ValueError, match="plain values"):
        read_parameters(path)


def test_a_misspelt_name_is_refused_with_those_that_there_are():
    """S3.1: papermill only warns, and runs with the default."""
    with pytest.raises(ValueError, match=r"'gama' \(did you mean 'gamma'\?\).*scale='laptop'.*lr="):
        convert(gama=3)
    with pytest.raises(ValueError, match=r"unknown parameter 'xyz'; the parameters are scale"):
        convert(xyz=3)


@pytest.mark.parametrize(
    ("name", "given", "right"),
    [
        ("lr", "1e-3", 0.001),
        ("lr", 2, 2.0),
        ("lr", "inf", math.inf),
        ("lr", -math.inf, -math.inf),
        ("lr", np.float32(0.5), 0.5),
        ("n", "-5", -5),
        ("n", "1e3", 1000),
        ("n", np.int64(3), 3),
        ("gamma", "None", None),
        ("gamma", "null", None),
        ("gamma", "inf", math.inf),
        ("gamma", "3", 3),
        ("gamma", "1e-3", 0.001),
        ("gamma", "half", "half"),
        ("bias", "true", True),
        ("bias", "False", False),
        ("bias", np.bool_(True), True),
        ("taus", (1, 2), [1.0, 2.0]),
        ("taus", "[0.1, inf]", [0.1, math.inf]),
        ("taus", np.array([0.5]), [0.5]),
        ("sizes", "[[32, 1]]", [[32, 1]]),
        ("scale", pathlib.Path("x"), "x"),
        ("scale", "1e-3", "1e-3"),
    ],
)
def test_values_arrive_with_the_type_of_the_default(name, given, right):
    """S3.3: text from a command line or YAML, and objects from Python."""
    arrived = convert(**{name: given})[name]
    assert arrived == right
    assert type(arrived) is type(right)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("lr", "fast", "lr must be a number"),
        ("lr", True, "lr must be a number"),
        ("lr", None, "lr must be a number"),
        ("lr", math.nan, "lr must be a plain value"),
        ("gamma", "nan", "gamma must be a plain value"),
        ("n", 2.5, "n must be a whole number"),
        ("n", "inf", "n must be a whole number"),
        ("n", True, "n must be a whole number"),
        ("bias", 1, "bias must be True or False"),
        ("bias", "no", "bias must be True or False"),
        ("taus", 0.1, "taus must be a list"),
        ("taus", "(1", "taus must be a list"),
        ("taus", [True], "taus must be a number"),
        ("scale", 3, "scale must be text"),
        ("gamma", {1: 2}, "gamma must be a plain value"),
        ("gamma", object(), "gamma must be a plain value"),
    ],
)
def test_values_without_a_faithful_conversion_are_refused(name, given, says):
    """S3.3"""
    with pytest.raises(ValueError, match=says):
        convert(**{name: given})


RULES = {
    "scale": ["smoke", "laptop"],
    "n": (1, 100),
    "tau": (0.0, math.inf),
    "gamma": float | None,
    "bias": bool,
    "families": [{"normal", "cauchy"}],
    "sizes": [((1, 25), (1, 32))],
}
GOOD = {
    "scale": "smoke",
    "n": 3,
    "tau": 2,
    "gamma": None,
    "bias": False,
    "families": ["normal"],
    "sizes": [[16, 16], [25, 32]],
}


def test_good_parameters_pass():
    check_parameters(GOOD, **RULES)
    check_parameters(GOOD | {"gamma": math.inf, "tau": math.inf, "n": 100}, **RULES)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "scale",
            "laptopp",
            r"one of 'smoke', 'laptop', got 'laptopp' \(did you mean 'laptop'\?\)",
        ),
        ("n", 0, r"n must be a whole number in \[1, 100\], got 0"),
        ("n", 2.0, "n must be a whole number"),
        ("n", True, "n must be a whole number"),
        ("tau", -1e-9, r"tau must be in \[0.0, inf\], got -1e-09"),
        ("tau", math.nan, "tau must be in"),
        ("tau", "0.1", "tau must be in"),
        ("gamma", "None", "gamma must be of type float or None, got 'None'"),
        ("bias", "false", "bias must be of type bool, got 'false'"),
        ("bias", 1, "bias must be of type bool"),
        ("families", [], "families must be a list of at least one value"),
        ("families", "[normal]", "give papermill a list with -y"),
        ("families", ["norml"], r"did you mean 'normal'"),
        ("sizes", [[16]], r"sizes must be a list of 2 numbers, got \[16\]"),
        ("sizes", [[1, 2, 3]], "sizes must be a list of 2 numbers"),
        ("sizes", [16, 16], "sizes must be a list of 2 numbers, got 16"),
        ("sizes", [[16, 33]], r"sizes must be a whole number in \[1, 32\], got 33"),
    ],
)
def test_values_out_of_range_are_named(name, value, says):
    with pytest.raises(ValueError, match=says):
        check_parameters(GOOD | {name: value}, **RULES)


def test_a_parameter_that_is_not_set_is_named():
    with pytest.raises(ValueError, match="must set 'tau'"):
        check_parameters({key: value for key, value in GOOD.items() if key != "tau"}, **RULES)


def test_a_name_that_papermill_injected_is_checked():
    """S3.1, in plain papermill: its cell comes between the parameters and the check."""
    rules = {"n": (1, 10), "tau": float}
    cells = ["", "n = 1\ntau = 0.1", "# Parameters\nn = 2\ntua = 0.5\n", "check_parameters(...)"]
    namespace = {"n": 2, "tau": 0.1, "tua": 0.5, "In": cells}
    with pytest.raises(ValueError, match=r"unknown parameter 'tua' \(did you mean 'tau'\?\)"):
        check_parameters(namespace, **rules)


def test_names_of_later_cells_are_no_parameters():
    """In Jupyter the first cells are run again after all others."""
    rules = {"n": (1, 10), "tau": float}
    cells = ["", "n = 1\ntau = 0.1", "check()", "steps = 20", "n = 3\ntau = 0.1", "check()"]
    check_parameters({"n": 3, "tau": 0.1, "steps": 20, "In": cells}, **rules)
