"""Distances between two runs, on numbers small enough to know the answer."""

from __future__ import annotations

import math

import pytest
import torch

from kvferry.engines.handoff.clock import Stopwatch, covered
from kvferry.engines.handoff.compare import Comparison, first_difference, kl_divergence


def test_kl_of_known_distributions() -> None:
    p = torch.tensor([0.5, 0.25, 0.25]).log()
    q = torch.tensor([0.25, 0.25, 0.5]).log()
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert kl_divergence(p, q) == pytest.approx(expected, rel=1e-6)
    assert kl_divergence(p + 3.0, q - 9.0) == pytest.approx(expected, rel=1e-5)  # logits, not probabilities
    assert kl_divergence(p, p) == 0.0


def test_kl_where_something_is_impossible() -> None:
    p = torch.tensor([0.0, -math.inf])
    assert kl_divergence(p, torch.tensor([0.0, 0.0])) == pytest.approx(math.log(2))
    assert kl_divergence(torch.tensor([0.0, 0.0]), p) == math.inf
    assert math.isnan(kl_divergence(torch.tensor([math.nan, 0.0]), torch.tensor([0.0, 0.0])))


def test_the_summary_leaves_out_what_is_not_finite_and_says_so() -> None:
    comparison = Comparison()
    zero = torch.zeros(2)
    comparison.add(zero, zero)
    comparison.add(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    comparison.add(torch.tensor([math.nan, 0.0]), zero)
    found = comparison.fidelity()
    assert (found.n, found.nonfinite, found.top1_agreement) == (2, 1, 0.5)
    assert found.kl_max == pytest.approx(2 * found.kl_mean)
    assert found.kl_p50 == pytest.approx(found.kl_mean)


def test_the_summary_of_nothing_has_no_numbers() -> None:
    comparison = Comparison()
    comparison.add(torch.tensor([math.nan]), torch.tensor([0.0]))
    assert comparison.fidelity().to_json() == {
        "n": 0,
        "kl_mean": None,
        "kl_p50": None,
        "kl_p95": None,
        "kl_max": None,
        "top1_agreement": None,
        "nonfinite": 1,
    }


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([5], [6], 0)],
)
def test_first_difference(one: list[int], other: list[int], expected: int | None) -> None:
    assert first_difference(one, other) == expected


def test_overlapping_spans_are_counted_once() -> None:
    assert covered([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    assert covered([(20, 25), (0, 10)]) == 15
    assert covered([]) == 0


def test_a_stopwatch_adds_up_and_remembers_its_ends() -> None:
    watch = Stopwatch()
    with watch.running():
        pass
    first = watch.to_json()
    with pytest.raises(KeyError), watch.running():
        raise KeyError
    assert watch.began == first["began"]
    assert watch.ended > first["ended"]
    assert watch.busy <= watch.ended - watch.began
