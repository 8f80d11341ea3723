"""How a cache is cut into frames: a rule that both ends know, so that nothing need be listed."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from kvferry.snapshot import Identity

BY_LAYER, WHOLE = 0, 1
"""Ways to cut a cache: a frame holds one layer, or all of them."""


@dataclass(frozen=True, slots=True)
class FrameSlot:
    """Which part of the cache a frame holds: layers ``[first_layer, last_layer)`` × tokens ``[start, stop)``."""

    index: int
    first_layer: int
    last_layer: int
    start: int
    stop: int
    level: int = 0

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        layers = (
            f"layer {self.first_layer}"
            if self.last_layer == self.first_layer + 1
            else (f"layers {self.first_layer}…{self.last_layer - 1}")
        )
        return f"frame {self.index} ({layers}, tokens {self.start}…{self.stop - 1})"


@dataclass(frozen=True, slots=True)
class Layout:
    """One frame a layer, or one for every ``frame_tokens`` tokens of a layer; layers without tensors have none.

    Frames end at multiples of ``frame_tokens`` of the whole sequence, also in a sliding layer whose first held token
    lies between two. Layers are in order, and the frames of a layer lie together. Cut `WHOLE`, all layers lie in one
    frame, or in one for every ``frame_tokens`` tokens, from the first token that any of them holds.

    Attributes:
        seq_len: tokens of the sequence.
        frame_tokens: tokens a frame; 0 for all.
        firsts: first token that each layer holds (``seq_len`` when none).
        ends: index behind the last frame of each layer; cut `WHOLE`, of all.
        cut: `BY_LAYER` or `WHOLE`.
    """

    seq_len: int
    frame_tokens: int
    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    cut: int = BY_LAYER

    @classmethod
    def of(cls, identity: Identity, seq_len: int, frame_tokens: int, cut: int = BY_LAYER) -> Self:
        """The layout of a cache of ``seq_len`` tokens."""
        firsts = tuple(seq_len - layer.kind.held(seq_len) for layer in identity.layers)
        ends, total = [], 0
        for first in firsts if cut == BY_LAYER else (min(firsts, default=seq_len),):
            if first < seq_len:
                total += 1 if frame_tokens == 0 else (seq_len - 1) // frame_tokens - first // frame_tokens + 1
            ends.append(total)
        return cls(seq_len, frame_tokens, firsts, tuple(ends), cut)

    @property
    def count(self) -> int:
        """Number of frames."""
        return self.ends[-1] if self.ends else 0

    def slot(self, index: int) -> FrameSlot:
        """The frame of that index."""
        layer = bisect.bisect_right(self.ends, index)
        first, behind = self.firsts[layer], layer + 1
        if self.cut == WHOLE:
            first, behind = min(self.firsts), len(self.firsts)
        size = self.frame_tokens
        if size == 0:
            return FrameSlot(index, layer, behind, first, self.seq_len)
        block = first // size + index - (self.ends[layer - 1] if layer else 0)
        return FrameSlot(index, layer, behind, max(first, block * size), min(self.seq_len, (block + 1) * size))

    def __iter__(self) -> Iterator[FrameSlot]:
        return (self.slot(index) for index in range(self.count))
