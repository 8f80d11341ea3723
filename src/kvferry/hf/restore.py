"""Putting a cache into a model."""

from __future__ import annotations

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from kvferry.errors import IncompatibleIdentity, InvalidInput, UnsupportedCache
from kvferry.hf.compat import VERSION
from kvferry.hf.identity import identity_of
from kvferry.snapshot import LayerState, Snapshot


def to_cache(
    snapshot: Snapshot,
    model: PreTrainedModel,
    *,
    kind: str = "dynamic",
    max_cache_len: int | None = None,
    check: bool = True,
) -> Cache:
    """A fresh transformers cache that continues where ``snapshot`` ends; shares no storage with it.

    Hand it to ``model.generate`` together with the whole prompt (at least one token longer than the snapshot) and,
    where the snapshot masks tokens, an ``attention_mask`` that begins with its mask.

    Args:
        snapshot: what is to be continued.
        model: by which model; the tensors go to its device.
        kind: ``dynamic`` (grows) or ``static`` (preallocated).
        max_cache_len: tokens that a static cache has room for, the snapshot's included.
        check: require that the snapshot was made for this very model, by the hash of every byte of its weights where
            the snapshot carries one. Without it only the layout is checked, and
            tensors are converted to the model's dtype; the caller answers for the rest.

    Raises:
        IncompatibleIdentity: made for another model; ``differences`` names every field that differs.
        InvalidInput: an unknown kind, a ``max_cache_len`` that is missing or too small, or the middle of a sequence.
    """
    _require_beginning(snapshot)
    want = identity_of(model, full_hash=check and snapshot.identity.full_weights is not None)
    if check:
        snapshot.identity.require_compatible(want)
    else:
        differences = {
            name: pair for name, pair in snapshot.identity.layout_differences(want).items() if ".rope" not in name
        }
        if differences:
            raise IncompatibleIdentity("this cache has another layout than the model's", differences)
    if kind == "dynamic":
        if max_cache_len is not None:
            raise InvalidInput("max_cache_len is for static caches; a dynamic one grows")
        cache: Cache = DynamicCache(config=model.config)
    elif kind == "static":
        if max_cache_len is None or max_cache_len < snapshot.seq_len:
            raise InvalidInput(
                f"a static cache needs max_cache_len, at least the snapshot's {snapshot.seq_len} tokens and those to "
                f"come, not {max_cache_len}"
            )
        cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
    else:
        raise InvalidInput(f'unknown kind of cache {kind!r}: "dynamic" and "static" are')
    for index, layer in enumerate(snapshot.layers):
        if layer.kind.name != "shared":
            _fill(cache, index, layer, model)
    return cache


def _require_beginning(snapshot: Snapshot) -> None:
    """Refuse a segment: a cache counts its tokens, so what stands at position 256 must have 256 tokens before it."""
    columns = torch.arange(snapshot.seq_len, device=snapshot.positions.device)
    beyond = (snapshot.positions > columns) & snapshot.mask
    if bool(beyond.any()):
        row, column = (int(place) for place in beyond.nonzero()[0])
        position = int(snapshot.positions[row, column])
        raise InvalidInput(
            f"token {column} of sequence {row} stands at position {position}: this is a segment of a longer context, "
            "and a model needs the tokens before it too"
        )


def empty_cache(model: PreTrainedModel) -> Cache:
    """A cache of ``model`` that holds nothing yet, and grows."""
    return DynamicCache(config=model.config)


def _fill(cache: Cache, index: int, state: LayerState, model: PreTrainedModel) -> None:
    """Hand one layer's tokens to the cache, which copies them, and tell it how many it has seen in all."""
    assert state.keys is not None
    assert state.values is not None
    keys, values = (tensor.to(device=model.device, dtype=model.dtype) for tensor in (state.keys, state.values))
    layer = cache.layers[index]
    if isinstance(layer, StaticSlidingWindowLayer) and state.seen >= layer.max_cache_len > state.held:
        # A full window of the static kind has one slot more than there are tokens to keep: it is pushed out by the
        # next token before anything attends to it, so what fills it does not matter as long as it is finite.
        keys, values = (torch.cat([tensor[:, :, :1], tensor], dim=2) for tensor in (keys, values))
    cache.update(keys, values, index)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = state.seen
    elif isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = state.seen
    if int(layer.get_seq_length()) != state.seen:
        raise UnsupportedCache(
            f"layer {index}: a {type(layer).__name__} of transformers {VERSION} says that it has seen "
            f"{int(layer.get_seq_length())} tokens after a restore of {state.seen}"
        )
