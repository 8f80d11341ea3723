"""The policies of SpectrumKV (arXiv 2606.08635), by the paper's names, with a nominal budget b.

All take ``(scores, nominal budget, n, context)`` and return a tier for each of the n tokens of one sequence. Sinks lead
the ranking (`ranking`), so they take the highest tier that the fractions leave. Rounding is `counts`'.
"""

from __future__ import annotations

from jaxtyping import Float, UInt8
from torch import Tensor

from kvferry.ship.policy.tiers import RAW, PolicyContext, assign, counts, ranking


def greedy_fractions(b: float) -> tuple[float, float, float]:
    """Fractions of 16 bit, INT8 and INT4: f8 = 4b - 1, f4 = 2 - 4b up to b = 0.5; f16 = 2b - 1, f8 = 2 - 2b above."""
    if b <= 0.5:
        return 0.0, 4 * b - 1, 2 - 4 * b
    return 2 * b - 1, 2 - 2 * b, 0.0


def balanced_fractions(b: float) -> tuple[float, float, float]:
    """R = 4b - 1; f16 = R/5, f8 = 2R/5, the rest INT4. Above b = 2/3, where no INT4 is left, as `greedy_fractions`."""
    rest = 4 * b - 1
    if rest > 5 / 3:
        return greedy_fractions(b)
    return rest / 5, 2 * rest / 5, 1 - 3 * rest / 5


def two_tier_fractions(b: float) -> tuple[float, float, float]:
    """16 bit and INT8 only, as `greedy_fractions` from b = 0.5 on; below, f8 = 2b and the rest is dropped."""
    if b >= 0.5:
        return greedy_fractions(b)
    return 0.0, 2 * b, 0.0


def greedy(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:
    """`greedy_fractions` along the ranking. Needs b of at least 0.25."""
    return assign(ranking(scores, context.n_sink), *counts(n, *greedy_fractions(b)))


def balanced(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:
    """`balanced_fractions` along the ranking. Needs b of at least 0.25."""
    return assign(ranking(scores, context.n_sink), *counts(n, *balanced_fractions(b)))


def sink_protect(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:
    """`greedy`, then the sinks forced up to 16 bit: the mean cost exceeds b by at most 0.75 n_sink / n."""
    tiers = greedy(scores, b, n, context)
    tiers[: context.n_sink] = RAW
    return tiers


def two_tier(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:
    """`two_tier_fractions` along the ranking: for models that do not bear INT4."""
    return assign(ranking(scores, context.n_sink), *counts(n, *two_tier_fractions(b)))


def adaptive(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:
    """What the probe allows: `greedy` for a model that bears INT4, else `two_tier`. Needs b of at least 0.25."""
    return (greedy if context.int4_allowed else two_tier)(scores, b, n, context)
