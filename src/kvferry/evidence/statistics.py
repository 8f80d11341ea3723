"""Intervals and tests for what is measured: Wilson, clustered and paired bootstraps, exact McNemar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from jaxtyping import Float

from kvferry.errors import InvalidInput

RESAMPLES = 10_000

Interval = tuple[float, float]


def wilson(hits: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a rate (Wilson 1927). With no hits its upper end is still above 0.

    Raises:
        InvalidInput: not ``0 <= hits <= n``, ``n`` not positive, or a confidence outside of (0, 1).
    """
    if n < 1 or not 0 <= hits <= n:
        raise InvalidInput(f"{hits} hits of {n}: a rate needs 0 <= hits <= n and n of at least 1")
    z = NormalDist().inv_cdf(0.5 + _checked(confidence) / 2)
    rate = hits / n
    center = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if hits == 0 else (center - spread) / scale
    return max(0.0, low), (1.0 if hits == n else min(1.0, (center + spread) / scale))


def bootstrap_mean(
    values: Sequence[float],
    clusters: Sequence[object] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Bootstrap interval of a mean; whole clusters are drawn, so what they share is not counted twice.

    Percentiles, moved outward for small numbers of clusters ("expanded percentile interval"). For a paired comparison
    give the differences. ``None`` with fewer than two clusters: nothing can be said then.

    Args:
        values: one an observation.
        clusters: which cluster each is in; by default each is its own.
        confidence: of the interval.
        resamples: number of resamples.
        seed: of the generator.

    Raises:
        InvalidInput: no values, as many clusters as values are not given, or values that are not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise InvalidInput("a bootstrap needs a list of finite values, at least one")
    named = list(range(len(array))) if clusters is None else list(clusters)
    if len(named) != len(array):
        raise InvalidInput(f"{len(named)} clusters for {len(array)} values")
    place: dict[object, int] = {}
    of = np.array([place.setdefault(cluster, len(place)) for cluster in named])
    sums, counts = np.bincount(of, weights=array), np.bincount(of, weights=np.ones_like(array))
    n = len(sums)
    if n < 2:
        return None
    # Resampling n clusters makes means too narrow by sqrt((n - 1) / n), and their normal tails ignore that the spread
    # itself is estimated: the tails are moved out by as much as Student's are (Hesterberg 2015, section 5.2).
    tail = (1 - _checked(confidence)) / 2
    moved = NormalDist().cdf(math.sqrt(n / (n - 1)) * student_quantile(tail, n - 1))
    low, high = np.percentile(_resampled_means(sums, counts, resamples, seed), [100 * moved, 100 - 100 * moved])
    return float(low), float(high)


def _resampled_means(
    sums: Float[np.ndarray, " clusters"], counts: Float[np.ndarray, " clusters"], resamples: int, seed: int
) -> Float[np.ndarray, " resamples"]:
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(sums), size=(resamples, len(sums)))
    means: Float[np.ndarray, " resamples"] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return means


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; ``None`` for fewer than two."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else None


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided McNemar test on discordant pairs (McNemar 1947): p of a fair coin doing as badly.

    Args:
        only_first: pairs in which only the first method succeeded.
        only_second: pairs in which only the second did.
    """
    if min(only_first, only_second) < 0:
        raise InvalidInput(f"{only_first} and {only_second} discordant pairs: counts are not negative")
    n, least = only_first + only_second, min(only_first, only_second)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return min(1.0, float(2 * tail / (1 << n)) if n < 1000 else math.exp(_log_ratio(2 * tail, n)))


def _log_ratio(count: int, bits: int) -> float:
    """``log(count / 2**bits)`` for integers too large for a float."""
    shift = max(0, count.bit_length() - 53)
    return math.log(count >> shift) + (shift - bits) * math.log(2)


def student_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t distribution with a whole number of degrees of freedom."""
    if not 0 < p < 1 or degrees < 1:
        raise InvalidInput(f"Student's quantile of {p} with {degrees} degrees of freedom")
    if p > 0.5:
        return -student_quantile(1 - p, degrees)
    low = -1.0
    while _student_tail(-low, degrees) > p:
        low *= 2
    high = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(-middle, degrees) < p else (low, middle)
    return (low + high) / 2


def _student_tail(t: float, degrees: int) -> float:
    """P(T > t) for t >= 0; the finite series of Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= square * (k + 1) / (k + 2)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 - inside) / 2


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise InvalidInput(f"a confidence of {confidence}: it lies between 0 and 1")
    return confidence
