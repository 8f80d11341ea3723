"""A refinement, whole in memory; on disk a valid safetensors file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.ship.frame import bytes_tensor
from kvferry.ship.refine.message import LEVELS, RefinementHeader, open_frame, parse_header
from kvferry.snapshot.container import naming, read_container, write_container

if TYPE_CHECKING:
    from kvferry.ship.packet import Packet
    from kvferry.snapshot import Snapshot

REFINEMENT_KIND = "refinement"
_HEADER_TENSOR = "header"


@dataclass(frozen=True, slots=True, eq=False)
class Refinement:
    """What brings a decoded packet, level by level, to the exact cache. ``len(refinement)`` is its bytes on the wire.

    Attributes:
        header_bytes: the header message.
        frames: all frames of level 1, then those of level 2, each in the order of their index.
        header: the header, parsed.
    """

    header_bytes: bytes
    frames: tuple[memoryview, ...]
    header: RefinementHeader

    @classmethod
    def of(cls, header_bytes: bytes | memoryview, frames: Sequence[bytes | memoryview]) -> Refinement:
        """Check a header and its frames, and put them together.

        Raises:
            CorruptPacket, UnsupportedVersion, TooLarge: what is wrong with them.
        """
        raw = bytes(header_bytes)
        header = parse_header(raw)
        return cls._verified(raw, header, [memoryview(frame).cast("B") for frame in frames])

    @classmethod
    def _verified(cls, raw: bytes, header: RefinementHeader, views: Sequence[memoryview]) -> Refinement:
        if len(views) != LEVELS * header.frames:
            raise CorruptPacket(f"the refinement has {len(views)} frames, its header announces {header.frames} a level")
        for place, view in enumerate(views):
            frame = open_frame(view, header)
            if place != (frame.level - 1) * header.frames + frame.index:
                raise CorruptPacket(f"the refinement's {frame} is out of its place")
        return cls(raw, tuple(views), header)

    def __len__(self) -> int:
        return len(self.header_bytes) + sum(map(len, self.frames))

    def __bool__(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self)

    @property
    def level_bytes(self) -> tuple[int, ...]:
        """Bytes of the frames of each level."""
        count = self.header.frames
        return tuple(sum(map(len, self.frames[level * count : (level + 1) * count])) for level in range(LEVELS))

    def wire(self) -> Iterator[bytes | memoryview]:
        """The refinement as it goes over a wire: the header, then each frame."""
        yield self.header_bytes
        yield from self.frames

    def apply(self, packet: Packet, *, level: int = LEVELS, max_bytes: int | None = None) -> Snapshot:
        """Decode ``packet`` and refine it up to ``level``; at level 2 all bits are proven to be the sender's.

        Raises:
            IncompatibleIdentity: another packet than the one that was refined.
            CorruptPacket, UnsupportedVersion, TooLarge: of the packet or of the refinement.
            InvalidInput: there is no such level.
        """
        from kvferry.ship.encode import decode
        from kvferry.ship.refine.refiner import Refiner

        if level not in range(1, LEVELS + 1):
            raise InvalidInput(f"level = {level!r}: 1 … {LEVELS}")
        refiner = Refiner(packet.header_bytes, decode(packet, max_bytes=max_bytes), self.header_bytes)
        for frame in self.frames[: level * self.header.frames]:
            refiner.add(frame)
        if level == LEVELS:
            refiner.verify()
        return refiner.snapshot()

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write a valid safetensors file, whole or not at all; returns its bytes."""
        tensors = {_HEADER_TENSOR: bytes_tensor(memoryview(self.header_bytes))}
        tensors |= {name: bytes_tensor(view) for name, view in zip(self._names(self.header), self.frames, strict=True)}
        return write_container(path, REFINEMENT_KIND, tensors, {})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> Refinement:
        """Read what `save` wrote. Every checksum is verified; nothing is decoded.

        Raises:
            CorruptPacket, UnsupportedVersion: no refinement's file, a damaged one, or one of a newer format.
            TooLarge: the file has more than ``max_bytes``.
            InvalidInput: there is no such file.
        """
        container = read_container(path, kind=REFINEMENT_KIND, max_bytes=max_bytes)
        with naming(path):
            return cls._from_tensors(dict(container.tensors))

    @classmethod
    def _from_tensors(cls, tensors: dict[str, Tensor]) -> Refinement:
        message = tensors.pop(_HEADER_TENSOR, None)
        if message is None or any(t.dtype != torch.uint8 or t.dim() != 1 for t in (message, *tensors.values())):
            raise CorruptPacket("the file is no refinement: it lacks a header, or holds other than bytes")
        raw = message.numpy().tobytes()
        header = parse_header(raw)
        if len(tensors) != LEVELS * header.frames:
            raise CorruptPacket(f"{len(tensors)} frames, but the header announces {header.frames} a level")
        views = []
        for name in cls._names(header):
            if name not in tensors:
                raise CorruptPacket(f"{name} is missing")
            views.append(memoryview(tensors[name].numpy()).toreadonly())  # type: ignore[arg-type]
        return cls._verified(raw, header, views)

    @staticmethod
    def _names(header: RefinementHeader) -> Iterable[str]:
        return (f"level.{level}.frame.{index}" for level in range(1, LEVELS + 1) for index in range(header.frames))
