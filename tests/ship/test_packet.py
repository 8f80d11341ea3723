"""Encode and decode: what is promised at each tier, for every kind of layer, padding, dtype and frame size."""

from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import kvferry as kv
from kvferry.errors import CorruptPacket, TooLarge, UnsupportedVersion
from kvferry.ship import header
from kvferry.ship import packet as packet_module
from kvferry.ship.allocate import FAMILIES
from kvferry.ship.encode import estimate_size
from kvferry.ship.header import render_header
from kvferry.ship.plan import plan
from kvferry.ship.policy import POLICIES
from kvferry.ship.reader import MAX_EXPANSION, PacketReader
from kvferry.snapshot import FULL, LayerKind
from tests.ship.builders import MIXED, left_padded, realistic, unmasked, with_value
from tests.snapshot.builders import SLIDING, make_snapshot, same_bits


def sides(one, other):
    """Keys of both, then values of both, tokens before heads so that a mask can pick them."""
    for left, right in ((one.keys, other.keys), (one.values, other.values)):
        yield left.transpose(1, 2), right.transpose(1, 2)


def assert_same_cache(got, want):
    """Bit-exact in all that is not masked; zeros in the rest."""
    for name in ("token_ids", "positions", "mask"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for index, (one, other) in enumerate(zip(got.layers, want.layers, strict=True)):
        assert (one.kind, one.seen, one.held) == (other.kind, other.seen, other.held), index
        if other.keys is None:
            assert one.keys is None
            continue
        seen = got.mask[:, other.first :]
        for left, right in sides(one, other):
            assert same_bits(left[seen], right[seen]), index
            assert left[~seen].eq(0).all(), index


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(MIXED), max_size=4),
    batch=st.integers(1, 3),
    seq_len=st.integers(1, 24),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    frame_tokens=st.sampled_from([None, 1, 5, 16, 100]),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_at_full_budget_a_cache_is_carried_bit_for_bit(kinds, batch, seq_len, dtype, dims, frame_tokens, padded, seed):
    snapshot = make_snapshot(
        [FULL, *kinds],
        batch=batch,
        seq_len=seq_len,
        dtype=dtype,
        head_dim=dims[0],
        value_head_dim=dims[1],
        seed=seed,
        model="ünïcode",
    )
    snapshot = snapshot if padded else unmasked(snapshot)
    packet = kv.encode(snapshot, budget=1.0, frame_tokens=frame_tokens)
    assert packet.budget == 1.0
    assert len(packet) == packet.full_bytes == sum(map(len, packet.wire()))
    decoded = kv.decode(packet)
    assert_same_cache(decoded, snapshot)
    assert decoded.identity == snapshot.identity.then(f"packet(full; {packet.quantizer}, {len(packet)})")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_tier_keeps_its_promise(policy, family):
    """Raw tokens are exact, INT8 ones close, INT4 ones less so, dropped ones masked and zero; and no plan lies."""
    snapshot = make_snapshot(MIXED, batch=2, seq_len=40, head_dim=64, dtype="bfloat16", seed=7)
    snapshot = left_padded(snapshot, 40, 29)
    nominal = min(0.6, POLICIES[policy].most)
    made = plan(snapshot, None, policy, nominal_budget=max(nominal, POLICIES[policy].least), quantizers=family)
    packet = kv.Packet.of(made.header_bytes, list(made.frames()))
    assert len(packet) == made.nbytes
    assert [len(frame) for frame in packet.frames] == list(made.frame_sizes)
    decoded = kv.decode(packet)
    tiers = made.allocation.key_tiers[0]
    assert torch.equal(decoded.mask, made.allocation.sent)
    for got, want in zip(decoded.layers, snapshot.layers, strict=True):
        if want.keys is None:
            continue
        here, sent = tiers[:, want.first :], decoded.mask[:, want.first :]
        for left, right in sides(got, want):
            assert same_bits(left[sent & (here == 0)], right[sent & (here == 0)])
            assert left[~sent].eq(0).all()
            for tier, bound in ((1, 0.06), (2, 0.6)):
                chosen = sent & (here == tier)
                if chosen.any():
                    error = (left[chosen].float() - right[chosen].float()).abs().max()
                    assert 0 < error < bound, (tier, error)


@pytest.mark.parametrize("frame_tokens", [None, 7, 64])
@pytest.mark.parametrize("quantizers", ["sym", "asym", "chan", "sym6/sym3", "chan5b16:asym6g32/chan2b8:asym3row"])
def test_oracle_decodes_what_a_packet_says(frame_tokens, quantizers):
    """Encoding is deterministic, and decoding twice into any order of frames gives the same bits."""
    snapshot = make_snapshot(MIXED, batch=2, seq_len=50, head_dim=64, dtype="float16")
    packet = kv.encode(snapshot, policy="greedy", nominal_budget=0.4, quantizers=quantizers, frame_tokens=frame_tokens)
    again = kv.encode(snapshot, policy="greedy", nominal_budget=0.4, quantizers=quantizers, frame_tokens=frame_tokens)
    assert packet.to_bytes() == again.to_bytes()
    reader = PacketReader(packet.header_bytes)
    for frame in reversed(packet.frames):
        reader.add(frame)
    assert_same_cache(reader.snapshot(), kv.decode(packet))


def test_strided_and_shared_storage_make_no_difference():
    snapshot = make_snapshot(MIXED, batch=2, seq_len=60, head_dim=32, dtype="bfloat16")

    def turned(tensor):
        return None if tensor is None else tensor.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)

    layers = tuple(replace(one, keys=turned(one.keys), values=turned(one.values)) for one in snapshot.layers)
    for budget in (1.0, 0.7):
        want = kv.encode(snapshot, budget=budget).to_bytes()
        assert kv.encode(replace(snapshot, layers=layers), budget=budget).to_bytes() == want


def test_a_decoded_cache_shares_nothing():
    snapshot = make_snapshot(seq_len=10)
    packet = kv.encode(snapshot, budget=1.0)
    one, other = kv.decode(packet), kv.decode(packet)
    one.layers[0].keys.zero_()
    one.mask.zero_()
    one.token_ids.zero_()
    assert_same_cache(other, snapshot)
    assert_same_cache(kv.decode(packet), snapshot)


def test_file_round_trip(tmp_path):
    snapshot = make_snapshot(MIXED, batch=2, seq_len=133, head_dim=64, dtype="bfloat16")
    for frame_tokens in (None, 64):
        packet = kv.encode(snapshot, budget=0.7, frame_tokens=frame_tokens)
        size = packet.save(tmp_path / "p")
        assert size == (tmp_path / "p").stat().st_size
        loaded = kv.Packet.load(tmp_path / "p")
        assert loaded.to_bytes() == packet.to_bytes()
        assert_same_cache(kv.decode(loaded), kv.decode(packet))
        assert (loaded.policy, loaded.budget, loaded.report) == (packet.policy, packet.budget, packet.report)
    with safe_open(str(tmp_path / "p"), "pt") as file:
        assert "layers.2.frame.64" in file.keys()  # noqa: SIM118 - not a mapping
        assert file.metadata()["format"] == "kvferry"
        assert file.metadata()["kind"] == "packet"


def test_bytes_round_trip_in_any_order_of_frames():
    packet = kv.encode(make_snapshot(MIXED, seq_len=20), policy="greedy", nominal_budget=0.7, frame_tokens=6)
    data = packet.header_bytes + b"".join(reversed(packet.frames))
    assert (
        kv.Packet.from_bytes(data).to_bytes() == packet.to_bytes() == kv.Packet.from_bytes(packet.to_bytes()).to_bytes()
    )


def test_tokens_that_are_not_finite_go_raw_and_are_counted():
    snapshot = unmasked(make_snapshot([FULL, SLIDING], batch=2, seq_len=30, head_dim=64, dtype="bfloat16"))
    snapshot = with_value(snapshot, 0, 1, 9, float("nan"))
    snapshot = with_value(snapshot, 1, 0, 2, float("inf"))  # token 25 of the sequence
    packet = kv.encode(snapshot, policy="uniform_int8")
    assert packet.report["nonfinite"] == 2
    decoded = kv.decode(packet)
    keys, got = snapshot.layers[0].keys, decoded.layers[0].keys
    assert same_bits(got[1, :, 9], keys[1, :, 9])
    assert same_bits(got[0, :, 25], keys[0, :, 25])
    assert not same_bits(got[0, :, 9], keys[0, :, 9])
    assert same_bits(decoded.layers[1].keys[0, :, 2], snapshot.layers[1].keys[0, :, 2])
    clean = [layer.keys.isfinite().sum() + layer.values.isfinite().sum() for layer in decoded.layers]
    want = [layer.keys.isfinite().sum() + layer.values.isfinite().sum() for layer in snapshot.layers]
    assert clean == want


def test_a_cache_of_nan_alone_can_be_sent_only_raw():
    snapshot = make_snapshot(seq_len=20, dtype="float16")
    keys = torch.full_like(snapshot.layers[0].keys, float("nan"))
    snapshot = replace(snapshot, layers=(replace(snapshot.layers[0], keys=keys), *snapshot.layers[1:]))
    assert_same_cache(kv.decode(kv.encode(snapshot, budget=1.0)), snapshot)
    with pytest.raises(kv.BudgetTooSmall, match="NaN") as caught:
        kv.encode(snapshot, budget=0.6)
    assert caught.value.least_budget > 0.95


def test_padding_is_never_sent():
    full = left_padded(make_snapshot(batch=2, seq_len=64, head_dim=64, dtype="bfloat16"), 64, 64)
    half = left_padded(full, 64, 0)
    assert len(kv.encode(half, budget=1.0)) < 0.55 * len(kv.encode(full, budget=1.0))
    assert kv.encode(half, budget=1.0).report["padding"] == 64


def test_sinks_of_a_padded_row_are_its_own_first_tokens():
    snapshot = left_padded(make_snapshot(batch=2, seq_len=32, head_dim=16), 32, 12)
    made = plan(snapshot, None, "sink_protect", nominal_budget=0.25)
    raw = (made.allocation.key_tiers[0] == 0) & made.allocation.sent
    assert raw.nonzero().tolist() == [[0, t] for t in range(4)] + [[1, t] for t in range(20, 24)]


def test_scores_decide_which_tokens_keep_their_bits():
    snapshot = unmasked(make_snapshot(seq_len=40, head_dim=16))
    scores = torch.zeros(40)
    scores[[11, 30]] = 5.0
    made = plan(snapshot, None, "sink_protect", scores, nominal_budget=0.25 + 0.25 * 6 / 40)
    assert (made.allocation.key_tiers[0][0] == 1).nonzero().flatten().tolist() == [11, 30]
    assert made.header.report["scorer"] == "given"


def test_scores_may_be_lists():
    snapshot = unmasked(make_snapshot(batch=2, seq_len=12, head_dim=16))
    scores = torch.arange(24.0).view(2, 12).flip(0)
    want = kv.encode(snapshot, policy="sink_protect", scores=scores, nominal_budget=0.5).to_bytes()
    for same in (scores.tolist(), scores.numpy(), [tuple(row) for row in scores.int().tolist()]):
        assert kv.encode(snapshot, policy="sink_protect", scores=same, nominal_budget=0.5).to_bytes() == want


def test_a_packet_that_drops_nearly_all_can_be_decoded():
    """Of 3,000 tokens five are sent: the cache has more than a thousand times the packet's bytes."""
    snapshot = realistic(3000, layers=16, heads=8, dim=128)
    packet = kv.encode(snapshot, policy="sws", nominal_budget=0.0009, scores="positional")
    assert int(packet.header.mask.sum()) == 5
    assert packet.header.cache_bytes > MAX_EXPANSION * len(packet) / 4
    small = replace(packet.header, mask=torch.zeros_like(packet.header.mask))
    assert small.sent_bytes() == 0
    assert packet.header.sent_bytes() * 600 == packet.header.sent_bytes(3000) == packet.header.cache_bytes
    assert torch.equal(kv.decode(packet).mask, packet.header.mask)
    with pytest.raises(TooLarge, match="max_bytes"):
        kv.decode(packet, max_bytes=packet.header.cache_bytes - 1)


def test_the_header_names_the_quantisers_that_some_frame_has():
    """Where only sliding layers hold tokens, the sinks' precision is in no frame."""
    snapshot = unmasked(make_snapshot([SLIDING, SLIDING], seq_len=40, head_dim=16))
    packet = kv.encode(snapshot, policy="sink_protect", nominal_budget=0.3, scores="positional")
    assert packet.header.quantizers == {"keys": ["sym8", "sym4"], "values": ["sym8", "sym4"]}
    assert kv.decode(packet).identity.construction[-1].startswith("packet(sink_protect; sym8+sym4 / sym8+sym4, ")
    assert kv.Packet.from_bytes(packet.to_bytes()).quantizer == packet.quantizer
    assert kv.decode(kv.encode(make_snapshot([], seq_len=4))).identity.construction[-1].startswith("packet(full;  / , ")


def test_a_packet_has_only_so_many_tokens(monkeypatch):
    snapshot = make_snapshot(batch=2, seq_len=50)
    data = kv.encode(snapshot).to_bytes()
    monkeypatch.setattr(header, "MAX_TOKENS", 99)
    with pytest.raises(TooLarge, match="99 tokens"):
        kv.encode(snapshot)
    with pytest.raises(TooLarge, match="99 tokens"):
        kv.Packet.from_bytes(data)
    monkeypatch.undo()
    monkeypatch.setattr(header, "MAX_HEADER", 1000)
    with pytest.raises(TooLarge, match="1,000 bytes"):
        kv.encode(snapshot)


def test_every_part_of_a_packet_is_verified_once(monkeypatch):
    packet = kv.encode(make_snapshot(MIXED, seq_len=20), policy="greedy", nominal_budget=0.7, frame_tokens=6)
    data, counts = packet.to_bytes(), {"parse_header": 0, "open_frame": 0}

    def counted(name):
        def call(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        original = getattr(packet_module, name)
        monkeypatch.setattr(packet_module, name, call)

    counted("parse_header")
    counted("open_frame")
    loaded = kv.Packet.from_bytes(data)
    assert counts == {"parse_header": 1, "open_frame": len(packet.frames)}
    assert loaded.header.layout is loaded.header.layout


def test_a_fault_in_a_file_has_the_files_name_and_the_snapshots_error(tmp_path):
    """A layer of a kind to come: `Snapshot.load` and `Packet.load` say the same of it."""
    snapshot = make_snapshot(seq_len=8)
    snapshot.save(tmp_path / "snapshot")
    packet = kv.encode(snapshot)
    header_bytes = packet.header_bytes.replace(b'"kind":"full"', b'"kind":"chun"')
    later = replace(packet, header_bytes=header_bytes[:-16] + xxhash.xxh3_128_digest(header_bytes[:-16]))
    later.save(tmp_path / "damaged")
    with pytest.raises(CorruptPacket, match=f"^{tmp_path}/damaged: .*chun"):
        kv.Packet.load(tmp_path / "damaged")
    geometry = replace(snapshot.identity.layers[0], kind=LayerKind("recurrent"))
    message = render_header(replace(packet.header, identity=replace(snapshot.identity, layers=(geometry,))))
    replace(packet, header_bytes=message).save(tmp_path / "newer")
    with pytest.raises(UnsupportedVersion, match=f"^{tmp_path}/newer: layer 0 has a recurrent cache"):
        kv.Packet.load(tmp_path / "newer")
    with pytest.raises(UnsupportedVersion, match="recurrent"):
        PacketReader(message)


def test_a_file_whose_header_would_grow_beyond_the_limit(tmp_path):
    packet = kv.encode(realistic(4000, layers=1, heads=1, dim=1), policy="sws", nominal_budget=0.0009)
    size = packet.save(tmp_path / "p")
    assert size < 17 * 4000
    for read in (lambda most: kv.Packet.load(tmp_path / "p", max_bytes=most),
                 lambda most: kv.Packet.from_bytes(packet.to_bytes(), max_bytes=most)):  # fmt: skip
        assert read(17 * 4000).nbytes == packet.nbytes
        with pytest.raises(TooLarge, match="68,000"):
            read(17 * 4000 - 1)
        with pytest.raises(TooLarge, match="more than the limit"):
            read(1000)


def test_what_a_packet_tells_of_itself():
    snapshot = unmasked(make_snapshot(MIXED, seq_len=40, head_dim=64, dtype="bfloat16"))
    packet = kv.encode(snapshot, policy="sink_protect", nominal_budget=0.3, scores="kv_norm")
    assert packet.nominal_budget == 0.3
    assert packet.policy == "sink_protect"
    assert packet.quantizer == "raw+sym8+sym4 / raw+sym8+sym4"
    assert packet.report["scorer"] == "kv_norm"
    assert packet.report["nominal_cost"] == pytest.approx(0.3 + 0.5 * 4 / 40, abs=0.01)
    rows = packet.bits_by_layer()
    assert [row["kind"] for row in rows] == ["full", "sliding(8)", "full", "shared(0)"]
    assert sum(row["bytes"] for row in rows) + len(packet.header_bytes) == len(packet)
    assert sum(rows[0]["keys"].values()) == 40
    assert sum(rows[1]["values"].values()) == 7
    assert 4 < rows[0]["bits"] < 9
    assert rows[3]["bits"] == 0
    assert bool(packet)
    assert estimate_size(snapshot, policy="sink_protect", nominal_budget=0.3, scores="kv_norm") == len(packet)


def test_a_reader_that_knows_its_model_refuses_another_before_any_frame():
    snapshot = make_snapshot(seq_len=8)
    packet = kv.encode(snapshot, budget=1.0)
    PacketReader(packet.header_bytes, want=snapshot.identity)
    with pytest.raises(kv.IncompatibleIdentity) as caught:
        PacketReader(packet.header_bytes, want=replace(snapshot.identity, weights="other"))
    assert caught.value.differences == {"weights": (snapshot.identity.weights, "other")}


def test_a_reader_says_what_is_missing_and_takes_frames_once():
    packet = kv.encode(make_snapshot(MIXED, seq_len=20), budget=1.0, frame_tokens=8)
    reader = PacketReader(packet.header_bytes)
    assert reader.add(packet.frames[4]) == range(1, 2)
    assert reader.missing() == [i for i in range(len(packet.frames)) if i != 4]
    assert not reader.complete
    with pytest.raises(CorruptPacket, match="twice"):
        reader.add(packet.frames[4])
    with pytest.raises(CorruptPacket, match="missing"):
        reader.snapshot()
    for index in reader.missing():
        reader.add(packet.frames[index])
    assert reader.complete
    assert reader.missing() == []
    assert_same_cache(reader.snapshot(), kv.decode(packet))


def test_plans_build_single_frames_again():
    made = plan(make_snapshot(MIXED, seq_len=20), nominal_budget=0.9, frame_tokens=8)
    frames = list(made.frames())
    assert made.frame(2) == frames[2]
    assert list(made.frames([3, 1])) == [frames[3], frames[1]]


def test_a_nonce_tells_two_packets_of_one_cache_apart():
    snapshot = make_snapshot(seq_len=8)
    one, other = (plan(snapshot, 1.0, nonce=nonce) for nonce in (b"a", b"b"))
    reader = PacketReader(one.header_bytes)
    with pytest.raises(CorruptPacket, match="another packet"):
        reader.add(other.frame(0))


def test_limits():
    packet = kv.encode(realistic(64, layers=4), budget=1.0)
    size = packet.header.cache_bytes
    assert kv.decode(packet, max_bytes=size).nbytes == size
    with pytest.raises(TooLarge, match="max_bytes"):
        kv.decode(packet, max_bytes=size - 1)


def test_a_cache_with_gradients_is_a_cache():
    snapshot = make_snapshot(seq_len=20, head_dim=16)
    layers = tuple(replace(one, keys=one.keys.clone().requires_grad_()) for one in snapshot.layers)
    for nominal in (1.0, 0.5):
        want = kv.encode(snapshot, policy="greedy", nominal_budget=nominal)
        assert (
            kv.encode(replace(snapshot, layers=layers), policy="greedy", nominal_budget=nominal).to_bytes()
            == want.to_bytes()
        )
    assert not kv.decode(want).layers[0].keys.requires_grad
