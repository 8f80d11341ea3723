"""The knapsack: exact bytes, never over the limit, better than any one tier for all, and bits go where they count."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

import kvferry as kv
from kvferry.ship import optimize
from kvferry.ship.plan import plan
from kvferry.ship.policy import INT4, INT8, RAW, TIER_COST, PolicyContext, policy
from kvferry.ship.policy.optimal import Ladder, Problem
from kvferry.ship.sensitivity import flat
from tests.ship.builders import MIXED, left_padded, realistic, unmasked, with_value
from tests.snapshot.builders import make_snapshot

SPECS = ("raw", "b", "c")


def toy(parts, batch, tokens, seed=0):
    """Tiers of 16, 6 and 3 bytes a token, and 5 more a section of the second: a problem small enough to enumerate."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.arange(tokens + 1)
    table = torch.stack([16 * counts, 6 * counts + 5 * (counts > 0), 3 * counts])
    weight = torch.exp(2 * torch.randn(parts, 1, batch, tokens, generator=generator))
    errors = torch.tensor([0.0, 1.0, 9.0])[:, None, None] * weight
    sent = torch.ones(parts, batch, tokens, dtype=torch.bool)
    sent[:, 0, 0] = False
    return Problem([Ladder(SPECS, table)] * parts, list(errors), list(sent)), errors, sent, table


def by_hand(tiers, errors, sent, table):
    """Error and bytes of one part, from the definition."""
    counts = [Counter(row[mask].tolist()) for row, mask in zip(tiers, sent, strict=True)]
    used = sorted(set().union(*counts))
    nbytes = 1 + sum(1 + len(SPECS[tier]) for tier in used)
    nbytes += sum(int(table[tier, count[tier]]) for tier in used for count in counts)
    bits = {1: 0, 2: 1, 3: 2}[len(used)]
    nbytes += (bits * int(sent.sum()) + 7) // 8
    error = errors.gather(0, tiers.long().unsqueeze(0))[0][sent].sum()
    return float(error), nbytes


@pytest.mark.parametrize("seed", range(4))
def test_choice_is_exact_and_near_the_best_of_all(seed):
    problem, errors, sent, table = toy(1, 1, 9, seed)
    every = []
    for given in itertools.product(range(3), repeat=8):
        tiers = torch.tensor([[0, *given]])
        every.append(by_hand(tiers, errors[0], sent[0], table))
    low, high = problem.smallest().total, 1 + 4 + 16 * 8
    for limit in range(low, high + 1, 7):
        found = problem.solve(limit)
        assert found is not None
        error, nbytes = by_hand(found.tiers[0], errors[0], sent[0], table)
        assert nbytes == found.total <= limit
        assert error == pytest.approx(float(found.error.sum()), rel=1e-4, abs=1e-6)
        # The relaxation leaves at most what one token's upgrade costs unused.
        assert error <= 1.0001 * min(e for e, b in every if b <= limit - 16) if limit >= low + 16 else True
    assert problem.solve(low - 1) is None
    assert float(problem.solve(high).error.sum()) == 0


def test_never_worse_than_one_tier_for_all():
    problem, errors, sent, table = toy(3, 2, 60, seed=5)
    for tier in range(3):
        pairs = [by_hand(torch.full((2, 60), tier), errors[part], sent[part], table) for part in range(3)]
        found = problem.solve(sum(nbytes for _, nbytes in pairs))
        assert found is not None
        assert float(found.error.sum()) <= sum(error for error, _ in pairs) + 1e-6


def test_more_bytes_less_error():
    problem, *_ = toy(4, 2, 50, seed=9)
    limits = range(problem.smallest().total, 4 * (5 + 16 * 99), 97)
    errors = [float(problem.solve(limit).error.sum()) for limit in limits]
    assert all(later <= 1.001 * earlier + 1e-9 for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.01 * errors[0]


def test_nominal():
    """Greedy where scores are alike; 16 bit before INT8 only for a token that counts for more than a hundred."""
    assign = policy("optimal").assign
    flat_scores = torch.ones(40)
    got = assign(flat_scores, 0.4, 40, PolicyContext(n_sink=0))
    assert Counter(got.tolist()) == {INT8: 24, INT4: 16}
    scores = torch.ones(40)
    scores[7] = 1000.0
    got = assign(scores, 0.4, 40, PolicyContext(n_sink=0))
    assert got[7] == RAW
    assert sum(TIER_COST[tier] for tier in got.tolist()) <= 0.4 * 40 + 1e-9
    for n in (1, 5, 33):
        for b in (0.25, 0.3, 0.77, 1.0):
            got = assign(torch.randn(n), b, n, PolicyContext())
            assert sum(TIER_COST[tier] for tier in got.tolist()) <= b * n + 1e-6


CACHES = {
    "mixed": lambda: left_padded(make_snapshot(MIXED, batch=2, seq_len=300, head_dim=64, dtype="bfloat16"), 300, 170),
    "wide": lambda: unmasked(make_snapshot(seq_len=200, head_dim=80, value_head_dim=48, dtype="float16")),
    "fp32": lambda: unmasked(make_snapshot(seq_len=150, head_dim=128, dtype="float32")),
}


@pytest.mark.parametrize("name", sorted(CACHES))
@pytest.mark.parametrize("frame_tokens", [None, 64])
@pytest.mark.parametrize("budget", [0.3, 0.6])
def test_packets_are_as_large_as_planned_and_come_back(name, frame_tokens, budget):
    snapshot = CACHES[name]()
    made = plan(snapshot, budget, "optimal", frame_tokens=frame_tokens)
    packet = kv.Packet.of(made.header_bytes, list(made.frames()))
    assert len(packet) == made.nbytes <= budget * made.full_bytes
    assert [len(frame) for frame in packet.frames] == list(made.frame_sizes)
    decoded = kv.decode(kv.Packet.from_bytes(packet.to_bytes()))
    assert torch.equal(decoded.mask, snapshot.mask)
    for got, want in zip(decoded.layers, snapshot.layers, strict=True):
        for left, right in ((got.keys, want.keys), (got.values, want.values)):
            if right is None:
                continue
            here = snapshot.mask[:, None, want.first :, None]
            error = (left.float() - right.float()).pow(2) * here
            assert float(error.sum()) < 0.2 * float((right.float().pow(2) * here).sum())


def test_sinks_and_what_is_not_finite_go_raw():
    snapshot = with_value(realistic(200, layers=2), 1, 0, 77, float("inf"))
    made = plan(snapshot, 0.3, "optimal")
    raw = made.allocation.key_tiers[:, 0].eq(0) & made.allocation.value_tiers[:, 0].eq(0)
    assert raw[:, [0, 1, 2, 3, 77]].all()
    assert made.header.report["nonfinite"] == 1
    assert 0.15 < made.header.nominal_budget < 0.3


def test_bits_go_to_tokens_that_score_and_to_layers_that_feel():
    snapshot = realistic(400, layers=3)
    scores = torch.zeros(400)
    scores[200:240] = 1.0
    known = flat(snapshot)
    felt = replace(
        known, keys=(known.keys[0] * 100, *known.keys[1:]), values=(known.values[0] * 100, *known.values[1:])
    )
    made = plan(snapshot, 0.25, "optimal", scores, sensitivity=felt)
    assert made.header.report["sensitivity"] == "calibrated"
    bits = torch.tensor([16.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0])
    for tiers in (made.allocation.key_tiers, made.allocation.value_tiers):
        spent = bits[tiers[:, 0, 4:].long()]
        assert spent[0].mean() > spent[1:].mean() + 2
        assert spent[:, 196:236].mean() > spent[:, :196].mean() + 0.5


def test_a_cache_that_is_not_there_yet_is_planned_by_what_is_to_be_expected():
    """Stand-ins have no data to measure: the model's own energies count."""
    snapshot = realistic(300, layers=2)
    nothing = torch.zeros((), dtype=torch.bfloat16)
    layers = tuple(
        replace(layer, keys=nothing.expand(layer.keys.shape), values=nothing.expand(layer.values.shape))
        for layer in snapshot.layers
    )
    known = replace(flat(snapshot), key_energy=(100.0, 1.0), value_energy=(1.0, 1.0))
    made = plan(replace(snapshot, layers=layers), 0.25, "optimal", "positional", sensitivity=known)
    assert made.nbytes <= 0.25 * made.full_bytes
    assert made.allocation.key_tiers[0].float().mean() < made.allocation.key_tiers[1].float().mean() - 1


def test_ladders_follow_the_budget_and_the_frames():
    snapshot = realistic(512, layers=2)
    for budget, frame_tokens, key in ((0.2, None, "cen"), (0.6, None, "chan"), (0.6, 32, "asym")):
        made = plan(snapshot, budget, "optimal", frame_tokens=frame_tokens)
        assert all(spec.startswith((key, "raw", "asym8")) for spec in made.header.quantizers["keys"])
    own = plan(
        snapshot, 0.3, "optimal", quantizers={"keys": ("raw", "sym8", "sym4", "sym2"), "values": ("raw", "sym3")}
    )
    assert set(own.header.quantizers["values"]) <= {"raw", "sym3"}


def test_errors_of_rotated_rows_are_those_that_are_made():
    x = torch.randn(1, 2, 100, 64).to(torch.bfloat16)
    channels, usable = torch.rand(2, 64), torch.ones(1, 100, dtype=torch.bool)
    ladder = ("raw", "had6g64", "had4g64", "had3g64", "had2g64", "asym3g64")
    found = optimize.measure_errors(x, ladder, channels, usable)
    for place, spec in enumerate(ladder):
        back = torch.empty_like(x[0])
        method = kv.ship.quantize.quantizer(spec)
        data = torch.empty(method.nbytes(2, 100, 64, x.dtype), dtype=torch.uint8)
        method.encode(x[0], None, data)
        method.decode(data, None, back)
        error = ((back.float() - x[0].float()).pow(2) * channels[:, None]).sum(dim=(0, 2))
        assert float(found[place].sum()) == pytest.approx(float(error.sum()), rel=0.15)
