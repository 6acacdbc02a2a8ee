"""Attacks on the bounds: search for the input that comes closest to breaking each of them.

A :class:`Problem` knows how to start (structured corner cases first, then random restarts), how to
turn free parameters into an input that meets the bound's assumptions, and the ratio of what the
input measures to what the bound allows. :func:`attack` ascends on the log of that ratio, all
restarts at once, in float64. A ratio above 1 refutes the bound: the input is then made as plain as
it can be, and is printed.

The dispersion of the scores is given, not searched: most restarts would otherwise end near 0, where
exponentials do not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd
import torch
from torch import Tensor

from leancluster_core.distances import _squared_distances
from leancluster_core.embeddings import cluster_codes
from leancluster_core.experiments import bounds
from leancluster_core.experiments.bounds import AttentionTerms, Constant
from leancluster_core.experiments.streams import random_stream
from leancluster_core.losses import REGULARIZERS, _min_weights, _smoothed_minimum

Inputs = dict[str, Tensor]

ROUNDING = 1e-9
"""A ratio may exceed 1 by this much in float64."""

# Changes between these sizes are tried: small enough for derivatives, large enough for float64.
SMALLEST_CHANGE, LARGEST_CHANGE = 1e-3, 10.0

# A difference of two results counts if it is this share of them: then it has ten digits.
SMALLEST_SHARE = 1e-5

# Counter-examples with more characters are told by their size alone.
LONGEST_INPUT = 120

# Free scales (norms, penalties) stay within exp(+-3).
LARGEST_LOG = 3.0


@dataclass(frozen=True)
class Problem:
    """A bound under attack.

    claim: its id in the ledger. bound, reading: in words. stated: whether this reading is the
    paper's. size: what is fixed, in words. shapes: free parameters of one restart, name -> shape.
    corners: structured starts, each a few of these parameters (the others are drawn).
    decode: free parameters (R, ...) -> an input that meets the assumptions (R, ...).
    ratio: input -> measured / bound (R,).
    """

    claim: str
    bound: str
    reading: str
    stated: bool
    size: str
    shapes: Mapping[str, tuple[int, ...]]
    corners: Sequence[Mapping[str, Tensor]]
    decode: Callable[[Inputs], Inputs]
    ratio: Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Worst:
    """What an attack found: the largest ratio and the input (without restarts) that gave it."""

    problem: Problem
    ratio: float
    inputs: Inputs

    @property
    def refuted(self) -> bool:
        return self.ratio > 1 + ROUNDING


@dataclass(frozen=True)
class Effort:
    """How long an attack searches: restarts, and steps of ascent."""

    n_restarts: int
    n_steps: int


EFFORTS = {"smoke": Effort(12, 4), "laptop": Effort(32, 120), "paper": Effort(128, 600)}


def attack_all(problems: Iterable[Problem], *, scale: str, seed: int = 0) -> list[Worst]:
    """The worst input found for each problem, with the effort of a scale."""
    effort = EFFORTS[scale]
    return [
        attack(problem, seed=seed, n_restarts=effort.n_restarts, n_steps=effort.n_steps)
        for problem in problems
    ]


def attack(
    problem: Problem,
    *,
    seed: int = 0,
    n_restarts: int = 64,
    n_steps: int = 200,
    learning_rate: float = 0.05,
) -> Worst:
    """The worst input found: corners, then random starts, all followed uphill with Adam."""
    generator = random_stream(seed, "directions")
    raw = {
        name: torch.randn(n_restarts, *shape, generator=generator, dtype=torch.float64)
        for name, shape in problem.shapes.items()
    }
    for index, corner in enumerate(problem.corners[:n_restarts]):
        for name, value in corner.items():
            raw[name][index] = value
    for tensor in raw.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.Adam(raw.values(), lr=learning_rate)
    best, inputs = -math.inf, {}
    for step in range(n_steps + 1):
        if step == n_steps // 2:
            optimizer.param_groups[0]["lr"] = learning_rate / 10
        candidates = problem.decode(raw)
        ratio = problem.ratio(candidates)
        usable = torch.isfinite(ratio) & (ratio > 0)
        seen = torch.where(usable, ratio.detach(), -math.inf)
        index = int(seen.argmax())
        if float(seen[index]) > best:
            best = float(seen[index])
            inputs = {name: value[index].detach().clone() for name, value in candidates.items()}
        optimizer.zero_grad()
        torch.where(usable, ratio, 1.0).log().sum().neg().backward()
        for tensor in raw.values():
            # A start that sits in a kink (0/0) stays where it is.
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    return Worst(problem, best, inputs)


def measure(problem: Problem, inputs: Inputs) -> float:
    """The ratio of one input, without restarts' axis: what a reader types in to see for himself."""
    return float(problem.ratio({name: value[None] for name, value in inputs.items()})[0])


def simplest(worst: Worst, share: float = 0.5) -> Worst:
    """An input with as few digits and as many zeros as still exceed the bound, by at least a
    ``share`` of the excess found. Raises ValueError if the bound was not refuted."""
    if not worst.refuted:
        raise ValueError(f"the bound must be refuted, got the ratio {worst.ratio:g}")
    wanted = 1 + share * (worst.ratio - 1)
    inputs = {name: value.clone() for name, value in worst.inputs.items()}

    def try_value(flat: Tensor, index: int, value: float) -> bool:
        flat[index] = value
        try:
            return measure(worst.problem, inputs) >= wanted
        except ValueError:  # a norm of 0
            return False

    for tensor in inputs.values():
        flat = tensor.view(-1)
        for index in range(flat.numel()):
            exact = float(flat[index])
            for digits in range(6):
                rounded, power = round(exact, digits) + 0.0, math.copysign(10.0**-digits, exact)
                if any(try_value(flat, index, value) for value in (rounded, power)):
                    break
            else:
                flat[index] = exact
    return Worst(worst.problem, measure(worst.problem, inputs), inputs)


def is_ours(bound: str) -> bool:
    """Whether a bound is a constant of ours, not the paper's in some reading."""
    return bound.endswith((" sharp", " repaired"))


def verdicts_table(table: pd.DataFrame) -> pd.DataFrame:
    """One line a bound and reading, to read: the worst ratio over all sizes, what it means, and
    where it was found; for a bound that fell, the shortest counter-example."""
    lines = []
    for (bound, reading, stated), rows in table.groupby(["bound", "reading", "stated"], sort=False):
        worst = rows.loc[rows["worst_ratio"].idxmax()]
        fallen = rows[rows["worst_ratio"] > 1 + ROUNDING]
        if len(fallen):
            told = fallen["input"][fallen["input"] != fallen["size"]]
            told = told if len(told) else fallen["input"]
            plainest = told.iloc[told.str.len().argmin()]
        lines.append(
            {
                "bound": bound,
                "reading": reading,
                "whose": "paper" if stated else "ours" if is_ours(bound) else "other reading",
                "worst ratio": worst["worst_ratio"],
                "verdict": "refuted" if len(fallen) else "holds",
                "where": plainest if len(fallen) else worst["input"],
            }
        )
    return pd.DataFrame(lines)


def bounds_table(worst: Iterable[Worst]) -> pd.DataFrame:
    """One row an attack, as the ledger reads it: claim, bound, reading, stated, size, worst_ratio,
    input (in numbers if the bound fell and they are few, else the size)."""
    rows = []
    for found in worst:
        problem = found.problem
        shown = problem.size
        if found.refuted:
            plain = numbers(simplest(found).inputs)
            shown = plain if len(plain) <= LONGEST_INPUT else problem.size
        rows.append(
            {
                "claim": problem.claim,
                "bound": problem.bound,
                "reading": problem.reading,
                "stated": problem.stated,
                "size": problem.size,
                "worst_ratio": found.ratio,
                "input": shown,
            }
        )
    return pd.DataFrame(rows)


def numbers(inputs: Inputs) -> str:
    """An input in one line: "scores [0 x3], changed [0.1, 0 x2]"; matrices row by row."""
    parts = []
    for name, value in inputs.items():
        entries = [f"{entry:.10g}" for entry in value.flatten().tolist()]
        runs = [(entry, len(list(run))) for entry, run in groupby(entries)]
        text = ", ".join(entry if count == 1 else f"{entry} x{count}" for entry, count in runs)
        parts.append(f"{name} [{text}]" if value.dim() else f"{name} {text}")
    return ", ".join(parts)


# --- maps onto what the assumptions allow --------------------------------------------------------


def _ball(tokens: Tensor, radius: Tensor) -> Tensor:
    """Tokens (R, m, e) with Euclidean norms of at most radius (R,)."""
    return tokens * (radius[:, None, None] / tokens.norm(dim=-1, keepdim=True).clamp_min(1))


def _spectral_ball(weights: Tensor, radius: Tensor) -> Tensor:
    """Weights (R, ..., e, e) with spectral norms of at most radius (R,)."""
    largest = torch.linalg.matrix_norm(weights, ord=2).clamp_min(1)
    return weights * (radius.view(-1, *[1] * (weights.dim() - 1)) / largest[..., None, None])


def _scale(log: Tensor) -> Tensor:
    """A free scale (R,), within exp(+-LARGEST_LOG)."""
    return log.clamp(-LARGEST_LOG, LARGEST_LOG).exp()


def _resolved(ratio: Tensor, change: Tensor, scale: Tensor) -> Tensor:
    """The ratio, or NaN where the change is so small a share of what changes that the rounding of
    the difference would show in the ratio."""
    return torch.where(change > SMALLEST_SHARE * scale, ratio, math.nan)


def _change(log: Tensor) -> Tensor:
    """A size of change (R,): random starts spread over the allowed sizes on a log axis."""
    low, high = math.log(SMALLEST_CHANGE), math.log(LARGEST_CHANGE)
    return ((low + high) / 2 + (high - low) / 4 * log).clamp(low, high).exp()


# For corners, in the units of :func:`_change`: 0.001 and about 0.04.
_NO_CHANGE = torch.tensor(-9.0, dtype=torch.float64)
_SMALL_CHANGE = torch.tensor(-0.4, dtype=torch.float64)


# --- Lemma I.3: softmax --------------------------------------------------------------------------

_ORDERS = {"sum of absolute values": 1.0, "Euclidean": 2.0, "largest": math.inf}


def softmax_problems(n_scores: int, dispersion: float, constant: float = 1.0) -> list[Problem]:
    """Lemma I.3 for m scores whose differences are at most ``dispersion``: the entries, and the
    change in several norms; ``constant`` is planted into the stated bounds (below 1: too small)."""
    m = n_scores
    shapes = {"scores": (m,), "direction": (m,), "log_change": ()}
    first = torch.zeros(m, dtype=torch.float64)
    first[0] = 1.0
    flat = {"scores": 0 * first, "direction": first, "log_change": _NO_CHANGE}
    corners = [flat, flat | {"scores": first}, {"scores": first}, {"scores": -first}]

    def decode(raw: Inputs) -> Inputs:
        # Scaled into the allowed dispersion; smaller ones stay small.
        scores = raw["scores"]
        changed = scores + _change(raw["log_change"])[:, None] * raw["direction"]
        both = torch.stack([scores, changed], 1)
        both = both - scores.mean(-1)[:, None, None]
        widest = (both.amax(-1) - both.amin(-1)).amax(-1)
        both = both * (dispersion / widest.clamp_min(dispersion))[:, None, None]
        return {"scores": both[:, 0], "changed": both[:, 1]}

    def delta(inputs: Inputs) -> Tensor:
        both = torch.stack([inputs["scores"], inputs["changed"]], 1)
        return (both.amax(-1) - both.amin(-1)).amax(-1)

    def entries(inputs: Inputs, halved: bool = False) -> Tensor:
        disp = delta(inputs) / (2 if halved else 1)
        bound = bounds.softmax_stability(m, disp)
        largest = torch.softmax(inputs["scores"], -1).amax(-1)
        return largest / (constant * bound.factor * bound.exponent.exp())

    def stability(order_out: float, order_in: float, sharp: str = "") -> Callable:
        def ratio(inputs: Inputs) -> Tensor:
            weights, changed = (torch.softmax(inputs[n], -1) for n in ("scores", "changed"))
            out = torch.linalg.vector_norm(changed - weights, order_out, dim=-1)
            step = inputs["changed"] - inputs["scores"]
            spread = step.amax(-1) - step.amin(-1)
            if sharp == "range":
                return _resolved(out / (spread / 2), spread, delta(inputs))
            stable = bounds.softmax_stability_repaired if sharp else bounds.softmax_stability
            bound = stable(m, delta(inputs))
            size = torch.linalg.vector_norm(step, order_in, dim=-1)
            found = out / (constant * bound.factor * bound.exponent.exp() * size)
            return _resolved(found, spread, delta(inputs))

        return ratio

    def problem(bound: str, reading: str, stated: bool, ratio: Callable) -> Problem:
        size = f"m={m}, delta <= {dispersion:g}"
        return Problem("I-3", bound, reading, stated, size, shapes, corners, decode, ratio)

    found = [
        problem("I.3 entries", "delta = max - min", True, entries),
        problem("I.3 entries", "delta = half of max - min", False, lambda x: entries(x, True)),
    ]
    for name, order in _ORDERS.items():
        bound = "I.3 stability"
        found.append(problem(bound, f"{name} on both sides", order == 1, stability(order, order)))
    found += [
        problem(
            "I.3 stability",
            "sum of absolute values by the largest score change",
            False,
            stability(1.0, math.inf),
        ),
        problem(
            "I.3 repaired", "2 e^delta/m, sum of absolute values", False, stability(1.0, 1.0, "2")
        ),
        problem(
            "I.3 sharp", "half the range of the score changes", False, stability(1.0, 1.0, "range")
        ),
    ]
    return found


# --- Lemmas I.4 to I.8: one attention ------------------------------------------------------------


def attention_problems(
    n_queries: int, n_keys: int, width: int, dispersion: float, constant: float = 1.0
) -> list[Problem]:
    """Lemmas I.4-I.8 for m queries and m' keys of a width, delta given; the norms G1, G2, rho, rho'
    are searched, gamma follows from delta. ``constant`` is planted into the stated bounds."""
    m, r, e = n_queries, n_keys, width
    scales = ("log_query_norm", "log_key_norm", "log_qk_norm", "log_value_norm")
    shapes = {
        "queries": (m, e),
        "keys": (r, e),
        "Q": (e, e),
        "K": (e, e),
        "V": (e, e),
        "direction": (e, e),
        "key_direction": (r, e),
        "log_change": (),
        **dict.fromkeys(scales, ()),
    }
    corners = _attention_corners(m, r, e)

    def decode(raw: Inputs) -> Inputs:
        rho, rho_key, g1, g2 = (_scale(raw[name]) for name in scales)
        size = _change(raw["log_change"])[:, None, None]
        inputs = {
            "queries": _ball(raw["queries"], rho),
            "keys": _ball(raw["keys"], rho_key),
            "changed_keys": _ball(raw["keys"] + size * raw["key_direction"], rho_key),
        }
        for name, radius in (("Q", g1), ("K", g1), ("V", g2)):
            inputs[name] = _spectral_ball(raw[name], radius)
            changed = raw[name] + size * raw["direction"]
            inputs[f"changed_{name}"] = _spectral_ball(changed, radius)
        gamma = dispersion * math.sqrt(e) / (g1 * (rho + rho_key)).square()
        return inputs | {"rho": rho, "rho_key": rho_key, "G1": g1, "G2": g2, "gamma": gamma}

    def terms(x: Inputs) -> AttentionTerms:
        return AttentionTerms(m, r, x["rho"], x["rho_key"], x["G1"], x["G2"], x["gamma"], e)

    def scores(x: Inputs, query: str = "Q", key: str = "K", keys: str = "keys") -> Tensor:
        difference = (x["queries"] @ x[query].mT).unsqueeze(2) - (x[keys] @ x[key].mT).unsqueeze(1)
        return -x["gamma"][:, None, None] / math.sqrt(e) * difference.square().sum(-1)

    def attend(x: Inputs, q: str = "Q", k: str = "K", v: str = "V", keys: str = "keys") -> Tensor:
        return torch.softmax(scores(x, q, k, keys), -1) @ (x[keys] @ x[v].mT)

    def value(bound: Constant) -> Tensor:
        exponent = bound.exponent
        return bound.factor * (exponent.exp() if isinstance(exponent, Tensor) else 1.0)

    def output_change(x: Inputs, **changed: str) -> Tensor:
        return (attend(x, **changed) - attend(x)).norm(dim=-1).sum(-1)

    def for_weights(stability: Callable, letter: str, planted: float) -> Callable:
        def ratio(x: Inputs) -> Tensor:
            step = torch.linalg.matrix_norm(x[f"changed_{letter}"] - x[letter], ord=2)
            out = output_change(x, **{letter.lower(): f"changed_{letter}"})
            ratio = out / (planted * value(stability(terms(x))) * step)
            ratio = _resolved(ratio, out, m * x["G2"] * x["rho_key"])
            return _resolved(ratio, step, x["G2" if letter == "V" else "G1"])

        return ratio

    def for_keys(stability: Callable, norm: Callable[[Tensor], Tensor], planted: float) -> Callable:
        def ratio(x: Inputs) -> Tensor:
            step = norm((x["changed_keys"] - x["keys"]).norm(dim=-1))
            out = output_change(x, keys="changed_keys")
            ratio = out / (planted * value(stability(terms(x))) * step)
            ratio = _resolved(ratio, out, m * x["G2"] * x["rho_key"])
            return _resolved(ratio, step, x["rho_key"])

        return ratio

    def dispersed(x: Inputs) -> Tensor:
        found = scores(x)
        widest = (found.amax(-1) - found.amin(-1)).amax(-1)
        return widest / (constant * bounds.score_dispersion(terms(x)))

    def problem(claim: str, bound: str, reading: str, stated: bool, ratio: Callable) -> Problem:
        size = f"m={m}, m'={r}, d_emb={e}, delta={dispersion:g}"
        return Problem(claim, bound, reading, stated, size, shapes, corners, decode, ratio)

    usual = "weights: spectral norm, tokens: sum of Euclidean norms"
    total, largest = (lambda step: step.sum(-1)), (lambda step: step.amax(-1))
    by_weights = (
        ("I-5", "I.5", bounds.value_stability, "V", True),
        ("I-6", "I.6", bounds.query_stability, "Q", True),
        ("I-7", "I.7", bounds.key_stability, "K", True),
        ("I-6", "I.6 sharp", bounds.query_stability_sharp, "Q", False),
        ("I-7", "I.7 sharp", bounds.key_stability_sharp, "K", False),
    )
    stable, sharp = bounds.key_token_stability, bounds.key_token_stability_sharp
    return [
        problem("I-4", "I.4", "max - min over the keys of a query", True, dispersed),
        *(
            problem(claim, bound, usual, stated, for_weights(f, letter, constant if stated else 1))
            for claim, bound, f, letter, stated in by_weights
        ),
        problem("I-8", "I.8", usual, True, for_keys(stable, total, constant)),
        problem(
            "I-8",
            "I.8",
            "change of the keys by their largest change",
            False,
            for_keys(stable, largest, 1),
        ),
        problem(
            "I-8",
            "I.8 sharp",
            "change of the keys by their largest change",
            False,
            for_keys(sharp, largest, 1),
        ),
    ]


def _attention_corners(m: int, r: int, e: int) -> list[dict[str, Tensor]]:
    """Starts from the equality cases of the proofs' inequalities."""
    eye = torch.eye(e, dtype=torch.float64)
    along = eye[0].expand(m, e).clone()
    sign = torch.tensor([(-1.0) ** j for j in range(r)], dtype=torch.float64)
    alternate = sign[:, None] * eye[0]
    cycle = torch.stack([eye[j % e] for j in range(r)])
    equal = eye[0].expand(r, e).clone()
    one_moves = torch.zeros(r, e, dtype=torch.float64)
    one_moves[0, 0] = -1.0
    low, high = torch.tensor(-LARGEST_LOG).double(), torch.tensor(LARGEST_LOG).double()
    reflection = eye.clone()
    reflection[-1, -1] = -1.0
    plain = {"Q": eye, "K": eye, "V": eye, "log_change": _SMALL_CHANGE}
    short_queries = {"log_query_norm": low, "log_key_norm": high}
    averaging = plain | {"Q": 0 * eye, "K": 0 * eye}
    return [
        plain | {"queries": -along, "keys": equal, "V": 0 * eye, "direction": eye},
        plain
        | short_queries
        | {"keys": alternate, "Q": 0 * eye, "queries": along, "direction": eye},
        plain | short_queries | {"keys": cycle, "queries": -along, "direction": reflection},
        plain | {"keys": alternate, "queries": along, "direction": -eye},
        averaging | {"keys": equal, "key_direction": one_moves},
        plain | short_queries | {"keys": alternate, "queries": along, "key_direction": one_moves},
        averaging | {"keys": equal, "key_direction": -equal},
    ]


# --- Lemma I.1 and Theorem I.1: the model --------------------------------------------------------


def model_problems(
    n_points: int,
    n_features: int,
    n_clusters: int,
    embedding: str,
    dispersion: float,
    constant: float = 1.0,
) -> list[Problem]:
    """Lemma I.1 and Theorem I.1 for tasks in the unit cube: points, centers, all twelve weights,
    their changes and G1, G2 are searched; gamma follows from the dispersion of A3's scores."""
    n, d, k = n_points, n_features, n_clusters
    codes = cluster_codes(k, embedding).double()
    e = d + codes.shape[1]
    d_e = bounds.center_square_norm(d, k, embedding)
    weights = dict.fromkeys("QKV", (4, e, e))
    shapes = {
        "points": (n, d),
        "centers": (k, d),
        "log_change": (),
        "log_qk_norm": (),
        "log_value_norm": (),
        **weights,
        **{f"direction_{name}": shape for name, shape in weights.items()},
    }
    eye = torch.eye(e, dtype=torch.float64).expand(4, e, e)
    ones = torch.full((1, 1), math.pi / 2, dtype=torch.float64)
    low = torch.tensor(-LARGEST_LOG, dtype=torch.float64)
    aligned = {"points": ones, "centers": ones, "V": eye, "log_change": _NO_CHANGE}
    moved = {f"direction_{name}": 0 * eye for name in "QKV"} | {"direction_V": eye}
    corners: list[dict[str, Tensor]] = [
        aligned,
        aligned | {"Q": 0 * eye, "K": 0 * eye} | moved,
        aligned | {"Q": 0 * eye, "K": 0 * eye, "log_value_norm": low} | moved,
        aligned | {"log_qk_norm": low} | moved,
        aligned | {"V": -eye, "Q": 0 * eye, "K": 0 * eye},
    ]
    kept = {name: shape for name, shape in shapes.items() if name in {"points", "centers"}}

    def decode(raw: Inputs) -> Inputs:
        g1, g2 = _scale(raw["log_qk_norm"]), _scale(raw["log_value_norm"])
        size = _change(raw["log_change"])[:, None, None, None]
        inputs = {name: raw[name].sin().square() for name in kept}
        for name, radius in (("Q", g1), ("K", g1), ("V", g2)):
            inputs[name] = _spectral_ball(raw[name], radius)
            changed = raw[name] + size * raw[f"direction_{name}"]
            inputs[f"changed_{name}"] = _spectral_ball(changed, radius)
        gamma = dispersion * math.sqrt(e) / (4 * g1.square() * (1 + g2).square() * d_e)
        return inputs | {"G1": g1, "G2": g2, "gamma": gamma}

    def layer(x: Inputs, changed: str = "") -> tuple[Tensor, Tensor]:
        points = torch.nn.functional.pad(x["points"], (0, codes.shape[1]))
        centers = torch.cat([x["centers"], codes.expand(len(points), -1, -1)], -1)
        return literal_layer(
            points,
            centers,
            *(x[f"{changed}{name}"] for name in "QKV"),
            inverse_temperature=x["gamma"],
        )

    def norms(x: Inputs, which: int) -> Tensor:
        root_d, root_e = math.sqrt(d), math.sqrt(d_e)
        g2 = x["G2"]
        bound = ((1 + g2) * root_d + g2 * root_e, (1 + 2 * g2 + 2 * g2**2) * root_e)[which]
        return layer(x)[which].norm(dim=-1).amax(-1) / (constant * bound)

    def change(x: Inputs) -> Tensor:
        difference = layer(x, "changed_")[1] - layer(x)[1]
        return difference[..., :d].norm(dim=-1).sum(-1)

    def steps(x: Inputs) -> Tensor:
        return torch.cat(
            [torch.linalg.matrix_norm(x[f"changed_{name}"] - x[name], ord=2) for name in "QKV"], -1
        )

    def stability(bound: Callable, order: float) -> Callable:
        def ratio(x: Inputs) -> Tensor:
            moved = steps(x)
            size = torch.linalg.vector_norm(moved, order, dim=-1)
            # One of the twelve must have moved by more than rounding, in its own unit.
            unit = torch.stack([x["G1"]] * 8 + [x["G2"]] * 4, -1)
            relative = moved / unit
            moved_by = change(x)
            found = _resolved(
                moved_by / (bound(x) * size), relative.amax(-1), torch.ones_like(size)
            )
            return _resolved(found, moved_by, k * math.sqrt(d_e) * (1 + x["G2"]).square())

        return ratio

    def phi(x: Inputs) -> Tensor:
        parts = bounds.model_stability_parts(
            d_e, e, k, qk_norm=x["G1"], value_norm=x["G2"], inverse_temperature=x["gamma"]
        )
        values = [
            part.factor * (part.exponent.exp() if isinstance(part.exponent, Tensor) else 1.0)
            for part in parts.values()
        ]
        return constant * torch.stack(values).amax(0)

    def sharp(x: Inputs) -> Tensor:
        norms = (x["G1"], x["G2"], x["gamma"])
        return torch.tensor(
            [
                bounds.model_stability_sharp(
                    d, k, embedding, qk_norm=g1, value_norm=g2, inverse_temperature=gamma
                ).factor
                for g1, g2, gamma in zip(*(v.tolist() for v in norms), strict=True)
            ],
            dtype=torch.float64,
        )

    size = f"n={n}, d={d}, k={k}, {embedding}, delta={dispersion:g}"
    total = "weights: sum of spectral norms, centers: sum of Euclidean norms"
    largest = "weights: largest spectral norm, centers: sum of Euclidean norms"

    def problem(
        claim: str, bound: str, reading: str, stated: bool, ratio: Callable[[Inputs], Tensor]
    ) -> Problem:
        return Problem(claim, bound, reading, stated, size, shapes, corners, decode, ratio)

    return [
        problem("I-1", "I.1 points", "Euclidean norms", True, lambda x: norms(x, 0)),
        problem("I-1", "I.1 centers", "Euclidean norms", True, lambda x: norms(x, 1)),
        problem("I-phi", "Theorem I.1", total, True, stability(phi, 1.0)),
        problem("I-phi", "Theorem I.1", largest, False, stability(phi, math.inf)),
        problem("I-phi", "Theorem I.1 sharp", total, False, stability(sharp, 1.0)),
    ]


def literal_layer(
    points: Tensor,
    centers: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    inverse_temperature: Tensor,
) -> tuple[Tensor, Tensor]:
    """Equation 4 as it is written, on token rows (R, n, e), (R, k, e), each restart with weights
    (R, 4, e, e) and an inverse temperature (R,) of its own: what the attacks differentiate."""
    scale = inverse_temperature[:, None, None] / math.sqrt(points.shape[-1])

    def attend(index: int, queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (
            tokens @ weight[:, index].mT
            for tokens, weight in ((queries, query), (keys, key), (keys, value))
        )
        distances = q.square().sum(-1)[:, :, None] + k.square().sum(-1)[:, None] - 2 * q @ k.mT
        return torch.softmax(-scale * distances, -1) @ v

    updated = points + attend(0, points, centers) + attend(1, points, points)
    return updated, centers + attend(2, centers, updated) + attend(3, centers, centers)


# --- Lemma I.2: the loss -------------------------------------------------------------------------


def loss_problems(
    n_points: int,
    n_features: int,
    n_clusters: int,
    embedding: str,
    dispersion: float,
    constant: float = 1.0,
) -> list[Problem]:
    """Lemma I.2: points in the unit cube, centers wherever Lemma I.1 lets a layer put them; penalty
    such that the spread of the squared distances is ``dispersion`` penalties."""
    n, d, k = n_points, n_features, n_clusters
    d_e = bounds.center_square_norm(d, k, embedding)
    shapes = {"points": (n, d), "centers": (k, d), "direction": (k, d), "log_change": (),
              "log_value_norm": ()}  # fmt: skip
    corner = torch.full((n, d), math.pi / 2, dtype=torch.float64)
    far = torch.full((k, d), -1.0, dtype=torch.float64)
    near = far.clone()
    near[0] = 0.0
    low = torch.tensor(-LARGEST_LOG, dtype=torch.float64)
    start = {"points": corner, "log_value_norm": low, "log_change": _NO_CHANGE}
    corners = [start | {"centers": far}, start | {"centers": near}, start | {"centers": -near}]

    def decode(raw: Inputs) -> Inputs:
        g2 = _scale(raw["log_value_norm"])
        radius = (1 + 2 * g2 + 2 * g2**2) * math.sqrt(d_e)
        size = _change(raw["log_change"])[:, None, None]
        x = {
            "points": raw["points"].sin().square(),
            "centers": _ball(raw["centers"], radius),
            "changed": _ball(raw["centers"] + size * raw["direction"], radius),
            "G2": g2,
        }
        return x | {"penalty": spread(x) / dispersion}

    def spread(x: Inputs) -> Tensor:
        both = torch.cat(
            [_squared_distances(x["points"], x[c]) for c in ("centers", "changed")], -1
        )
        return (both.amax(-1) - both.amin(-1)).amax(-1)

    def change(x: Inputs, regularizer: str) -> Tensor:
        tau = x["penalty"][:, None, None]
        losses = [
            _smoothed_minimum(_squared_distances(x["points"], x[c]), tau, regularizer).sum(-1)
            for c in ("centers", "changed")
        ]
        return (losses[1] - losses[0]).abs()

    def kappa(x: Inputs, regularizer: str) -> Tensor:
        if regularizer == "l2":
            # The paper gives no omega for L2; this is the largest column sum of its Jacobian.
            omega = Constant(2 * (1 - 1 / k), torch.zeros_like(x["penalty"]))
        else:
            omega = bounds.softmax_stability(k, spread(x) / x["penalty"])
        bound = bounds._loss_constant(n, d_e, x["G2"], omega, x["penalty"])
        return bound.factor * bound.exponent.exp()

    slopes = {
        regularizer: bounds.largest_loss_slope(k, regularizer) for regularizer in REGULARIZERS
    }

    def sharp(x: Inputs, regularizer: str) -> Tensor:
        return 4 * n * (1 + x["G2"]).square() * math.sqrt(d_e) * slopes[regularizer]

    def by_norm(bound: Callable, regularizer: str, order: float, planted: float) -> Callable:
        def ratio(x: Inputs) -> Tensor:
            step = (x["changed"] - x["centers"]).norm(dim=-1)
            size = torch.linalg.vector_norm(step, order, dim=-1)
            moved_by = change(x, regularizer)
            found = moved_by / (planted * bound(x, regularizer) * size)
            furthest = _squared_distances(x["points"], x["centers"]).amax((-2, -1))
            found = _resolved(found, moved_by, n * furthest)
            found = _resolved(found, spread(x), furthest)
            return _resolved(found, step.amax(-1), furthest.sqrt())

        return ratio

    total, largest = "centers: sum of Euclidean norms", "centers: largest Euclidean norm"
    cases = [
        ("I.2", f"NE, {total}", True, by_norm(kappa, "entropy", 1.0, constant)),
        ("I.2", f"NE, {largest}", False, by_norm(kappa, "entropy", math.inf, 1.0)),
        ("I.2", f"L2 with omega = 2 - 2/k, {total}", False, by_norm(kappa, "l2", 1.0, 1.0)),
        ("I.2 sharp", f"NE, {total}", False, by_norm(sharp, "entropy", 1.0, 1.0)),
        ("I.2 sharp", f"L2, {total}", False, by_norm(sharp, "l2", 1.0, 1.0)),
    ]
    size = f"n={n}, d={d}, k={k}, {embedding}, spread/tau={dispersion:g}"
    return [
        Problem("I-2", bound, reading, stated, size, shapes, corners, decode, ratio)
        for bound, reading, stated, ratio in cases
    ]


# --- Appendix H ----------------------------------------------------------------------------------


def smoothing_problems(n_clusters: int, penalty: float, constant: float = 1.0) -> list[Problem]:
    """Appendix H for one point's squared distances to k centers: the bound, which of the two
    regularizers is tighter, and how far the weights are from the argmin's."""
    k = n_clusters
    shapes = {"root_distances": (k,), "log_scale": ()}
    steps = torch.arange(k, dtype=torch.float64)
    tie = torch.full((k,), 1e-4, dtype=torch.float64)
    corners = [
        {"root_distances": value} for value in (tie, steps, steps.sqrt(), steps.clamp_max(1))
    ]

    def decode(raw: Inputs) -> Inputs:
        scale = penalty * _scale(raw["log_scale"])
        return {"distances": raw["root_distances"].square() * scale[:, None]}

    def smoothed(x: Inputs, regularizer: str) -> Tensor:
        return _smoothed_minimum(x["distances"], penalty, regularizer)

    def gap(x: Inputs, regularizer: str) -> Tensor:
        weights = _min_weights(x["distances"], penalty, regularizer)
        excess = x["distances"] - x["distances"].amin(-1, keepdim=True)
        return (weights * excess).sum(-1)

    def distance(x: Inputs, regularizer: str, order: float) -> Tensor:
        weights = _min_weights(x["distances"], penalty, regularizer)
        argmin = torch.nn.functional.one_hot(x["distances"].argmin(-1), k)
        away = torch.linalg.vector_norm(weights - argmin, order, dim=-1)
        return away / (constant * bounds.weight_distance(k, regularizer))

    def below(regularizer: str) -> Callable[[Inputs], Tensor]:
        return lambda x: x["distances"].amin(-1) / (constant * smoothed(x, regularizer))

    def meets(regularizer: str) -> Callable[[Inputs], Tensor]:
        return lambda x: gap(x, regularizer) / bounds.largest_gap(k, penalty, regularizer)

    cases = [
        ("H-bound", "k-means loss <= smoothed loss", "NE", True, below("entropy")),
        ("H-bound", "k-means loss <= smoothed loss", "L2", True, below("l2")),
        ("H-bound", "gap <= tau log k, so equal as tau -> 0", "NE", True, meets("entropy")),
        ("H-bound", "gap <= tau (1 - 1/k) / 2, so equal as tau -> 0", "L2", True, meets("l2")),
        ("H-tighter", "gap of L2 <= gap of NE", "equal penalty", True,
         lambda x: gap(x, "l2") / (constant * gap(x, "entropy"))),
        ("H-distance", "sqrt(1 - 1/k)", "L2, Euclidean", True, lambda x: distance(x, "l2", 2.0)),
        ("H-distance", "sqrt(2 log k)", "NE, sum of absolute values", True,
         lambda x: distance(x, "entropy", 1.0)),
        ("H-distance", "sqrt(2 log k)", "NE, Euclidean", True,
         lambda x: distance(x, "entropy", 2.0)),
    ]  # fmt: skip
    size = f"k={k}, tau={penalty:g}"
    return [
        Problem(claim, bound, reading, stated, size, shapes, corners, decode, ratio)
        for claim, bound, reading, stated, ratio in cases
    ]
