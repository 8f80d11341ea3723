"""What one run of one arm left behind: logits, keys, values, attention outputs and the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.audit.arm import Arm
from kvferry.snapshot import Snapshot

TENSORS = ("keys", "values", "attention", "residual")
"""What is traced in each layer, in the order in which a layer computes it."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """Keys and values of one layer, ``(kv_heads, held, dim)``; ``first``: position of the first token held."""

    keys: Float[Tensor, "kv_heads held head_dim"]
    values: Float[Tensor, "kv_heads held value_head_dim"]
    first: int


Held = tuple[LayerCache | None, ...]
"""A cache of one sequence, a layer each; ``None`` for a layer that uses another's."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One run; positions count the sequence's own tokens, without padding.

    Attributes:
        arm: how it ran.
        start: tokens of the prefix; the rest is the suffix.
        length: tokens in all.
        logits: ``(length - start, vocabulary)``: row i after token ``start + i``.
        built: the cache of the prefix, as the suffix found it; recomputed for an arm that keeps none.
        final: the cache at the end.
        attention, residual: ``(layers, length, hidden)``.
    """

    arm: Arm
    start: int
    length: int
    logits: Float[Tensor, "suffix vocabulary"]
    built: Held
    final: Held
    attention: Float[Tensor, "layers length hidden"]
    residual: Float[Tensor, "layers length hidden"]

    @property
    def layers(self) -> int:
        return int(self.residual.shape[0])

    @property
    def nbytes(self) -> int:
        """Of everything traced."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def same_bits(self, other: Trace) -> bool:
        """Whether everything traced is the same to the bit."""
        mine, theirs = list(self._tensors()), list(other._tensors())
        return len(mine) == len(theirs) and all(
            a.shape == b.shape and a.dtype == b.dtype and bits_equal(a, b) for a, b in zip(mine, theirs, strict=True)
        )

    def same_outputs(self, other: Trace) -> bool:
        """Whether logits and final caches are the same to the bit: all that anyone else gets to see."""
        mine, theirs = [self.logits, *_of(self.final)], [other.logits, *_of(other.final)]
        return all(a.shape == b.shape and bits_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.logits, self.attention, self.residual)
        yield from _of(self.final)
        yield from _of(self.built)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Equal bit patterns: NaN equals the same NaN, and -0 does not equal 0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def same_bits(a: Held, b: Held) -> bool:
    """Whether two caches hold the same bits for the same tokens."""
    return all(
        mine is theirs
        or (
            mine is not None
            and theirs is not None
            and mine.first == theirs.first
            and mine.keys.shape == theirs.keys.shape
            and mine.values.shape == theirs.values.shape
            and bits_equal(mine.keys, theirs.keys)
            and bits_equal(mine.values, theirs.values)
        )
        for mine, theirs in zip(a, b, strict=True)
    )


def held_by(snapshot: Snapshot, row: int = 0, padding: int = 0) -> Held:
    """One sequence's cache out of a snapshot, the first ``padding`` tokens cut off."""
    found: list[LayerCache | None] = []
    for layer in snapshot.layers:
        if layer.keys is None or layer.values is None:
            found.append(None)
            continue
        skip = max(0, padding - layer.first)
        first = layer.first + skip - padding
        found.append(LayerCache(layer.keys[row, :, skip:], layer.values[row, :, skip:], first))
    return tuple(found)


def _of(held: Held) -> Iterator[Tensor]:
    for layer in held:
        if layer is not None:
            yield from (layer.keys, layer.values)
