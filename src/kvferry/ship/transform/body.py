"""A frame's body with payload kind 1: all layers of some tokens, by a transform.

Layout, little endian: step code i16; for each sequence the number of its raw tokens u32 and their indices u32; for each
layer and sequence the keys, then the values of the raw tokens that it holds, as they are, head by head; then for each
sequence and group of the transform a block (`kvferry.ship.transform.block`), unless it would have no tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvferry.errors import CorruptPacket
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.block import STEP_CODES, Components, decode_block, encode_block
from kvferry.ship.transform.groups import Group
from kvferry.snapshot import LayerState, Snapshot
from kvferry.snapshot.rope import Rotary

_STEP = struct.Struct("<h")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The tokens of one frame.

    Attributes:
        start, stop: its range.
        firsts: first token that each layer holds.
        sent: of the whole packet: False on what is not sent.
        raw: of the whole packet: sent as they are.
    """

    start: int
    stop: int
    firsts: Sequence[int]
    sent: Bool[Tensor, "batch seq"]
    raw: Bool[Tensor, "batch seq"]

    def tokens(self, row: int, layer: int, *, raw: bool) -> Int[Tensor, " tokens"]:
        """Which of them a layer holds, of those raw or of the others."""
        begin = max(self.start, self.firsts[layer])
        if begin >= self.stop:
            return torch.empty(0, dtype=torch.int64)
        sent, pinned = self.sent[row, begin : self.stop], self.raw[row, begin : self.stop]
        return begin + (sent & (pinned if raw else ~pinned)).nonzero().flatten()


def group_rows(
    snapshot: Snapshot, rotaries: Sequence[Rotary], group: Group, row: int, tokens: Int[Tensor, " tokens"]
) -> Tensor:
    """Channels of a group's layers side by side, keys before RoPE, ``(tokens, width)`` float32."""
    places = snapshot.positions[row : row + 1, tokens].cpu()
    parts = []
    for index in group.layers:
        layer = snapshot.layers[index]
        tensor = layer.keys if group.keys else layer.values
        assert tensor is not None
        own = tensor[row : row + 1].index_select(2, (tokens - layer.first).to(tensor.device)).cpu()
        turned = rotaries[index].strip(own, places) if group.keys else own.float()
        parts.append(turned[0].transpose(0, 1).flatten(1))
    return torch.cat(parts, dim=1)


def encode_body(
    snapshot: Snapshot, transform: Transform, span: Span, blocks: dict[tuple[int, int], Components], code: int
) -> bytes:
    """A frame's body.

    Args:
        blocks: ``(sequence, group)`` → its components; none where there are no tokens.
        code: of the step.
    """
    parts = [_STEP.pack(code)]
    for row in range(snapshot.batch_size):
        raw = span.start + span.raw[row, span.start : span.stop].nonzero().flatten()
        parts += [_COUNT.pack(len(raw)), raw.numpy().astype("<u4").tobytes()]
    for index, layer in enumerate(snapshot.layers):
        for row in range(snapshot.batch_size):
            tokens = span.tokens(row, index, raw=True) - layer.first
            for tensor in (layer.keys, layer.values):
                if tensor is not None and len(tokens):
                    own = tensor[row].index_select(1, tokens.to(tensor.device)).cpu().contiguous()
                    parts.append(own.view(torch.uint8).numpy().tobytes())
    for (_, group), components in sorted(blocks.items()):
        parts.append(encode_block(components, transform.bases[group], transform.tables, code))
    return b"".join(parts)


def read_raw(
    body: memoryview, start: int, stop: int, sent: Bool[Tensor, "batch seq"]
) -> tuple[int, Bool[Tensor, "batch seq"], int]:
    """The step code and the raw tokens that a body begins with, and where they end.

    Raises:
        CorruptPacket: indices out of order, outside of the frame or of what is sent; a step out of range.
    """
    if len(body) < _STEP.size:
        raise CorruptPacket("a frame ends within its step")
    (code,) = _STEP.unpack_from(body)
    if not STEP_CODES[0] <= code <= STEP_CODES[1]:
        raise CorruptPacket(f"a frame's step code is {code}")
    at = _STEP.size
    raw = torch.zeros_like(sent)
    for row in range(sent.shape[0]):
        if at + _COUNT.size > len(body):
            raise CorruptPacket("a frame ends within its raw tokens")
        (count,) = _COUNT.unpack_from(body, at)
        at += _COUNT.size
        if count > stop - start or at + 4 * count > len(body):
            raise CorruptPacket("a frame ends within its raw tokens")
        index = torch.from_numpy(np.frombuffer(body, "<u4", count, at).astype(np.int64))
        at += 4 * count
        rising = bool((index[1:] > index[:-1]).all())
        if count and (
            not rising or int(index[0]) < start or int(index[-1]) >= stop or not bool(sent[row, index].all())
        ):
            raise CorruptPacket("a frame's raw tokens are not among those that it sends")
        raw[row, index] = True
    return code, raw, at


def decode_body(
    body: memoryview,
    transform: Transform,
    span: Span,
    code: int,
    at: int,
    layers: Sequence[LayerState],
    positions: Tensor,
) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """What a body holds, piece by piece: ``(layer, side, sequence, tokens, rows)``; rows ``(heads, tokens, dim)``.

    Args:
        at: where the raw tokens' bytes begin, from `read_raw`.
        layers: geometry and dtype of the target; its tensors are not written.

    Raises:
        CorruptPacket: the body is inconsistent, or does not end where it should.
    """
    batch = span.sent.shape[0]
    for index, layer in enumerate(layers):
        for row in range(batch):
            tokens = span.tokens(row, index, raw=True)
            for side, tensor in enumerate((layer.keys, layer.values)):
                if tensor is None or not len(tokens):
                    continue
                shape = (tensor.shape[1], len(tokens), tensor.shape[3])
                size = shape[0] * shape[1] * shape[2] * tensor.element_size()
                if at + size > len(body):
                    raise CorruptPacket("a frame ends within its raw tokens")
                data = np.frombuffer(body, np.uint8, size, at).copy()
                yield index, side, row, tokens, torch.from_numpy(data).view(tensor.dtype).view(shape)
                at += size
    for row in range(batch):
        for basis in transform.bases:
            tokens = span.tokens(row, basis.group.layers[0], raw=False)
            if not len(tokens):
                continue
            rows, at = decode_block(body, at, len(tokens), basis, transform.tables, code)
            for index, own in zip(basis.group.layers, torch.split(rows, list(basis.group.sizes), dim=1), strict=True):
                tensor = layers[index].keys if basis.group.keys else layers[index].values
                assert tensor is not None
                piece = own.view(len(tokens), tensor.shape[1], tensor.shape[3]).transpose(0, 1)
                if basis.group.keys:
                    places = positions[row : row + 1, tokens]
                    piece = transform.rotaries[index].apply(piece[None], places)[0]
                limit = min(torch.finfo(tensor.dtype).max, torch.finfo(piece.dtype).max)
                yield index, int(not basis.group.keys), row, tokens, piece.clamp(-limit, limit).to(tensor.dtype)
    if at != len(body):
        raise CorruptPacket(f"a frame holds {len(body) - at} bytes too many")
