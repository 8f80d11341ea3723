"""Packets of policy klt: what is promised of any packet holds of them, and what is theirs alone."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvferry as kv
from kvferry.errors import BudgetTooSmall, CorruptPacket, IncompatibleIdentity, InvalidInput, KVFerryError
from kvferry.ship import native
from kvferry.ship.encode import any_plan, estimate_size
from kvferry.ship.entropy import coder
from kvferry.ship.frame import CODED
from kvferry.ship.layout import WHOLE
from kvferry.ship.reader import MAX_EXPANSION, PacketReader
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.block import _octave_bins
from kvferry.ship.transform.store import keep
from kvferry.snapshot import FULL, LayerKind, Snapshot
from tests.attacks.test_packets import FRAME, frame_with, header_with, sign_frame
from tests.ship.builders import left_padded, unmasked
from tests.ship.transform.builders import error, make_cache, make_transform, with_token
from tests.snapshot.builders import SLIDING, assert_same_snapshot, same_bits

MIXED = (FULL, SLIDING, FULL, LayerKind("shared", 0))
N_SINK = 4
Pair = tuple[Snapshot, Transform]


def pair(seq_len: int = 200, batch: int = 2, dtype: str = "bfloat16", seed: int = 3, **settings: int) -> Pair:
    made = {"kv_heads": 2, "head_dim": 8, "value_head_dim": 6, **settings}
    snapshot = unmasked(make_cache(MIXED, batch=batch, seq_len=seq_len, dtype=dtype, seed=seed, **made))
    return snapshot, make_transform(snapshot.identity)


@pytest.fixture(scope="module")
def made() -> Pair:
    """Two sequences of 200 tokens; the layers are full, sliding over 8, full, shared."""
    return pair()


def ship(snapshot: Snapshot, transform: Transform, budget: float | None, **options: int) -> tuple[kv.Packet, Snapshot]:
    packet = kv.encode(snapshot, budget, "klt", transform=transform, **options)
    return packet, kv.decode(packet, transform=transform)


def bits_of(snapshot: Snapshot, row: int, token: int) -> list[torch.Tensor]:
    """Keys and values of one token in every layer that holds it."""
    return [
        tensor[row, :, token - layer.first]
        for layer in snapshot.layers
        for tensor in (layer.keys, layer.values)
        if tensor is not None and token >= layer.first
    ]


def assert_exact(got: Snapshot, want: Snapshot, row: int, token: int) -> None:
    for one, other in zip(bits_of(got, row, token), bits_of(want, row, token), strict=True):
        assert same_bits(one, other)


def test_every_budget_is_met_and_more_bytes_are_better(made: Pair, tmp_path: Path) -> None:
    snapshot, transform = made
    last = 9.0
    for budget in (0.2, 0.22, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7):
        packet, decoded = ship(snapshot, transform, budget)
        limit = int(budget * packet.full_bytes)
        assert 0.9 * limit < len(packet) <= packet.save(tmp_path / "p") <= limit
        found = error(decoded, snapshot)
        assert found <= 1.02 * last
        last = found
        assert estimate_size(snapshot, budget, "klt", transform=transform) == len(packet)
        assert_same_snapshot(kv.decode(kv.Packet.load(tmp_path / "p"), transform=transform), decoded)
    assert last < 3e-3  # of bfloat16's own rounding
    assert error(ship(snapshot, transform, 0.2)[1], snapshot) < 0.2


def test_a_transform_of_the_caches_own_kind_beats_every_other_policy(made: Pair) -> None:
    snapshot, transform = made
    ours = error(ship(snapshot, transform, 0.6)[1], snapshot)
    assert ours < 0.1 * error(kv.decode(kv.encode(snapshot, 0.6, "auto")), snapshot)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    return tmp_path


def test_the_default_takes_the_kept_transform_where_bytes_are_few(own_folder: Path) -> None:
    snapshot, transform = pair(seq_len=600, kv_heads=4, head_dim=16, value_head_dim=16)
    before = kv.encode(snapshot, 0.28)
    assert before.policy != "klt"
    keep(transform)
    packet = kv.encode(snapshot, 0.28)
    assert (packet.policy, packet.report["transform"]) == ("klt", transform.digest)
    assert error(kv.decode(packet), snapshot) < error(kv.decode(before), snapshot)
    assert estimate_size(snapshot, 0.28) == len(packet)
    assert kv.encode(snapshot, 0.6).policy == "optimal"
    assert bytes(kv.encode(snapshot, 0.28, "fast").to_bytes()) == bytes(before.to_bytes())
    for asked in ({"nominal_budget": 0.6}, {"budget": 0.29, "scores": "kv_norm"}, {"budget": 0.29, "decay": 0.001}):
        assert kv.encode(snapshot, **asked).policy != "klt", asked
    other, _ = pair(seq_len=600, kv_heads=4, head_dim=32, value_head_dim=16)
    assert kv.encode(other, 0.28).policy != "klt", "a transform of another model"


def test_the_default_takes_a_transform_that_is_given(made: Pair, own_folder: Path) -> None:
    snapshot, transform = made
    transform.save(own_folder / "one")
    packet = kv.encode(snapshot, 0.28, transform=own_folder / "one")
    assert packet.policy == "klt"
    assert kv.encode(snapshot, 0.6, transform=transform).policy == "optimal"
    with pytest.raises(IncompatibleIdentity):
        kv.encode(pair(head_dim=16)[0], 0.28, transform=transform)
    with pytest.raises(InvalidInput, match="not for fast"):
        kv.encode(snapshot, 0.28, "fast", transform=transform)


@pytest.mark.parametrize("seq_len", [40, 80, 600])
def test_the_default_says_the_least_budget_of_all_that_it_can_do(seq_len: int, own_folder: Path) -> None:
    snapshot, transform = pair(seq_len=seq_len)
    keep(transform)
    least = {}
    for policy in ("auto", "fast", "klt"):
        with pytest.raises(BudgetTooSmall) as small:
            kv.encode(snapshot, 0.001, policy)
        least[policy] = small.value.least_budget
    assert least["auto"] == min(least["fast"], least["klt"])
    assert kv.encode(snapshot, least["auto"]).budget <= least["auto"]


def test_no_budget_is_the_finest_step_and_a_whole_one_is_bit_exact(made: Pair) -> None:
    snapshot, transform = made
    packet, decoded = ship(snapshot, transform, 1.0)
    assert (packet.policy, packet.budget) == ("full", 1.0)
    assert_same_snapshot(replace(decoded, identity=snapshot.identity), snapshot)
    float32 = pair(dtype="float32", seq_len=40)
    packet, decoded = ship(*float32, None)
    assert packet.policy == "klt"
    assert error(decoded, float32[0]) < 1e-3  # of components that the basis has no bits for


def test_what_a_packet_says_of_itself(made: Pair) -> None:
    snapshot, transform = made
    packet, decoded = ship(snapshot, transform, 0.3)
    assert packet.quantizer == "klt+raw / klt+raw"
    assert packet.header.cut == WHOLE
    assert packet.report["transform"] == transform.digest
    assert packet.report["raw_tokens"] == 2 * N_SINK
    assert packet.full_bytes == kv.encode(snapshot, policy="full").full_bytes
    assert decoded.identity.construction[-1] == f"packet(klt; klt+raw / klt+raw, {len(packet)})"
    rows = packet.bits_by_layer()
    assert len(rows) == 4
    assert sum(row["bytes"] for row in rows) == pytest.approx(sum(map(len, packet.frames)), abs=4)


@pytest.mark.parametrize("n_sink", [0, 1, 4, 9])
def test_the_first_tokens_are_raw(made: Pair, n_sink: int) -> None:
    snapshot, transform = made
    packet, decoded = ship(snapshot, transform, 0.4, n_sink=n_sink)
    assert packet.report["raw_tokens"] == 2 * n_sink
    for token in range(n_sink):
        assert_exact(decoded, snapshot, 1, token)
    assert not same_bits(decoded.layers[0].keys[:, :, n_sink:], snapshot.layers[0].keys[:, :, n_sink:])


def test_left_padding(made: Pair) -> None:
    snapshot, transform = made
    padded = left_padded(snapshot, 200, 61)
    packet, decoded = ship(padded, transform, 0.3)
    assert packet.report["padding"] == 139
    assert torch.equal(decoded.mask, padded.mask)
    assert torch.equal(decoded.positions, padded.positions)
    for layer in decoded.layers[:3]:
        for tensor in (layer.keys, layer.values):
            assert not tensor[1, :, : max(0, 139 - layer.first)].any()
    for token in range(139, 143):
        assert_exact(decoded, padded, 1, token)
    # the keys were turned by the positions of a row without padding
    told = replace(padded, positions=snapshot.positions)
    assert error(ship(told, transform, 0.4)[1], told) < 0.05


def test_a_cache_of_which_nothing_is_shown(made: Pair) -> None:
    snapshot, transform = made
    hidden = replace(snapshot, mask=torch.zeros_like(snapshot.mask))
    _, decoded = ship(hidden, transform, None)
    assert not any(bool(layer.keys.any()) for layer in decoded.layers[:3])


@pytest.mark.parametrize("seq_len", [2, 5, 7, 8, 9, 11, 12, 33])
def test_sliding_layers_shorter_and_longer_than_their_window(seq_len: int) -> None:
    """A window of eight holds seven tokens; near four tokens all are sinks."""
    snapshot, transform = pair(seq_len)
    packet, decoded = ship(snapshot, transform, None)
    assert decoded.layers[1].keys.shape[2] == min(7, seq_len)
    for token in range(min(seq_len, N_SINK)):
        assert_exact(decoded, snapshot, 0, token)
    assert packet.report["raw_tokens"] == 2 * min(seq_len, N_SINK)
    # what a packet has beside its codes is more than all else of a few tokens
    assert error(decoded, snapshot) < (0.5 if seq_len < 33 else 0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tokens_that_are_not_finite_are_raw(made: Pair, value: float) -> None:
    snapshot, transform = made
    plain = ship(snapshot, transform, 0.3)[1]
    packet, decoded = ship(with_token(snapshot, 1, 77, value), transform, 0.3)
    assert (packet.report["nonfinite"], packet.report["outlying"], packet.report["raw_tokens"]) == (1, 0, 9)
    assert_exact(decoded, with_token(snapshot, 1, 77, value), 1, 77)
    others = replace(snapshot, mask=torch.arange(200).expand(2, 200) != 77)
    assert error(replace(decoded, mask=others.mask), others) < 1.2 * error(replace(plain, mask=others.mask), others)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_finite_outliers_go_raw_and_harm_no_other_token(dtype: str) -> None:
    snapshot, transform = pair(dtype=dtype)
    plain = ship(snapshot, transform, 0.3)[1]
    others = replace(snapshot, mask=torch.arange(200).expand(2, 200) != 77)
    want = error(replace(plain, mask=others.mask), others)
    for value in (1e3, -1e9, 1e30, 3e38):
        hurt = with_token(snapshot, 0, 77, value)
        packet, decoded = ship(hurt, transform, 0.3)
        assert (packet.report["nonfinite"], packet.report["outlying"]) == (0, 1)
        assert_exact(decoded, hurt, 0, 77)
        assert error(replace(decoded, mask=others.mask), others) < 1.2 * want


def test_frames_of_some_tokens_each_in_any_order(made: Pair) -> None:
    snapshot, transform = made
    packet, decoded = ship(snapshot, transform, 0.6, frame_tokens=48)
    assert [(slot.start, slot.stop) for slot in packet.header.layout] == [
        (0, 48), (48, 96), (96, 144), (144, 192), (192, 200)
    ]  # fmt: skip
    assert error(decoded, snapshot) < 0.1
    orders = [list(range(5))[::-1], [2, 0, 4, 1, 3]]
    for order in orders:
        reader = PacketReader(packet.header_bytes, transform=transform)
        for place, index in enumerate(order):
            assert reader.add(packet.frames[index]) == range(4)
            assert reader.complete == (place == 4)
        assert_same_snapshot(reader.snapshot(), decoded)
    reader = PacketReader(packet.header_bytes, transform=transform)
    reader.add(packet.frames[1])
    with pytest.raises(CorruptPacket, match="came twice"):
        reader.add(packet.frames[1])
    assert reader.missing() == [0, 2, 3, 4]
    with pytest.raises(CorruptPacket, match="incomplete"):
        reader.snapshot()


def test_a_frame_of_another_packet_is_refused(made: Pair) -> None:
    snapshot, transform = made
    packet = kv.encode(snapshot, 0.3, "klt", transform=transform)
    for other in (
        kv.encode(snapshot, 0.32, "klt", transform=transform),
        kv.encode(with_token(snapshot, 0, 9, 0.5), 0.3, "klt", transform=transform),
        kv.encode(snapshot, 0.6, "greedy"),
    ):
        reader = PacketReader(packet.header_bytes, transform=transform)
        with pytest.raises(CorruptPacket, match="another packet"):
            reader.add(other.frames[0])


def test_the_right_transform_and_no_other(made: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    snapshot, transform = made
    packet = kv.encode(snapshot, 0.3, "klt", transform=transform)
    with pytest.raises(InvalidInput, match=f"{transform.digest}, which is not here"):
        kv.decode(packet)
    with pytest.raises(InvalidInput, match="ship calibrate"):
        kv.encode(snapshot, 0.3, "klt")
    with pytest.raises(IncompatibleIdentity, match="another transform"):
        kv.decode(packet, transform=make_transform(snapshot.identity, seed=1))
    stranger = make_transform(replace(snapshot.identity, weights="v" * 16))
    with pytest.raises(IncompatibleIdentity, match="of another model"):
        kv.encode(snapshot, 0.3, "klt", transform=stranger)
    forged = replace(transform, identity=stranger.identity)
    renamed = json.loads(json.dumps(packet.report)) | {"transform": forged.digest}
    header = header_with(packet, {"report": renamed})
    with pytest.raises(IncompatibleIdentity, match="not its model's"):
        PacketReader(header, transform=forged)
    keep(transform)
    assert_same_snapshot(kv.decode(packet), kv.decode(packet, transform=transform))
    assert len(kv.encode(snapshot, 0.3, "klt")) == len(packet)
    for digest in (None, 7, "x", "../../../../../../../etc/passwd0"):
        header = header_with(packet, {"report": {**packet.report, "transform": digest}})
        with pytest.raises(CorruptPacket, match="which transform"):
            PacketReader(header, transform=transform)
    assert frame_with(packet.frames[0]) == packet.frames[0]


def test_what_makes_no_sense(made: Pair) -> None:
    snapshot, transform = made
    for budget in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="budget"):
            kv.encode(snapshot, budget, "klt", transform=transform)
    for options in (
        {"scores": "kv_norm"}, {"nominal_budget": 0.5}, {"quantizers": "sym"}, {"decay": 0.1}, {"n_sink": -1},
        {"frame_tokens": 0},
    ):  # fmt: skip
        with pytest.raises(InvalidInput):
            kv.encode(snapshot, None, "klt", transform=transform, **options)
    with pytest.raises(InvalidInput, match="for policies klt and auto, not for greedy"):
        kv.encode(snapshot, 0.5, "greedy", transform=transform)
    with pytest.raises(kv.UnsupportedVersion, match="klt cannot be refined"):
        kv.refine(snapshot, kv.encode(snapshot, 0.3, "klt", transform=transform))


def test_a_budget_that_is_too_small_says_what_would_do(made: Pair) -> None:
    snapshot, transform = made
    for budget in (0.1, 1e-3, 1e-9):
        with pytest.raises(BudgetTooSmall) as caught:
            kv.encode(snapshot, budget, "klt", transform=transform)
    packet = kv.encode(snapshot, caught.value.least_budget, "klt", transform=transform)
    assert packet.budget <= caught.value.least_budget


def test_no_packet_is_made_that_its_reader_refuses() -> None:
    """At the coarsest step nearly nothing is left of a token: less than a reader believes."""
    snapshot, transform = pair(1500, batch=1, dtype="float64", kv_heads=16, head_dim=32, value_head_dim=32)
    with pytest.raises(BudgetTooSmall, match=f"{MAX_EXPANSION} times") as caught:
        kv.encode(snapshot, 0.0008, "klt", transform=transform, n_sink=0)
    assert 0.0009 < caught.value.least_budget < 0.001
    packet = kv.encode(snapshot, 0.0011, "klt", transform=transform, n_sink=0)
    assert kv.decode(packet, transform=transform).seq_len == 1500


@pytest.mark.skipif(not native.available(), reason=native.why_not() or "no compiled kernels")
def test_without_kernels_the_bytes_are_the_same(made: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, transform = made
    padded = left_padded(snapshot, 150, 200)
    packets = [kv.encode(padded, budget, "klt", transform=transform) for budget in (0.3, 0.5)]
    decoded = kv.decode(packets[0], transform=transform)
    monkeypatch.setenv("KVFERRY_NATIVE", "0")
    for packet, budget in zip(packets, (0.3, 0.5), strict=True):
        assert kv.encode(padded, budget, "klt", transform=transform).to_bytes() == packet.to_bytes()
    assert_same_snapshot(kv.decode(packets[0], transform=transform), decoded)


def test_attention_of_the_last_queries_moves_bits() -> None:
    """Tokens that the last queries look at come out better than without them."""
    snapshot = unmasked(make_cache((FULL, FULL), seq_len=120, heads=4, head_dim=8, kv_heads=2, dtype="float32", seed=5))
    transform = make_transform(snapshot.identity)
    target = 50
    layers = tuple(
        replace(layer, queries=(20 * layer.keys[:, :, target] / layer.keys[:, :, target].norm(dim=-1, keepdim=True))
                .repeat_interleave(2, dim=1)[:, :, None].expand(1, 4, 3, 8).contiguous())
        for layer in snapshot.layers
    )  # fmt: skip
    looking = replace(snapshot, layers=layers)
    blind = replace(snapshot, layers=tuple(replace(layer, queries=None) for layer in layers))
    only = torch.arange(120)[None] == target

    def wrong(source: Snapshot) -> float:
        return error(replace(ship(source, transform, 0.25)[1], mask=only), replace(snapshot, mask=only))

    assert wrong(looking) < 0.8 * wrong(blind)


def test_a_plan_is_what_the_packet_becomes(made: Pair) -> None:
    snapshot, transform = made
    planned = any_plan(snapshot, 0.3, "klt", transform=transform, nonce=b"once")
    packet = kv.Packet.of(planned.header_bytes, list(planned.frames()))
    assert planned.frame_sizes == tuple(map(len, packet.frames))
    assert planned.nbytes == len(packet)
    assert all(frame[6] == CODED for frame in packet.frames)
    again = any_plan(snapshot, 0.3, "klt", transform=transform, nonce=b"twice")
    assert again.header_bytes != planned.header_bytes


def body_with(packet: kv.Packet, body: bytes) -> bytes:
    """The first frame with another body, signed."""
    raw = bytearray(packet.frames[0][: FRAME.size]) + body
    struct.pack_into("<Q", raw, 8, len(raw) + 8)
    return sign_frame(bytes(raw))


def bodies(transform: Transform, body: bytes) -> dict[str, bytes]:
    """Signed bodies that lie, by what is wrong with them."""
    step, counts = body[:2], struct.unpack_from("<I", body, 2)[0]
    assert counts == N_SINK
    rest = body[22:]

    def index(*tokens: int) -> bytes:
        return struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)

    return {
        "nothing": b"",
        "half a step": body[:1],
        "a step too small": struct.pack("<h", -1281) + body[2:],
        "a step too large": struct.pack("<h", 769) + body[2:],
        "another step": struct.pack("<h", struct.unpack("<h", step)[0] + 64) + body[2:],
        "raw tokens in another order": step + index(1, 0, 2, 3) + rest,
        "a raw token twice": step + index(0, 1, 1, 3) + rest,
        "a raw token behind the frame": step + index(0, 1, 2, 40) + rest,
        "a raw token far away": step + index(0, 1, 2, 2**32 - 1) + rest,
        "no end of raw tokens": step + struct.pack("<I", 2**32 - 1) + rest,
        "a raw token more": step + index(0, 1, 2, 3, 9) + rest,
        "a raw token less": step + index(0, 1, 2) + rest,
        "cut within raw tokens": body[:300],
        "cut within a block": body[:-1],
        "a byte more": body + b"\0",
        "no blocks": body[: 22 + N_SINK * 2 * 3 * (16 + 12)],
    }


@pytest.fixture(scope="module")
def small() -> tuple[kv.Packet, Transform]:
    snapshot, transform = pair(40, batch=1)
    return kv.encode(snapshot, 0.8, "klt", transform=transform), transform


def test_signed_bodies_that_lie(small: tuple[kv.Packet, Transform]) -> None:
    packet, transform = small
    body = bytes(packet.frames[0][FRAME.size : -8])
    assert body_with(packet, body) == packet.frames[0]
    header = header_with(packet, payload=packet.header.payload_bytes + 1000)
    for name, other in bodies(transform, body).items():
        reader = PacketReader(header, transform=transform)
        own = bytearray(body_with(packet, other))
        own[16:32] = header[-16:]
        with pytest.raises(CorruptPacket):
            reader.add(sign_frame(bytes(own[:-8])))
        assert reader.received == frozenset(), name


def test_a_weight_that_no_encoder_gives_is_refused(small: tuple[kv.Packet, Transform]) -> None:
    packet, transform = small
    body = bytes(packet.frames[0][FRAME.size : -8])
    at = 22 + 2 * (N_SINK * 2 * (8 + 6)) * 2  # behind the raw tokens of the two layers that hold them
    (length,) = struct.unpack_from("<I", body, at)
    octaves = coder.decode(transform.tables.bank, body[at + 4 : at + 4 + length], 1, 36, *_octave_bins(36))
    assert np.abs(octaves).max() <= 8
    for value in (9, -9, 2**31 - 1, -(2**31)):
        octaves[0, 5] = value
        stream = coder.encode(transform.tables.bank, torch.from_numpy(octaves), *_octave_bins(36))
        other = body[:at] + struct.pack("<I", len(stream)) + stream + body[at + 4 + length :]
        with pytest.raises(CorruptPacket, match="weight is out of range"):
            read(packet, transform, other)


def read(packet: kv.Packet, transform: Transform, body: bytes) -> Snapshot:
    """What a reader makes of another body; the header allows for it."""
    forged = body_with(packet, body)
    header = header_with(packet, payload=max(len(forged), packet.header.payload_bytes))
    reader = PacketReader(header, transform=transform)
    reader.add(frame_with(memoryview(forged), packet=header[-16:]))
    return reader.snapshot()


def test_any_signed_body_is_refused_or_makes_a_finite_cache(small: tuple[kv.Packet, Transform]) -> None:
    packet, transform = small
    body = bytes(packet.frames[0][FRAME.size : -8])
    rng = random.Random(1)
    accepted = refused = 0
    for _ in range(400):
        changed = bytearray(body)
        for _ in range(rng.choice([1, 1, 2, 8])):
            place = rng.randrange(len(changed))
            kind = rng.random()
            if kind < 0.7:
                changed[place] = rng.randrange(256)
            elif kind < 0.85:
                del changed[place : place + rng.randrange(1, 9)]
            else:
                changed[place:place] = rng.randbytes(rng.randrange(1, 9))
        try:
            got = read(packet, transform, bytes(changed))
        except (CorruptPacket, kv.TooLarge):
            refused += 1
        else:
            accepted += 1
            assert len(changed) == len(body) or bytes(changed) != body
            assert got.seq_len == 40
    assert refused > 200
    assert accepted > 5  # raw tokens may hold anything


def test_flipped_bytes_are_refused_and_leave_nothing(small: tuple[kv.Packet, Transform]) -> None:
    packet, transform = small
    want = kv.decode(packet, transform=transform)
    reader = PacketReader(packet.header_bytes, transform=transform)
    raw = bytearray(packet.frames[0])
    for place in range(len(raw)):
        raw[place] ^= 1 << place % 8
        with pytest.raises(KVFerryError):
            reader.add(raw)
        raw[place] ^= 1 << place % 8
    assert reader.received == frozenset()
    reader.add(raw)
    assert_same_snapshot(reader.snapshot(), want)


def test_a_refused_frame_writes_nothing_over_what_is_there() -> None:
    """The second frame is damaged at its very end; what the first one wrote, and the rest of memory, stay."""
    snapshot, transform = pair(64, batch=1)
    packet = kv.encode(snapshot, 0.8, "klt", transform=transform, frame_tokens=32)
    reader = PacketReader(packet.header_bytes, transform=transform)
    reader.add(packet.frames[0])
    tensors = [tensor for pair_ in reader._tensors if pair_ is not None for tensor in pair_]
    for tensor in tensors:
        tensor[:, :, -tensor.shape[2] // 2 :] = 7.0
    before = [tensor.clone() for tensor in tensors]
    body = bytearray(packet.frames[1][:-8])
    body[-1] ^= 1
    assert len(body) > FRAME.size
    with pytest.raises(CorruptPacket):
        reader.add(sign_frame(bytes(body)))
    assert all(same_bits(one, other) for one, other in zip(tensors, before, strict=True))
