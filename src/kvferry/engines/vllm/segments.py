"""A prompt's cache in segments: a range of its tokens as a snapshot whose positions begin where the segment does.

A segment's identity says in its construction path which tokens of which prefix it is: `SEGMENT`. On its own it is no
cache that a model could continue from, unless it begins at 0; `join` puts a run of them together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput, UnsupportedCache
from kvferry.snapshot import Identity, LayerState, Snapshot


def stage(start: int, stop: int, key: str) -> str:
    """The stage of construction of the tokens ``start … stop - 1`` of the prefix named ``key``."""
    return f"segment({start}:{stop} of {key})"


def make_segment(
    identity: Identity, token_ids: Sequence[int], start: int, key: str, pairs: Sequence[tuple[Tensor, Tensor]]
) -> Snapshot:
    """A segment from keys and values ``(kv_heads, tokens, dim)`` of each layer that has its own.

    Raises:
        UnsupportedCache: a sliding layer whose window is smaller than the segment.
    """
    ids = torch.tensor([list(token_ids)], dtype=torch.int64)
    count = ids.shape[1]
    owners = iter(pairs)
    layers = []
    for index, geometry in enumerate(identity.layers):
        if geometry.kind.name == "shared":
            layers.append(LayerState(geometry.kind, None, None, count))
            continue
        require_held(index, geometry.kind.held(count), count)
        keys, values = next(owners)
        layers.append(LayerState(geometry.kind, keys.unsqueeze(0), values.unsqueeze(0), count))
    return Snapshot(
        identity=identity.then(stage(start, start + count, key)),
        token_ids=ids,
        positions=torch.arange(start, start + count).unsqueeze(0),
        mask=torch.ones(1, count, dtype=torch.bool),
        layers=tuple(layers),
    )


def require_held(layer: int, held: int, count: int) -> None:
    """Raise `UnsupportedCache` unless a layer holds every token of a segment."""
    if held < count:
        raise UnsupportedCache(
            f"layer {layer} slides over {held + 1} tokens and would not hold all {count} of a segment: choose "
            f"chunk_tokens of at most {held}"
        )


def cut(snapshot: Snapshot, start: int, stop: int, key: str) -> Snapshot:
    """The tokens ``start … stop - 1`` of a whole cache as a segment; shares storage.

    Raises:
        InvalidInput: more than one sequence, padding or dropped tokens, or positions other than 0, 1, 2…
        UnsupportedCache: a sliding layer no longer holds these tokens.
    """
    require_plain(snapshot)
    pairs = []
    for index, layer in enumerate(snapshot.layers):
        if layer.keys is None or layer.values is None:
            continue
        if layer.first > start:
            raise UnsupportedCache(
                f"layer {index} ({layer.kind}) holds tokens {layer.first}…{layer.seen - 1} only, not those from "
                f"{start} on: publish the cache whole, or capture shorter prompts"
            )
        span = slice(start - layer.first, stop - layer.first)
        pairs.append((layer.keys[0, :, span], layer.values[0, :, span]))
    return make_segment(snapshot.identity, snapshot.token_ids[0, start:stop].tolist(), start, key, pairs)


def require_plain(snapshot: Snapshot) -> None:
    """Raise `InvalidInput` unless a snapshot is one sequence from position 0 on with no token masked."""
    plain = torch.arange(snapshot.seq_len)
    if snapshot.batch_size != 1 or not bool(snapshot.mask.all()) or not torch.equal(snapshot.positions[0].cpu(), plain):
        raise InvalidInput(
            f"a cache of {snapshot.batch_size} sequences, of which {int((~snapshot.mask).sum())} tokens are padding or "
            "dropped: an engine's pages hold one sequence, every token of it, from position 0 on"
        )


def join(segments: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of a run of segments from position 0 on; copies.

    Raises:
        CorruptPacket: a segment does not continue the one before it, or is another model's.
    """
    first = segments[0]
    at = 0
    for segment in segments:
        if int(segment.positions[0, 0]) != at:
            raise CorruptPacket(f"a segment begins at token {int(segment.positions[0, 0])}; {at} was to come")
        segment.identity.require_compatible(first.identity, "these segments are of different models")
        at += segment.seq_len
    layers = []
    for index, geometry in enumerate(first.identity.layers):
        parts = [segment.layers[index] for segment in segments]
        tensors = []
        for side in ("keys", "values"):
            found = [getattr(part, side) for part in parts]
            held = geometry.kind.held(at)
            tensors.append(None if found[0] is None else torch.cat(found, 2)[:, :, -held:])
        layers.append(LayerState(geometry.kind, tensors[0], tensors[1], at))
    every = dict.fromkeys(name for segment in segments for name in segment.identity.construction)
    stages = tuple(name for name in every if not name.startswith("segment("))
    return Snapshot(
        identity=replace(first.identity, construction=stages),
        token_ids=torch.cat([segment.token_ids for segment in segments], 1),
        positions=torch.cat([segment.positions for segment in segments], 1),
        mask=torch.cat([segment.mask for segment in segments], 1),
        layers=tuple(layers),
    )
