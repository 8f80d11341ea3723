"""Packets on the wire: damaged, cut, mixed up, and forged by someone who can compute checksums.

What the checksums bind is refused. Whoever computes them anew can send other numbers, but takes no more memory, makes
no other shape and no crash: headers and frames are written down here a second time, to sign what has been changed.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import CorruptPacket, KVFerryError, TooLarge, UnsupportedVersion
from kvferry.ship.encode import encode
from kvferry.ship.fields import TOKEN_BYTES
from kvferry.ship.header import render_header
from kvferry.ship.packet import Packet
from kvferry.ship.reader import MAX_EXPANSION, PacketReader
from kvferry.snapshot import FULL, LayerKind
from tests.snapshot.builders import SLIDING, make_snapshot, same_bits

REFUSALS = (CorruptPacket, UnsupportedVersion, TooLarge)
FIXED = struct.Struct("<8sHHQQQQQQQd16sQQQQ")
FIELDS = (
    "magic", "version", "cut", "length", "batch", "seq_len", "frame_tokens", "frames", "payload", "full", "nominal",
    "content", "text", "ids", "positions", "mask",
)  # fmt: skip
FRAME = struct.Struct("<4sHBBQ16sIIIQQ")
FRAME_FIELDS = ("magic", "version", "kind", "level", "length", "packet", "index", "first", "last", "start", "stop")


def make_packet(seed: int = 0, *, frame_tokens: int | None = 8, nominal: float = 0.4) -> Packet:
    snapshot = make_snapshot(
        (FULL, SLIDING, LayerKind("shared", 0)), batch=2, seq_len=21, head_dim=16, dtype="bfloat16", seed=seed
    )
    same = make_snapshot((FULL,), batch=2, seq_len=21)
    snapshot = replace(snapshot, token_ids=same.token_ids, mask=same.mask)  # packets of all seeds are about one prompt
    return encode(
        snapshot, policy="sink_protect", nominal_budget=nominal, scores="positional", frame_tokens=frame_tokens
    )


@pytest.fixture(scope="module")
def packet() -> Packet:
    return make_packet()


def decoded(packet: Packet):
    reader = PacketReader(packet.header_bytes)
    for frame in packet.frames:
        reader.add(frame)
    return reader.snapshot()


def sign_header(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_digest(body)


def sign_frame(body: bytes) -> bytes:
    return body + xxhash.xxh3_64_digest(body)


def header_with(packet: Packet, description: dict | None = None, /, **changes: object) -> bytes:
    """The header with fields of its fixed part or of its JSON changed, lengths and checksum right."""
    raw = packet.header_bytes[:-16]
    fixed = dict(zip(FIELDS, FIXED.unpack_from(raw), strict=True))
    rest = raw[FIXED.size :]
    if description is not None:
        plain = json.loads(rest[: fixed["text"]])
        plain.update(description)
        new = json.dumps(plain, separators=(",", ":")).encode()
        rest, fixed["text"] = new + rest[fixed["text"] :], len(new)
        fixed["length"] = FIXED.size + len(rest) + 16
    return sign_header(FIXED.pack(*{**fixed, **changes}.values()) + rest)


def frame_with(frame: memoryview, **changes: object) -> bytes:
    fixed = dict(zip(FRAME_FIELDS, FRAME.unpack_from(frame), strict=True))
    return sign_frame(FRAME.pack(*{**fixed, **changes}.values()) + bytes(frame[FRAME.size : -8]))


def test_the_forms_written_here_are_the_librarys(packet):
    assert header_with(packet) == packet.header_bytes
    assert [frame_with(frame) for frame in packet.frames] == list(packet.frames)


def test_every_flipped_bit_of_the_header_is_refused(packet):
    raw = bytearray(packet.header_bytes)
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(REFUSALS):
            PacketReader(raw)
        raw[bit // 8] ^= 1 << bit % 8


def test_every_flipped_bit_of_a_frame_is_refused_and_forgotten(packet):
    """After any number of broken copies the good ones still make the right cache."""
    want = decoded(packet)
    reader = PacketReader(packet.header_bytes)
    for index in (0, len(packet.frames) - 1):
        raw = bytearray(packet.frames[index])
        for bit in range(0, 8 * len(raw), 3 if index == 0 else 1):
            raw[bit // 8] ^= 1 << bit % 8
            with pytest.raises(REFUSALS):
                reader.add(raw)
            raw[bit // 8] ^= 1 << bit % 8
    assert reader.received == frozenset()
    for frame in packet.frames:
        reader.add(frame)
    for got, right in zip(reader.snapshot().layers, want.layers, strict=True):
        assert same_bits(got.keys, right.keys)
        assert same_bits(got.values, right.values)


def test_cut_and_extended_messages(packet):
    reader = PacketReader(packet.header_bytes)
    frame = packet.frames[0]
    for stop in range(len(frame)):
        with pytest.raises(REFUSALS):
            reader.add(frame[:stop])
    for stop in range(0, len(packet.header_bytes), 3):
        with pytest.raises(REFUSALS):
            PacketReader(packet.header_bytes[:stop])
    for extra in (b"\0", b"x" * 100, bytes(frame)):
        with pytest.raises(REFUSALS):
            reader.add(bytes(frame) + extra)
        with pytest.raises(REFUSALS):
            PacketReader(packet.header_bytes + extra)


def test_cut_spliced_and_extended_streams(packet):
    data, other = packet.to_bytes(), make_packet(1).to_bytes()
    rng = random.Random(0)
    cases = [data[:stop] for stop in range(0, len(data), 37)] + [data + b"\0", data + data, b"\0" + data]
    for _ in range(300):
        a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        cases += [data[:a] + data[b:], data[:a] + other[a:], data[:a] + rng.randbytes(b - a) + data[b:]]
    for case in cases:
        if case in (data, other):
            continue
        with pytest.raises(REFUSALS):
            Packet.from_bytes(case)


def test_frames_of_another_cache_of_the_same_prompt_are_refused(packet):
    other = make_packet(1)
    assert torch.equal(other.header.token_ids, packet.header.token_ids)
    assert [len(frame) for frame in other.frames] == [len(frame) for frame in packet.frames]
    for index, frame in enumerate(other.frames):
        with pytest.raises(CorruptPacket, match="another packet"):
            PacketReader(packet.header_bytes).add(frame)
        frames = list(packet.frames)
        frames[index] = frame
        with pytest.raises(CorruptPacket):
            Packet.of(packet.header_bytes, frames)


def test_duplicates_and_losses(packet):
    reader = PacketReader(packet.header_bytes)
    for frame in reversed(packet.frames[1:]):
        reader.add(frame)
        with pytest.raises(CorruptPacket, match="twice"):
            reader.add(frame)
    assert reader.missing() == [0]
    with pytest.raises(CorruptPacket, match="frames 0 of"):
        reader.snapshot()
    doubled = [*packet.frames[:1], *packet.frames[:1], *packet.frames[2:]]
    for frames in (packet.frames[:-1], (*packet.frames, packet.frames[0]), doubled, packet.frames[::-1]):
        with pytest.raises(CorruptPacket):
            Packet.of(packet.header_bytes, frames)
    with pytest.raises(CorruptPacket):
        Packet.from_bytes(packet.header_bytes + b"".join(doubled))


FORGED_FIELDS = [
    {"magic": b"KVFERRYX"}, {"version": 0}, {"version": 2}, {"cut": 1}, {"length": 0}, {"length": 2**63},
    {"batch": 0}, {"batch": 1}, {"batch": 3}, {"batch": 2**40}, {"batch": 2**63}, {"seq_len": 0}, {"seq_len": 2**48},
    {"batch": 21, "seq_len": 2}, {"seq_len": 20}, {"seq_len": 22}, {"batch": 2**32, "seq_len": 2**32},
    {"frame_tokens": 0}, {"frame_tokens": 1}, {"frame_tokens": 30}, {"frame_tokens": 2**63}, {"frames": 0},
    {"frames": 2**40}, {"frames": 2**63}, {"payload": 2**63}, {"full": 2**63},
    {"full": 0}, {"full": 1000}, {"full": 100_000}, {"nominal": float("nan")},
    {"nominal": float("inf")}, {"nominal": -1.0}, {"text": 0}, {"ids": 2**63}, {"positions": 0}, {"mask": 2**40},
]  # fmt: skip


@pytest.mark.parametrize("changes", FORGED_FIELDS, ids=str)
def test_signed_headers_that_lie(packet, changes):
    with pytest.raises(REFUSALS) as caught:
        PacketReader(header_with(packet, **changes))
    assert len(str(caught.value)) < 500


def identity_with(packet: Packet, **geometry: object) -> dict:
    who = packet.identity.to_dict()
    return {"identity": {**who, "geometries": [{**who["geometries"][0], **geometry}, *who["geometries"][1:]]}}


FORGED_TEXTS = {
    "heads without end": lambda p: identity_with(p, kv_heads=2**20 - 1, head_dim=2**20 - 1),
    "no heads": lambda p: identity_with(p, kv_heads=0),
    "heads as text": lambda p: identity_with(p, kv_heads="3"),
    "heads as a fraction": lambda p: identity_with(p, kv_heads=2.5),
    "heads as a truth": lambda p: identity_with(p, kv_heads=True),
    "a chunked layer": lambda p: identity_with(p, kind="chunked(8)"),
    "a recurrent layer": lambda p: identity_with(p, kind="recurrent"),
    "a layer of no kind": lambda p: identity_with(p, kind="full(3)"),
    "a layer that shares itself": lambda p: identity_with(p, kind="shared(0)"),
    "more layers": lambda p: {"identity": {**p.identity.to_dict(), "layers": [0] * 5}},
    "layers of another geometry": lambda p: {"identity": {**p.identity.to_dict(), "layers": [0, 9, 0]}},
    "a great many layers": lambda p: {"identity": {**p.identity.to_dict(), "layers": [0] * 20_000}},
    "no layers": lambda p: {"identity": {**p.identity.to_dict(), "layers": []}},
    "integers": lambda p: {"identity": {**p.identity.to_dict(), "dtype": "int8"}},
    "a dtype that is a module": lambda p: {"identity": {**p.identity.to_dict(), "dtype": "nn"}},
    "no identity": lambda p: {"identity": None},
    "a field more": lambda p: {"code": "import os"},
    "a policy that is none": lambda p: {"policy": ["greedy"]},
    "a long policy": lambda p: {"policy": "x" * 1000},
    "a report that is none": lambda p: {"report": 3},
    "quantisers that are none": lambda p: {"quantizers": {"keys": "sym8", "values": []}},
    "quantisers of one side": lambda p: {"quantizers": {"keys": []}},
    "much of nothing": lambda p: {"report": {"x": [0] * 40_000}},
    "deep": lambda p: {"report": json.loads("[" * 400 + "]" * 400)},
}


@pytest.mark.parametrize("name", sorted(FORGED_TEXTS))
def test_signed_descriptions_that_lie(packet, name):
    with pytest.raises(REFUSALS):
        PacketReader(header_with(packet, FORGED_TEXTS[name](packet)))


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"XXXX"}, {"version": 2}, {"kind": 1}, {"level": 1}, {"length": 0}, {"length": 2**63},
        {"packet": bytes(16)}, {"index": 1}, {"index": 2**31}, {"first": 1}, {"last": 2}, {"last": 0}, {"start": 1},
        {"stop": 2**63}, {"start": 8, "stop": 16}, {"index": 1, "start": 8, "stop": 16},
    ],
    ids=str,
)  # fmt: skip
def test_signed_frames_that_lie(packet, changes):
    reader = PacketReader(packet.header_bytes)
    with pytest.raises(REFUSALS):
        reader.add(frame_with(packet.frames[0], **changes))
    assert reader.received == frozenset()


def test_signed_frames_with_any_body(packet):
    """Of 6,000 forged bodies each is refused or has exactly the announced size; none harms the reader."""
    rng = random.Random(7)
    refused = accepted = 0
    for _ in range(6000):
        index = rng.randrange(len(packet.frames))
        raw = bytearray(packet.frames[index][:-8])
        for _ in range(rng.choice([1, 1, 2, 8])):
            place = rng.randrange(FRAME.size, len(raw)) if rng.random() < 0.5 else FRAME.size + rng.randrange(40)
            if rng.random() < 0.7:
                raw[min(place, len(raw) - 1)] = rng.randrange(256)
            elif rng.random() < 0.5:
                del raw[place : place + rng.randrange(1, 9)]
            else:
                raw[place:place] = rng.randbytes(rng.randrange(1, 9))
        struct.pack_into("<Q", raw, 8, len(raw) + 8)
        reader = PacketReader(packet.header_bytes)
        try:
            reader.add(sign_frame(bytes(raw)))
        except REFUSALS:
            refused += 1
            assert reader.received == frozenset()
        else:
            accepted += 1
            assert len(raw) + 8 == len(packet.frames[index])
    assert min(refused, accepted) > 500  # both ways are exercised


def test_an_unknown_quantiser_is_a_newer_version_not_damage(packet):
    raw = bytes(packet.frames[0][:-8])
    assert raw.count(b"sym4") == 2
    with pytest.raises(UnsupportedVersion, match="zip4"):
        PacketReader(packet.header_bytes).add(sign_frame(raw.replace(b"sym4", b"zip4")))


def test_a_header_cannot_claim_more_memory_than_its_packet_is_worth(packet):
    wire = len(packet)
    sent = int(packet.header.mask.sum())
    heads = 2 * MAX_EXPANSION * wire // (sent * 16 * 2 * 2)
    forged = header_with(packet, identity_with(packet, kv_heads=heads), full=heads * (sent + 2) * 16 * 2 * 2)
    with pytest.raises(TooLarge, match="times its size"):
        PacketReader(forged)
    with pytest.raises(TooLarge, match="max_bytes"):
        PacketReader(packet.header_bytes, max_bytes=1000)


def test_a_header_that_sends_nothing_cannot_claim_rows_without_end():
    hidden = make_snapshot((FULL,), seq_len=8, kv_heads=1, head_dim=1)
    nothing = encode(replace(hidden, mask=torch.zeros_like(hidden.mask)))
    forged = header_with(nothing, identity_with(nothing, kv_heads=2**20 - 1, head_dim=512))
    with pytest.raises(TooLarge, match="times its size"):
        PacketReader(forged, max_bytes=2**40)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_quantisers_that_the_frames_do_not_have(packet, side):
    """The header's list is what reports show; a frame that has others is refused, and so is a packet that has less."""
    right = packet.header.quantizers
    for specs, early in ((["raw", "sym8"], True), ([*right[side], "sym2"], False), ([], True)):
        raw = header_with(packet, {"quantizers": {**right, side: specs}})
        frames = [frame_with(frame, packet=raw[-16:]) for frame in packet.frames]
        message = f"quantisers of the {side}"
        reader = PacketReader(raw)
        if early:
            with pytest.raises(CorruptPacket, match=message):
                reader.add(frames[0])
            assert reader.received == frozenset()
        else:
            for frame in frames:
                reader.add(frame)
            with pytest.raises(CorruptPacket, match=message):
                reader.snapshot()
        with pytest.raises(CorruptPacket, match=message):
            Packet.of(raw, frames)
        with pytest.raises(CorruptPacket, match=message):
            Packet.from_bytes(raw + b"".join(frames))


GROWTH = """
import re, sys
from pathlib import Path
from kvferry.ship.header import parse_header
def peak():  # not ru_maxrss, which a process inherits from the one that starts it
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
data = Path(sys.argv[1]).read_bytes()
before = peak()
header = parse_header(data)
print(header.token_ids.numel(), peak() - before)
"""


@pytest.mark.parametrize("kind", ["few bytes", "many bytes"])
def test_a_header_takes_17_bytes_a_token_and_no_copies(kind, tmp_path):
    """Eight of the id, eight of the position, one of the mask: as a snapshot holds them. 8 MiB are for all else."""
    seq_len = 4_000_000 if kind == "few bytes" else 800_000
    small = make_snapshot((FULL,), seq_len=8, kv_heads=1, head_dim=1, dtype="bfloat16")
    ids, positions = torch.arange(seq_len) % 200, torch.arange(seq_len)
    mask = torch.ones(seq_len, dtype=torch.bool)
    if kind == "many bytes":
        positions, mask = positions * 2, torch.rand(seq_len) < 0.5
    shown = {"token_ids": ids.unsqueeze(0), "positions": positions.unsqueeze(0), "mask": mask.unsqueeze(0)}
    header = replace(encode(small).header, **shown, payload_bytes=4 * seq_len)
    data = render_header(replace(header, full_bytes=len(render_header(header)) + 4 * seq_len + 78))
    (tmp_path / "header").write_bytes(data)
    command = [sys.executable, "-c", GROWTH, str(tmp_path / "header")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, grown = map(int, done.stdout.split())
    assert tokens == seq_len
    assert 0.9 * TOKEN_BYTES * seq_len < grown < TOKEN_BYTES * seq_len + (8 << 20)


CONFINED = """
import resource, sys
from pathlib import Path
from kvferry.errors import KVFerryError
from kvferry.ship.reader import PacketReader
header, frames = Path(sys.argv[1]).read_bytes(), [Path(p).read_bytes() for p in sys.argv[2:]]
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
reader = PacketReader(header)  # declares 4 GiB, and promises as much on the wire
for frame in frames:
    try:
        reader.add(frame)
    except KVFerryError as error:
        print(type(error).__name__)
    else:
        print("accepted")
"""


def test_nothing_is_allocated_before_a_frame_is_found_good(packet, tmp_path):
    """A header that declares 4 GiB costs nothing, and neither do frames for it, signed or not, that do not fit."""
    row = (2**20 - 1) * (64 + 16) * 2
    full = (int(packet.header.mask.sum()) + 2) * row
    who = identity_with(packet, kv_heads=2**20 - 1, head_dim=64)
    header = header_with(packet, who, payload=2**33, frames=5, full=full)
    names = ["header", *(f"frame{i}" for i in range(4))]
    own = header[-16:]
    good = frame_with(packet.frames[0], packet=own)
    frames = [bytes(packet.frames[0]), good[:-1], good, frame_with(packet.frames[0], packet=own, level=3)]
    for name, data in zip(names, [header, *frames], strict=True):
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", CONFINED, *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["CorruptPacket", "CorruptPacket", "CorruptPacket", "UnsupportedVersion"]


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_any_bytes_at_all(data):
    for read in (PacketReader, Packet.from_bytes, lambda raw: PacketReader(sign_header(raw))):
        with pytest.raises(KVFerryError):
            read(data)
