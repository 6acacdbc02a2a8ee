"""The constants of Appendices H and I, one small function each, and sharper ones where there are.

A stability constant times the size of a change bounds the change of an attention's output. Norms,
as the derivations need them: weights by their spectral norm; tokens, and changes of tokens, by the
sum over tokens of Euclidean norms; scores and softmax weights by the sum of absolute values.

Every constant is ``factor * exp(exponent)``, since the exponents of Appendix I overflow a float for
quite small models. Terms may be numbers, tensors (one value an attack's restart) or positive sympy
symbols (from which the arrows of Table 2 are computed).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from leancluster_core.checks import check_choice, check_integer, check_number
from leancluster_core.embeddings import code_width
from leancluster_core.losses import REGULARIZERS

ATTENTIONS = ("A1", "A2", "A3", "A4")


class Constant(NamedTuple):
    """The value factor * exp(exponent)."""

    factor: Any
    exponent: Any = 0.0

    @property
    def value(self) -> float:
        """The number; inf where a float cannot hold it."""
        return 10**self.log10 if self.log10 < 300 else math.inf

    @property
    def log10(self) -> float:
        """Its order of magnitude; -inf for 0."""
        if self.factor == 0:
            return -math.inf
        return math.log10(self.factor) + self.exponent / math.log(10)

    def times(self, other: Constant) -> Constant:
        return Constant(self.factor * other.factor, self.exponent + other.exponent)


@dataclass(frozen=True)
class AttentionTerms:
    """What the constants of one attention are made of (Table 2, Table 3).

    n_queries, n_keys: m, m'. query_norm, key_norm: rho, rho', the largest Euclidean norm of a
    query and of a key token. qk_norm, value_norm: G1, G2, the largest spectral norms of Q and K,
    and of V. inverse_temperature: gamma. embedding_dim: d_emb.

    Raises ValueError or TypeError, naming the term, for one that is not positive and finite.
    """

    n_queries: Any
    n_keys: Any
    query_norm: Any
    key_norm: Any
    qk_norm: Any
    value_norm: Any
    inverse_temperature: Any
    embedding_dim: Any

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_positive(field.name, getattr(self, field.name))

    @property
    def sharpness(self) -> Any:
        """c = gamma / sqrt(d_emb), the factor of a squared distance in a score."""
        return self.inverse_temperature * self.embedding_dim**-0.5


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, Real):
        check_number(name, value, 0.0, above=True)
    elif isinstance(value, Tensor):
        for entry in (value.min(), value.max()):
            check_number(name, entry.item(), 0.0, above=True)
    elif not getattr(value, "is_positive", False):
        raise TypeError(f"{name} must be a positive number, tensor or symbol, got {value!r}")


# --- Appendix H ----------------------------------------------------------------------------------


def weight_distance(n_clusters: int, regularizer: str) -> float:
    """Largest distance of the weights from the argmin's: sqrt(1 - 1/k) for L2, sqrt(2 log k) for NE
    (Appendix H)."""
    k = check_integer("n_clusters", n_clusters, 1)
    check_choice("regularizer", regularizer, REGULARIZERS)
    return math.sqrt(1 - 1 / k) if regularizer == "l2" else math.sqrt(2 * math.log(k))


def largest_gap(n_clusters: int, penalty: float, regularizer: str) -> float:
    """Largest excess of the smoothed minimum over the minimum: penalty * (1 - 1/k) / 2 for L2,
    penalty * log k for NE. Ours: both losses meet as the penalty falls, at this rate."""
    k = check_integer("n_clusters", n_clusters, 1)
    penalty = check_number("penalty", penalty, 0.0, above=True)
    check_choice("regularizer", regularizer, REGULARIZERS)
    return penalty * ((1 - 1 / k) / 2 if regularizer == "l2" else math.log(k))


# --- Lemma I.1 and Table 3: norms of tokens ------------------------------------------------------


class TokenNorms(NamedTuple):
    """Largest Euclidean norms of the tokens, before (0) and after (1) one layer."""

    point: float
    center: float
    updated_point: float
    updated_center: float


def center_square_norm(n_features: int, n_clusters: int, embedding: str) -> int:
    """d_E, the largest squared norm of an embedded center in the unit cube, as the paper counts it:
    d + 1 (onehot), d + ceil(log2 k) (binary), d (none)."""
    width = code_width(n_clusters, embedding)
    return n_features + (1 if embedding == "onehot" else width)


def attained_center_square_norm(n_features: int, n_clusters: int, embedding: str) -> int:
    """The same, attained: a binary code of an index below k has at most floor(log2 k) ones."""
    ones = n_clusters.bit_length() - 1
    paper = center_square_norm(n_features, n_clusters, embedding)
    return min(paper, n_features + ones) if embedding == "binary" else paper


def token_norms(
    n_features: int, n_clusters: int, embedding: str, *, value_norm: float
) -> TokenNorms:
    """Lemma I.1: norms of embedded tokens in the unit cube, and after a layer with |V| <= G2."""
    check_integer("n_features", n_features, 1)
    g2 = check_number("value_norm", value_norm, 0.0)
    point = math.sqrt(n_features)
    center = math.sqrt(center_square_norm(n_features, n_clusters, embedding))
    return TokenNorms(
        point, center, (1 + g2) * point + g2 * center, (1 + 2 * g2 + 2 * g2**2) * center
    )


def attention_terms(
    n_points: int,
    n_features: int,
    n_clusters: int,
    embedding: str,
    *,
    qk_norm: float,
    value_norm: float,
    inverse_temperature: float = 1.0,
) -> dict[str, AttentionTerms]:
    """Table 3: the terms of the four attentions A1 (points to centers), A2 (points to points),
    A3 (centers to updated points), A4 (centers to centers)."""
    n_points = check_integer("n_points", n_points, 1)
    check_integer("n_clusters", n_clusters, 1, n_points, note="n_points")
    norms = token_norms(n_features, n_clusters, embedding, value_norm=value_norm)
    point, center = (n_points, norms.point), (n_clusters, norms.center)
    updated_point = (n_points, norms.updated_point)
    pairs = ((point, center), (point, point), (center, updated_point), (center, center))
    width = n_features + code_width(n_clusters, embedding)
    return {
        name: AttentionTerms(m, r, rho, rho_key, qk_norm, value_norm, inverse_temperature, width)
        for name, ((m, rho), (r, rho_key)) in zip(ATTENTIONS, pairs, strict=True)
    }


# --- Lemmas I.3 to I.8: one attention ------------------------------------------------------------


def score_dispersion(terms: AttentionTerms) -> Any:
    """Lemma I.4: delta, the largest difference of two scores of one query,
    gamma / sqrt(d_emb) * G1^2 (rho + rho')^2."""
    return terms.sharpness * terms.qk_norm**2 * (terms.query_norm + terms.key_norm) ** 2


def softmax_stability(n_scores: Any, dispersion: Any) -> Constant:
    """Lemma I.3: e^delta / m, said to bound both the entries of a softmax over m scores whose
    largest and smallest differ by at most delta, and its change (sum of absolute values) for a
    change of the scores (the same). The second is refuted; :func:`softmax_stability_repaired`."""
    return Constant(1 / n_scores, dispersion)


def value_stability(terms: AttentionTerms) -> Constant:
    """Lemma I.5: kappa2 = m rho', for a change of V."""
    return Constant(terms.n_queries * terms.key_norm)


def query_stability(terms: AttentionTerms) -> Constant:
    """Lemma I.6: kappa3 = 2 m gamma G1 G2 rho rho' (rho + rho') / sqrt(d_emb) * e^delta, for a
    change of Q."""
    factor = _qk_factor(terms) * terms.query_norm * (terms.query_norm + terms.key_norm)
    return Constant(factor, score_dispersion(terms))


def key_stability(terms: AttentionTerms) -> Constant:
    """Lemma I.7: kappa4, as kappa3 with rho'^2 in place of rho rho', for a change of K."""
    factor = _qk_factor(terms) * terms.key_norm * (terms.query_norm + terms.key_norm)
    return Constant(factor, score_dispersion(terms))


def _qk_factor(terms: AttentionTerms) -> Any:
    scale = 2 * terms.n_queries * terms.sharpness
    return scale * terms.qk_norm * terms.value_norm * terms.key_norm


def key_token_stability(terms: AttentionTerms) -> Constant:
    """Lemma I.8: kappa5 = (1 + 2 gamma / sqrt(d_emb) G1^2 rho' (rho + rho')) m G2 / m' * e^delta,
    for a change of the key tokens (sum over tokens of Euclidean norms)."""
    factor = _token_factor(terms) * terms.n_queries * terms.value_norm / terms.n_keys
    return Constant(factor, score_dispersion(terms))


def _token_factor(terms: AttentionTerms) -> Any:
    both = terms.key_norm * (terms.query_norm + terms.key_norm)
    return 1 + 2 * terms.sharpness * terms.qk_norm**2 * both


# --- ours: what holds in place of I.3, and without the exponential -------------------------------


def softmax_stability_repaired(n_scores: Any, dispersion: Any) -> Constant:
    """2 e^delta / m, in place of Lemma I.3's e^delta / m for changes: the Jacobian diag(p) - pp'
    has columns of absolute sum 2 p_j (1 - p_j)."""
    return Constant(2 / n_scores, dispersion)


def query_stability_sharp(terms: AttentionTerms) -> Constant:
    """2 m gamma G1 G2 rho rho'^2 / sqrt(d_emb): no exponential, since softmax moves by at most half
    the range of its scores' changes, and the query's own term shifts all scores alike."""
    return Constant(_qk_factor(terms) * terms.query_norm * terms.key_norm)


def key_stability_sharp(terms: AttentionTerms) -> Constant:
    """kappa4 without e^delta, for the same reason."""
    return Constant(key_stability(terms).factor)


def key_token_stability_sharp(terms: AttentionTerms) -> Constant:
    """m G2 (1 + 2 gamma / sqrt(d_emb) G1^2 rho' (rho + rho')), for a change of the key tokens
    measured by the LARGEST change of a token; no exponential and no m'."""
    return Constant(_token_factor(terms) * terms.n_queries * terms.value_norm)


# --- Theorem I.1: the model ----------------------------------------------------------------------


def model_stability(
    n_features: int,
    n_clusters: int,
    embedding: str,
    *,
    qk_norm: float,
    value_norm: float,
    inverse_temperature: float = 1.0,
) -> Constant:
    """Theorem I.1 (3.1): phi, for the change of the new centers (sum of Euclidean norms) under a
    change of the twelve weights (sum of spectral norms). It does not depend on n."""
    parts = model_stability_parts(
        center_square_norm(n_features, n_clusters, embedding),
        n_features + code_width(n_clusters, embedding),
        n_clusters,
        qk_norm=qk_norm,
        value_norm=value_norm,
        inverse_temperature=inverse_temperature,
    )
    return max(parts.values(), key=lambda part: part.log10)


def model_stability_parts(
    center_square_norm: Any,
    embedding_dim: Any,
    n_clusters: Any,
    *,
    qk_norm: Any,
    value_norm: Any,
    inverse_temperature: Any,
) -> dict[str, Constant]:
    """The four expressions whose maximum is phi, by the weights that they stand for."""
    terms = {
        "center_square_norm": center_square_norm,
        "embedding_dim": embedding_dim,
        "n_clusters": n_clusters,
        "qk_norm": qk_norm,
        "value_norm": value_norm,
        "inverse_temperature": inverse_temperature,
    }
    for name, value in terms.items():
        _check_positive(name, value)
    g1, g2 = qk_norm, value_norm
    c1 = 1 + 2 * g2
    c2 = 4 * g1 * g2 * c1**3
    c3 = 4 * g1**2 * (1 + g2) ** 2
    c4 = 4 * g1**2 * c1**2
    c5 = 4 * g1 * g2**2
    c6 = c4 * c5
    c7 = c3 + 4 * g1**2
    size = n_clusters * center_square_norm**0.5
    gs = inverse_temperature * center_square_norm * embedding_dim**-0.5
    return {
        "V3, V4": Constant(c1 * size),
        "Q3, K3, Q4, K4": Constant(c2 * size * gs, c3 * gs),
        "V1, V2": Constant(g2 * size * (1 + c4 * gs), c3 * gs),
        "Q1, K1, Q2, K2": Constant(size * gs * (c5 + c6 * gs), c7 * gs),
    }


def model_stability_sharp(
    n_features: int,
    n_clusters: int,
    embedding: str,
    *,
    qk_norm: float,
    value_norm: float,
    inverse_temperature: float = 1.0,
) -> Constant:
    """phi without its exponentials (ours): the sharp constants of the four attentions, composed.

    The points' update moves each key of A3 by at most the constant of ONE query of A1 or A2, which
    is what :func:`key_token_stability_sharp` takes.
    """
    norms = {"qk_norm": qk_norm, "value_norm": value_norm}
    terms = attention_terms(
        n_clusters,
        n_features,
        n_clusters,
        embedding,
        inverse_temperature=inverse_temperature,
        **norms,
    )
    carried = key_token_stability_sharp(terms["A3"])
    constants = []
    for name, of in terms.items():
        for stability in (value_stability, query_stability_sharp, key_stability_sharp):
            constant = stability(of)
            if name in ("A1", "A2"):
                constant = carried.times(Constant(constant.factor / of.n_queries))
            constants.append(constant)
    return max(constants, key=lambda constant: constant.log10)


# --- Table 2: the arrows -------------------------------------------------------------------------

# How the paper says that a larger term moves a bound that has it.
STATED_DIRECTIONS = {
    "m": "+",
    "m'": "-",
    "rho": "+",
    "rho'": "+",
    "G1": "+",
    "G2": "+",
    "gamma": "+",
    "d_emb": "-",
}

ONE_ATTENTION: dict[str, Callable[[AttentionTerms], Any]] = {
    "delta (I.4)": score_dispersion,
    "kappa2 (I.5)": value_stability,
    "kappa3 (I.6)": query_stability,
    "kappa4 (I.7)": key_stability,
    "kappa5 (I.8)": key_token_stability,
}


def directions(n_grid: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Table 2 computed: the sign of each bound's derivative by each term that it has.

    One row a bound and term: columns bound, term, derivative (of the bound's logarithm), computed
    ("+", "-", or "?" if sympy cannot tell), grid (the sign at ``n_grid`` random values of all
    terms, from 0.01 to 100; "mixed" if it varies) and stated (the paper's).
    """
    import sympy

    symbols = {name: sympy.Symbol(name, positive=True) for name in STATED_DIRECTIONS}
    m, m_keys, rho, rho_keys, g1, g2, gamma, width = symbols.values()
    terms = AttentionTerms(m, m_keys, rho, rho_keys, g1, g2, gamma, width)
    values = 10 ** np.random.default_rng(seed).uniform(-2, 2, (len(symbols), n_grid))
    rows = []
    for bound, function in ONE_ATTENTION.items():
        found = function(terms)
        constant = found if isinstance(found, Constant) else Constant(found)
        for name, symbol in symbols.items():
            factor, exponent = (sympy.sympify(part) for part in constant)
            if not (factor.has(symbol) or exponent.has(symbol)):
                continue
            derivative = factor.diff(symbol) / factor + exponent.diff(symbol)
            derivative = sympy.simplify(sympy.nsimplify(derivative))
            at = sympy.lambdify(list(symbols.values()), derivative)
            signs = set(np.sign(np.broadcast_to(at(*values), n_grid)))
            known = derivative.is_positive, derivative.is_negative
            rows.append(
                {
                    "bound": bound,
                    "term": name,
                    "derivative": str(derivative),
                    "computed": "+" if known[0] else "-" if known[1] else "?",
                    "grid": {1.0: "+", -1.0: "-"}.get(signs.pop()) if len(signs) == 1 else "mixed",
                    "stated": STATED_DIRECTIONS[name],
                }
            )
    return pd.DataFrame(rows)


# --- Lemma I.2: the loss -------------------------------------------------------------------------


def loss_stability(
    n_points: int,
    n_features: int,
    n_clusters: int,
    embedding: str,
    *,
    value_norm: float,
    penalty: float,
    spread: float,
    regularizer: str = "entropy",
) -> Constant:
    """Lemma I.2: kappa1 = 4 n (1 + G2)^2 sqrt(d_E) (1 + 4 (1 + G2)^4 d_E omega / tau), for the
    change of one task's smoothed loss under a change of the centers (sum of Euclidean norms).

    omega = e^(spread / tau) / k for NE, spread the difference of the largest and the smallest
    squared distance. For L2 the specification has no omega; 2 - 2/k is the largest absolute column
    sum of sparsemax's Jacobian (ours).
    """
    tau = check_number("penalty", penalty, 0.0, above=True)
    spread = check_number("spread", spread, 0.0)
    check_choice("regularizer", regularizer, REGULARIZERS)
    d_e = center_square_norm(n_features, n_clusters, embedding)
    omega = Constant(2 - 2 / n_clusters)
    if regularizer == "entropy":
        omega = softmax_stability(n_clusters, spread / tau)
    return _loss_constant(n_points, d_e, value_norm, omega, tau)


def _loss_constant(
    n_points: Any, d_e: Any, value_norm: Any, omega: Constant, penalty: Any
) -> Constant:
    outer = 4 * n_points * (1 + value_norm) ** 2 * d_e**0.5
    inner = 4 * (1 + value_norm) ** 4 * d_e * omega.factor / penalty
    # 1 + a e^b = (e^-b + a) e^b keeps the exponent apart.
    small = -omega.exponent
    decay = small.exp() if isinstance(small, Tensor) else math.exp(small)
    return Constant(outer * (decay + inner), omega.exponent)


def largest_loss_slope(n_clusters: int, regularizer: str) -> float:
    """The largest derivative of a smoothed minimum of k squared distances by one of them (ours):
    2 - 1/k for L2, max_p p (1 + (1 - p) log(p (k-1) / (1 - p))) for NE, whatever the penalty."""
    k = check_integer("n_clusters", n_clusters, 1)
    check_choice("regularizer", regularizer, REGULARIZERS)
    if regularizer == "l2" or k == 1:
        return 2 - 1 / k
    # The function is concave on (1/2, 1) and below its value at 1/2 before: bisect its derivative.
    low, high = 0.5, 1.0
    for _ in range(50):
        p = (low + high) / 2
        odds = math.log(p * (k - 1) / (1 - p))
        low, high = (p, high) if 2 + (1 - 2 * p) * odds > 0 else (low, p)
    return low * (1 + (1 - low) * math.log(low * (k - 1) / (1 - low)))


def loss_stability_sharp(
    n_points: int,
    n_features: int,
    n_clusters: int,
    embedding: str,
    *,
    value_norm: float,
    regularizer: str,
) -> Constant:
    """4 n (1 + G2)^2 sqrt(d_E) times :func:`largest_loss_slope` (ours): in place of kappa1, for
    both regularizers and every penalty."""
    d_e = center_square_norm(n_features, n_clusters, embedding)
    slope = largest_loss_slope(n_clusters, regularizer)
    return Constant(4 * n_points * (1 + value_norm) ** 2 * math.sqrt(d_e) * slope)
