"""From a packet to the exact cache, in place: every kind of cache, and every way in which it must not go."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvferry as kv
from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput, UnsupportedVersion
from kvferry.ship.header import parse_header as parse_packet_header
from kvferry.ship.header import render_header as render_packet_header
from kvferry.ship.refine import RefinementEncoder
from kvferry.ship.refine import encode as encode_module
from kvferry.ship.refine.message import parse_header, render_header
from kvferry.ship.refine.residual import TARGET
from kvferry.snapshot import FULL
from tests.ship.builders import MIXED, left_padded, realistic, unmasked
from tests.ship.refine.builders import REFUSALS, contents, level_frames, refiner_of, refused, resigned, small, with_bits
from tests.ship.test_packet import assert_same_cache
from tests.snapshot.builders import SLIDING, make_snapshot

PATTERNS = [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x7C00, 0xFC01, 0x8000, 0x0001, 0x80000000, 0x7F800000, 0xFFC00001, 1 << 63]
"""NaN, infinity, -0 and subnormal, in one dtype or another."""


@settings(deadline=None, max_examples=80)
@given(
    kinds=st.lists(st.sampled_from(MIXED), max_size=4),
    batch=st.integers(1, 3),
    seq_len=st.integers(1, 24),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    cuts=st.tuples(*[st.sampled_from([None, 1, 5, 16])] * 2),
    policy=st.sampled_from(
        [("greedy", 0.3), ("sink_protect", 0.6), ("pdtrim", 0.4), ("sws", 0.2), ("uniform_int4", 0.25)]
    ),
    padded=st.booleans(),
    odd=st.lists(st.sampled_from(PATTERNS), max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_cache_comes_back_bit_for_bit(kinds, batch, seq_len, dtype, dims, cuts, policy, padded, odd, seed):
    snapshot = make_snapshot(
        [FULL, *kinds], batch=batch, seq_len=seq_len, head_dim=dims[0], value_head_dim=dims[1], dtype=dtype, seed=seed
    )
    snapshot = left_padded(snapshot, *[1 + (seed + row) % seq_len for row in range(batch)]) if padded else snapshot
    snapshot = with_bits(snapshot, odd, seed)
    name, nominal = policy
    packet = kv.encode(snapshot, policy=name, nominal_budget=nominal, frame_tokens=cuts[0], scores="positional")
    refinement = kv.refine(snapshot, packet, frame_tokens=cuts[1])
    refiner, near = refiner_of(packet, refinement)
    for level in (1, 2):
        assert refiner.level == level - 1
        frames = list(level_frames(refinement, level))
        random.Random(seed).shuffle(frames)
        for frame in frames:
            slot = refiner.add(frame)
            assert slot.level == level
        assert not (refiner.mask & ~snapshot.mask).any()
    refiner.verify()
    assert refiner.complete
    assert refiner.missing() == []
    assert_same_cache(refiner.snapshot(), snapshot)
    assert refiner.snapshot().layers[0].keys is near.layers[0].keys  # in place
    assert refiner.snapshot().identity.construction[-1] == f"refinement(level 2, {len(refinement)})"


def errors_of(got, want):
    """Relative error of each token's keys and values, its deviation from the mean being the signal."""
    for one, other in zip(got.layers, want.layers, strict=True):
        for left, right in ((one.keys, other.keys), (one.values, other.values)):
            signal = (right.double() - right.double().mean(dim=2, keepdim=True)).square().sum(dim=(1, 3))
            yield ((left.double() - right.double()).square().sum(dim=(1, 3)) / signal).sqrt()


@pytest.mark.parametrize("level", [0, 3, -1, 1.5])
def test_there_are_two_levels(level):
    snapshot = unmasked(make_snapshot([FULL], seq_len=40, kv_heads=1, head_dim=16))
    packet = kv.encode(snapshot, policy="uniform_int8")
    with pytest.raises(InvalidInput, match="level"):
        kv.refine(snapshot, packet).apply(packet, level=level)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_level_one_is_as_good_as_int8(dtype):
    snapshot = unmasked(make_snapshot([FULL, FULL], seq_len=200, kv_heads=2, head_dim=64, dtype=dtype))
    packet = kv.encode(snapshot, policy="sink_protect", nominal_budget=0.3)
    int8 = kv.decode(kv.encode(snapshot, policy="uniform_int8"))
    refinement = kv.refine(snapshot, packet)
    got = refinement.apply(packet, level=1)
    base_error, error, int8_error = (
        max(float(each.max()) for each in errors_of(one, snapshot)) for one in (kv.decode(packet), got, int8)
    )
    assert base_error > 5 * TARGET
    assert error < 1.5 * TARGET
    assert error < 2 * int8_error
    assert len(packet) + refinement.level_bytes[0] < 0.58 * len(kv.encode(snapshot, budget=1.0)) or dtype == "float32"


def test_dropped_tokens_are_shown_once_every_layer_has_brought_them():
    snapshot = unmasked(make_snapshot([FULL, SLIDING, FULL], seq_len=40, dtype="float16"))
    packet = kv.encode(snapshot, policy="pdtrim", nominal_budget=0.5)
    refinement = kv.refine(snapshot, packet)
    refiner, _ = refiner_of(packet, refinement)
    dropped = ~packet.header.mask
    assert dropped.any()
    first, *rest = level_frames(refinement, 1)
    refiner.add(first)
    assert torch.equal(refiner.mask, packet.header.mask)
    for frame in rest:
        refiner.add(frame)
    assert refiner.mask.all()
    shown = refiner.snapshot()
    assert shown.mask.all()
    assert max(float(each.max()) for each in errors_of(shown, snapshot)) < 3 * TARGET


def test_a_dropped_token_with_nan_is_shown_only_when_it_is_whole():
    snapshot = unmasked(make_snapshot([FULL], seq_len=40, dtype="float32"))
    packet = kv.encode(snapshot, policy="pdtrim", nominal_budget=0.5)
    assert not packet.header.mask[0, 20]
    snapshot.layers[0].keys[0, 0, 20, 1] = torch.nan
    refinement = kv.refine(snapshot, packet)
    hidden = ~refinement.apply(packet, level=1).mask
    assert hidden.nonzero().tolist() == [[0, 20]]
    assert refinement.apply(packet).mask.all()


def test_totals_of_noise_stay_below_the_16_bit_packet():
    snapshot = realistic(512, layers=4)
    packet = kv.encode(snapshot, budget=0.27)
    refinement = kv.refine(snapshot, packet)
    assert (len(packet) + len(refinement)) / packet.full_bytes < 0.9
    encoder = RefinementEncoder(snapshot, packet.header_bytes, kv.decode(packet))
    assert all(len(frame) <= limit for frame, limit in zip(encoder.frames(), encoder.limits, strict=True))
    with pytest.raises(InvalidInput, match="asked for already"):
        next(encoder.frames())


def test_threads_change_nothing():
    snapshot = realistic(200, layers=2)
    packet = kv.encode(snapshot, policy="uniform_int4")
    one = kv.refine(snapshot, packet)
    torch.set_num_threads(2)
    assert list(kv.refine(snapshot, packet).wire()) == list(one.wire())
    refiner, near = refiner_of(packet, one)
    for frame in one.frames[:-1]:
        refiner.add(frame)
    with refused(near):  # an error in the second thread
        refiner.add(resigned(bytes(one.frames[-1][:-30]) + bytes(30)))
    refiner.add(one.frames[-1])
    refiner.verify()


def test_no_frame_is_too_large(monkeypatch):
    snapshot = small(tokens=20)
    packet = kv.encode(snapshot, policy="uniform_int4")
    assert kv.refine(snapshot, packet, frame_tokens=20).header.frames == 2
    monkeypatch.setattr(encode_module, "_MOST_VALUES", 100)  # six tokens of two heads of eight channels
    refinement = kv.refine(snapshot, packet, frame_tokens=20)
    assert (refinement.header.frame_tokens, refinement.header.frames) == (6, 8)
    assert_same_cache(refinement.apply(packet), snapshot)
    monkeypatch.setattr(encode_module, "_LARGEST_TOKEN", 15)
    with pytest.raises(kv.TooLarge, match="fewer at a time"):
        kv.refine(snapshot, packet)


def test_an_exact_base_needs_next_to_nothing():
    snapshot = realistic(256, layers=2)
    packet = kv.encode(snapshot, budget=1.0)
    refinement = kv.refine(snapshot, packet)
    assert len(refinement) < 0.02 * len(packet)
    assert_same_cache(refinement.apply(packet), snapshot)


def test_one_decoded_cache_serves_while_it_is_refined():
    """Level 1 of one layer leaves the others alone, and level 2 of a layer needs no other layer's level 1."""
    snapshot = small(layers=3)
    packet = kv.encode(snapshot, policy="uniform_int4")
    refinement = kv.refine(snapshot, packet)
    refiner, near = refiner_of(packet, refinement)
    before = [layer.keys.clone() for layer in near.layers]
    refiner.add(level_frames(refinement, 1)[1])
    refiner.add(level_frames(refinement, 2)[1])
    assert torch.equal(near.layers[1].keys, snapshot.layers[1].keys)
    assert all(torch.equal(near.layers[index].keys, before[index]) for index in (0, 2))
    assert refiner.level == 0
    assert refiner.missing(1) == [0, 2]
    with pytest.raises(CorruptPacket, match="frames 0, 2 of level 2 are missing"):
        refiner.verify()


def test_order_and_repetition_are_watched():
    snapshot = small()
    packet = kv.encode(snapshot, policy="uniform_int4")
    refinement = kv.refine(snapshot, packet)
    refiner, near = refiner_of(packet, refinement)
    one, two = level_frames(refinement, 1)[0], level_frames(refinement, 2)[0]
    with refused(near, "before that of level 1"):
        refiner.add(two)
    refiner.add(one)
    with refused(near, "twice"):
        refiner.add(one)
    refiner.add(two)
    for frame in (one, two):
        with refused(near, "twice"):
            refiner.add(frame)
    assert refiner.missing() == [1]


def test_the_wrong_base_is_refused():
    snapshot, other = small(), small(seed=1)
    packet, other_packet = (kv.encode(each, policy="uniform_int4") for each in (snapshot, other))
    better = kv.encode(snapshot, policy="uniform_int8")
    refinement = kv.refine(snapshot, packet)
    for wrong in (other_packet, better):
        with pytest.raises(IncompatibleIdentity, match="another packet") as caught:
            refinement.apply(wrong)
        assert set(caught.value.differences) == {"base packet"}
    with pytest.raises(InvalidInput, match="not decoded from this packet"):
        kv.Refiner(packet.header_bytes, kv.decode(other_packet), refinement.header_bytes)
    near = kv.decode(better)  # the right tokens, from another packet: found out before anything is written
    refiner = kv.Refiner(packet.header_bytes, near, refinement.header_bytes)
    with refused(near, "not as its packet was decoded"):
        refiner.add(refinement.frames[0])
    with pytest.raises(IncompatibleIdentity, match="another prompt"):
        kv.refine(other, packet)
    with pytest.raises(IncompatibleIdentity):
        kv.refine(small("float16"), packet)
    positions = replace(snapshot, positions=snapshot.positions + 1)
    with pytest.raises(InvalidInput, match="other positions"):
        kv.refine(positions, packet)


def test_a_cache_that_someone_wrote_to_is_found_out():
    snapshot = small()
    packet = kv.encode(snapshot, policy="uniform_int4")
    refinement = kv.refine(snapshot, packet)
    refiner, near = refiner_of(packet, refinement)
    for frame in level_frames(refinement, 1):
        refiner.add(frame)
    near.layers[1].values.view(torch.int16)[0, 1, 4, 2] ^= 1
    first, second = level_frames(refinement, 2)
    refiner.add(first)
    with refused(near, "not as its packet was decoded"):
        refiner.add(second)
    near.layers[1].values[0, 1, 4, 2] = refinement.apply(packet, level=1).layers[1].values[0, 1, 4, 2]
    refiner.add(second)
    refiner.verify()
    near.layers[0].keys[0, 0, 0, 0] += 1
    with pytest.raises(CorruptPacket, match="not the sender's"):
        refiner.verify()


def test_a_base_that_differs_between_machines_is_refused():
    snapshot = small()
    packet = kv.encode(snapshot, policy="uniform_int4")
    refinement = kv.refine(snapshot, packet)
    header = replace(parse_packet_header(packet.header_bytes), quantizers={"keys": ["klt"], "values": ["sym4"]})
    with pytest.raises(UnsupportedVersion, match="klt cannot be refined"):
        kv.refine(snapshot, replace(packet, header=header))
    raw = render_packet_header(header)
    own = render_header(replace(parse_header(refinement.header_bytes), base=raw[-16:]))
    with pytest.raises(UnsupportedVersion, match="klt cannot be refined"):
        kv.Refiner(raw, kv.decode(packet), own)


def test_files(tmp_path):
    snapshot = small()
    packet = kv.encode(snapshot, policy="uniform_int4")
    refinement = kv.refine(snapshot, packet)
    size = refinement.save(tmp_path / "refinement")
    assert size == (tmp_path / "refinement").stat().st_size
    loaded = kv.Refinement.load(tmp_path / "refinement", max_bytes=size)
    assert list(loaded.wire()) == list(refinement.wire())
    assert loaded.nbytes == len(loaded) == len(loaded.header_bytes) + sum(loaded.level_bytes)
    assert_same_cache(loaded.apply(packet), snapshot)
    packet.save(tmp_path / "packet")
    with pytest.raises(CorruptPacket, match="a packet, not a refinement"):
        kv.Refinement.load(tmp_path / "packet")
    with pytest.raises(kv.TooLarge):
        kv.Refinement.load(tmp_path / "refinement", max_bytes=size - 1)
    with pytest.raises(CorruptPacket, match="out of its place"):
        kv.Refinement.of(refinement.header_bytes, refinement.frames[::-1])
    with pytest.raises(CorruptPacket, match="3 frames"):
        kv.Refinement.of(refinement.header_bytes, refinement.frames[:3])


def test_every_flipped_byte_and_every_cut_is_refused():
    snapshot = small(tokens=3, layers=1)
    packet = kv.encode(snapshot, policy="uniform_int4")
    refinement = kv.refine(snapshot, packet)
    near = kv.decode(packet)
    message = refinement.header_bytes
    for place in range(len(message)):
        for wrong in (message[:place], message[:place] + bytes([message[place] ^ 0x41]) + message[place + 1 :]):
            with pytest.raises((*REFUSALS, IncompatibleIdentity)):
                kv.Refiner(packet.header_bytes, near, wrong)
    refiner = kv.Refiner(packet.header_bytes, near, message)
    for frame in map(bytes, refinement.frames):
        for place in range(len(frame)):
            for wrong in (frame[:place], frame[:place] + bytes([frame[place] ^ 0x41]) + frame[place + 1 :]):
                with refused(near):
                    refiner.add(wrong)
        with refused(near):
            refiner.add(frame + b"\0")
        refiner.add(frame)
    refiner.verify()


def forgery(valid: bytes, dice: random.Random) -> bytes:
    """The frame, changed in a few places behind its id, with the length and checksum that belong to that."""
    frame = bytearray(valid)
    for _ in range(dice.choice((1, 1, 2, 8))):
        place = dice.randrange(32, len(frame) - 8)
        match dice.randrange(3):
            case 0:
                frame[place] ^= 1 << dice.randrange(8)
            case 1:
                frame[place : place + 4] = dice.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x7f"))
            case _:
                del frame[place : place + dice.randrange(1, 9)]
    frame[8:16] = len(frame).to_bytes(8, "little")
    return resigned(frame)


def test_forged_frames_never_make_a_wrong_cache():
    """Whoever computes the checksum anew, but not the cache: no cache but the right one comes out."""
    snapshot = unmasked(make_snapshot([FULL], batch=2, seq_len=40, kv_heads=2, head_dim=8, dtype="bfloat16"))
    packet = kv.encode(snapshot, policy="sink_protect", nominal_budget=0.4)
    refinement = kv.refine(snapshot, packet)
    dice = random.Random(7)
    harmless = 0

    def prepared(level):
        refiner, near = refiner_of(packet, refinement)
        for frame in refinement.frames[:level]:
            refiner.add(frame)
        return refiner, near, contents(near)

    for level, valid in enumerate(map(bytes, refinement.frames), 1):
        refiner, near, before = prepared(level - 1)
        _, _, right = prepared(level)
        for _ in range(400):
            forged = forgery(valid, dice)
            try:
                refiner.add(forged)
            except REFUSALS:
                assert contents(near) == before
            else:  # a residual that rounding makes the same
                assert contents(near) == right
                harmless += forged != valid
                refiner, near, before = prepared(level - 1)
    assert harmless < 40


def test_a_header_that_lies_about_its_packet_is_refused():
    snapshot = small(tokens=20)
    packet = kv.encode(snapshot, policy="pdtrim", nominal_budget=0.5)
    refinement = kv.refine(snapshot, packet)
    header = parse_header(refinement.header_bytes)
    assert header.mask
    near = kv.decode(packet)
    from kvferry.ship.fields import encode_mask

    hides = encode_mask(torch.zeros_like(packet.header.mask))
    same = encode_mask(packet.header.mask)
    for lie in (
        {"batch": 2},
        {"seq_len": 21},
        {"frames": 3},
        {"frame_tokens": 4},
        {"mask": hides},
        {"mask": same},
        {"mask": header.mask[:-1]},
        {"frames": 2**60},
    ):
        with pytest.raises(REFUSALS):
            kv.Refiner(packet.header_bytes, near, render_header(replace(header, **lie)))
