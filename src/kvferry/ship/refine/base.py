"""What a refinement and the packet under it agree on: which packets may be refined, and how the cache is cut."""

from __future__ import annotations

import re

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput, UnsupportedVersion
from kvferry.ship.fields import decode_mask
from kvferry.ship.header import PacketHeader
from kvferry.ship.layout import FrameSlot, Layout
from kvferry.ship.refine import lossless, residual
from kvferry.ship.refine.message import LEAST_FRAME, RefinementHeader, digest_tensors
from kvferry.snapshot import Identity, Snapshot

_EXACT = re.compile(r"raw|sym[0-9]|asym[0-9](?:row|g[0-9]+)|chan[0-9]b[0-9]+|had[0-9]g[0-9]+|cen[0-9](?:g[0-9]+)?")
"""Quantisers that decode to the same bits on every machine: every sum and product in them is rounded on its own, in an
order that is fixed. A transform's matrix product does not."""


def require_exact(header: PacketHeader) -> None:
    """Raise `UnsupportedVersion` unless the packet decodes to the same bits everywhere, as a refinement needs."""
    unknown = sorted({spec for specs in header.quantizers.values() for spec in specs if not _EXACT.fullmatch(spec)})
    if unknown:
        raise UnsupportedVersion(
            f"a packet of {', '.join(spec[:40] for spec in unknown[:4])} cannot be refined: only raw, sym, asym, chan, "
            "had and cen decode to the same bits on every machine; encode the base with one of those (policy fast does)"
        )


def require_decoded_from(snapshot: Snapshot, header: PacketHeader) -> None:
    """Raise `InvalidInput` unless the snapshot may be what the packet of ``header`` decodes to."""
    same = (
        snapshot.identity.layers == header.identity.layers
        and snapshot.identity.dtype == header.identity.dtype
        and torch.equal(snapshot.token_ids.cpu(), header.token_ids)
        and torch.equal(snapshot.positions.cpu(), header.positions)
        and torch.equal(snapshot.mask.cpu(), header.mask)
    )
    if not same:
        raise InvalidInput("this snapshot was not decoded from this packet: its tokens, mask or layers are others")


def final_mask(header: RefinementHeader, base: PacketHeader) -> Bool[Tensor, "batch seq"]:
    """Mask of the exact cache; raises `CorruptPacket` where it hides tokens that the base shows."""
    if not header.mask:
        return base.mask
    mask = decode_mask(memoryview(header.mask), base.batch, base.seq_len)
    if bool((base.mask & ~mask).any()) or torch.equal(mask, base.mask):
        raise CorruptPacket("the refinement's mask is not one that shows more tokens than the packet's")
    return mask


def slot_tensors(snapshot: Snapshot, slot: FrameSlot) -> tuple[Tensor, Tensor]:
    """The part of keys and of values that a frame covers: views."""
    layer = snapshot.layers[slot.first_layer]
    assert layer.keys is not None
    assert layer.values is not None
    tokens = slice(slot.start - layer.first, slot.stop - layer.first)
    return layer.keys[:, :, tokens], layer.values[:, :, tokens]


def shown_part(
    tensor: Float[Tensor, "batch heads tokens dim"], shown: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch heads tokens dim"]:
    """On the CPU, with zeros where no token is shown, as at a receiver."""
    local = tensor.detach().cpu()
    return local if bool(shown.all()) else local.masked_fill(~shown[:, None, :, None], 0)


def dims_of(identity: Identity, slot: FrameSlot) -> tuple[tuple[int, int], tuple[int, int]]:
    """``(heads, dim)`` of a frame's keys and of its values."""
    geometry = identity.layers[slot.first_layer]
    return (geometry.kv_heads, geometry.head_dim), (geometry.kv_heads, geometry.value_head_dim)


def frame_limit(identity: Identity, batch: int, slot: FrameSlot, level: int, itemsize: int) -> int:
    """Upper bound of a frame's bytes."""
    dims = dims_of(identity, slot)
    if level == 1:
        return LEAST_FRAME + residual.most_bytes(batch, slot.tokens, dims)
    counts = [batch * slot.tokens * heads * dim for heads, dim in dims]
    return LEAST_FRAME + lossless.most_bytes(counts, itemsize)


def cache_digest(snapshot: Snapshot, layout: Layout, mask: Bool[Tensor, "batch seq"]) -> bytes:
    """Digest of all keys and values, layer by layer, with zeros where ``mask`` hides a token."""
    return digest_tensors(
        shown_part(tensor, mask[:, slot.start : slot.stop])
        for slot in layout
        for tensor in slot_tensors(snapshot, slot)
    )
