"""Which blocks of the source may serve which block of the target, and where each lies among the moments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from kvferry.errors import InvalidInput
from kvferry.map.blocks import Block, Side, blocks_of, holds
from kvferry.snapshot import Identity


@dataclass(frozen=True)
class Layout:
    """Blocks on both sides of a map.

    Attributes:
        sources: blocks of the source, in order.
        source_widths: numbers a token of each.
        targets: blocks of the target, in order.
        target_widths: numbers a token of each.
        target_heads: kv heads of each.
        candidates: for each target, the sources (by index, rising) that it may be made of.
    """

    sources: tuple[Block, ...]
    source_widths: tuple[int, ...]
    targets: tuple[Block, ...]
    target_widths: tuple[int, ...]
    target_heads: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]

    @cached_property
    def source_starts(self) -> tuple[int, ...]:
        """Where each source begins, and the width of all at the end."""
        return _starts(self.source_widths)

    @cached_property
    def target_starts(self) -> tuple[int, ...]:
        """Where each target begins, and the width of all at the end."""
        return _starts(self.target_widths)

    @cached_property
    def partners(self) -> tuple[int, ...]:
        """For each source, one past the last source that shares a target with it."""
        ends = [index + 1 for index in range(len(self.sources))]
        for own in self.candidates:
            for index in own:
                ends[index] = max(ends[index], own[-1] + 1)
        return tuple(ends)

    @cached_property
    def served(self) -> tuple[tuple[int, int], ...]:
        """For each source, the range of targets that it is a candidate of (``(0, 0)`` for none)."""
        spans = []
        for index in range(len(self.sources)):
            mine = [target for target, own in enumerate(self.candidates) if index in own]
            spans.append((mine[0], mine[-1] + 1) if mine else (0, 0))
        return tuple(spans)

    @property
    def digest(self) -> str:
        """Names this layout."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), sort_keys=True).encode())

    def to_json(self) -> dict[str, Any]:
        return {
            "sources": [block.to_json() for block in self.sources],
            "source_widths": list(self.source_widths),
            "targets": [block.to_json() for block in self.targets],
            "target_widths": list(self.target_widths),
            "target_heads": list(self.target_heads),
            "candidates": [list(own) for own in self.candidates],
        }


def plan_layout(
    source: Identity, target: Identity, targets: Sequence[Side], sources: Sequence[Side], *, reach: float = 1.0
) -> Layout:
    """The layout of a fit.

    Args:
        source, target: the two models.
        targets: sides of the target to be made.
        sources: sides of the source that they are made of.
        reach: how far apart in depth a source layer may lie, as a share of the whole; 1: anywhere. The moments of a
            narrow band are small.

    Raises:
        InvalidInput: a target layer for which no source layer is left.
    """
    if not 0 < reach <= 1:
        raise InvalidInput(f"a reach of {reach}: it lies above 0 and is at most 1")
    have, want = blocks_of(source, sources), blocks_of(target, targets)
    candidates = []
    for block in want:
        depth = block.layer / max(1, len(target.layers) - 1)
        own = tuple(
            index
            for index, other in enumerate(have)
            if holds(source.layers[other.layer], target.layers[block.layer])
            and abs(other.layer / max(1, len(source.layers) - 1) - depth) <= reach + 1e-9
        )
        if not own:
            raise InvalidInput(
                f"no layer of {source.model} within a reach of {reach} keeps all tokens that layer {block.layer} of "
                f"{target.model} ({target.layers[block.layer].kind}) needs"
            )
        candidates.append(own)
    return Layout(
        sources=have,
        source_widths=tuple(block.width(source) for block in have),
        targets=want,
        target_widths=tuple(block.width(target) for block in want),
        target_heads=tuple(block.heads(target) for block in want),
        candidates=tuple(candidates),
    )


def _starts(widths: Sequence[int]) -> tuple[int, ...]:
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width)
    return tuple(starts)
