"""A packet: a cache encoded, whole in memory; on disk a valid safetensors file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket, TooLarge
from kvferry.ship import sizing
from kvferry.ship.frame import announced_frame_length, bytes_tensor, frame_quantizers, frame_specs, open_frame
from kvferry.ship.header import PacketHeader, announced_length, packet_id, parse_header
from kvferry.snapshot import Identity
from kvferry.snapshot.container import naming, read_container, write_container


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """An encoded cache. ``len(packet)`` is its bytes on the wire: header and frames, all checksums in.

    Attributes:
        header_bytes: the header message.
        frames: the frames, in the order of their index.
        header: the header, parsed.
    """

    header_bytes: bytes
    frames: tuple[memoryview, ...]
    header: PacketHeader

    @classmethod
    def of(cls, header_bytes: bytes | memoryview, frames: Sequence[bytes | memoryview]) -> Packet:
        """Check a header and its frames, and put them together.

        Raises:
            CorruptPacket, UnsupportedVersion, TooLarge: what is wrong with them.
        """
        raw = bytes(header_bytes)
        return cls._verified(raw, parse_header(raw), (memoryview(frame).cast("B") for frame in frames), in_order=True)

    @classmethod
    def _verified(cls, raw: bytes, header: PacketHeader, views: Iterable[memoryview], *, in_order: bool) -> Packet:
        """Open every frame, once, and put them in their places."""
        owner = packet_id(raw)
        found: dict[int, memoryview] = {}
        quantizers: dict[str, set[str]] = {"keys": set(), "values": set()}
        for place, view in enumerate(views):
            frame = open_frame(view, owner, header.layout)
            index = frame.slot.index
            if index in found:
                raise CorruptPacket(f"frame {index} is there twice")
            if in_order and index != place:
                raise CorruptPacket(f"the packet's frame {place} is out of its place")
            for side, specs in frame_quantizers(frame, header.mask).items():
                quantizers[side] |= specs
            found[index] = view
        if len(found) != header.frames:
            raise CorruptPacket(f"the packet has {len(found)} frames, its header announces {header.frames}")
        if sum(map(len, found.values())) != header.payload_bytes:
            raise CorruptPacket("the packet's frames do not have the bytes that its header announces")
        header.check_quantizers(quantizers, complete=True)
        return cls(raw, tuple(found[index] for index in range(header.frames)), header)

    def __len__(self) -> int:
        return len(self.header_bytes) + sum(map(len, self.frames))

    def __bool__(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self)

    @property
    def identity(self) -> Identity:
        """Who made the cache."""
        return self.header.identity

    @property
    def policy(self) -> str:
        """The policy that chose the tiers."""
        return self.header.policy

    @property
    def full_bytes(self) -> int:
        """Bytes of the same packet with every token raw, in the source's dtype."""
        return self.header.full_bytes

    @property
    def budget(self) -> float:
        """Actual budget: ``len(packet) / full_bytes``."""
        return len(self) / self.full_bytes

    @property
    def nominal_budget(self) -> float:
        """The policy's b: mean cost of a token, scales and maps and headers not counted."""
        return self.header.nominal_budget

    @property
    def report(self) -> dict[str, Any]:
        """What the encoder says: tokens of padding, dropped, with NaN or infinity; the scorer, the seed."""
        return dict(self.header.report)

    @property
    def quantizer(self) -> str:
        """The quantisers in use, as ``keys / values``."""
        return self.header.quantizer

    def bits_by_layer(self) -> list[dict[str, Any]]:
        """For each layer: bytes of its frames, bits an element of what is sent, and tokens of each quantiser.

        Layers that share a frame share its bytes evenly.
        """
        header, layout = self.header, self.header.layout
        rows: list[dict[str, Any]] = [
            {"layer": index, "kind": str(layer.kind), "bytes": 0, "bits": 0.0, "keys": {}, "values": {}}
            for index, layer in enumerate(header.identity.layers)
        ]
        elements = [0] * len(rows)
        for view in self.frames:
            frame = open_frame(view, packet_id(self.header_bytes), layout)
            specs = frame_specs(frame, header.mask)
            layers = range(frame.slot.first_layer, frame.slot.last_layer)
            for layer in layers:
                row, geometry = rows[layer], header.identity.layers[layer]
                row["bytes"] += len(view) // len(layers)
                for side, spec, tokens in specs:
                    row[side][spec] = row[side].get(spec, 0) + tokens
                    dim = geometry.head_dim if side == "keys" else geometry.value_head_dim
                    elements[layer] += tokens * geometry.kv_heads * dim
        for row, count in zip(rows, elements, strict=True):
            row["bits"] = round(8 * row["bytes"] / count, 4) if count else 0.0
        return rows

    def wire(self) -> Iterator[bytes | memoryview]:
        """The packet as it goes over a wire: the header, then each frame."""
        yield self.header_bytes
        yield from self.frames

    def to_bytes(self) -> bytes:
        """The whole packet in one piece; `from_bytes` reads it."""
        return b"".join(self.wire())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, max_bytes: int | None = None) -> Packet:
        """Inverse of `to_bytes`; frames may come in any order, and share memory with ``data``.

        Raises:
            CorruptPacket, UnsupportedVersion: no packet, a damaged one, or one of a newer format.
            TooLarge: ``data``, or what its header becomes in memory, has more than ``max_bytes``.
        """
        view = memoryview(data).cast("B")
        if max_bytes is not None and len(view) > max_bytes:
            raise TooLarge(f"the packet has {len(view):,} bytes, more than the limit of {max_bytes:,}")
        stop = announced_length(view)
        if stop > len(view):
            raise CorruptPacket(f"the packet ends within its header: {len(view)} of {stop} bytes")
        raw = bytes(view[:stop])
        header = parse_header(raw, max_bytes=max_bytes)
        if len(view) - stop != header.payload_bytes:
            raise CorruptPacket(
                f"the packet has {len(view) - stop} bytes of frames, its header announces {header.payload_bytes}"
            )
        return cls._verified(raw, header, _frames(view[stop:]), in_order=False)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write a valid safetensors file, whole or not at all; returns its bytes."""
        tensors = {sizing.HEADER_TENSOR: bytes_tensor(memoryview(self.header_bytes))}
        for slot, view in zip(self.header.layout, self.frames, strict=True):
            tensors[sizing.frame_tensor(slot.first_layer, slot.start)] = bytes_tensor(view)
        return write_container(path, sizing.PACKET_KIND, tensors, {})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> Packet:
        """Read what `save` wrote. Every checksum is verified; nothing is decoded.

        Raises:
            CorruptPacket, UnsupportedVersion: no packet's file, a damaged one, or one of a newer format.
            TooLarge: the file, or what its header becomes in memory, has more than ``max_bytes``.
            InvalidInput: there is no such file.
        """
        container = read_container(path, kind=sizing.PACKET_KIND, max_bytes=max_bytes)
        with naming(path):
            return cls._from_tensors(dict(container.tensors), max_bytes)

    @classmethod
    def _from_tensors(cls, tensors: dict[str, Tensor], max_bytes: int | None) -> Packet:
        header_tensor = tensors.pop(sizing.HEADER_TENSOR, None)
        if header_tensor is None or any(
            t.dtype != torch.uint8 or t.dim() != 1 for t in (header_tensor, *tensors.values())
        ):
            raise CorruptPacket("the file is no packet: it lacks a header, or holds other than bytes")
        raw = header_tensor.numpy().tobytes()
        header = parse_header(raw, max_bytes=max_bytes)
        if header.frames != len(tensors):
            raise CorruptPacket(f"{len(tensors)} frames, but the header announces {header.frames}")
        views = []
        for slot in header.layout:
            tensor = tensors.get(sizing.frame_tensor(slot.first_layer, slot.start))
            if tensor is None:
                raise CorruptPacket(f"{slot} is missing")
            views.append(memoryview(tensor.numpy()).toreadonly())  # type: ignore[arg-type]
        return cls._verified(raw, header, views, in_order=True)


def _frames(data: memoryview) -> Iterator[memoryview]:
    """The frames that lie one behind the other in ``data``."""
    at = 0
    while at < len(data):
        length = announced_frame_length(data[at:])
        if not 0 < length <= len(data) - at:
            raise CorruptPacket("the packet ends within a frame")
        yield data[at : at + length]
        at += length
