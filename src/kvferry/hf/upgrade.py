"""Better values for tokens that a model's cache holds already, written between two forward passes."""

from __future__ import annotations

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvferry.errors import UnsupportedCache
from kvferry.snapshot import Snapshot


@torch.no_grad()
def upgrade_cache(cache: Cache, snapshot: Snapshot, layer: int, start: int, stop: int) -> None:
    """Copy tokens ``start`` to ``stop`` of one layer of ``snapshot`` over those in ``cache``, in place.

    Tokens that a sliding layer has let go meanwhile are passed over. No forward pass may run on the cache meanwhile.

    Args:
        cache: a growing cache that began as ``snapshot``'s own and may have grown since.
        snapshot: what the cache was made of, with better values in the same places.
        layer: index of the layer.
        start: first token, counted over the whole sequence.
        stop: token behind the last.

    Raises:
        UnsupportedCache: the layer does not grow, or has not got these tokens.
    """
    for ours, theirs in _pairs(cache, snapshot, layer, start, stop):
        theirs.copy_(ours)


def holds(cache: Cache, snapshot: Snapshot) -> bool:
    """Whether the tokens of ``snapshot`` that ``cache`` still holds have the same bits in it.

    Raises:
        UnsupportedCache: as `upgrade_cache`.
    """
    return all(
        torch.equal(ours.contiguous().view(torch.uint8), theirs.to(ours.device).contiguous().view(torch.uint8))
        for index, layer in enumerate(snapshot.layers)
        if layer.keys is not None
        for ours, theirs in _pairs(cache, snapshot, index, layer.first, layer.seen)
    )


def _pairs(
    cache: Cache, snapshot: Snapshot, layer: int, start: int, stop: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same tokens in the snapshot and in the cache, keys and values; none where the cache holds none of them."""
    own, other = snapshot.layers[layer], cache.layers[layer]
    if not isinstance(other, DynamicLayer) or not other.is_initialized or own.keys is None or own.values is None:
        raise UnsupportedCache(f"layer {layer}: tokens of a {type(other).__name__} cannot be upgraded in place")
    seen = int(other.get_seq_length())
    if seen < snapshot.seq_len:
        raise UnsupportedCache(f"layer {layer} of the cache has seen {seen} tokens, the snapshot {snapshot.seq_len}")
    first = seen - int(other.keys.shape[2])
    start = max(start, first, own.first)
    if start >= stop:
        return []
    ours, theirs = slice(start - own.first, stop - own.first), slice(start - first, stop - first)
    return [
        (own.keys[:, :, ours], other.keys[:, :, theirs]),
        (own.values[:, :, ours], other.values[:, :, theirs]),
    ]
