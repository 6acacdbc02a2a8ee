"""The ledger: every evaluator says yes to numbers that fulfil its criterion, and no to others."""

import hashlib
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from leancluster_core.experiments import claims as ledger_module
from leancluster_core.experiments.claims import (
    NOT_REPRODUCED,
    NOT_RUN,
    REDUCED,
    REPRODUCED,
    VERDICTS,
    Verdict,
    evaluate_claims,
    ledger,
    load_claims,
    one_line,
    print_claims,
    publish_verdicts,
    read_verdicts,
    save_verdicts,
    score,
    write_verdicts,
)
from leancluster_core.experiments.config import TrainingConfig
from leancluster_core.experiments.criteria import (
    ON_CURVES,
    ON_TABLES,
    REMARKS,
    SCALE_FREE,
    rank_correlation,
)
from leancluster_core.experiments.grids import GRIDS, curve_frame, figure_configs
from leancluster_core.experiments.paths import project_root
from leancluster_core.experiments.store import Run

CLAIMS = load_claims()
ASSETS = {claim.id: claim.asset for claim in CLAIMS}

DIGEST = "6f2417162a6bac3188ce964f8e7dccb41979d50e8b48daea6cdc58bbc88949d6"


def test_the_claims_are_those_of_the_paper_word_for_word():
    """Criteria were fixed before any result was seen; this digest changes if one of them does."""
    entries = yaml.safe_load((project_root() / "book" / "claims.yml").read_text("utf-8"))
    words = [[e["id"], e["asset"], e["claim"], e["criterion"]] for e in entries]
    text = json.dumps(words, ensure_ascii=False)
    assert len(CLAIMS) == len(entries) == 72
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_a_criterion_that_is_the_same_is_spelt_out():
    criteria = {claim.id: claim.criterion for claim in CLAIMS}
    assert "same" not in criteria.values()
    assert criteria["I-8"] == f"as for I-1: {criteria['I-1']}"


# --- numbers of a world in which all that the paper says is so -----------------------------------


def relative_end(config: TrainingConfig) -> float:
    task, tau, l2 = config.task, config.penalty, config.regularizer == "l2"
    d, k = task.n_features, task.n_clusters
    if task.family == "cauchy":
        return 2.0
    if config.learning_rate >= 0.1 and (config.learning_rate == 1.0 or d == 32):
        return 3.0
    if config.embedding == "none":
        return 1.2 if tau < 1 else 1.4
    if d == 32 and tau == 1.0:
        return 0.95 if l2 else 1.1 + 0.01 * k
    if d == 4 and tau == 1.0:
        bits = 0.01 * k if config.embedding == "binary" else 0.0
        return (1.02 if l2 else 1.4) + bits
    if d == 4 and tau == 0.1 and k == 25 and config.embedding == "binary":
        return 1.3
    gain = {4: 0.3, 8: 0.16, 16: 0.12, 32: 0.04}[d] * tau
    crowding = 0.001 * (k - 6) if d == 4 and config.embedding == "onehot" else 0.0
    return 0.9 + 0.05 * tau + (0.0 if l2 else gain + crowding)


def history(config: TrainingConfig) -> pd.DataFrame:
    d, tau = config.task.n_features, config.penalty
    share = np.arange(1, 11) / 10
    end, start = relative_end(config), 4.0
    slow = config.embedding != "onehot" and (d, tau) != (16, 0.25)
    pace = 0.5 if config.learning_rate == 0.001 else 0.14 if slow else 0.1
    relative = end + (start - end) * np.exp(-share / pace)
    if config.regularizer == "entropy" and tau == 1.0 and end > 1:
        relative = end - 0.2 + 0.2 * share  # validation gets worse
    loss = 10 * (1 + tau) * (1 + np.exp(-share / (0.1 if tau == 1.0 else 0.25)))
    loss *= 1.2 if config.regularizer == "entropy" else 1.0
    cheap = config.embedding == "binary" and config.task.n_clusters == 25
    blows_up = (config.embedding, config.task.n_clusters, d, tau) == ("onehot", 25, 32, 0.1)
    frames = []
    for trial in range(len(config.seeds)):
        shift = 5.0 if blows_up and trial == 1 and config.gradient_clipping is None else 0.0
        frames.append(
            pd.DataFrame(
                {
                    "trial": trial,
                    "step": (share * config.n_steps).astype(int),
                    "elapsed": share * (30.0 if cheap else 100.0),
                    "training_loss": loss + 0.01 * trial,
                    "relative_loss": relative + 0.001 * trial + shift,
                    "learning_rate": config.learning_rate,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


@cache
def figure_frame(asset: str) -> pd.DataFrame:
    configs = figure_configs(asset, "laptop")
    return curve_frame(Run(config, history(config), None, {}) for config in configs)


def bounds_table(claim: str, ratio: float = 0.9) -> pd.DataFrame:
    row = {"claim": claim, "bound": "kappa", "reading": "Euclidean", "input": "d=2", "stated": True}
    other = row | {"reading": "another norm", "stated": False, "worst_ratio": 7.0}
    return pd.DataFrame([row | {"worst_ratio": ratio}, row | {"worst_ratio": 0.1}, other])


def exact_table() -> pd.DataFrame:
    rows = [
        (e, d, k, t)
        for e in ("onehot", "binary")
        for d, k in ((1, 2), (64, 100))
        for t in range(1, 21)
    ]
    frame = pd.DataFrame(rows, columns=["embedding", "n_features", "n_clusters", "iteration"])
    return frame.assign(n_tasks=500, max_difference=1e-15, labels_equal=True)


def parameter_table() -> pd.DataFrame:
    rows = []
    for d in (4, 16, 64):
        for k in (d, 4 * d):
            for e, code in (("onehot", k), ("binary", math.ceil(math.log2(k)))):
                rows.append((e, d, k, 12 * (d + code) ** 2))
    return pd.DataFrame(rows, columns=["embedding", "n_features", "n_clusters", "n_parameters"])


def phi_table() -> pd.DataFrame:
    rows = [(e, d, 6, v) for d in (4, 32) for e, v in (("onehot", 1.0), ("binary", 2.0))]
    return pd.DataFrame(rows, columns=["embedding", "n_features", "n_clusters", "phi"])


def good_frames(claim: str) -> "pd.DataFrame | dict[str, pd.DataFrame]":
    if claim in ON_CURVES:
        return figure_frame(ASSETS[claim])
    if claim == "T2-directions":
        rows = [("I.5", "m", "+", "+"), ("I.8", "m'", "-", "-")]
        return {"directions": pd.DataFrame(rows, columns=["bound", "term", "computed", "stated"])}
    return {
        "exact": exact_table(),
        "parameters": parameter_table(),
        "bounds": bounds_table(claim),
        "phi": phi_table(),
    }


def change(frame, column, value, *, last=True, **setting):
    """The frame with another value in the selected rows: at the last step, or at all."""
    keep = pd.Series(True, index=frame.index)
    for name, wanted in setting.items():
        keep &= frame[name] == wanted
    if last:
        keep &= frame["step"] == frame["n_steps"]
    assert keep.any()
    changed = frame.copy()
    new = value(frame.loc[keep]) if callable(value) else value
    changed.loc[keep, column] = new
    return changed


def curve(embedding, regularizer, **setting):
    return {"embedding": embedding, "regularizer": regularizer, **setting}


REL, LOSS = "relative_loss", "training_loss"
CHANGES = {
    "F2-monotone": (LOSS, lambda rows: rows["step"], False, curve("onehot", "l2", penalty=0.1)),
    "F2-l2-tighter": (LOSS, 1e6, True, curve("none", "l2", n_features=16)),
    "F2-ne-fails": (REL, 0.5, True, curve("binary", "entropy", penalty=1.0)),
    "F2-l2-tau1": (REL, 0.99, True, curve("binary", "l2", penalty=1.0)),
    "F2-beats": (REL, 1.01, True, curve("binary", "entropy", penalty=0.1)),
    "F2-na": (REL, 0.99, True, curve("none", "l2", penalty=0.1)),
    "F2-tau-speed": (REL, 5.0, True, curve("binary", "l2", penalty=0.1)),
    "F2-oh-faster": (REL, 1.5, False, curve("onehot", "l2", penalty=0.1)),
    "F2-same-end": (REL, 0.8, True, curve("onehot", "l2", penalty=0.1)),
    "F2-d-gap": (REL, 5.0, False, curve("binary", "l2", n_features=16)),
    "F4-cauchy": (REL, 0.9, True, curve("none", "l2", family="cauchy", penalty=0.1)),
    "F4-l2": (REL, 1.1, True, curve("binary", "l2", family="laplace", penalty=1.0)),
    "F4-ne": (REL, 0.9, True, curve("onehot", "entropy", family="gumbel", penalty=1.0)),
    "F4-both": (REL, 0.8, True, curve("onehot", "l2", family="normal", penalty=0.1)),
    "F10-tau": (LOSS, 1e6, True, curve("onehot", "l2", n_features=4, penalty=0.14)),
    "F10-d32": (REL, 1.1, True, curve("binary", "l2", n_features=32, penalty=1.0)),
    "F10-l2": (REL, 9.0, True, curve("onehot", "entropy", n_features=32, penalty=0.25)),
    "F11-slow": (REL, 0.5, False, curve("binary", "l2", initial_learning_rate=0.001)),
    "F11-large": (REL, 0.9, True, curve("binary", "l2", n_features=32, initial_learning_rate=0.1)),
    "F13-n": (REL, 2.0, True, curve("onehot", "l2", n_features=4, n_points=32)),
    "F14-l2": (REL, 2.0, True, curve("binary", "entropy", n_features=32, penalty=0.25)),
    "F15a-l2": (REL, 0.99, True, curve("onehot", "l2", n_features=4, penalty=1.0, n_clusters=25)),
    "F15a-bn": (REL, 1.0, True, curve("binary", "l2", n_features=4, penalty=1.0, n_clusters=25)),
    "F15b-oh": (REL, 1.1, True, curve("onehot", "l2", n_features=4, penalty=0.1, n_clusters=16)),
    "F15b-bn": (REL, 1.0, True, curve("binary", "l2", n_features=4, penalty=0.1, n_clusters=25)),
    "F15c": (REL, 1.1, True, curve("binary", "l2", n_features=32, penalty=1.0, n_clusters=10)),
    "F15d": (REL, 1.1, True, curve("binary", "entropy", n_features=32, penalty=0.1, n_clusters=6)),
    "F15d-clip": (REL, 2.0, True, curve("onehot", "l2", clipped=True, n_features=32)),
    "F16-ne": (REL, 0.9, True, curve("none", "entropy", family="gumbel", penalty=1.0)),
    "F16-both": (REL, 1.1, True, curve("binary", "l2", family="lognormal", penalty=0.1)),
    "F17-small": ("elapsed", lambda rows: rows["step"] / 1e6, False, curve("binary", "l2")),
    "F17-large": (REL, 9.0, False, curve("binary", "l2", n_clusters=25, n_points=64)),
}


def bad_frames(claim: str) -> "pd.DataFrame | dict[str, pd.DataFrame]":
    good = good_frames(claim)
    if claim in ON_CURVES:
        column, value, last, setting = CHANGES[claim]
        return change(good, column, value, last=last, **setting)
    if claim in ("S2-exact", "S2-exact-oh"):
        embedding = "onehot" if claim == "S2-exact-oh" else "binary"
        rows = (good["exact"]["embedding"] == embedding) & (good["exact"]["iteration"] == 7)
        return {"exact": good["exact"].assign(max_difference=np.where(rows, 2e-12, 0.0))}
    if claim == "S2-params":
        heavier = good["parameters"].assign(n_parameters=lambda t: t["n_parameters"] + t.index)
        return {"parameters": heavier}
    if claim == "T2-directions":
        return {"directions": good["directions"].assign(computed="+")}
    return good | {"bounds": bounds_table(claim, ratio=1.0001)}


def verdict_of(claim, frames, scale="laptop"):
    return ledger_module._evaluate(
        claim, frames, scale, []
    )  # as evaluate_claims, without the others


@pytest.mark.parametrize("claim", [*ON_CURVES, *ON_TABLES])
def test_changing_the_numbers_changes_the_verdict(claim):
    good = verdict_of(claim, good_frames(claim))
    assert good.verdict == (REPRODUCED if claim in SCALE_FREE else REDUCED), good.figures
    assert verdict_of(claim, good_frames(claim), scale="paper").verdict == REPRODUCED
    bad = verdict_of(claim, bad_frames(claim))
    assert bad.verdict == NOT_REPRODUCED, bad.figures
    assert bad.figures != good.figures
    assert any(character.isdigit() for character in bad.figures)


def test_every_convergence_claim_has_an_evaluator_and_every_evaluator_a_claim():
    assert set(ON_CURVES) == {claim.id for claim in CLAIMS if claim.asset in GRIDS}
    assert set(ON_TABLES) == {
        claim.id for claim in CLAIMS if claim.asset in ("thm21", "thm31", "tab02", "tab03")
    }
    assert set(REMARKS) <= set(ASSETS)
    assert set(CHANGES) == set(ON_CURVES)


# --- what is missing is said ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drop", "says"),
    [
        (lambda f: f[f["embedding"] != "binary"], "there is no curve BN:NE at tau=0.1, d=4"),
        (lambda f: f[(f["trial"] != 1)], "OH:NE at tau=0.1, d=4 has 2 of 3 trials"),
        (lambda f: f[f["step"] < f["n_steps"]], "OH:NE at tau=0.1, d=4 ends at step 2700 of 3000"),
        (lambda f: f.drop(f.index[3]), "has trials without a value at some steps"),
    ],
    ids=["curve", "trial", "end", "row"],
)
def test_a_gap_is_not_passed_over(drop, says):
    frame = figure_frame("fig02")
    chosen = frame["penalty"] == 0.1
    frame = pd.concat([frame[~chosen], drop(frame[chosen].reset_index(drop=True))])
    found = verdict_of("F2-beats", frame)
    assert found.verdict == NOT_RUN
    assert says in found.figures


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_trial_counts_as_infinite_and_is_named(value):
    frame = figure_frame("fig02")
    one = change(frame, REL, value, trial=0, **curve("onehot", "l2", penalty=0.1))
    found = verdict_of("F2-beats", one)
    assert found.verdict == REDUCED  # the median of three bears one
    assert "OH:L2 at tau=0.1, d=4: 1 of 3 trials not finite from step 3000" in found.figures
    assert "not finite" not in verdict_of("F2-ne-fails", one).figures
    two = change(one, REL, value, trial=1, **curve("onehot", "l2", penalty=0.1))
    assert verdict_of("F2-beats", two).verdict == NOT_REPRODUCED
    lost = verdict_of("F15d-clip", change(figure_frame("fig15"), REL, value, trial=2, clipped=True))
    assert lost.verdict == NOT_REPRODUCED


def test_two_runs_of_one_curve_are_refused():
    frame = figure_frame("fig02")
    twice = pd.concat([frame, frame.assign(key="other")], ignore_index=True)
    with pytest.raises(ValueError, match="several runs are OH:NE"):
        evaluate_claims("fig02", twice, scale="laptop")


def test_too_few_values_of_n_are_not_enough():
    frame = figure_frame("fig17")
    found = verdict_of("F17-small", frame[frame["n_points"] != 64])
    assert found.verdict == NOT_RUN
    assert "needs 3 values of n_points" in found.figures


def test_tables_that_are_not_there_are_named():
    assert verdict_of("S2-exact", {}).figures == "there is no table 'exact'"
    fewer = exact_table().query("iteration < 20")
    assert verdict_of("S2-exact", {"exact": fewer}).verdict == NOT_RUN
    other = bounds_table("I-4")
    assert "no row of I-5" in verdict_of("I-5", {"bounds": other}).figures
    undecided = bounds_table("I-5", ratio=math.nan)
    assert verdict_of("I-5", {"bounds": undecided}).verdict == NOT_REPRODUCED


@pytest.mark.parametrize(
    ("asset", "scale", "says"),
    [("fig99", "laptop", "asset must be one"), ("fig02", "desktop", "scale must be one of")],
)
def test_unknown_names_are_refused(asset, scale, says):
    with pytest.raises(ValueError, match=says):
        evaluate_claims(asset, figure_frame("fig02"), scale=scale)


def test_rank_correlation_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    for _ in range(20):
        x, y = generator.integers(0, 6, (2, 12)).astype(float)  # with ties
        assert rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0.0


# --- the ledger on disk --------------------------------------------------------------------------


def some(claim="F2-beats", verdict=REDUCED, scale="laptop", figures="rel 0.93"):
    return Verdict(claim, verdict, scale, figures, ["abc"])


def test_verdicts_use_the_words_of_the_ledger_and_one_line():
    assert VERDICTS == (
        "reproduced",
        "reproduced at reduced scale",
        "not reproduced",
        "not run",
    )
    with pytest.raises(ValueError, match="verdict must be one of 'reproduced'"):
        some(verdict="works")
    with pytest.raises(ValueError, match="figures of F2-beats must be one line"):
        some(figures="two\nlines")


def test_saved_verdicts_are_the_same_bytes_and_come_back(tmp_path):
    verdicts = evaluate_claims("fig02", figure_frame("fig02"), scale="laptop")
    shown = save_verdicts(verdicts, str(tmp_path / "a"))
    save_verdicts(
        evaluate_claims("fig02", figure_frame("fig02"), scale="laptop"), str(tmp_path / "b")
    )
    first, second = (tmp_path / name / "verdicts.json" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert read_verdicts(first, CLAIMS) == verdicts
    assert len(verdicts) == 10
    assert len(verdicts[0].runs) == 24
    assert shown.data["text/html"].count("<tr>") == 11
    save_verdicts(verdicts, "")


def test_the_ledger_has_every_claim_and_why_one_is_not_run(tmp_path, capsys, monkeypatch):
    write_verdicts([some()], tmp_path / "fig02.json")
    pairs = ledger(tmp_path)
    assert [claim.id for claim, _ in pairs] == [claim.id for claim in CLAIMS]
    found = {verdict.id: verdict for _, verdict in pairs}
    assert found["F2-beats"] == some()
    assert found["F2-na"].figures == "notebook fig02 has not been run at laptop or paper scale"
    assert found["F9-cauchy"].verdict == NOT_RUN
    assert score(pairs) == {REPRODUCED: 0, REDUCED: 1, NOT_REPRODUCED: 0, NOT_RUN: 71}
    monkeypatch.setattr(ledger_module, "published_folder", lambda: tmp_path)
    print_claims()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 72
    assert one_line(some()) == "F2-beats reproduced at reduced scale laptop rel 0.93"
    assert one_line(some()) in lines


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"id": "F99-x"}], "has no claim 'F99-x'"),
        (
            [{"id": "F4-l2", "verdict": NOT_RUN, "scale": "laptop", "figures": "x"}],
            "no claim 'F4-l2'",
        ),
        ([{"id": "F2-na", "verdict": "fine", "scale": "laptop", "figures": "x"}], "must be one of"),
        ([{"id": "F2-na"}], "missing 3 required"),
        ("torn", "fig02.json"),
    ],
)
def test_a_file_that_does_not_fit_the_claims_is_named(tmp_path, content, says):
    path = tmp_path / "fig02.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"fig02\.json(.|\n)*{says}" if says != "fig02.json" else says
    ):
        ledger(tmp_path)


def test_smoke_is_never_published_and_laptop_does_not_replace_paper(tmp_path):
    saved, folder = tmp_path / "verdicts.json", tmp_path / "ledger"

    def publish(scale, figures):
        write_verdicts([some(scale=scale, figures=figures)], saved)
        return publish_verdicts("fig02", saved, folder)

    assert not publish("smoke", "first")
    assert not folder.exists()
    assert publish("laptop", "second")
    assert publish("laptop", "third")
    assert publish("paper", "fourth")
    assert not publish("laptop", "fifth")
    assert "fourth" in Path(folder / "fig02.json").read_text()
    assert not publish_verdicts("fig02", tmp_path / "none.json", folder)
