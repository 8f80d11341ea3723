"""Where packets rest between producer and consumer: files named by the prefix that they belong to.

Two kinds of entries: a **segment** holds one chunk of tokens and is named by the prefix that ends with it; a **prefix**
holds everything from the first token on, and is named by the same key. Each is a packet's file as `Packet.save` writes
it, so every tool that reads packets reads them, and it is there whole or not at all. Files may be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
import xxhash

from kvferry.engines.vllm.segments import stage
from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput, TooLarge, UnsupportedCache
from kvferry.ship.header import MAX_HEADER, PacketHeader, parse_header
from kvferry.ship.packet import Packet
from kvferry.ship.sizing import HEADER_TENSOR, PACKET_KIND
from kvferry.snapshot import Identity
from kvferry.snapshot.container import naming, peek

Kind = Literal["segment", "prefix"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One packet of a store: tokens ``start … stop - 1`` of the prefix ``key``; a prefix's entry starts at 0."""

    key: str
    kind: Kind
    start: int
    stop: int


class Store(Protocol):
    """What a connector asks of the place where packets rest. A new one is a class with these methods."""

    def has(self, key: str, kind: Kind) -> bool:
        """Whether there is such an entry; cheap."""

    def header(self, key: str, kind: Kind) -> PacketHeader:
        """An entry's header, checked; the frames are neither read nor checked."""

    def get(self, key: str, kind: Kind) -> Packet:
        """An entry, every byte checked."""

    def put(self, key: str, kind: Kind, packet: Packet) -> int:
        """Keep a packet, whole or not at all; returns the bytes that it takes."""

    def discard(self, key: str, kind: Kind) -> None:
        """Put a damaged entry out of the way, so that a producer writes it anew."""


class FolderStore:
    """A store in a folder that producer and consumer see; a shared file system will do."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"{self.folder} cannot hold packets: {error.strerror}") from error

    def path(self, key: str, kind: Kind) -> Path:
        """Where the entry lies, if it is there."""
        return self.folder / key[:2] / f"{key}.{kind}.safetensors"

    def has(self, key: str, kind: Kind) -> bool:
        return self.path(key, kind).is_file()

    def header(self, key: str, kind: Kind) -> PacketHeader:
        """See `Store`. Raises `CorruptPacket`, `UnsupportedVersion`, or `InvalidInput` where there is none."""
        path = self.path(key, kind)
        outline = peek(path)
        with naming(path):
            info = outline.tensors.get(HEADER_TENSOR)
            if outline.kind != PACKET_KIND or info is None:
                raise CorruptPacket("the file is no packet")
            if info.end - info.begin > MAX_HEADER:
                raise TooLarge(f"the packet's header claims {info.end - info.begin} bytes, more than {MAX_HEADER}")
            with path.open("rb") as file:
                file.seek(outline.payload_start + info.begin)
                raw = file.read(info.end - info.begin)
            if xxhash.xxh3_128_hexdigest(raw) != info.checksum:
                raise CorruptPacket("the packet's header does not match its checksum")
            return parse_header(raw)

    def get(self, key: str, kind: Kind) -> Packet:
        """See `Store`. Raises `CorruptPacket`, `UnsupportedVersion`, or `InvalidInput` where there is none."""
        return Packet.load(self.path(key, kind))

    def put(self, key: str, kind: Kind, packet: Packet) -> int:
        """See `Store`. Raises `InvalidInput` for a folder that cannot be written, `OSError` for a full disk."""
        path = self.path(key, kind)
        path.parent.mkdir(exist_ok=True)
        return packet.save(path)

    def discard(self, key: str, kind: Kind) -> None:
        """See `Store`: the file stays, as ``….damaged``, for who wants to know."""
        path = self.path(key, kind)
        with suppress(OSError):  # another consumer was faster, or the folder is read-only
            path.rename(path.with_name(f"{path.name}.damaged"))


def check_entry(header: PacketHeader, entry: Entry, token_ids: Sequence[int], want: Identity) -> None:
    """Raise unless an entry's packet is what its name says, for this prompt and this model.

    Args:
        header: the packet's.
        entry: what it was taken for.
        token_ids: of the prompt, at least up to ``entry.stop``.
        want: identity of the receiver's model.

    Raises:
        IncompatibleIdentity: of another model, or of other tokens; names what differs.
        CorruptPacket: it says itself that it belongs somewhere else.
        UnsupportedCache: it dropped tokens, which an engine's pages cannot express.
    """
    header.identity.require_compatible(want, "this packet was not made for this model")
    have, expected = header.token_ids[0].tolist(), list(token_ids[entry.start : entry.stop])
    if header.batch != 1 or have != expected:
        raise IncompatibleIdentity(
            "this packet was made from other tokens than the prompt's", {"token_ids": (have[:8], expected[:8])}
        )
    if not torch.equal(header.positions[0], torch.arange(entry.start, entry.stop)):
        raise CorruptPacket(f"the packet's positions are not {entry.start}…{entry.stop - 1}")
    if not bool(header.mask.all()):
        raise UnsupportedCache(f"policy {header.policy} dropped tokens, which an engine's pages cannot leave out")
    named = stage(entry.start, entry.stop, entry.key)
    if entry.kind == "segment" and header.identity.construction[-1:] != (named,):
        raise CorruptPacket(f"the packet is {header.identity.construction[-1:]}, not {named}")
