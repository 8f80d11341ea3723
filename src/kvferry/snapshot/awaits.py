"""The stage ``awaits(TOKENS at LENGTH)`` of a construction path: the token that followed a cache when it was taken.

One token a sequence, in the order of the batch, as in ``awaits(17, 4 at 512)``. It holds for a cache of exactly that
length and order of sequences: what is cropped loses the stage, what is selected keeps its own sequences' tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_AWAITS = re.compile(r"awaits\(([0-9]{1,10}(?:, [0-9]{1,10})*) at ([0-9]{1,18})\)")
_MAX_TOKEN = 1 << 31


def awaits(tokens: Sequence[int], seq_len: int) -> str:
    """The stage: ``tokens``, one a sequence, follow a cache of ``seq_len`` tokens."""
    return f"awaits({', '.join(str(token) for token in tokens)} at {seq_len})"


def awaited(construction: Sequence[str], batch: int, seq_len: int) -> tuple[int, ...] | None:
    """The tokens that follow a cache of this size, or ``None`` where its construction path names none for it."""
    for stage in reversed(construction):
        match = _AWAITS.fullmatch(stage)
        if match is None:
            continue
        tokens = tuple(int(token) for token in match[1].split(", "))
        if len(tokens) == batch and int(match[2]) == seq_len and max(tokens) < _MAX_TOKEN:
            return tokens
    return None


def without_awaits(construction: Sequence[str]) -> tuple[str, ...]:
    """The construction path of what is no longer followed by that token."""
    return tuple(stage for stage in construction if not stage.startswith("awaits("))


def select_awaits(construction: Sequence[str], rows: Sequence[int], batch: int) -> tuple[str, ...]:
    """The construction path of the sequences ``rows``, in this order, of a batch of ``batch``."""
    kept = []
    for stage in construction:
        match = _AWAITS.fullmatch(stage)
        tokens = [] if match is None else match[1].split(", ")
        if match is not None and len(tokens) == batch:
            kept.append(awaits([int(tokens[row]) for row in rows], int(match[2])))
        elif not stage.startswith("awaits("):
            kept.append(stage)
    return tuple(kept)
