"""Frames: one part of the cache each, self-describing, checked, decodable in any order.

Layout, little endian::

    0   magic "KVFR"              4   version u16     6   payload kind u8    7   level u8
    8   bytes of the whole frame u64                  16  packet id, 16 bytes
    32  index u32                 36  first layer u32                        40  layer behind the last u32
    44  first token u64           52  token behind the last u64
    60  body
    …   XXH3-64 of all before

Payload kind 0 (rows): for each layer the description of the keys, that of the values, the sections of the keys, those
of the values. A description is a byte (number of tiers in use, at most 15; + 128 in a values' one that has the map of
its keys), for each tier the length of its spec and the spec, and, where there is more than one tier and no map to
share, the tiers of the sent tokens (sequence by sequence), in as many bits as they need, lowest bit first. A section is
what the tier's quantiser writes for one sequence: sequence by sequence, tiers in order. Which tokens are sent is what
the packet's mask says; the others have zeros at the receiver.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kvferry.errors import CorruptPacket, UnsupportedVersion
from kvferry.ship.allocate import Allocation
from kvferry.ship.layout import BY_LAYER, FrameSlot, Layout
from kvferry.ship.parts import BodyReader, Part, count_tiers, description_nbytes, make_part, used_tiers
from kvferry.ship.quantize import quantizer
from kvferry.snapshot import LayerState

MAGIC = b"KVFR"
VERSION = 1
SPECS = ("klt", "raw")
"""What a header names as the quantisers of packets of kind `CODED`."""

ROWS, CODED = 0, 1
"""Payload kinds: tiers of row quantisers; all layers by a transform (`kvferry.ship.transform.body`)."""

_FIXED = struct.Struct("<4sHBBQ16sIIIQQ")
_SUM_BYTES = 8
LEAST_FRAME = _FIXED.size + _SUM_BYTES


def frame_nbytes(
    tiers: tuple[UInt8[Tensor, "batch tokens"], UInt8[Tensor, "batch tokens"]],
    sent: Bool[Tensor, "batch tokens"],
    specs: tuple[Sequence[str], Sequence[str]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> int:
    """Exact bytes of a one-layer frame whose keys and values have these tiers.

    Args:
        tiers: of keys and of values; one and the same tensor where the map is shared.
        sent: tokens of which something is sent.
        specs: quantisers of the key tiers and of the value tiers.
        shape: ``(kv_heads, head_dim, value_head_dim)``.
        dtype: of the source.
    """
    total = LEAST_FRAME
    counts = count_tiers(tiers[0], sent, len(specs[0]))
    same = tiers[1] is tiers[0]
    for side, dim in enumerate(shape[1:]):
        if side == 1 and not same:
            counts = count_tiers(tiers[1], sent, len(specs[1]))
        total += description_nbytes(counts, specs[side], same=same and side == 1)
        for tier in used_tiers(counts):
            method = quantizer(specs[side][tier])
            total += sum(method.nbytes(shape[0], row[tier], dim, dtype) for row in counts)
    return total


def encode_frame(slot: FrameSlot, packet: bytes, layers: Sequence[LayerState], allocation: Allocation) -> memoryview:
    """Build the frame of ``slot``: one buffer of its exact size, written once.

    Args:
        slot: which layers and tokens.
        packet: the packet's id.
        layers: all layers of the snapshot.
        allocation: tiers of its tokens.
    """
    sent = allocation.sent[:, slot.start : slot.stop]
    layout: list[list[tuple[Part, Tensor, int]]] = []
    total = LEAST_FRAME
    for index in range(slot.first_layer, slot.last_layer):
        layer = layers[index]
        assert layer.keys is not None
        assert layer.values is not None
        tokens = slice(slot.start - layer.first, slot.stop - layer.first)
        sides = []
        for part, tensor in zip(_parts(allocation, index, slot, sent), (layer.keys, layer.values), strict=True):
            size = part.nbytes(tensor.shape[1], tensor.shape[3], tensor.dtype)
            total += len(part.description) + size
            sides.append((part, tensor[:, :, tokens], size))
        layout.append(sides)
    out = torch.empty(total, dtype=torch.uint8)
    view = memoryview(out.numpy()).cast("B")  # type: ignore[arg-type]
    _FIXED.pack_into(
        view,
        0,
        MAGIC,
        VERSION,
        ROWS,
        slot.level,
        total,
        packet,
        slot.index,
        slot.first_layer,
        slot.last_layer,
        slot.start,
        slot.stop,
    )
    at = _FIXED.size
    for sides in layout:
        for part, _, _ in sides:
            view[at : at + len(part.description)] = part.description
            at += len(part.description)
        for part, tensor, size in sides:
            part.encode(tensor, out[at : at + size])
            at += size
    assert at == total - _SUM_BYTES
    view[at:] = xxhash.xxh3_64_digest(view[:at])
    return view.toreadonly()


def envelope(slot: FrameSlot, packet: bytes, kind: int, body: bytes) -> memoryview:
    """The frame of ``slot`` around a body that is there already."""
    total = LEAST_FRAME + len(body)
    numbers = (slot.index, slot.first_layer, slot.last_layer, slot.start, slot.stop)
    inner = _FIXED.pack(MAGIC, VERSION, kind, slot.level, total, packet, *numbers) + body
    return memoryview(inner + xxhash.xxh3_64_digest(inner))


def announced_frame_length(prefix: bytes | memoryview) -> int:
    """Bytes of the whole frame, from its first 16; raises `CorruptPacket` or `UnsupportedVersion`."""
    if len(prefix) < 16 or bytes(prefix[:4]) != MAGIC:
        raise CorruptPacket("this is no frame of a kvferry packet: it does not begin with KVFR")
    version, _, _, length = struct.unpack_from("<HBBQ", prefix, 4)
    if version != VERSION:
        raise UnsupportedVersion(f"frame format {version}; this kvferry reads {VERSION}: upgrade kvferry to read it")
    return int(length)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame whose checksum, packet and place are right; its body is not looked at yet."""

    slot: FrameSlot
    body: memoryview
    kind: int


def open_frame(data: bytes | bytearray | memoryview, packet: bytes, layout: Layout) -> Frame:
    """Check a frame from the wire.

    Raises:
        CorruptPacket: damaged, cut, extended, of another packet, or not where it says.
        UnsupportedVersion: another version, payload kind or level.
    """
    view = memoryview(data).cast("B")
    length = announced_frame_length(view)
    if length != len(view) or length < LEAST_FRAME:
        raise CorruptPacket(f"a frame declares {length} bytes, but has {len(view)}: cut off or extended")
    if xxhash.xxh3_64_digest(view[:-_SUM_BYTES]) != view[-_SUM_BYTES:]:
        raise CorruptPacket("a frame does not match its checksum: it was damaged on the way")
    _, _, kind, level, _, owner, index, first, last, start, stop = _FIXED.unpack_from(view)
    if owner != packet:
        raise CorruptPacket("a frame belongs to another packet than this header's")
    if kind != (ROWS if layout.cut == BY_LAYER else CODED) or level != 0:
        raise UnsupportedVersion(
            f"frame {index} has payload kind {kind} at level {level}, which this kvferry cannot read"
        )
    if index >= layout.count:
        raise CorruptPacket(f"a frame has index {index}, but the packet has {layout.count} frames")
    slot = layout.slot(index)
    if (first, last, start, stop) != (slot.first_layer, slot.last_layer, slot.start, slot.stop):
        raise CorruptPacket(f"a frame says layers {first}…{last}, tokens {start}…{stop}; index {index} is {slot}")
    return Frame(slot, view[_FIXED.size : -_SUM_BYTES], kind)


def frame_specs(frame: Frame, sent: Bool[Tensor, "batch seq"]) -> list[tuple[str, str, int]]:
    """What a frame holds: ``("keys" or "values", spec, tokens)`` for each tier in use, of its first layer."""
    if frame.kind == CODED:
        count = int(sent[:, frame.slot.start : frame.slot.stop].sum())
        return [(side, SPECS[0], count) for side in ("keys", "values")]
    reader = BodyReader(frame.slot, frame.body, sent[:, frame.slot.start : frame.slot.stop])
    keys = reader.part(None)
    values = reader.part(keys)
    return [
        (side, method.spec, sum(row[tier] for row in part.counts))
        for side, part in (("keys", keys), ("values", values))
        for tier, method in enumerate(part.quantizers)
    ]


def frame_quantizers(frame: Frame, sent: Bool[Tensor, "batch seq"]) -> dict[str, set[str]]:
    """Specs of the keys and of the values of a frame's first layer; nothing else of it is looked at.

    Raises:
        CorruptPacket: there is no list of tiers where it should be.
        UnsupportedVersion: an unknown quantiser.
    """
    if frame.kind == CODED:
        return {side: set(SPECS) for side in ("keys", "values")}
    reader = BodyReader(frame.slot, frame.body, sent[:, frame.slot.start : frame.slot.stop])
    keys, _ = reader.table(None)
    reader.skip_map(len(keys))
    values, _ = reader.table(len(keys))
    return {side: {method.spec for method in methods} for side, methods in (("keys", keys), ("values", values))}


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredFrame:
    """A frame whose body is known to be consistent: nothing is left that could fail."""

    slot: FrameSlot
    sent: Bool[Tensor, "batch tokens"]
    sides: tuple[tuple[Part, memoryview], ...]  # keys, values, layer by layer

    @property
    def quantizers(self) -> dict[str, set[str]]:
        """Specs of the keys and of the values."""
        found: dict[str, set[str]] = {"keys": set(), "values": set()}
        for place, (part, _) in enumerate(self.sides):
            found["values" if place % 2 else "keys"].update(method.spec for method in part.quantizers)
        return found


def measure_frame(
    frame: Frame, sent: Bool[Tensor, "batch seq"], shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype
) -> MeasuredFrame:
    """Find every section of a frame; one whose sections do not fill it exactly is refused.

    Args:
        frame: from `open_frame`.
        sent: the packet's mask.
        shapes: ``(kv_heads, head_dim, value_head_dim)`` of each layer of the frame.
        dtype: of the cache.

    Raises:
        CorruptPacket: the body is inconsistent.
        UnsupportedVersion: it names an unknown quantiser.
    """
    here = sent[:, frame.slot.start : frame.slot.stop]
    reader = BodyReader(frame.slot, frame.body, here)
    sides = []
    for heads, key_dim, value_dim in shapes:
        keys = reader.part(None)
        values = reader.part(keys)
        for part, dim in ((keys, key_dim), (values, value_dim)):
            sides.append((part, reader.take(part.nbytes(heads, dim, dtype), "sections")))
    reader.end()
    return MeasuredFrame(frame.slot, here, tuple(sides))


def install_frame(
    frame: MeasuredFrame,
    targets: Sequence[Float[Tensor, "batch heads tokens dim"]],
) -> None:
    """Write a frame into its place: decoded tokens, and zeros where nothing is sent.

    Args:
        frame: from `measure_frame`.
        targets: keys, then values, layer by layer: the part of the tensors that the frame covers, any strides.
    """
    absent = None if bool(frame.sent.all()) else [(~row).nonzero().flatten() for row in frame.sent]
    for (part, data), target in zip(frame.sides, targets, strict=True):
        part.decode(bytes_tensor(data), target)
        if absent is not None:
            for row, tokens in enumerate(absent):
                target[row].index_fill_(1, tokens.to(target.device), 0)


def _parts(allocation: Allocation, layer: int, slot: FrameSlot, sent: Tensor) -> tuple[Part, Part]:
    tokens = slice(slot.start, slot.stop)
    key_tiers = allocation.tiers(layer, keys=True)[:, tokens]
    keys = make_part(key_tiers, sent, allocation.specs.keys)
    if allocation.same_map:
        return keys, make_part(key_tiers, sent, allocation.specs.values, keys)
    return keys, make_part(allocation.tiers(layer, keys=False)[:, tokens], sent, allocation.specs.values)


class _Lent:
    """Memory of someone else, shown to numpy as writable: torch knows no read-only tensors and only warns."""

    def __init__(self, data: memoryview):
        self.owner = data
        address = np.frombuffer(data, np.uint8).ctypes.data
        self.__array_interface__ = {"shape": (len(data),), "typestr": "|u1", "data": (address, False), "version": 3}


def bytes_tensor(data: memoryview) -> UInt8[Tensor, " nbytes"]:
    """Bytes as a uint8 tensor that shares their memory; nothing may write to it."""
    return torch.from_numpy(np.asarray(_Lent(data))) if len(data) else torch.empty(0, dtype=torch.uint8)
