"""Tokens that no transform made by calibration can be trusted with."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor

from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.basis import LEVELS
from kvferry.snapshot import Snapshot

MOST_TIMES = 16
"""So many times what the widest channel of a layer had in calibration is too much."""


def outlying_tokens(snapshot: Snapshot, transform: Transform) -> Bool[Tensor, "batch seq"]:
    """Tokens with a key or value far beyond all that the transform was made from.

    Within a block they would drag the mean away from every other token, and their own energy lies where the basis has
    no bits; sent raw, they harm nobody.
    """
    found = torch.zeros(snapshot.batch_size, snapshot.seq_len, dtype=torch.bool)
    for layer, reach in zip(snapshot.layers, _reaches(transform), strict=True):
        for tensor, most in zip((layer.keys, layer.values), reach, strict=True):
            if tensor is None or tensor.numel() == 0:
                continue
            low, high = torch.aminmax(tensor)  # one fast pass; both are NaN where anything is
            if not -most <= low.item() <= high.item() <= most:
                bad = ~(tensor.abs() <= most).all(dim=3).all(dim=1)
                found[:, layer.first :] |= bad.cpu()
    return found


@lru_cache(maxsize=2)
def _reaches(transform: Transform) -> tuple[tuple[float, float], ...]:
    """Largest magnitude that is still believed, of the keys and of the values of each layer."""
    most = [[0.0, 0.0] for _ in transform.identity.layers]
    for basis in transform.bases:
        mean = (basis.back @ basis.mean).abs()
        deviation = (basis.back.square() @ (2 * basis.level.float() / LEVELS).exp2()).sqrt()
        parts = torch.split(mean + deviation, list(basis.group.sizes))
        for layer, part in zip(basis.group.layers, parts, strict=True):
            scale = transform.rotaries[layer].scale if basis.group.keys else 1.0
            # A rotation may turn both of a pair's channels into one.
            most[layer][int(not basis.group.keys)] = MOST_TIMES * 2**0.5 * scale * float(part.max())
    return tuple((keys, values) for keys, values in most)
