"""What curves end at: quartiles of what is finite, and what is not finite is said."""

import math

import numpy as np
import pandas as pd
import pytest

from leancluster_core.experiments.summary import (
    convergence_alt,
    describe_ends,
    describe_rises,
    final_losses,
    final_table,
)


def curves(ends, **labels):
    """A frame with two evaluations; ends: {(penalty, embedding): relative losses of the trials}."""
    rows = [
        {
            "penalty": penalty,
            "embedding": embedding,
            "regularizer": "l2",
            "key": f"{penalty}{embedding}",
            "trial": trial,
            "step": step,
            "relative_loss": value if step == 100 else 2.0,
            "elapsed": step / 10,
            "n_steps": 100,
            "n_trials": len(values),
        }
        for (penalty, embedding), values in ends.items()
        for trial, value in enumerate(values)
        for step in (50, 100)
    ]
    return pd.DataFrame(rows).assign(**labels)


def test_the_end_is_the_last_step_and_statistics_are_numpys():
    values = [0.9, 1.2, 0.8, 1.0]
    (row,) = final_losses(curves({(0.1, "onehot"): values}), ["penalty"]).to_dict("records")
    assert row["median"] == np.median(values)
    assert (row["lower"], row["upper"]) == tuple(np.quantile(values, [0.25, 0.75]))
    assert (row["n_trials"], row["n_finite"], row["n_steps"], row["seconds"]) == (4, 4, 100, 10.0)


def test_a_table_has_a_row_a_setting_and_tells_what_is_lost_or_missing():
    frame = curves(
        {
            (1.0, "onehot"): [0.9, 0.9, 0.9],
            (1.0, "none"): [math.nan, 1.1, 1.3],
            (0.1, "onehot"): [math.inf] * 3,
        }
    )
    table = final_table(frame, ["penalty"])
    assert list(table.columns) == ["tau", "OH:L2", "NA:L2"]
    assert list(table["tau"]) == ["1", "0.1"]
    assert list(table["OH:L2"]) == ["0.900 (0.900–0.900)", "none, 3 of 3 lost"]
    assert list(table["NA:L2"]) == ["1.200 (1.150–1.250, 1 of 3 lost)", "–"]


def test_a_trial_that_ends_early_counts_as_lost():
    frame = curves({(1.0, "onehot"): [0.9, 0.8]})
    frame = frame[~((frame["trial"] == 1) & (frame["step"] == 100))]
    assert final_losses(frame, ["penalty"])["n_finite"].tolist() == [1]


def test_words_count_what_lies_below_lloyd_and_name_the_extremes():
    frame = curves(
        {
            (1.0, "onehot"): [0.95],
            (1.0, "none"): [1.5],
            (0.1, "onehot"): [0.9],
            (0.1, "none"): [math.nan],
        }
    )
    text = describe_ends(frame, ["penalty"]).data["text/markdown"]
    assert "2 of 4 curves lie below" in text
    assert "of 2 settings, OH:L2 in 2, NA:L2 in 0" in text
    assert "By tau: 1: 1 of 2, 0.1: 1 of 2." in text
    assert "lowest relative loss is 0.900 (OH:L2 at tau = 0.1)" in text
    assert "highest 1.500 (NA:L2 at tau = 1)" in text
    assert "1 of 1 of NA:L2 at tau = 0.1" in text
    assert text in convergence_alt(frame, ["penalty"])
    assert "2 settings" in convergence_alt(frame, ["penalty"])


def test_large_losses_take_little_room_in_a_table():
    (cell,) = final_table(curves({(1.0, "onehot"): [9.9, 130.956, 4055.5]}), ["penalty"])["OH:L2"]
    assert cell == "131 (70.4–2.1e+03)"


def test_curves_that_still_fall_are_named():
    frame = curves({(1.0, "onehot"): [1.0, 1.1, 1.2], (0.1, "binary"): [1.99, 1.99, 1.99]})
    text = describe_ends(frame, ["penalty"]).data["text/plain"]
    assert "1 of 2 curves still fell by more than 0.02, OH:L2 at tau = 1 the most (0.900)" in text
    settled = frame.assign(relative_loss=1.0)
    assert "still fell" not in describe_ends(settled, ["penalty"]).data["text/plain"]


def test_blow_ups_are_counted_by_jumps_not_by_ends():
    def history(losses, **labels):
        rows = {"step": range(len(losses)), "relative_loss": losses}
        return pd.DataFrame(rows).assign(**labels)

    frame = pd.concat([
        history([3.0, 2.0, 1.5], clipped="no", key="a", trial=0),  # slow
        history([1.8, 5.4, 0.9], clipped="no", key="a", trial=1),  # up, and down again
        history([1.8, math.nan, math.nan], clipped="no", key="b", trial=0),
        history([math.inf, math.inf, math.inf], clipped="no", key="b", trial=1),
        history([1.8, 1.9, 0.9], clipped="yes", key="c", trial=0),
    ])  # fmt: skip
    assert describe_rises(frame.sample(frac=1, random_state=0), ["clipped"]).data["text/plain"] == (
        "Trials whose relative loss rose by more than 1 from one evaluation to the next: "
        "no: 3 of 4 trials (largest rise inf); yes: 0 of 1 trials (largest rise 0.100)."
    )


def test_nothing_finite_is_said_not_hidden():
    text = describe_ends(curves({(1.0, "onehot"): [math.nan]}), ["penalty"]).data["text/plain"]
    assert "0 of 1 curves" in text
    assert "lowest" not in text
    assert "Trials without a finite loss" in text


@pytest.mark.parametrize("value", [3.25e6, 1234.5])
def test_large_numbers_stay_short(value):
    text = describe_ends(curves({(1.0, "onehot"): [value]}), ["penalty"]).data["text/plain"]
    assert f"highest {value:.2g}" in text
