"""A prefill that hands out each layer's cache as soon as it is there, while later layers are still being computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvferry.errors import UnsupportedCache
from kvferry.hf.capture import capture
from kvferry.hf.geometry import geometry_of, text_config
from kvferry.hf.observe import observe_queries
from kvferry.hf.tokens import as_ids
from kvferry.snapshot import LayerState, Snapshot

OnLayer = Callable[[int, LayerState], None]
"""Told each layer that has tokens of its own, in order; what it raises ends the prefill."""


def stream_capture(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch seq_len"] | Sequence[int],
    on_layer: OnLayer,
    *,
    attention_mask: Tensor | None = None,
    query_window: int = 0,
) -> Snapshot:
    """As `kvferry.capture`, all tokens at once; ``on_layer`` gets each layer when its attention is done.

    The tensors that it gets are those of the snapshot, and nothing writes to them any more: another thread may read
    them while the prefill goes on. Layers of a model whose attention shows no cache to its hooks come all at the end.
    The model's hooks are as they were afterwards, whatever happens.

    Args:
        model: a causal language model.
        input_ids: ``(batch, seq_len)``, or ``(seq_len,)`` for a batch of one.
        on_layer: called in this thread, between two layers: what takes time belongs in another one.
        attention_mask: ``(batch, seq_len)``, 0 on left padding.
        query_window: the last so many queries go with each layer.

    Raises:
        InvalidInput, UnsupportedCache: as `kvferry.capture`, and whatever ``on_layer`` raises.
    """
    ids = as_ids(model, input_ids)
    kinds = [geometry.kind for geometry in geometry_of(model)]
    owners = [index for index, kind in enumerate(kinds) if kind.name != "shared"]
    seq_len = int(ids.shape[1])
    attention = getattr(text_config(model), "_attn_implementation", None)
    told = 0
    queries: dict[int, Tensor] = {}

    def look(index: int, cache: Cache) -> None:
        nonlocal told
        if told == len(owners) or owners[told] != index or index >= len(cache.layers):
            return
        layer = cache.layers[index]
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized or layer.get_seq_length() != seq_len:
            return
        if query_window and index not in queries:
            return
        start = int(layer.keys.shape[2]) - kinds[index].held(seq_len)
        keys, values = layer.keys[:, :, start:].detach(), layer.values[:, :, start:].detach()
        told += 1
        on_layer(index, LayerState(kinds[index], keys, values, seq_len, queries.get(index)))

    with contextlib.ExitStack() as stack:
        if query_window:
            queries = stack.enter_context(observe_queries(model, query_window))
        stack.enter_context(_watched(model, look))
        snapshot = capture(model, ids, attention_mask=attention_mask)
    if query_window:
        if len(queries) != len(kinds):
            raise UnsupportedCache(f"{len(queries)} of {len(kinds)} layers of {type(model).__name__} showed queries")
        layers = (replace(layer, queries=queries[index]) for index, layer in enumerate(snapshot.layers))
        identity = replace(snapshot.identity, attention=attention)  # and not the backend that is being observed
        snapshot = replace(snapshot, identity=identity, layers=tuple(layers))
    for index in owners[told:]:
        on_layer(index, snapshot.layers[index])
    return snapshot


@contextlib.contextmanager
def _watched(model: nn.Module, look: Callable[[int, Cache], None]) -> Iterator[None]:
    """Call ``look`` with the layer's index and the cache whenever a module that says its layer has run."""
    handles = []
    try:
        for module in model.modules():
            index: Any = getattr(module, "layer_idx", None)
            if isinstance(index, int) and index >= 0:
                handles.append(module.register_forward_hook(_hook(index, look), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(index: int, look: Callable[[int, Cache], None]) -> Callable[..., None]:
    def done(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        for given in (*kwargs.values(), *args):
            if isinstance(given, Cache):
                look(index, given)
                return

    return done
