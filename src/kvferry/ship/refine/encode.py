"""The sender's side: what a packet lacks to the cache that it was made of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvferry.errors import IncompatibleIdentity, InvalidInput, TooLarge
from kvferry.ship.encode import decode
from kvferry.ship.fields import encode_mask
from kvferry.ship.header import PacketHeader, packet_id
from kvferry.ship.header import parse_header as parse_packet_header
from kvferry.ship.layout import FrameSlot, Layout
from kvferry.ship.packet import Packet
from kvferry.ship.refine import base, lossless, residual
from kvferry.ship.refine.both import both
from kvferry.ship.refine.message import (
    LEVELS,
    RefinementHeader,
    digest_tensors,
    parse_header,
    render_frame,
    render_header,
)
from kvferry.ship.refine.ordinals import contexts, differences
from kvferry.ship.refine.refinement import Refinement
from kvferry.snapshot import Snapshot

_MOST_VALUES = 1 << 22
"""Of keys, or of values, in a frame: sorting them takes some 20 bytes of memory each."""

_LARGEST_TOKEN = 1 << 30


class RefinementEncoder:
    """Builds a refinement frame by frame: all of level 1 first, then all of level 2.

    Memory beside the source: the decoded packet, which `frames` brings up to level 1 as it goes, and one frame.

    Args:
        exact: the cache; it must not change while frames are built.
        packet_header: header message of its packet.
        near: the decoded packet; it is taken over and written to.
        frame_tokens: tokens a frame, at most; ``None``: as the packet has them.

    Raises:
        UnsupportedVersion: the packet uses a quantiser that does not decode to the same bits on every machine.
        IncompatibleIdentity, InvalidInput: it is not this cache's packet.
        TooLarge: one token of all sequences has more values than a frame can hold.
    """

    def __init__(
        self,
        exact: Snapshot,
        packet_header: bytes | memoryview,
        near: Snapshot,
        *,
        frame_tokens: int | None = None,
    ):
        if frame_tokens is not None and frame_tokens < 1:
            raise InvalidInput(f"frame_tokens = {frame_tokens}: at least 1, or None to cut as the packet is cut")
        packet = parse_packet_header(packet_header)
        base.require_exact(packet)
        _require_packet_of(exact, packet)
        base.require_decoded_from(near, packet)
        self._exact, self._near, self._packet = exact, near, packet
        self._mask = exact.mask.cpu()
        size = _frame_tokens(packet, frame_tokens)
        self.layout = Layout.of(packet.identity, packet.seq_len, size)
        header = RefinementHeader(
            base=packet_id(packet_header),
            digest=base.cache_digest(exact, self.layout, self._mask),
            batch=packet.batch,
            seq_len=packet.seq_len,
            frame_tokens=size,
            frames=self.layout.count,
            mask=b"" if torch.equal(self._mask, packet.mask) else encode_mask(self._mask),
        )
        self.header_bytes = render_header(header)
        self.header = parse_header(self.header_bytes)
        self._begun = False

    @property
    def limits(self) -> list[int]:
        """Upper bound of each frame's bytes, in the order of `frames`."""
        identity, itemsize = self._packet.identity, self._exact.dtype.itemsize
        return [
            base.frame_limit(identity, self._packet.batch, slot, level, itemsize)
            for level in range(1, LEVELS + 1)
            for slot in self.layout
        ]

    def frames(self) -> Iterator[memoryview]:
        """Every frame, once: building the second level takes what the first one left in the decoded packet."""
        if self._begun:
            raise InvalidInput("the frames of this encoder were asked for already; make another encoder")
        self._begun = True
        for level in range(1, LEVELS + 1):
            for slot in self.layout:
                yield self._frame(level, slot)

    @torch.no_grad()
    def _frame(self, level: int, slot: FrameSlot) -> memoryview:
        shown = self._mask[:, slot.start : slot.stop]
        exact = [base.shown_part(tensor, shown) for tensor in base.slot_tensors(self._exact, slot)]
        places = base.slot_tensors(self._near, slot)
        near = [tensor.cpu() for tensor in places]
        if level == 1:
            sides = [residual.Residual.of(*pair, shown) for pair in zip(exact, near, strict=True)]
            left: list[Tensor] = [side.added_to(tensor) for side, tensor in zip(sides, near, strict=True)]
            for place, tensor in zip(places, left, strict=True):
                place.copy_(tensor)
            body = residual.body(sides)
        else:
            left = exact

            def coded(side: int) -> list[bytes]:
                return lossless.compress(differences(exact[side], near[side]), contexts(near[side]))

            body = lossless.joined(*both(coded, near))
        return render_frame(self.header.own, level, slot, digest_tensors(left), body)


def refine(snapshot: Snapshot, packet: Packet, *, frame_tokens: int | None = None) -> Refinement:
    """What brings the decoded ``packet`` to ``snapshot``, bit for bit: to INT8's quality first, then whole.

    Tokens that the packet dropped come back; padding stays zero.

    Args:
        snapshot: the cache that the packet was encoded from.
        packet: its packet, of any policy whose quantisers decode to the same bits on every machine: all but transforms.
        frame_tokens: tokens a frame, at most; ``None``: as the packet has them. A frame has 2^22 keys at most.

    Raises:
        UnsupportedVersion: the packet uses a quantiser that does not decode to the same bits on every machine.
        IncompatibleIdentity, InvalidInput: it is not this cache's packet.
        TooLarge: one token of all sequences has more values than a frame can hold.
    """
    base.require_exact(packet.header)
    most = packet.header.cache_bytes + 32 * packet.header.token_ids.numel()
    encoder = RefinementEncoder(
        snapshot, packet.header_bytes, decode(packet, max_bytes=most), frame_tokens=frame_tokens
    )
    return Refinement(encoder.header_bytes, tuple(encoder.frames()), encoder.header)


def _frame_tokens(packet: PacketHeader, asked: int | None) -> int:
    """Tokens a frame, 0 for all: so many as asked for, or as the packet has, but few enough for `_MOST_VALUES`."""
    widths = [layer.kv_heads * max(layer.head_dim, layer.value_head_dim) for layer in packet.identity.layers]
    width = packet.batch * max(widths, default=1)
    if width > _LARGEST_TOKEN:
        raise TooLarge(f"one token of {packet.batch:,} sequences has {width:,} values: refine fewer at a time")
    size = min((packet.frame_tokens if asked is None else asked) or packet.seq_len, max(1, _MOST_VALUES // width))
    return 0 if size >= packet.seq_len else size


def _require_packet_of(snapshot: Snapshot, packet: PacketHeader) -> None:
    packet.identity.require_compatible(snapshot.identity, "this packet is of another model's cache")
    if not torch.equal(packet.token_ids, snapshot.token_ids.cpu()):
        raise IncompatibleIdentity("this packet is of another prompt's cache", {})
    if not torch.equal(packet.positions, snapshot.positions.cpu()) or bool((packet.mask & ~snapshot.mask.cpu()).any()):
        raise InvalidInput("this packet was not encoded from this cache: it has other positions, or shows its padding")
