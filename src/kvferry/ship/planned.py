"""What every plan of a packet says before a byte of it is sent."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.ship.header import PacketHeader
from kvferry.ship.sizing import Size
from kvferry.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A packet that is decided upon.

    Attributes:
        snapshot: the cache to encode; it must not change while frames are built.
        header: the packet's header.
        header_bytes: the header message.
        size: exact bytes of header and frames.
    """

    snapshot: Snapshot
    header: PacketHeader
    header_bytes: bytes
    size: Size

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, exactly."""
        return self.size.wire

    @property
    def full_bytes(self) -> int:
        """Bytes of the same cache's packet with every token raw."""
        return self.header.full_bytes

    @property
    def frame_sizes(self) -> tuple[int, ...]:
        """Bytes of each frame, exactly."""
        return self.size.frames
