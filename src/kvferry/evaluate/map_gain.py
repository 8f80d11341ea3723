"""How much of what a context is worth to a model comes through a mapped cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from kvferry.errors import InvalidInput
from kvferry.evaluate.scores import TokenScores
from kvferry.evidence.statistics import RESAMPLES, Interval, student_quantile


@dataclass(frozen=True, slots=True)
class ContextGain:
    """Context gain recovered: (log-likelihood on the mapped prefix less that with none) / (the same on the target's
    own prefix); 1: as good as the target's own, 0: worth nothing, negative: worse than no context.

    Attributes:
        windows: how many.
        recovered: over all scored tokens; ``None`` where the target's own prefix gains nothing, or a likelihood is not
            finite.
        ci: 95%, windows drawn anew with replacement; ``None`` for a single window.
        gain: nats a token that the target's own prefix is worth.
    """

    windows: int
    recovered: float | None
    ci: Interval | None
    gain: float

    def to_json(self) -> dict[str, Any]:
        return {"windows": self.windows, "recovered": self.recovered, "ci": self.ci, "gain": self.gain}


def context_gain(
    method: Sequence[TokenScores], full: Sequence[TokenScores], none: Sequence[TokenScores], *, seed: int = 0
) -> ContextGain:
    """Of one method; window i of all three must be of the same tokens.

    Raises:
        InvalidInput: no windows, or not the same ones.
    """
    sizes = [[len(score.nll) for score in side] for side in (method, full, none)]
    if not sizes[0] or sizes[0] != sizes[1] or sizes[0] != sizes[2]:
        raise InvalidInput("a context gain needs the same windows, at least one, of all three")
    sums = [np.array([score.nll.astype(np.float64).sum() for score in side]) for side in (method, full, none)]
    won, whole = sums[2] - sums[0], sums[2] - sums[1]
    gain = float(whole.sum()) / sum(sizes[0])
    if not np.isfinite([won, whole]).all() or gain <= 0:
        return ContextGain(len(won), None, None, gain)
    return ContextGain(len(won), float(won.sum() / whole.sum()), ratio_interval(won, whole, seed=seed), gain)


def ratio_interval(
    above: np.ndarray, below: np.ndarray, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """Bootstrap interval of ``Σ above / Σ below``, pairs drawn together.

    Percentiles are moved outward for small numbers, as in `kvferry.evidence.statistics.bootstrap_mean`. ``None`` for
    fewer than two pairs, and where the lower sum of a resample is not positive: a ratio that may change its sign has no
    such interval.
    """
    n = len(above)
    if n < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    tops, bottoms = above[drawn].sum(axis=1), below[drawn].sum(axis=1)
    if not (bottoms > 0).all():
        return None
    ratios = tops / bottoms
    moved = NormalDist().cdf(math.sqrt(n / (n - 1)) * student_quantile((1 - confidence) / 2, n - 1))
    low, high = np.percentile(ratios, [100 * moved, 100 - 100 * moved])
    return float(low), float(high)
