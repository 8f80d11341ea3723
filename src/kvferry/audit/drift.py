"""How far two runs are apart inside: relative L2 of keys, values, attention and residual, by layer and position.

The measure is that of 'Stage-Replay Divergence Follows the KV Cache' (arXiv 2607.28495): ``‖a − b‖ / max(‖a‖, ‖b‖)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.audit.trace import TENSORS, Held, LayerCache, Trace

Map = Float[np.ndarray, "layers length"]


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """Relative L2 by layer and position of each of `TENSORS`, ``(layers, length)``; NaN where nothing is held."""

    maps: dict[str, Map]

    def by_layer(self, tensor: str) -> Float[np.ndarray, " layers"]:
        """The largest of each layer, over positions; 0 where a layer holds none."""
        found: Float[np.ndarray, " layers"] = np.nan_to_num(self.maps[tensor], nan=-1.0, posinf=np.inf).max(axis=1)
        return np.asarray(np.maximum(found, 0.0))


def relative_l2(a: Tensor, b: Tensor) -> Tensor:
    """``‖a − b‖ / max(‖a‖, ‖b‖)`` over the last dimension, float64; 0 for two zeros, infinite where not finite."""
    x, y = a.to(torch.float64), b.to(torch.float64)
    scale = torch.maximum(x.norm(dim=-1), y.norm(dim=-1))
    distance = (x - y).norm(dim=-1)
    found = torch.where(scale == 0, 0.0, distance / scale.clamp_min(torch.finfo(torch.float64).tiny))
    return torch.where(found.isfinite(), found, torch.inf)


def drift(a: Trace, b: Trace) -> Drift:
    """Drift between two runs of the same sequence."""
    maps = {
        "keys": np.full((a.layers, a.length), np.nan),
        "values": np.full((a.layers, a.length), np.nan),
        "attention": relative_l2(a.attention, b.attention).numpy(),
        "residual": relative_l2(a.residual, b.residual).numpy(),
    }
    # A sliding layer has let go at the end of what it held of the prefix: the earlier cache shows it.
    for mine, theirs in ((a.built, b.built), (a.final, b.final)):
        for layer in range(a.layers):
            for tensor in ("keys", "values"):
                heads = head_drift(mine, theirs, layer, tensor)
                if heads is not None:
                    first, by_head = heads
                    into = maps[tensor][layer, first : first + by_head.shape[1]]
                    np.fmax(into, _over_heads(mine, theirs, layer, tensor), out=into)
    return Drift({name: maps[name] for name in TENSORS})


def cache_distance(a: Held, b: Held, tensors: Sequence[str] = ("keys", "values")) -> float:
    """Relative L2 of two whole caches, every layer in one: the paper's single number."""
    apart = norm_a = norm_b = 0.0
    for layer in range(len(a)):
        for tensor in tensors:
            both = _shared(a[layer], b[layer], tensor)
            if both is not None:
                mine, theirs = both[1].to(torch.float64), both[2].to(torch.float64)
                apart += float((mine - theirs).square().sum())
                norm_a += float(mine.square().sum())
                norm_b += float(theirs.square().sum())
    scale = max(norm_a, norm_b)
    return math.sqrt(apart / scale) if scale else 0.0


def head_drift(a: Held, b: Held, layer: int, tensor: str) -> tuple[int, Float[np.ndarray, "kv_heads tokens"]] | None:
    """Of each head and token that both hold, and the first of these tokens; ``None`` where there is none."""
    shared = _shared(a[layer], b[layer], tensor)
    if shared is None:
        return None
    first, mine, theirs = shared
    return first, relative_l2(mine, theirs).numpy()


def shared_tokens(a: Held, b: Held, layer: int, tensor: str) -> tuple[int, Tensor, Tensor] | None:
    """``(first, tensor of a, tensor of b)`` of the tokens that both hold, ``(kv_heads, tokens, dim)``."""
    return _shared(a[layer], b[layer], tensor)


def _over_heads(a: Held, b: Held, layer: int, tensor: str) -> Float[np.ndarray, " tokens"]:
    shared = _shared(a[layer], b[layer], tensor)
    assert shared is not None
    _, mine, theirs = shared
    return relative_l2(mine.transpose(0, 1).flatten(1), theirs.transpose(0, 1).flatten(1)).numpy()


def _shared(a: LayerCache | None, b: LayerCache | None, tensor: str) -> tuple[int, Tensor, Tensor] | None:
    if a is None or b is None:
        return None
    mine: Tensor = getattr(a, tensor)
    theirs: Tensor = getattr(b, tensor)
    first = max(a.first, b.first)
    end = min(a.first + mine.shape[1], b.first + theirs.shape[1])
    if first >= end:
        return None
    return first, mine[:, first - a.first : end - a.first], theirs[:, first - b.first : end - b.first]


def nonfinite(trace: Trace) -> tuple[int, str, int] | None:
    """Where NaN or infinity first appears: ``(layer, tensor, position)``, in the order of computation.

    The logits count as a layer behind the last, under the name ``logits``.
    """
    for layer in range(trace.layers):
        for tensor in TENSORS:
            positions: list[int] = []
            if tensor in ("keys", "values"):
                for held in (trace.built, trace.final):
                    one = held[layer]
                    if one is not None:
                        bad = ~getattr(one, tensor).isfinite().all(dim=-1).all(dim=0)
                        positions += [one.first + int(place) for place in bad.nonzero()[:1]]
            else:
                bad = ~getattr(trace, tensor)[layer].isfinite().all(dim=-1)
                positions += [int(place) for place in bad.nonzero()[:1]]
            if positions:
                return layer, tensor, min(positions)
    bad = (~trace.logits.isfinite().all(dim=-1)).nonzero()
    return (trace.layers, "logits", trace.start + int(bad[0])) if bad.numel() else None
