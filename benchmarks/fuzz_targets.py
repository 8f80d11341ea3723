"""What `benchmarks.fuzz` feeds the readers: one function a kind of input makes a mutant, tries it, and proves harmless
what is accepted.

A function returns what came of an accepted mutant; a refusal is the reader's own error; `NotHarmless` is a fault.
"""

from __future__ import annotations

import functools
import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import digest
from kvferry.channel.socket import message as wire
from kvferry.errors import CorruptPacket, IncompatibleIdentity, TooLarge, UnsupportedVersion
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.reader import PacketReader
from kvferry.ship.transform.artifact import Transform
from kvferry.snapshot import FULL, LayerKind, Snapshot
from tests.attacks.mutate import mutants
from tests.attacks.test_packets import FIELDS, FIXED, FRAME, sign_frame, sign_header
from tests.ship.transform.builders import make_cache, make_transform
from tests.snapshot.builders import SLIDING, make_identity, make_snapshot, same_bits

REFUSALS = (CorruptPacket, UnsupportedVersion, TooLarge, IncompatibleIdentity)
"""The last: a signed header that names another model, or another transform, than the reader's transform is of."""

MAX_BYTES = 32 << 20
"""Most bytes that a decoded cache may have here."""


class NotHarmless(Exception):
    """An accepted mutant that does what it must not; the message says what."""


def require(true: bool, what: str) -> None:
    """Raise `NotHarmless` unless ``true``."""
    if not true:
        raise NotHarmless(what)


KINDS = (FULL, SLIDING, LayerKind("shared", 0))


@functools.cache
def transform() -> Transform:
    """What packets of policy klt are read with here; others need none."""
    return make_transform(make_identity(KINDS, head_dim=16, dtype="bfloat16"))


@functools.cache
def packets() -> list[tuple[Packet, Packet]]:
    """Pairs of packets of one form, other contents: all quantisers, dtypes and layer kinds, the last by a transform."""
    made = []
    for policy, nominal, frame_tokens, dtype, quantizers in (
        ("sink_protect", 0.4, 8, "bfloat16", None),
        ("uniform_int8", 0.5, None, "float16", None),
        ("greedy", 0.4, 16, "float32", ("raw", "asym8g8", "asym3row")),
        ("uniform_int4", 0.25, None, "bfloat16", ("raw", "asym8row", "chan4b16")),
        ("sws", 0.5, 8, "bfloat16", None),
    ):
        pair = []
        for seed in (0, 1):
            snapshot = make_snapshot(KINDS, batch=2, seq_len=21, head_dim=16, dtype=dtype, seed=seed)
            specs = {"asym": ("raw", "asym8g8", "asym3row"), "chan": ("raw", "asym8row", "chan4b16")}.get(
                quantizers or ""
            )
            options: dict[str, Any] = {} if specs is None else {"quantizers": {"keys": specs, "values": specs}}
            pair.append(
                encode(
                    snapshot, policy=policy, nominal_budget=nominal, scores="positional", frame_tokens=frame_tokens,
                    **options,
                )
            )  # fmt: skip
        made.append((pair[0], pair[1]))
    caches = [make_cache(KINDS, batch=2, seq_len=21, head_dim=16, dtype="bfloat16", seed=seed) for seed in (0, 1)]
    coded = [encode(cache, None, "klt", frame_tokens=8, transform=transform()) for cache in caches]
    return [*made, (coded[0], coded[1])]


def blind(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One of the mutations of someone who knows nothing."""
    changed = bytearray(data)
    at = rng.randrange(len(changed))
    length = rng.choice([1, 2, 3, 4, 8, 16, 64, 200])
    choice = rng.randrange(7)
    if choice == 0:
        for _ in range(rng.choice([1, 1, 2, 5])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif choice == 1:
        del changed[at : at + length]
    elif choice == 2:
        changed[at:at] = changed[at : at + length]
    elif choice == 3:
        piece = changed[at : at + length]
        del changed[at : at + length]
        to = rng.randrange(len(changed) + 1)
        changed[to:to] = piece
    elif choice == 4:
        changed[at : at + length] = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])
    elif choice == 5:
        changed[at:] = other[at:] if rng.random() < 0.5 else other[rng.randrange(len(other)) :]
    else:
        del changed[at:]
    return bytes(changed)


def signed(rng: random.Random, body: bytes, start: int) -> bytearray:
    """Changes behind ``start``, half of them near it, where the descriptions are."""
    changed = bytearray(body)
    for _ in range(rng.choice([1, 1, 2, 8])):
        last = len(changed) if rng.random() < 0.5 else min(len(changed), start + 60)
        at = rng.randrange(start, max(start + 1, last))
        choice = rng.random()
        if choice < 0.7 and at < len(changed):
            changed[at] = rng.choice([rng.randrange(256), changed[at] ^ 1 << rng.randrange(8)])
        elif choice < 0.85:
            del changed[at : at + rng.randrange(1, 9)]
        else:
            changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    return changed


def prove_cache(rng: random.Random, snapshot: Snapshot, reader: PacketReader) -> None:
    """The decoded cache is exactly as large and of such a shape as the header said beforehand, and can be used.

    That it can be sent on is tried with one in twenty.
    """
    header = reader.header
    require(snapshot.nbytes == header.cache_bytes <= MAX_BYTES, f"a cache of {snapshot.nbytes} bytes")
    shape = (header.batch, header.seq_len)
    for tensor, dtype in (
        (snapshot.token_ids, torch.int64), (snapshot.positions, torch.int64), (snapshot.mask, torch.bool),
    ):  # fmt: skip
        require(tuple(tensor.shape) == shape and tensor.dtype == dtype, "ids, positions or mask of another shape")
    for layer, geometry in zip(snapshot.layers, header.identity.layers, strict=True):
        for side, dim in ((layer.keys, geometry.head_dim), (layer.values, geometry.value_head_dim)):
            if geometry.kind.name == "shared":
                require(side is None, "a shared layer with tensors")
                continue
            assert side is not None
            held = (header.batch, geometry.kv_heads, geometry.kind.held(header.seq_len), dim)
            require(tuple(side.shape) == held and not side.is_sparse, f"a layer of {tuple(side.shape)}")
            float(side.float().nan_to_num().sum())  # every element can be read
    if rng.random() < 0.05:
        require(decode(encode(snapshot)).nbytes == snapshot.nbytes, "a cache that cannot be sent on")


def frame_blind(rng: random.Random) -> str:
    """A frame, mutated blindly."""
    valid, other = rng.choice(packets())
    index = rng.randrange(len(valid.frames))
    data = blind(rng, bytes(valid.frames[index]), bytes(other.frames[index]))
    reader = PacketReader(valid.header_bytes, transform=transform())
    reader.add(data)
    require(data == bytes(valid.frames[index]), "a damaged frame was accepted")
    return "unchanged"


def frame_signed(rng: random.Random) -> str:
    """A frame whose body, or head, was changed by someone who signs it."""
    valid, _ = rng.choice(packets())
    index = rng.randrange(len(valid.frames))
    raw = bytes(valid.frames[index][:-8])
    if rng.random() < 0.8:
        body = signed(rng, raw, FRAME.size)
    else:
        body = bytearray(raw)
        at = rng.randrange(FRAME.size)
        width = min(rng.choice([1, 2, 4, 8]), FRAME.size - at)
        body[at : at + width] = rng.choice([bytes(width), b"\xff" * width, rng.randbytes(width)])
    if rng.random() < 0.9:
        struct.pack_into("<Q", body, 8, len(body) + 8)
    reader = PacketReader(valid.header_bytes, transform=transform())
    before = reader.received
    try:
        reader.add(sign_frame(bytes(body)))
    except REFUSALS:
        require(reader.received == before, "a refused frame changed the reader")
        # whatever it left behind, the right frames still make the right cache
        if rng.random() < 0.1:
            for frame in valid.frames:
                reader.add(frame)
            require(digest(reader.snapshot()) == right(valid), "a refused frame left something behind")
        raise
    (taken,) = reader.received
    for place, frame in enumerate(valid.frames):
        if place != taken:
            reader.add(frame)
    try:
        snapshot = reader.snapshot()
    except REFUSALS:
        return "accepted, packet refused at its end"
    prove_cache(rng, snapshot, reader)
    prove_only_that_slot(snapshot, valid, taken)
    return "accepted, harmless"


def prove_only_that_slot(snapshot: Snapshot, valid: Packet, taken: int) -> None:
    """Outside the forged frame's layers and tokens every bit is as it was."""
    want, slot = right_cache(valid), valid.header.layout.slot(taken)
    require(torch.equal(snapshot.token_ids, want.token_ids), "a frame changed the token ids")
    for index, (got, other) in enumerate(zip(snapshot.layers, want.layers, strict=True)):
        for one, two in ((got.keys, other.keys), (got.values, other.values)):
            if one is None or two is None:
                continue
            first = want.seq_len - one.shape[2]
            left, right_side = one.clone(), two.clone()
            if slot.first_layer <= index < slot.last_layer:
                tokens = slice(max(0, slot.start - first), max(0, slot.stop - first))
                left[:, :, tokens] = right_side[:, :, tokens] = 0
            require(same_bits(left, right_side), f"a frame of {slot} changed layer {index}")


def packet_blind(rng: random.Random) -> str:
    """A whole packet, mutated blindly, or with its frames in another order."""
    pair = rng.choice(packets())
    valid, other = pair
    if rng.random() < 0.02:
        frames = [bytes(frame) for frame in valid.frames]
        rng.shuffle(frames)
        data = valid.header_bytes + b"".join(frames)
    else:
        data = blind(rng, valid.to_bytes(), other.to_bytes())
    packet = Packet.from_bytes(data, max_bytes=MAX_BYTES)
    found = digest(decode(packet, max_bytes=MAX_BYTES, transform=transform()))
    require(found in {right(each) for each in pair}, "a damaged packet was accepted")
    return "accepted, the same cache"


def packet_signed(rng: random.Random) -> str:
    """A packet whose header was changed by someone who signs it, and makes its frames belong to it."""
    valid, _ = rng.choice(packets())
    raw = valid.header_bytes[:-16]
    if rng.random() < 0.5:
        fixed = dict(zip(FIELDS, FIXED.unpack_from(raw), strict=True))
        name = rng.choice(FIELDS[2:])
        was = fixed[name]
        if isinstance(was, bytes):
            fixed[name] = rng.randbytes(len(was))
        elif isinstance(was, float):
            fixed[name] = rng.choice([0.0, -1.0, 1.0, 17.0, float("nan"), float("inf")])
        elif name in ("version", "cut"):
            fixed[name] = rng.randrange(1 << 16)
        else:
            near = [was + step for step in (-8, -1, 1, 2, 8) if was + step >= 0]
            fixed[name] = rng.choice([*near, 0, was * 2, 2**20, 2**31, 2**48, 2**63, 2**64 - 1, rng.randrange(2**64)])
        body = bytearray(FIXED.pack(*fixed.values()) + raw[FIXED.size :])
    elif rng.random() < 0.5:
        body = bytearray(_other_text(rng, raw))
    else:
        body = signed(rng, raw, FIXED.size)
        if rng.random() < 0.8:
            struct.pack_into("<Q", body, 12, len(body) + 16)
    header = sign_header(bytes(body))
    frames = []
    for frame in valid.frames:
        changed = bytearray(frame[:-8])
        changed[16:32] = header[-16:]
        frames.append(sign_frame(bytes(changed)))
    packet = Packet.from_bytes(header + b"".join(frames), max_bytes=MAX_BYTES)
    reader = PacketReader(header, max_bytes=MAX_BYTES, transform=transform())
    for frame in packet.frames:
        reader.add(frame)
    prove_cache(rng, reader.snapshot(), reader)
    return "accepted, harmless"


def _other_text(rng: random.Random, raw: bytes) -> bytes:
    """One value of the header's JSON is another."""
    fixed = dict(zip(FIELDS, FIXED.unpack_from(raw), strict=True))
    rest = raw[FIXED.size :]
    plain = json.loads(rest[: fixed["text"]])
    node: Any = plain
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
            break
        node = node[key]
    values: list[Any] = [
        None, True, 0, 1, -1, 2**31, 2**64, 1.5, "", "x" * 300, "full", "sliding(8)", "shared(0)", "sym8", "float32",
        "float16", [], {}, [[]],
    ]  # fmt: skip
    if isinstance(node[key], int):
        values += [node[key] + 1, node[key] - 1, node[key] * 2] * 3
    node[key] = rng.choice(values)
    text = json.dumps(plain, separators=(",", ":")).encode()
    rest = text + rest[fixed["text"] :]
    fixed["text"], fixed["length"] = len(text), FIXED.size + len(rest) + 16
    return FIXED.pack(*fixed.values()) + rest


def message(rng: random.Random) -> str:
    """A message of the socket channel, blind or signed, as either end would take it apart."""
    payload = rng.choice(
        [
            wire.pack_header(b"header" * 9, [100] * 5, b"note"),
            wire.pack_ranges([1, 2, 3, 7, 9]),
            bytes(packets()[0][0].frames[0]),
            b'{"type":"CorruptPacket","message":"no"}',
            b"",
        ]
    )
    if rng.random() < 0.5:
        payload = blind(rng, payload or b"x", b"other" * 20)
        parts = wire.pack(rng.choice(list(wire.Kind)), rng.randbytes(16), rng.randrange(2**64), payload)
    else:
        head, body = wire.pack(rng.choice(list(wire.Kind)), rng.randbytes(16), rng.randrange(2**64), payload)
        flat = blind(rng, bytes(head) + bytes(body), b"other" * 20)
        parts = [flat[: wire.HEAD_BYTES], flat[wire.HEAD_BYTES :]][: rng.choice([1, 2, 2, 2])]
    got = wire.unpack(parts)
    require(got.payload == parts[1], "another payload")
    if got.kind == wire.Kind.HEADER:
        header, limits, note = wire.unpack_header(got.payload)
        require(len(header) + 8 * len(limits) + len(note) <= len(got.payload), "more than was sent")
    elif got.kind == wire.Kind.WANT:
        wanted = wire.unpack_ranges(got.payload, 50)
        require(len(wanted) <= wire.MAX_WANTED and all(0 <= index < 50 for index in wanted), "frames that are not")
    return "accepted, harmless"


@functools.cache
def files() -> list[list[bytes]]:
    """Mutants of packets' files, the systematic ones of the test suite first."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for valid, other in packets():
            paths = [Path(folder) / "valid", Path(folder) / "other"]
            valid.save(paths[0])
            other.save(paths[1])
            cases = mutants(paths[0].read_bytes(), paths[1].read_bytes(), seed=0, count=1_200)
            found.append([case.data for case in cases])
    return found


def packet_file(rng: random.Random) -> str:
    """A packet's file, mutated; every mutant of these is to be refused."""
    data = rng.choice(rng.choice(files()))
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        packet = Packet.load(file.name, max_bytes=MAX_BYTES)
        decode(packet, max_bytes=MAX_BYTES, transform=transform())
    raise NotHarmless("a broken file was accepted")


@functools.cache
def right_cache(packet: Packet) -> Snapshot:
    """The cache of a valid packet."""
    return decode(packet, transform=transform())


@functools.cache
def right(packet: Packet) -> bytes:
    """Its digest."""
    return digest(right_cache(packet))


TARGETS: dict[str, tuple[Callable[[random.Random], str], float]] = {
    "frame, blind": (frame_blind, 0.20),
    "frame, signed": (frame_signed, 0.40),
    "packet, blind": (packet_blind, 0.12),
    "packet, signed": (packet_signed, 0.12),
    "packet file": (packet_file, 0.04),
    "socket message": (message, 0.12),
}
"""Name -> how one mutant is made and tried, and its share of all mutants."""
