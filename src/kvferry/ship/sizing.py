"""Exact sizes of packets before a byte of them is made, and the search for the largest plan that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.ship import fields
from kvferry.ship.allocate import Allocation
from kvferry.ship.frame import frame_nbytes
from kvferry.ship.header import description, description_identity, header_length
from kvferry.ship.layout import FrameSlot, Layout
from kvferry.snapshot import Snapshot
from kvferry.snapshot.header import plan_header

PACKET_KIND = "packet"
HEADER_TENSOR = "header"

BREAKS = (0.25, 0.5, 2 / 3, 1.0)
"""Nominal budgets at which a tier empties: the packet loses a map there and may be smaller than just below."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a packet.

    Attributes:
        header: of the header message.
        frames: of each frame.
    """

    header: int
    frames: tuple[int, ...]

    @property
    def wire(self) -> int:
        """Bytes on the wire."""
        return self.header + sum(self.frames)


class Sizer:
    """Sizes of the packets that one cache can become; what does not depend on the allocation is found out once."""

    def __init__(self, snapshot: Snapshot, layout: Layout):
        self.identity, self.layout, self.dtype = snapshot.identity, layout, snapshot.dtype
        self._identity_text = description_identity(snapshot.identity)
        self._ids = len(fields.encode_ids(snapshot.token_ids))
        self._positions = len(fields.encode_positions(snapshot.positions))

    def size(self, allocation: Allocation, policy: str, report: dict[str, Any]) -> Size:
        """Exact size of the packet that this allocation gives."""
        text = len(description(self._identity_text, policy, quantizer_names(allocation, self.layout), report))
        header = header_length((text, self._ids, self._positions, len(fields.encode_mask(allocation.sent))))
        known: dict[Any, int] = {}
        frames = []
        for slot in self.layout:
            geometry = self.identity.layers[slot.first_layer]
            shape = (geometry.kv_heads, geometry.head_dim, geometry.value_head_dim)
            key = (0 if allocation.shared else slot.first_layer, shape, slot.start, slot.stop)
            if key not in known:
                known[key] = self._frame(allocation, slot, shape)
            frames.append(known[key])
        return Size(header, tuple(frames))

    def _frame(self, allocation: Allocation, slot: FrameSlot, shape: tuple[int, int, int]) -> int:
        tokens = slice(slot.start, slot.stop)
        keys = allocation.tiers(slot.first_layer, keys=True)[:, tokens]
        values = keys if allocation.same_map else allocation.tiers(slot.first_layer, keys=False)[:, tokens]
        specs = (allocation.specs.keys, allocation.specs.values)
        return frame_nbytes((keys, values), allocation.sent[:, tokens], specs, shape, self.dtype)


def quantizer_names(allocation: Allocation, layout: Layout) -> dict[str, list[str]]:
    """Specs of the tiers that are in use anywhere in the cache: of a token that some layer of ``layout`` holds."""
    starts = layout.firsts
    found = {}
    for side, tiers, specs in (
        ("keys", allocation.key_tiers, allocation.specs.keys),
        ("values", allocation.value_tiers, allocation.specs.values),
    ):
        firsts = starts if len(tiers) > 1 else (min(starts, default=allocation.sent.shape[1]),)
        used = torch.zeros(len(specs), dtype=torch.int64)
        for layer, first in zip(tiers, firsts, strict=True):
            used += torch.bincount(layer[:, first:][allocation.sent[:, first:]], minlength=len(specs))
        found[side] = [spec for spec, count in zip(specs, used.tolist(), strict=True) if count]
    return found


def frame_tensor(layer: int, start: int) -> str:
    """Name of a frame in a packet's file."""
    return f"layers.{layer}.frame.{start}"


def file_size(size: Size, layout: Layout) -> int:
    """Exact size of the file that `Packet.save` writes for a packet of this size.

    Less the size on the wire, it grows with the number of digits of the frames' offsets only.
    """
    tensors = {HEADER_TENSOR: (torch.uint8, (size.header,))}
    for slot, nbytes in zip(layout, size.frames, strict=True):
        tensors[frame_tensor(slot.first_layer, slot.start)] = (torch.uint8, (nbytes,))
    return plan_header(PACKET_KIND, tensors, {}).nbytes


def largest_fitting(
    size_of: Callable[[float], int], limit: int, least: float, most: float, resolution: float
) -> float | None:
    """The largest nominal budget in ``[least, most]`` whose packet has at most ``limit`` bytes, to ``resolution``.

    Sizes grow with the nominal budget but for a step down at `BREAKS`. ``None``: not even ``least`` fits.
    """
    points = sorted({least, most, *(point for point in BREAKS if least < point < most)})
    fitting = [place for place, point in enumerate(points) if size_of(point) <= limit]
    if not fitting:
        return None
    place = fitting[-1]
    low = points[place]
    if place + 1 == len(points):
        return low
    high = points[place + 1]
    while high - low > resolution:
        middle = (low + high) / 2
        if size_of(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def round_budget(nbytes: int, full_bytes: int) -> float:
    """The budget, rounded up to six digits, that ``nbytes`` need: asking for it is granted."""
    budget = math.ceil(nbytes / full_bytes * 1e6) / 1e6
    while math.floor(budget * full_bytes) < nbytes:
        budget = math.ceil(budget * 1e6 + 1) / 1e6
    return budget
