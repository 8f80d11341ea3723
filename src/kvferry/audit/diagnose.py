"""What a semantic difference looks like: hypotheses, each tried on what two exact runs left behind.

A new one is one function and one line in `HYPOTHESES`. A name is given only where its own test holds; a difference that
fits none keeps its location and no name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.audit.drift import relative_l2, shared_tokens
from kvferry.audit.locate import Location
from kvferry.audit.trace import Trace
from kvferry.errors import UnsupportedCache
from kvferry.hf.geometry import layer_kinds, text_config
from kvferry.hf.rotary import rotaries_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16)
"""Positions by which keys may be off."""

EXPLAINED = 0.05
"""A hypothesis holds where it leaves no more than this part of the difference."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A reference, a run that differs from it, and where the difference begins."""

    model: PreTrainedModel
    reference: Trace
    other: Trace
    location: Location

    def cache(self, tensor: str, layer: int | None = None) -> tuple[int, Tensor, Tensor] | None:
        """First token, and ``(heads, tokens, dim)`` of both runs' caches as they were built."""
        place = self.location.layer if layer is None else layer
        return shared_tokens(self.reference.built, self.other.built, place, tensor)


def diagnose(case: Case) -> tuple[str, str] | None:
    """Name and explanation of the first hypothesis that holds."""
    for name, hypothesis in HYPOTHESES.items():
        found = hypothesis(case)
        if found is not None:
            return name, found
    return None


def _positions(case: Case) -> str | None:
    if case.location.tensor != "keys" or not case.location.cache:
        return None
    both = case.cache("keys")
    try:
        rotary = rotaries_of(case.model, case.reference.layers)[case.location.layer]
    except UnsupportedCache:
        return None
    if both is None or rotary.inv_freq.numel() == 0 or rotary.limit is not None:
        return None
    first, mine, theirs = both
    places = torch.arange(first, first + mine.shape[1]).unsqueeze(0)
    bare = rotary.strip(mine.unsqueeze(0), places)
    before = float(relative_l2(mine.flatten(), theirs.flatten()))
    for shift in SHIFTS:
        turned = rotary.apply(bare, places + shift)[0]
        if float(relative_l2(turned.flatten(), theirs.flatten())) < EXPLAINED * before:
            return f"keys are those of positions {shift:+d}; values are right"
    return None


def _swapped(case: Case) -> str | None:
    keys, values = case.cache("keys"), case.cache("values")
    if keys is None or values is None or keys[1].shape != values[1].shape or len(case.location.layers) > 1:
        return None
    swapped = []
    for head in case.location.heads:
        apart = float(relative_l2(keys[1][head].flatten(), keys[2][head].flatten()))
        crossed = max(
            float(relative_l2(keys[1][head].flatten(), values[2][head].flatten())),
            float(relative_l2(values[1][head].flatten(), keys[2][head].flatten())),
        )
        if crossed < EXPLAINED * apart:
            swapped.append(head)
    if not swapped:
        return None
    return f"keys of head {', '.join(map(str, swapped))} hold its values, and values its keys"


def _quantised(case: Case) -> str | None:
    found = []
    for tensor in case.location.tensor.split("+"):
        both = case.cache(tensor) if tensor in ("keys", "values") else None
        if both is None or not case.location.cache:
            return None
        mine, theirs = _levels(both[1]), _levels(both[2])
        if theirs > 17 or theirs * 1.5 > mine:
            return None
        found.append(f"{tensor} take {theirs:g} values in 32 channels of a token, where {mine:g} are usual")
    return "; ".join(found)


def _levels(tensor: Tensor) -> float:
    """Median number of different values among 32 channels of one head and token."""
    groups = tensor[..., : tensor.shape[-1] // 32 * 32] if tensor.shape[-1] >= 32 else tensor
    rows = groups.reshape(-1, min(32, groups.shape[-1])).sort(dim=-1).values
    return float(((rows[:, 1:] != rows[:, :-1]).sum(dim=-1) + 1).double().median())


def _stale(case: Case) -> str | None:
    if len(case.location.layers) != 1 or case.location.tensor != "keys+values" or not case.location.cache:
        return None
    sizes = []
    for tensor in ("keys", "values"):
        both = case.cache(tensor)
        if both is None or len(case.location.heads) < both[1].shape[0]:
            return None
        norms = float(both[2].double().norm() / both[1].double().norm().clamp_min(1e-300))
        sizes.append(float(relative_l2(both[1], both[2]).median()))
        if not 0.5 < norms < 2:
            return None
    if min(sizes) < 0.1:
        return None
    return "keys and values of this layer alone are of the usual size, and of other tokens"


def _weights(case: Case) -> str | None:
    last = case.reference.layers - 1
    if not case.location.cache or not {case.location.layer, last} <= set(_reaches(case)):
        return None
    tensor = case.location.tensor.split("+")[0]
    both = case.cache(tensor)
    if both is None:
        return None
    mine, theirs = both[1].double().flatten(), both[2].double().flatten()
    factor = float((mine @ theirs) / (mine @ mine).clamp_min(1e-300))
    left = float(relative_l2(factor * mine, theirs))
    if left < EXPLAINED * float(relative_l2(mine, theirs)):
        return f"{case.location.tensor} are {factor:.4g} times the right ones, and every later layer follows"
    return f"{case.location.tensor} come out differently from the same input, and every later layer follows"


def _reaches(case: Case) -> set[int]:
    """Layers whose cache, as built, differs in keys or values by more than rounding of exact runs."""
    found = set()
    for layer in range(case.reference.layers):
        for tensor in ("keys", "values"):
            both = case.cache(tensor, layer)
            if both is not None and float(relative_l2(both[1].flatten(), both[2].flatten())) > 1e-9:
                found.add(layer)
    return found | {index for index in range(case.reference.layers) if case.reference.final[index] is None}


def _window(case: Case) -> str | None:
    kind = layer_kinds(text_config(case.model))[case.location.layer]
    if case.location.tensor != "attention" or kind.name != "sliding" or kind.argument is None:
        return None
    if abs(kind.argument - case.location.first) > 8 or case.location.last < case.reference.length - 1:
        return None
    short = kind.argument - case.location.first
    word = f"{short} short" if short > 0 else f"{1 - short} long"
    return f"attention of sliding layers is right up to position {case.location.first - 1}: the window is {word}"


def _padding(case: Case) -> str | None:
    if case.location.tensor != "attention" or not case.other.arm.left_padding or case.location.first > 0:
        return None
    return "attention differs from the first token on, which has nothing but padding to attend to beside itself"


HYPOTHESES: dict[str, Callable[[Case], str | None]] = {
    "positions": _positions,
    "keys and values swapped": _swapped,
    "quantised": _quantised,
    "stale layer": _stale,
    "other weights": _weights,
    "sliding window": _window,
    "padding attended": _padding,
}
"""Name -> function that gives an explanation where the hypothesis holds. The first that does is taken."""
