"""Intervals and tests against scipy's, and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvferry.errors import InvalidInput
from kvferry.evaluate.sprt import Sprt
from kvferry.evidence.statistics import bootstrap_mean, mcnemar, standard_error, student_quantile, wilson


@given(
    st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95, 0.99])
)
def test_wilson_is_scipys(counts: tuple[int, int], confidence: float) -> None:
    hits, n = counts
    expected = stats.binomtest(hits, n).proportion_ci(confidence, method="wilson")
    assert wilson(hits, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_no_hits_leave_an_upper_bound() -> None:
    assert wilson(0, 20)[0] == 0
    assert 0.1 < wilson(0, 20)[1] < 0.2


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(first: int, second: int) -> None:
    expected = stats.binomtest(min(first, second), first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected)


def test_mcnemar_of_many_pairs() -> None:
    assert mcnemar(900, 1100) == pytest.approx(stats.binomtest(900, 2000).pvalue, rel=1e-9)
    assert 0 <= mcnemar(10, 4000) < 1e-300


@given(st.integers(1, 300), st.floats(0.001, 0.999))
def test_student_quantile_is_scipys(degrees: int, p: float) -> None:
    assert student_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-7, abs=1e-7)


def test_bootstrap_is_near_the_t_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 25)
    low, high = bootstrap_mean(values.tolist()) or (0, 0)
    expected = stats.t.interval(0.95, 24, values.mean(), values.std(ddof=1) / 5)
    assert (low, high) == pytest.approx(expected, abs=0.15)
    assert standard_error(values.tolist()) == pytest.approx(stats.sem(values))


def by_hand(values: list[float], clusters: list[object], resamples: int, seed: int) -> tuple[float, float]:
    """The clustered bootstrap written out: draws, ratios of sums, order statistics, and scipy's quantiles."""
    names = list(dict.fromkeys(clusters))
    members = [[value for value, own in zip(values, clusters, strict=True) if own == name] for name in names]
    n = len(names)
    means = []
    for draw in np.random.default_rng(seed).integers(0, n, size=(resamples, n)).tolist():
        taken = [members[index] for index in draw]
        means.append(sum(sum(one) for one in taken) / sum(len(one) for one in taken))
    means.sort()
    tail = stats.norm.cdf(math.sqrt(n / (n - 1)) * stats.t.ppf(0.025, n - 1))
    found = []
    for share in (tail, 1 - tail):
        place = share * (resamples - 1)
        below = math.floor(place)
        found.append(means[below] + (place - below) * (means[min(below + 1, resamples - 1)] - means[below]))
    return found[0], found[1]


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_paired_bootstrap_is_an_independent_ones_to_the_last_digit(seed: int) -> None:
    """Right and wrong answers of two arms, as free runs hold them against each other."""
    generator = np.random.default_rng(100 + seed)
    pairs = generator.random((60, 2)) < (0.4, 0.55)
    differences = [float(on) - float(off) for off, on in pairs]
    found = bootstrap_mean(differences, resamples=20_000, seed=seed)
    assert found == by_hand(differences, list(range(60)), 20_000, seed)


def test_the_clustered_bootstrap_is_an_independent_ones() -> None:
    generator = np.random.default_rng(5)
    values = generator.normal(1, 2, 70).tolist()
    clusters: list[object] = [int(number) for number in generator.integers(0, 12, 70)]
    found = bootstrap_mean(values, clusters, resamples=5_000, seed=3)
    assert found == pytest.approx(by_hand(values, clusters, 5_000, 3), rel=1e-9)


def test_bootstrap_covers_what_it_should() -> None:
    """Few windows are the usual case: plain percentiles cover 0.86 of the time there."""
    generator = np.random.default_rng(7)
    covered = 0
    for seed in range(1000):
        interval = bootstrap_mean(generator.normal(0, 1, 6).tolist(), resamples=1000, seed=seed)
        assert interval is not None
        covered += interval[0] <= 0 <= interval[1]
    assert 0.90 < covered / 1000 < 0.98


def test_clusters_widen_the_interval() -> None:
    values = np.repeat(np.random.default_rng(2).normal(0, 1, 10), 20)
    clusters = np.repeat(np.arange(10), 20)
    alone, clustered = bootstrap_mean(values.tolist()), bootstrap_mean(values.tolist(), clusters.tolist())
    assert alone is not None
    assert clustered is not None
    assert clustered[1] - clustered[0] > 3 * (alone[1] - alone[0])
    assert bootstrap_mean(values.tolist(), clusters.tolist()) == clustered  # same seed
    assert bootstrap_mean([1.0, 2.0], ["a", "a"]) is None


@pytest.mark.parametrize(
    "bad",
    [
        lambda: wilson(3, 2),
        lambda: wilson(0, 0),
        lambda: wilson(1, 2, 1.0),
        lambda: bootstrap_mean([]),
        lambda: bootstrap_mean([1.0, math.nan]),
        lambda: bootstrap_mean([1.0, 2.0], [1]),
        lambda: mcnemar(-1, 2),
        lambda: student_quantile(0.0, 3),
        lambda: Sprt(0.05, 0.01),
        lambda: Sprt(alpha=0.6),
        lambda: Sprt(most=0),
    ],
)
def test_nonsense_is_refused(bad: object) -> None:
    with pytest.raises(InvalidInput):
        bad()  # type: ignore[operator]


@pytest.mark.parametrize("rate", [0.01, 0.025, 0.05])
def test_the_operating_characteristic_is_what_happens(rate: float) -> None:
    sprt = Sprt(most=150)
    accept, undecided, looks = sprt.operating_characteristic(rate)
    generator = np.random.default_rng(3)
    runs = [sprt.decide(generator.random(sprt.most) < rate) for _ in range(4000)]
    spread = 4 * 0.5 / math.sqrt(len(runs))
    assert sum(run[0] == "accept" for run in runs) / len(runs) == pytest.approx(accept, abs=spread)
    assert sum(run[0] == "undecided" for run in runs) / len(runs) == pytest.approx(undecided, abs=spread)
    assert sum(run[2] for run in runs) / len(runs) == pytest.approx(looks, rel=0.05)


def test_the_stated_error_rates_hold() -> None:
    sprt = Sprt()
    accept, undecided, _ = sprt.operating_characteristic(sprt.tolerable)
    assert 1 - accept - undecided <= sprt.alpha
    assert sprt.operating_characteristic(sprt.intolerable)[0] <= sprt.beta * 1.01
    curve = [sprt.operating_characteristic(rate)[0] for rate in (0.001, 0.01, 0.02, 0.05, 0.2)]
    assert curve == sorted(curve, reverse=True)


def test_the_test_stops_by_itself() -> None:
    sprt = Sprt()

    def events() -> object:
        yield from (True, True)
        raise AssertionError("read on after the decision")

    assert sprt.decide(events()) == ("reject", 2, 2)  # type: ignore[arg-type]
    assert sprt.decide([]) == ("undecided", 0, 0)
