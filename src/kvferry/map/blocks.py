"""Blocks of a cache: keys or values of one layer, as rows of numbers, a row a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.snapshot import Identity, LayerGeometry, LayerState, Snapshot
from kvferry.snapshot.rope import Rotary

Side = Literal["keys", "values"]
SIDES: tuple[Side, Side] = ("keys", "values")

_STRETCH = 128
"""Tokens rotated at a time."""


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """Keys or values of one layer, all kv heads side by side.

    Attributes:
        layer: which.
        side: ``keys`` (rotary positions taken off) or ``values``.
    """

    layer: int
    side: Side

    def width(self, identity: Identity) -> int:
        """Numbers a token: kv heads times their size."""
        return self.heads(identity) * self.head_dim(identity)

    def heads(self, identity: Identity) -> int:
        return identity.layers[self.layer].kv_heads

    def head_dim(self, identity: Identity) -> int:
        geometry = identity.layers[self.layer]
        return geometry.head_dim if self.side == "keys" else geometry.value_head_dim

    def to_json(self) -> list[object]:
        return [self.layer, self.side]

    @classmethod
    def from_json(cls, data: object, identity: Identity) -> Block:
        """Inverse of `to_json`; raises `CorruptPacket` where the model has no such block."""
        match data:
            case [int(layer), ("keys" | "values") as side] if (
                type(layer) is int and 0 <= layer < len(identity.layers) and owns_cache(identity.layers[layer])
            ):
                return cls(layer, side)
        raise CorruptPacket(f"{data!r} names no keys or values of {identity.model}")


def owns_cache(geometry: LayerGeometry) -> bool:
    """Whether a layer has keys and values of its own."""
    return geometry.kind.name != "shared"


def blocks_of(identity: Identity, sides: Iterable[Side] = SIDES) -> tuple[Block, ...]:
    """Every block of a model, layer by layer."""
    wanted = tuple(sides)
    own = (index for index, layer in enumerate(identity.layers) if owns_cache(layer))
    return tuple(Block(index, side) for index in own for side in wanted)


def holds(source: LayerGeometry, target: LayerGeometry) -> bool:
    """Whether a layer of kind ``source`` still has every token that one of kind ``target`` keeps, at any length."""
    if source.kind.name == "full":
        return True
    if source.kind.name != "sliding" or target.kind.name != "sliding":
        return False
    return (source.kind.argument or 0) >= (target.kind.argument or 0)


def first_held(snapshot: Snapshot, blocks: Iterable[Block]) -> int:
    """Index of the first token that all of these blocks still hold."""
    return max((snapshot.layers[block.layer].first for block in blocks), default=0)


def block_rows(
    snapshot: Snapshot,
    rotaries: Sequence[Rotary] | None,
    blocks: Sequence[Block],
    tokens: Int[Tensor, " tokens"],
    dtype: torch.dtype = torch.float32,
) -> dict[Block, Float[Tensor, "batch tokens width"]]:
    """The rows of each block at ``tokens``, keys without their rotary positions.

    Args:
        snapshot: the cache.
        rotaries: of each layer; ``None`` leaves keys as they are.
        blocks: which.
        tokens: indices that all these layers hold.
        dtype: of the rows; rotary positions are taken off in float32 whatever it is.

    Raises:
        InvalidInput: a layer that does not hold these tokens.
    """
    places = snapshot.positions[:, tokens.to(snapshot.positions.device)]
    found: dict[Block, Tensor] = {}
    for block in blocks:
        if block.side == "values" or rotaries is None:
            found[block] = rows_of(taken(snapshot.layers[block.layer], block, tokens), dtype)
    if rotaries is not None:
        keyed = [block for block in blocks if block.side == "keys"]
        for group in by_rotation(keyed, rotaries):
            parts = [taken(snapshot.layers[block.layer], block, tokens) for block in group]
            turned = turn(rotaries[group[0].layer].strip, parts, places.to(parts[0].device), dtype, as_rows=True)
            for block, part in zip(group, turned, strict=True):
                found[block] = rows_of(part, dtype)
    return found


def by_rotation(blocks: Sequence[Block], rotaries: Sequence[Rotary]) -> list[list[Block]]:
    """Blocks whose layers rotate alike, together."""
    groups: list[list[Block]] = []
    for block in blocks:
        for group in groups:
            if same_rotation(rotaries[block.layer], rotaries[group[0].layer]):
                group.append(block)
                break
        else:
            groups.append([block])
    return groups


def same_rotation(one: Rotary, other: Rotary) -> bool:
    """Whether two layers rotate alike."""
    from dataclasses import fields

    if one is other:
        return True
    for item in fields(one):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not torch.equal(a, b):
                return False
        elif a != b:
            return False
    return True


def taken(layer: LayerState, block: Block, tokens: Tensor) -> Float[Tensor, "batch heads tokens dim"]:
    """A block's tensor at ``tokens``."""
    tensor = layer.keys if block.side == "keys" else layer.values
    if tensor is None:
        raise InvalidInput(f"layer {block.layer} has no {block.side} of its own")
    if tokens.numel() == 0:
        return tensor[:, :, :0]
    first, last = int(tokens[0]), int(tokens[-1])
    if int(tokens.min()) < layer.first or int(tokens.max()) >= layer.seen:
        raise InvalidInput(
            f"layer {block.layer} ({layer.kind}) holds tokens {layer.first}…{layer.seen - 1}, not all of these"
        )
    if last - first + 1 == tokens.numel():
        return tensor[:, :, first - layer.first : last + 1 - layer.first]
    return tensor.index_select(2, (tokens - layer.first).to(tensor.device))


def split_heads(tensor: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """``tensor``, heads of several layers side by side, cut into as many heads as each of ``like`` has."""
    found, start = [], 0
    for part in like:
        found.append(tensor[:, start : start + part.shape[1]])
        start += part.shape[1]
    return found


def turn(
    rotate: Callable[[Tensor, Tensor], Tensor],
    parts: Sequence[Float[Tensor, "batch heads tokens dim"]],
    positions: Int[Tensor, "batch tokens"],
    dtype: torch.dtype,
    *,
    as_rows: bool,
) -> list[Float[Tensor, "batch heads tokens dim"]]:
    """Keys of several layers that rotate alike, rotated together, a stretch of tokens at a time: their cosines are the
    same, and what is worked on stays in a core's own cache.

    Args:
        rotate: ``strip`` or ``apply`` of their `Rotary`.
        parts: of each layer.
        positions: of the tokens.
        dtype: of the result.
        as_rows: in memory token by token, so that `rows_of` is free.
    """
    made = []
    for part in parts:
        batch, heads, tokens, dim = part.shape
        shape = (batch, tokens, heads, dim) if as_rows else (batch, heads, tokens, dim)
        empty = torch.empty(shape, dtype=dtype, device=part.device)
        made.append(empty.transpose(1, 2) if as_rows else empty)
    for start in range(0, positions.shape[1], _STRETCH):
        span = slice(start, start + _STRETCH)
        whole = rotate(torch.cat([part[:, :, span] for part in parts], dim=1), positions[:, span])
        for out, piece in zip(made, split_heads(whole, parts), strict=True):
            out[:, :, span] = piece
    return made


def rows_of(tensor: Float[Tensor, "batch heads tokens dim"], dtype: torch.dtype) -> Float[Tensor, "batch tokens width"]:
    """Heads side by side."""
    return tensor.to(dtype).transpose(1, 2).reshape(tensor.shape[0], tensor.shape[2], -1)


def heads_of(rows: Float[Tensor, "batch tokens width"], heads: int) -> Float[Tensor, "batch heads tokens dim"]:
    """Inverse of `rows_of`."""
    return rows.reshape(rows.shape[0], rows.shape[1], heads, -1).transpose(1, 2)
