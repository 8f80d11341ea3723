"""Messages of the socket channel: a fixed head with a checksum over everything, and a payload.

=========  ====  =======================================================================
field      size  meaning
=========  ====  =======================================================================
magic      4     ``KVFC``
version    2     `PROTOCOL_VERSION`, little endian like all below
kind       1     `Kind`
reserved   1     0
handoff    16    BLAKE2b-128 of the hand-off's name
index      8     of the frame; for HELLO and HEADER the XXH3-64 of the header that is meant, 0 for none
stamp      8     monotonic nanoseconds at which the message was given to the link
checksum   8     XXH3-64 of the 40 bytes before it and of the payload
=========  ====  =======================================================================

The consumer speaks first: HELLO, answered by HEADER (or WAIT, as long as there is none yet), then WANT with ranges of
frame indices, at most `MAX_WANTED` in all, each answered by one FRAME when it has been produced, and at last DONE,
answered by BYE. WAIT says every half a second that the producer lives. REPEAT says that a message came damaged. ERROR
goes both ways, with a `kvferry.channel.faults` object. Nothing depends on a message arriving: whoever misses
something asks again, and what is not wanted is dropped.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from kvferry.channel.base import MAX_FRAMES
from kvferry.errors import CorruptPacket

PROTOCOL_VERSION = 1
MAGIC = b"KVFC"
MAX_WANTED = 256
MAX_REQUEST_BYTES = 16 << 10
"""Most bytes of one part of a message from a consumer; a larger one closes its connection."""

_HEAD = struct.Struct("<4sHBB16sQQQ")
_CHECKED = _HEAD.size - 8
HEAD_BYTES = _HEAD.size
_VERSION = struct.Struct("<4sH")
_HEADER = struct.Struct("<IQ")


class Kind(IntEnum):
    """What a message is; numbers are never used again for anything else."""

    HELLO = 1
    HEADER = 2
    WAIT = 3
    WANT = 4
    FRAME = 5
    DONE = 6
    BYE = 7
    REPEAT = 8
    ERROR = 9


@dataclass(frozen=True, slots=True)
class Message:
    """One message, checked."""

    kind: Kind
    handoff: bytes
    index: int = 0
    stamp: int = 0
    payload: bytes | memoryview = b""

    @property
    def size(self) -> int:
        """Bytes of head and payload."""
        return HEAD_BYTES + len(self.payload)


class Damaged(Exception):
    """The message is not the one that was sent, or makes no sense."""


class Foreign(Damaged):
    """The bytes are no message of this protocol."""


class OtherVersion(Exception):
    """The message is of another version of this protocol, whose number is the argument."""


def handoff_key(name: str) -> bytes:
    """The 16 bytes that stand for a hand-off's name on the wire."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def digest(data: bytes | memoryview) -> int:
    """XXH3-64, never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1


def pack(kind: Kind, handoff: bytes, index: int = 0, payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """The two parts of a message, stamped with the present time."""
    head = _HEAD.pack(MAGIC, PROTOCOL_VERSION, kind, 0, handoff, index, time.monotonic_ns(), 0)[:_CHECKED]
    return [head + _checksum(head, payload).to_bytes(8, "little"), payload]


def unpack(parts: Sequence[bytes | memoryview]) -> Message:
    """Inverse of `pack`; raises `Damaged` or `OtherVersion`."""
    if not parts or len(parts[0]) < _VERSION.size:
        raise Foreign("no head")
    head = bytes(parts[0][:HEAD_BYTES])
    magic, version = _VERSION.unpack_from(head)
    if magic != MAGIC:
        raise Foreign("no magic")
    sound = len(parts) == 2 and len(parts[0]) == HEAD_BYTES
    if version != PROTOCOL_VERSION:
        if sound and _checksum(_as_ours(head), parts[1]) == int.from_bytes(head[_CHECKED:], "little"):
            raise Damaged("the version was damaged: with this one's the checksum is right")
        raise OtherVersion(version)
    if not sound:
        raise Damaged("wrong number or size of parts")
    _, _, kind, reserved, handoff, index, stamp, checksum = _HEAD.unpack(head)
    if checksum != _checksum(head[:_CHECKED], parts[1]):
        raise Damaged("wrong checksum")
    if reserved or kind not in Kind.__members__.values():
        raise Damaged(f"unknown kind {kind}")
    return Message(Kind(kind), handoff, index, stamp, parts[1])


def pack_header(header: bytes, limits: Sequence[int], note: bytes) -> bytes:
    """Payload of HEADER."""
    sizes = struct.pack(f"<{len(limits)}Q", *limits)
    return b"".join((_HEADER.pack(len(limits), len(note)), sizes, note, header))


def unpack_header(payload: bytes | memoryview) -> tuple[bytes, tuple[int, ...], bytes]:
    """Header, limits and note out of a payload of HEADER; raises `CorruptPacket`."""
    if len(payload) < _HEADER.size:
        raise CorruptPacket("the producer's answer to HELLO is too short")
    count, note_bytes = _HEADER.unpack_from(payload)
    start = _HEADER.size + 8 * count
    if count > MAX_FRAMES or start + note_bytes > len(payload):
        raise CorruptPacket(
            f"the producer announces {count} frames and a note of {note_bytes} bytes that are not there"
        )
    limits = struct.unpack_from(f"<{count}Q", payload, _HEADER.size)
    return bytes(payload[start + note_bytes :]), limits, bytes(payload[start : start + note_bytes])


def pack_ranges(indices: Iterable[int]) -> bytes:
    """Payload of WANT: ascending indices as ranges ``start, stop``."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1][1] += 1
        else:
            ranges.append([index, index + 1])
    return b"".join(struct.pack("<II", *pair) for pair in ranges)


def unpack_ranges(payload: bytes | memoryview, count: int) -> list[int]:
    """Inverse of `pack_ranges` for a hand-off of ``count`` frames; raises `Damaged` for more than `MAX_WANTED`."""
    if len(payload) % 8 or len(payload) > 8 * MAX_WANTED:
        raise Damaged("no list of ranges")
    wanted: list[int] = []
    for start, stop in struct.iter_unpack("<II", payload):
        if not start < stop <= count or len(wanted) + stop - start > MAX_WANTED:
            raise Damaged(f"frames {start} to {stop} of {count}")
        wanted.extend(range(start, stop))
    return wanted


def _as_ours(head: bytes) -> bytes:
    """The checked part of a head, with this version's number."""
    return _VERSION.pack(MAGIC, PROTOCOL_VERSION) + head[_VERSION.size : _CHECKED]


def _checksum(head: bytes, payload: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(head)
    state.update(payload)
    return state.intdigest()
