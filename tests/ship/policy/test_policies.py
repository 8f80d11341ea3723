"""Fractions equal the paper's formulas to one token, sinks lead, and ranking is what decides the rest."""

from collections import Counter

import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.ship.policy import DROP, INT4, INT8, POLICIES, RAW, TIER_COST, PolicyContext, policy
from kvferry.ship.policy.tiers import ranking

GRID = [round(0.01 * step, 2) for step in range(1, 101)] + [2 / 3, 1 / 3, 0.3333, 0.5001]
LENGTHS = [*range(1, 40), 63, 100, 127, 512, 1000, 2047]


def formula(name, b):
    """(16 bit, INT8, INT4) as the paper has them."""
    if name in ("greedy", "sink_protect", "random_tier"):
        return (0, 4 * b - 1, 2 - 4 * b) if b <= 0.5 else (2 * b - 1, 2 - 2 * b, 0)
    if name == "balanced":
        r = 4 * b - 1
        return (r / 5, 2 * r / 5, 1 - 3 * r / 5) if b <= 2 / 3 else (2 * b - 1, 2 - 2 * b, 0)
    return (0, 2 * b, 0) if b < 0.5 else (2 * b - 1, 2 - 2 * b, 0)


def tiers(name, scores, b, **context):
    return policy(name).assign(scores, b, scores.numel(), PolicyContext(**context))


@pytest.mark.parametrize("name", ["greedy", "balanced", "two_tier", "random_tier"])
def test_fractions_to_one_token(name):
    for n in LENGTHS:
        scores = torch.randn(n)
        for b in GRID:
            if b < POLICIES[name].least:
                continue
            got = Counter(tiers(name, scores, b).tolist())
            for tier, fraction in zip((RAW, INT8, INT4), formula(name, b), strict=True):
                assert abs(got[tier] - fraction * n) < 1 + 1e-6, (name, n, b, tier)
            assert got[DROP] == 0 or name == "two_tier"
            assert sum(TIER_COST[tier] * count for tier, count in got.items()) <= b * n + 1e-6


def test_sink_protect_is_greedy_with_sinks_forced_up():
    for n in LENGTHS:
        scores = torch.randn(n)
        for b in GRID:
            if b < 0.25:
                continue
            got, greedy = tiers("sink_protect", scores, b), tiers("greedy", scores, b)
            assert got[:4].eq(RAW).all()
            assert torch.equal(got[4:], greedy[4:])


def test_sinks_lead_and_scores_decide():
    scores = torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 1.0, 9.0, 7.0, 3.0, 2.0])
    assert tiers("greedy", scores, 0.7).tolist() == [RAW] * 4 + [INT8] * 6
    assert tiers("greedy", scores, 0.75).tolist() == [RAW] * 4 + [INT8, INT8, RAW, INT8, INT8, INT8]
    assert tiers("greedy", scores, 0.4, n_sink=0).tolist() == [INT4] * 4 + [INT8, INT8, INT8, INT8, INT8, INT8]
    assert tiers("sws", scores, 0.6).tolist() == [RAW] * 4 + [DROP, DROP, RAW, RAW, DROP, DROP]
    assert tiers("pdtrim", scores, 0.6).tolist() == [RAW] * 4 + [DROP] * 4 + [RAW] * 2


def test_ties_go_to_the_later_token():
    assert ranking(torch.zeros(6), 2).tolist() == [0, 1, 5, 4, 3, 2]
    assert ranking(torch.tensor([1.0, 3.0, 3.0, 2.0]), 0).tolist() == [2, 1, 3, 0]


def test_at_one_half_greedy_is_uniform_int8():
    """The paper's point of comparison: b = 0.5 says nothing about ranking."""
    scores = torch.randn(100)
    assert torch.equal(tiers("greedy", scores, 0.5), tiers("uniform_int8", scores, 0.5))
    assert torch.equal(tiers("greedy", scores, 0.25), tiers("uniform_int4", scores, 0.25))
    assert torch.equal(tiers("greedy", scores, 1.0), tiers("full", scores, 1.0))


@pytest.mark.parametrize("name", ["pdtrim", "sws"])
def test_droppers_keep_the_budget_and_at_least_one_token_more_than_the_sinks(name):
    for n in LENGTHS:
        for b in GRID:
            got = Counter(tiers(name, torch.randn(n), b).tolist())
            assert got[RAW] == min(n, max(int(b * n + 1e-9), 5))
            assert got[RAW] + got[DROP] == n


def test_pdtrim_keeps_the_ends():
    got = tiers("pdtrim", torch.randn(100), 0.3)
    kept = (got == RAW).nonzero().flatten().tolist()
    assert kept == [0, 1, 2, 3, *range(74, 100)]


def test_random_tier_is_reproducible_and_not_ranked():
    scores = torch.arange(200.0)
    one, again = tiers("random_tier", scores, 0.4, seed=1), tiers("random_tier", -scores, 0.4, seed=1)
    assert torch.equal(one, again)
    assert not torch.equal(one, tiers("random_tier", scores, 0.4, seed=2))
    assert not torch.equal(one, tiers("random_tier", scores, 0.4, seed=1, row=1))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_answers_for_every_length(name):
    chosen = POLICIES[name]
    for n in (1, 2, 3, 4, 5, 9):
        for b in {chosen.least, (chosen.least + chosen.most) / 2, chosen.most}:
            got = chosen.assign(torch.randn(n), b, n, PolicyContext())
            assert got.shape == (n,)
            assert got.dtype == torch.uint8
            assert int(got.max()) <= DROP


def test_unknown_policy():
    with pytest.raises(InvalidInput, match="greedy"):
        policy("gready")
