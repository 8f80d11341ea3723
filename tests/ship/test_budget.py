"""A budget is a promise about bytes: never exceeded, on the wire or on disk, and not left unused."""

import math

import pytest

import kvferry as kv
from kvferry.ship import sizing
from kvferry.ship.plan import plan
from kvferry.ship.policy import POLICIES
from tests.ship.builders import left_padded, realistic
from tests.snapshot.builders import make_snapshot

BUDGETS = [0.27, 0.2719, 0.28, 0.3, 0.333, 0.4, 0.5, 0.5161, 0.52, 0.6, 0.7, 0.77, 0.9, 0.99, 0.9999, 1.0, 1.5]


@pytest.fixture(scope="module")
def caches():
    return {seq_len: realistic(seq_len) for seq_len in (512, 1500, 2000)}


@pytest.mark.parametrize("seq_len", [512, 1500, 2000])
@pytest.mark.parametrize(
    "policy", ["auto", "fast", "greedy", "balanced", "sink_protect", "two_tier", "uniform_int4", "sws", "optimal"]
)
def test_never_exceeded(caches, seq_len, policy):
    snapshot = caches[seq_len]
    for budget in BUDGETS:
        if policy == "sink_protect" and seq_len == 512 and budget < 0.2722:
            with pytest.raises(kv.BudgetTooSmall) as caught:
                plan(snapshot, budget, policy, "positional")
            assert caught.value.budget == budget < caught.value.least_budget < 0.273
            continue
        made = plan(snapshot, budget, policy, "positional")
        assert made.nbytes <= math.floor(budget * made.full_bytes)
        if budget < 1:
            assert sizing.file_size(made.size, made.header.layout) <= math.floor(budget * made.full_bytes)


@pytest.mark.parametrize("budget", [0.27, 0.28, 0.52])
def test_plans_are_exact(caches, budget, tmp_path):
    made = plan(caches[512], budget)
    packet = kv.encode(caches[512], budget)
    assert len(packet) == made.nbytes == len(packet.to_bytes())
    saved = packet.save(tmp_path / "packet")
    assert saved == sizing.file_size(made.size, made.header.layout) <= budget * packet.full_bytes


@pytest.mark.parametrize("policy", ["greedy", "balanced", "sink_protect", "two_tier", "sws", "pdtrim", "optimal"])
def test_not_left_unused(caches, policy):
    """What is left over is less than a token's upgrade in every layer, and the overhead of a file."""
    for budget in (0.3, 0.45, 0.6, 0.83):
        made = plan(caches[512], budget, policy, "positional")
        file = sizing.file_size(made.size, made.header.layout)
        assert budget * made.full_bytes - file < 30 * 2 * 3 * 130 + 600, (policy, budget)


def test_full_bytes_is_what_full_takes(caches):
    full = kv.encode(caches[512], 1.0)
    assert full.policy == "full"
    for policy in POLICIES:
        assert plan(caches[512], None, policy, "positional").full_bytes == len(full)


@pytest.mark.parametrize("policy", [*sorted(POLICIES), "auto", "fast"])
def test_the_least_budget_is_granted(policy):
    snapshot = left_padded(make_snapshot(batch=2, seq_len=90, head_dim=16, dtype="bfloat16"), 90, 31)
    with pytest.raises(kv.BudgetTooSmall) as caught:
        kv.encode(snapshot, 0.01, policy)
    least = caught.value.least_budget
    assert 0 < least <= 1.0
    packet = kv.encode(snapshot, least, policy)
    assert packet.budget <= least
    with pytest.raises(kv.BudgetTooSmall):
        kv.encode(snapshot, least * 0.97, policy)


@pytest.mark.parametrize("policy", [*sorted(POLICIES), "auto", "fast"])
@pytest.mark.parametrize("seq_len", [9, 40])
def test_the_least_budget_is_the_same_whatever_was_asked(policy, seq_len):
    snapshot = realistic(seq_len, layers=2)
    with pytest.raises(kv.BudgetTooSmall) as caught:
        plan(snapshot, 0.01, policy)
    least = caught.value.least_budget
    assert plan(snapshot, least, policy).nbytes <= least * plan(snapshot).full_bytes
    for asked in (0.1, 0.25, 0.39, 0.41, 0.5, 0.9):
        if asked < least:
            with pytest.raises(kv.BudgetTooSmall) as caught:
                plan(snapshot, asked, policy)
            assert caught.value.least_budget == least
        else:
            plan(snapshot, asked, policy)


def test_auto_says_what_each_of_its_policies_needs():
    with pytest.raises(
        kv.BudgetTooSmall, match=r"policy auto .* its least budget is 0\.[0-9]+ \(of optimal 0"
    ) as caught:
        plan(realistic(12, layers=2), 0.05)
    assert f"{caught.value.least_budget:g}" in str(caught.value)


def test_auto_is_exact_at_one_and_takes_the_first_that_fits(caches):
    assert plan(caches[512], 1.0).header.policy == "full"
    assert plan(caches[512]).header.policy == "full"
    for budget in (0.17, 0.28, 0.52, 0.9):
        made = plan(caches[512], budget)
        assert made.header.policy == "optimal"
        assert made.header.report["scorer"] == "positional"
    nominal = plan(caches[512], nominal_budget=0.4)
    assert (nominal.header.policy, nominal.header.quantizers["keys"][-1]) == ("sink_protect", "chan4b128")
    given = plan(caches[512], 0.28, quantizers="sym8/sym4", scores="kv_norm")
    assert (given.header.quantizers["keys"][-1], given.header.report["scorer"]) == ("sym4", "kv_norm")
    short = realistic(9, layers=2)  # four sinks at 16 bit do not pay for nine tokens
    with pytest.raises(kv.BudgetTooSmall) as caught:
        plan(short, 0.1)
    assert plan(short, caught.value.least_budget).header.quantizers["keys"][-1] == "sym4"


def test_the_nominal_budget_is_the_policys():
    snapshot = realistic(100, layers=2)
    for nominal in (0.3, 0.5, 0.7):
        packet = kv.encode(snapshot, policy="greedy", nominal_budget=nominal)
        assert packet.nominal_budget == nominal
        assert packet.report["nominal_cost"] == pytest.approx(nominal, abs=0.008)
        assert packet.budget > packet.report["nominal_cost"]


def test_small_caches_count_their_overhead():
    """Headers weigh as much as the payload here; the promise is the same."""
    for seq_len in (1, 2, 5, 17):
        snapshot = realistic(seq_len, layers=1)
        for budget in (0.5, 0.7, 0.9):
            packet, granted = encode_or_least(snapshot, budget)
            assert granted >= budget
            assert len(packet) <= granted * packet.full_bytes


def encode_or_least(snapshot, budget):
    try:
        return kv.encode(snapshot, budget, frame_tokens=4), budget
    except kv.BudgetTooSmall as error:
        return kv.encode(snapshot, error.least_budget, frame_tokens=4), error.least_budget
