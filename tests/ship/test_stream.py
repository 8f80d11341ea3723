"""Packets planned before their cache exists: the sizes hold, the bytes are those of the whole cache, and what cannot be
carried is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvferry as kv
from kvferry.errors import BudgetTooSmall, InvalidInput, UnsupportedCache
from kvferry.ship.frame import frame_specs, open_frame
from kvferry.ship.header import packet_id
from kvferry.ship.packet import Packet
from kvferry.ship.plan import plan
from kvferry.ship.policy import POLICIES
from kvferry.ship.sensitivity import flat
from kvferry.ship.stream import StreamPlan, stand_in_for, stream_plan, why_not
from kvferry.snapshot import FULL, Snapshot
from tests.ship.builders import MIXED, left_padded, realistic, unmasked, with_value
from tests.snapshot.builders import make_snapshot

NONCE = b"the same"


def shape_of(snapshot: Snapshot) -> Snapshot:
    return stand_in_for(snapshot.identity, snapshot.token_ids, snapshot.positions, snapshot.mask)


def streamed(planned: StreamPlan, snapshot: Snapshot) -> Packet:
    """Layer by layer, each with nothing but itself."""
    frames = []
    for index, layer in enumerate(snapshot.layers):
        if layer.keys is not None:
            frames.extend(planned.layer_frames(index, layer))
    return Packet.of(planned.header_bytes, frames)


def with_queries(snapshot: Snapshot, seed: int = 7) -> Snapshot:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer, geometry in zip(snapshot.layers, snapshot.identity.layers, strict=True):
        shape = (snapshot.batch_size, 2 * geometry.kv_heads, 4, geometry.head_dim)
        layers.append(replace(layer, queries=torch.randn(shape, generator=generator)))
    return replace(snapshot, layers=tuple(layers))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("frame_tokens", [None, 7])
def test_sizes_are_right_and_no_token_changes_its_side_of_the_mask(policy: str, frame_tokens: int | None) -> None:
    """Every policy, with layers that slide, share or hold all, whatever their own scores say."""
    snapshot = with_queries(unmasked(make_snapshot(MIXED, batch=2, seq_len=40)))
    nominal = max(POLICIES[policy].least, min(POLICIES[policy].most, 0.4))
    planned = stream_plan(
        shape_of(snapshot), None, policy, "observation_window", nominal_budget=nominal, frame_tokens=frame_tokens
    )
    packet = streamed(planned, snapshot)
    assert tuple(map(len, packet.frames)) == planned.frame_sizes
    assert len(packet) == planned.nbytes
    decoded = kv.decode(packet)
    assert torch.equal(decoded.mask, planned.header.mask)
    assert [bytes(frame) for frame in planned.frames(snapshot)] == [bytes(frame) for frame in packet.frames]
    for source, back in zip(snapshot.layers, decoded.layers, strict=True):
        if source.keys is not None and policy == "full":
            assert torch.equal(source.keys, back.keys)


@pytest.mark.parametrize("policy", ["sink_protect", "greedy", "uniform_int8", "pdtrim", "full"])
def test_without_scores_of_its_own_it_is_the_plan_of_the_whole_cache(policy: str) -> None:
    snapshot = left_padded(make_snapshot([FULL] * 3, batch=2, seq_len=60), 60, 41)
    budget = 0.9 if policy != "full" else 1.0
    whole = plan(snapshot, budget, policy, "positional", nonce=NONCE)
    ahead = stream_plan(shape_of(snapshot), budget, policy, nonce=NONCE)
    assert ahead.header_bytes == whole.header_bytes
    assert [bytes(frame) for frame in ahead.frames(snapshot)] == [bytes(frame) for frame in whole.frames()]


def test_auto_takes_what_needs_no_cache_and_the_dearest_that_fits() -> None:
    shape = shape_of(realistic(300, layers=2))
    budgets = {1.0: "full", 0.9: "optimal", 0.3: "optimal", 0.2: "optimal"}
    assert {budget: stream_plan(shape, budget).header.policy for budget in budgets} == budgets
    with pytest.raises(BudgetTooSmall) as caught:
        stream_plan(shape, 0.05)
    least = stream_plan(shape, caught.value.least_budget)
    assert least.nbytes <= caught.value.least_budget * least.full_bytes
    assert stream_plan(shape, nominal_budget=0.5).header.policy == "sink_protect"
    assert set(stream_plan(shape, 0.5, quantizers="sym8/sym4").header.quantizers["keys"]) <= {"raw", "sym8", "sym4"}


def test_a_policy_that_needs_the_whole_packet_is_refused_and_says_why() -> None:
    shape = shape_of(realistic(16, layers=1))
    assert "cannot be pipelined" in why_not("klt")
    with pytest.raises(InvalidInput, match="whole packet"):
        stream_plan(shape, 0.5, "klt")
    assert not any(map(why_not, POLICIES))


def test_ahead_of_the_cache_the_optimum_is_of_what_calibration_expects() -> None:
    """A layer that calibration calls fragile gets more bytes, before any of its keys is known."""
    snapshot = realistic(300, layers=2)
    calm = flat(snapshot)
    fragile = replace(calm, key_energy=(1.0, 4096.0), value_energy=(1.0, 4096.0))
    sizes = [stream_plan(shape_of(snapshot), 0.3, sensitivity=known).frame_sizes for known in (calm, fragile)]
    assert abs(sizes[0][0] - sizes[0][1]) < 0.2 * sizes[0][0]
    assert sizes[1][1] > 1.5 * sizes[1][0]
    packet = streamed(stream_plan(shape_of(snapshot), 0.3, sensitivity=fragile), snapshot)
    decoded = kv.decode(packet)
    errors = [
        float((layer.keys - back.keys).norm() / layer.keys.norm())
        for layer, back in zip(snapshot.layers, decoded.layers, strict=True)
    ]
    assert errors[1] < errors[0] / 2


def test_a_layers_own_scores_decide_who_gets_the_better_tier() -> None:
    """Two layers whose queries look at different tokens send different tokens at 16 bit, in frames of one size."""
    snapshot = realistic(64, layers=2)
    layers = []
    for favourite, layer in zip((20, 40), snapshot.layers, strict=True):
        keys = torch.zeros_like(layer.keys)
        keys[:, :, favourite] = 4.0
        layers.append(replace(layer, keys=keys, queries=torch.ones(1, 9, 4, 64)))
    snapshot = replace(snapshot, layers=tuple(layers))
    planned = stream_plan(shape_of(snapshot), None, "greedy", "observation_window", nominal_budget=0.55)
    packet = streamed(planned, snapshot)
    decoded = kv.decode(packet)
    for index, favourite in enumerate((20, 40)):
        values, back = snapshot.layers[index].values, decoded.layers[index].values
        exact = (values == back).all(dim=3).all(dim=1)[0]
        assert exact[favourite]
        assert exact[:4].all()  # the sinks lead every ranking
        assert exact.sum() < 16
        specs = frame_specs(
            open_frame(packet.frames[index], packet_id(packet.header_bytes), packet.header.layout), packet.header.mask
        )
        assert ("keys", "raw", 6) in specs
    assert packet.report["scorer"] == "observation_window of each layer"


def test_each_packet_is_another_ones_stranger() -> None:
    snapshot = realistic(16, layers=1)
    one, other = (stream_plan(shape_of(snapshot), 1.0) for _ in range(2))
    assert packet_id(one.header_bytes) != packet_id(other.header_bytes)


def test_what_cannot_be_planned_is_refused_before_anything_is_sent() -> None:
    shape = shape_of(realistic(64, layers=2))
    with pytest.raises(BudgetTooSmall):
        stream_plan(shape, 0.01, "greedy")
    with pytest.raises(InvalidInput, match="unknown scorer"):
        stream_plan(shape, 0.5, "greedy", "nonsense")
    with pytest.raises(InvalidInput, match="decay"):
        stream_plan(shape, 0.5, "greedy", "kv_norm", decay=-1.0)
    planned = stream_plan(shape, 0.5, "greedy", "observation_window")
    snapshot = realistic(64, layers=2)
    with pytest.raises(InvalidInput, match="needs queries"):
        list(planned.layer_frames(0, snapshot.layers[0]))
    with pytest.raises(InvalidInput, match="another shape"):
        list(planned.layer_frames(0, realistic(63, layers=2).layers[0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_goes_at_16_bit_or_not_at_all(value: float) -> None:
    plain = realistic(64, layers=2)
    bad = with_value(plain, 1, 0, 30, value)
    exact = stream_plan(shape_of(plain), 1.0)
    back = kv.decode(streamed(exact, bad)).layers[1].keys
    assert torch.equal(back.view(torch.int16), bad.layers[1].keys.view(torch.int16))
    few = stream_plan(shape_of(plain), None, "uniform_int8", nominal_budget=0.5)
    assert len(list(few.layer_frames(0, bad.layers[0]))) == 1
    with pytest.raises(UnsupportedCache, match=r"layer 1.*1 tokens hold NaN or infinity.*--no-pipeline"):
        list(few.layer_frames(1, bad.layers[1]))
    ranked = stream_plan(shape_of(plain), None, "greedy", "kv_norm", nominal_budget=0.6)  # 16-bit places are left
    back = kv.decode(streamed(ranked, bad)).layers[1].keys[0, 0, 30]
    assert torch.equal(back.view(torch.int16), bad.layers[1].keys[0, 0, 30].view(torch.int16))


def test_a_stand_in_takes_no_memory() -> None:
    snapshot = shape_of(realistic(512, layers=30))
    assert snapshot.nbytes == 512 * 30 * 2 * 3 * 64 * 2
    assert all(layer.keys.untyped_storage().nbytes() == 2 for layer in snapshot.layers)
