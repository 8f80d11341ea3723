"""Where a difference begins: the first layer and tensor, in the order of computation, that is beyond its bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvferry.audit.drift import Drift, head_drift
from kvferry.audit.trace import TENSORS, Trace

Bounds = Mapping[str, Float[np.ndarray, " layers"]]
"""Tensor -> the largest relative L2 of each layer that is no finding."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a difference begins.

    Attributes:
        layer: index of the first layer beyond its bound.
        tensor: ``keys``, ``values``, ``keys+values``, ``attention`` or ``residual``: the first in that layer.
        layers: all layers in which this tensor is beyond its bound.
        heads: kv heads concerned, for keys and values.
        first, last: positions of the first and last token concerned.
        tokens: how many are.
        size: largest relative L2 there.
        cache: whether the cache itself differs there as it was built, before any token of the suffix ran.
    """

    layer: int
    tensor: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    first: int
    last: int
    tokens: int
    size: float
    cache: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layers": list(self.layers), "heads": list(self.heads)}


def locate(found: Drift, bounds: Bounds, reference: Trace, other: Trace) -> Location | None:
    """The origin of a difference, or ``None`` where nothing is beyond its bound.

    Within a layer keys and values are computed first, then attention, then the rest of the layer.
    """
    beyond = {name: _beyond(found.maps[name], bounds[name]) for name in TENSORS}
    layers = reference.layers
    start = reference.start
    for layer in range(layers):
        pair = [name for name in ("keys", "values") if beyond[name][layer].any()]
        if len(pair) == 2:
            # What differs in a cache as it was built is the origin; what differs only in the suffix has followed.
            early = [name for name in pair if beyond[name][layer, :start].any()]
            pair = early or pair
        names = pair or [name for name in ("attention", "residual") if beyond[name][layer].any()][:1]
        if not names:
            continue
        marks = np.logical_or.reduce([beyond[name] for name in names])
        places = np.flatnonzero(marks[layer])
        heads = sorted({head for name in pair for head in _heads(reference, other, layer, name, bounds)})
        inside = bool(pair) and bool(marks[layer, :start].any())
        extent = marks[:, :start] if inside else marks
        return Location(
            layer=layer,
            tensor="+".join(names),
            layers=tuple(int(index) for index in np.flatnonzero(extent.any(axis=1))),
            heads=tuple(heads),
            first=int(places[0]),
            last=int(places[-1]),
            tokens=len(places),
            size=float(max(np.nanmax(found.maps[name][layer]) for name in names)),
            cache=inside,
        )
    return None


def _beyond(
    values: Float[np.ndarray, "layers length"], bounds: Float[np.ndarray, " layers"]
) -> Bool[np.ndarray, "l n"]:
    return np.asarray(np.nan_to_num(values, nan=0.0, posinf=np.inf) > bounds[:, None])


def _heads(reference: Trace, other: Trace, layer: int, tensor: str, bounds: Bounds) -> list[int]:
    heads: set[int] = set()
    for mine, theirs in (
        (reference.built, other.built),
        (reference.final, other.final),
    ):
        both = head_drift(mine, theirs, layer, tensor)
        if both is not None:
            heads |= {int(head) for head in np.flatnonzero((both[1] > bounds[tensor][layer]).any(axis=1))}
    return sorted(heads)
