"""The receiver's side: upgrades the tensors of a decoded packet in place, frame by frame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput
from kvferry.ship.header import packet_id
from kvferry.ship.header import parse_header as parse_packet_header
from kvferry.ship.layout import FrameSlot, Layout
from kvferry.ship.refine import base, lossless, residual
from kvferry.ship.refine.both import both
from kvferry.ship.refine.message import LEVELS, RefinementFrame, digest_tensors, open_frame, parse_header
from kvferry.ship.refine.ordinals import add_differences, contexts
from kvferry.snapshot import Snapshot


class Refiner:
    """Takes a refinement's frames and upgrades the snapshot that its packet was decoded to, in place.

    Frames of a level may come in any order, and a frame of level 2 as soon as level 1 of the same tokens is in. Each is
    verified whole and computed aside; what it leaves behind must have the digest that the sender got, or nothing is
    written: a frame that is refused leaves snapshot and refiner as they were.

    Args:
        packet_header: header message of the base packet.
        snapshot: what that packet was decoded to, as it was decoded; its keys and values are written to.
        header: header message of the refinement.

    Raises:
        IncompatibleIdentity: the refinement is of another packet.
        InvalidInput: the snapshot was not decoded from this packet.
        CorruptPacket, UnsupportedVersion, TooLarge: about the headers.
    """

    def __init__(
        self,
        packet_header: bytes | bytearray | memoryview,
        snapshot: Snapshot,
        header: bytes | bytearray | memoryview,
    ):
        self.header = parse_header(header)
        packet = parse_packet_header(packet_header)
        own = packet_id(memoryview(packet_header).cast("B"))
        if self.header.base != own:
            raise IncompatibleIdentity(
                "this refinement is of another packet", {"base packet": (self.header.base.hex(), own.hex())}
            )
        base.require_exact(packet)
        base.require_decoded_from(snapshot, packet)
        self.layout = Layout.of(packet.identity, packet.seq_len, self.header.frame_tokens)
        declared = (self.header.batch, self.header.seq_len, self.header.frames)
        if declared != (packet.batch, packet.seq_len, self.layout.count):
            raise CorruptPacket(
                f"the refinement declares (batch, tokens, frames) {declared}, which is not its packet's"
            )
        self._final = base.final_mask(self.header, packet)
        self._snapshot = snapshot
        self._levels = bytearray(self.layout.count)
        self._done = [0] * LEVELS
        self._nbytes = self.header.nbytes
        # Layers that have brought a token, where the packet dropped some; a layer that no longer holds it has.
        self._brought: Tensor | None = None
        if not torch.equal(self._final, packet.mask):
            self._brought = packet.mask.expand(len(snapshot.layers), -1, -1).clone()
            for layer, first in enumerate(self.layout.firsts):
                self._brought[layer, :, :first] = True

    @torch.no_grad()
    def add(self, frame: bytes | bytearray | memoryview) -> FrameSlot:
        """Verify a frame and upgrade its tokens; returns which they are, with the level that they now have.

        Raises:
            CorruptPacket: damaged, of another refinement, inconsistent, here already, of level 2 before level 1 of the
                same tokens; or the tokens would not be what the sender got.
            UnsupportedVersion: it needs a newer kvferry.
        """
        opened = open_frame(frame, self.header)
        slot = self._slot(opened, len(memoryview(frame).cast("B")))
        shown = self._final[:, slot.start : slot.stop]
        places = base.slot_tensors(self._snapshot, slot)
        near = [tensor.detach().cpu() for tensor in places]
        if opened.level == 1:
            sides = self._residuals(opened, slot, shown)
            left = [side.added_to(tensor) for side, tensor in zip(sides, near, strict=True)]
            brought = sides[0].sent & sides[1].sent
        else:
            left = _exact(opened, near)
            brought = shown
        if digest_tensors(left) != opened.digest:
            raise CorruptPacket(
                f"{opened} does not give what the sender got: the snapshot is not as its packet was decoded, or the "
                "frame was made for another"
            )
        for place, tensor in zip(places, left, strict=True):
            place.copy_(tensor)
        self._levels[slot.index] = opened.level
        self._done[opened.level - 1] += 1
        self._nbytes += len(memoryview(frame).cast("B"))
        if self._brought is not None:
            self._brought[slot.first_layer, :, slot.start : slot.stop] |= brought
        return replace(slot, level=opened.level)

    @property
    def level(self) -> int:
        """The level that all tokens have."""
        return sum(done == self.layout.count for done in self._done)

    @property
    def complete(self) -> bool:
        """Whether all frames are in."""
        return self.level == LEVELS

    def missing(self, level: int = LEVELS) -> list[int]:
        """Indices of the frames of a level that are not in yet, ascending."""
        if not 1 <= level <= LEVELS:
            raise InvalidInput(f"level = {level}: a refinement has levels 1 to {LEVELS}")
        return [index for index, have in enumerate(self._levels) if have < level]

    @property
    def mask(self) -> Bool[Tensor, "batch seq"]:
        """Tokens that attention may see by now: the packet's, and dropped ones that every layer has got back."""
        return self._snapshot.mask if self._brought is None else self._final & self._brought.all(dim=0)

    def snapshot(self) -> Snapshot:
        """The cache as it is by now; its construction path gains ``refinement(level, bytes)``.

        It shares keys and values with the snapshot that was given, and is upgraded as further frames come; its mask is
        that of now.
        """
        return replace(
            self._snapshot,
            identity=self._snapshot.identity.then(f"refinement(level {self.level}, {self._nbytes})"),
            mask=self.mask.to(self._snapshot.mask.device),
        )

    def digest(self) -> bytes:
        """Digest of the cache as it is by now; at the end it must be the header's."""
        return base.cache_digest(self._snapshot, self.layout, self._final)

    def verify(self) -> None:
        """Prove that the whole cache is the sender's, bit for bit.

        Raises:
            CorruptPacket: frames are missing, or some token is not what the sender had.
        """
        if not self.complete:
            missing = self.missing()
            shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise CorruptPacket(f"the refinement is incomplete: frames {shown} of level {LEVELS} are missing")
        if self.digest() != self.header.digest:
            raise CorruptPacket("the refined cache is not the sender's: something else wrote to it")

    def _slot(self, frame: RefinementFrame, nbytes: int) -> FrameSlot:
        slot = self.layout.slot(frame.index)
        if frame.place != (slot.first_layer, slot.last_layer, slot.start, slot.stop):
            raise CorruptPacket(f"{frame} says that it holds {frame.place}; by its index it is {slot}")
        have = self._levels[slot.index]
        if frame.level <= have:
            raise CorruptPacket(f"{frame} came twice")
        if frame.level > have + 1:
            raise CorruptPacket(f"{frame} came before that of level {have + 1} of the same tokens: add that one first")
        itemsize = self._snapshot.dtype.itemsize
        most = base.frame_limit(self._snapshot.identity, self.header.batch, slot, frame.level, itemsize)
        if nbytes > most:
            raise CorruptPacket(f"{frame} has {nbytes:,} bytes, more than its tokens can need ({most:,})")
        return slot

    def _residuals(
        self, frame: RefinementFrame, slot: FrameSlot, shown: Bool[Tensor, "batch tokens"]
    ) -> list[residual.Residual]:
        dims = base.dims_of(self._snapshot.identity, slot)
        sides = residual.read_body(frame.body, frame, (self.header.batch, slot.tokens), dims)
        if any(bool((side.sent & ~shown).any()) for side in sides):
            raise CorruptPacket(f"{frame} has residuals of tokens that the cache does not show")
        return sides


def _exact(frame: RefinementFrame, near: list[Tensor]) -> list[Tensor]:
    """The exact keys and values, out of a frame of level 2 and what level 1 left."""
    parts = lossless.parts(frame.body, frame)

    def decoded(side: int) -> Tensor:
        dtype = np.dtype(f"u{near[side].element_size()}")
        folded = lossless.decompress(parts[side], dtype, contexts(near[side]), frame)
        return add_differences(near[side], folded)

    return both(decoded, near)
