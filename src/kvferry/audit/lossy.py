"""Faults under a declared loss. A codec explains how far a cache is off; it does not turn keys or swap heads.

A lossy cache is beyond rounding everywhere, so nothing can be located by size. Each hypothesis is held against the
cache as it should be instead: where it brings a layer clearly nearer, it is what happened. A codec's own error is
nearest to no change at all. A new fault is one function and one line in `FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvferry.audit.diagnose import SHIFTS
from kvferry.audit.drift import relative_l2, shared_tokens
from kvferry.audit.trace import Trace
from kvferry.errors import UnsupportedCache
from kvferry.hf.rotary import rotaries_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEARER = 0.8
"""A hypothesis holds where it leaves at most this part of the distance; a codec's error alone leaves more than all."""

UNRELATED = 0.5
"""Below this cosine, keys or values (less each channel's mean) have nothing to do with the right ones."""

RELATED = 0.8
"""The median layer must be above it for one layer to stand out."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was found, and where."""

    name: str
    layer: int
    tensor: str
    why: str


class Lossy:
    """A cache as it should be, and one that a lossy stage has been at.

    Args:
        model: the receiver.
        reference: a run on the cache as it should be.
        other: the run on the given one.
        dropped: tokens that the cache declares dropped.
    """

    def __init__(self, model: PreTrainedModel, reference: Trace, other: Trace, dropped: Bool[Tensor, " tokens"]):
        self.model, self.reference, self.other, self.dropped = model, reference, other, dropped

    @property
    def layers(self) -> range:
        return range(self.reference.layers)

    def pair(self, layer: int, tensor: str) -> tuple[Tensor, Tensor, Tensor] | None:
        """Positions of the tokens that both hold, and ``(heads, tokens, dim)`` of both, float64."""
        both = shared_tokens(self.reference.built, self.other.built, layer, tensor)
        if both is None:
            return None
        first, mine, theirs = both
        places = torch.arange(first, first + mine.shape[1])
        kept = ~self.dropped[places]
        if not bool(kept.any()):
            return None
        return places[kept], mine[:, kept].double(), theirs[:, kept].double()

    @cached_property
    def likeness(self) -> dict[int, float]:
        """Of each layer, the larger of its keys' and values' cosines, where both are of the usual size."""
        found = {}
        for layer in self.layers:
            keys, values = self.pair(layer, "keys"), self.pair(layer, "values")
            if keys is None or values is None:
                continue
            sizes = [float(theirs.norm() / mine.norm().clamp_min(1e-300)) for _, mine, theirs in (keys, values)]
            if all(0.5 < size < 2 for size in sizes) and keys[1].shape[1] > 2:
                found[layer] = max(_cosine(mine, theirs) for _, mine, theirs in (keys, values))
        return found


def fault_under_loss(case: Lossy) -> Fault | None:
    """The first fault that is recognised under what the lossy stage did."""
    for fault in FAULTS.values():
        found = fault(case)
        if found is not None:
            return found
    return None


def _turned(case: Lossy) -> Fault | None:
    try:
        rotaries = rotaries_of(case.model, case.reference.layers)
    except UnsupportedCache:
        return None
    for layer in case.layers:
        both, rotary = case.pair(layer, "keys"), rotaries[layer]
        if both is None or rotary.inv_freq.numel() == 0 or rotary.limit is not None:
            continue
        places, mine, theirs = both
        bare = rotary.strip(mine.unsqueeze(0), places.unsqueeze(0))
        before = _apart(mine, theirs)
        left = {shift: _apart(rotary.apply(bare, places.unsqueeze(0) + shift)[0], theirs) for shift in SHIFTS}
        shift = min(left, key=lambda one: left[one])
        if left[shift] < NEARER * before:
            size = f"relative L2 {left[shift]:.3g} instead of {before:.3g}"
            why = f"keys are nearer to those of positions {shift:+d}: {size}"
            return Fault("positions", layer, "keys", why)
    return None


def _swapped(case: Lossy) -> Fault | None:
    for layer in case.layers:
        keys, values = case.pair(layer, "keys"), case.pair(layer, "values")
        if keys is None or values is None or keys[1].shape != values[1].shape:
            continue
        for head in range(keys[1].shape[0]):
            apart = min(_apart(keys[1][head], keys[2][head]), _apart(values[1][head], values[2][head]))
            crossed = max(_apart(keys[1][head], values[2][head]), _apart(values[1][head], keys[2][head]))
            if crossed < NEARER * apart:
                why = f"keys of head {head} are nearer to its values, and values to its keys"
                return Fault("keys and values swapped", layer, "keys+values", why)
    return None


def _stale(case: Lossy) -> Fault | None:
    if len(case.likeness) < 3 or median(case.likeness.values()) < RELATED:
        return None
    layer = min(case.likeness, key=lambda one: case.likeness[one])
    if case.likeness[layer] > UNRELATED:
        return None
    why = (
        f"keys and values of this layer are of the usual size, and of other tokens: cosine {case.likeness[layer]:.2f} "
        f"where {median(case.likeness.values()):.2f} is usual"
    )
    return Fault("stale layer", layer, "keys+values", why)


FAULTS: dict[str, Callable[[Lossy], Fault | None]] = {
    "positions": _turned,
    "keys and values swapped": _swapped,
    "stale layer": _stale,
}
"""Name -> function that finds it."""


def _apart(a: Tensor, b: Tensor) -> float:
    return float(relative_l2(a.flatten(), b.flatten()))


def _cosine(a: Float[Tensor, "heads tokens dim"], b: Float[Tensor, "heads tokens dim"]) -> float:
    """Of what is left of both behind what all texts share: the first token, and each channel's mean over the others."""
    x, y = (one[:, 1:] - one[:, 1:].mean(dim=1, keepdim=True) for one in (a, b))
    return float((x * y).sum() / (x.norm() * y.norm()).clamp_min(1e-300))
