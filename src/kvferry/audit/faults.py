"""Faults to plant: what goes wrong in real caches, as changes that an audit must catch, name and locate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.audit.arm import Change
from kvferry.audit.watch import attention_of, decoder_layers
from kvferry.errors import InvalidInput
from kvferry.hf.capture import capture
from kvferry.hf.geometry import text_config
from kvferry.ship.quantize.registry import quantizer
from kvferry.snapshot import LayerState, Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shifted_positions(by: int = 1) -> Change:
    """The cache was built ``by`` positions off."""
    return Change(f"positions off by {by}", position_shift=by)


def swapped_head(layer: int, head: int = 0) -> Change:
    """Keys and values of one head of one layer are in each other's place."""

    def swap(state: LayerState) -> LayerState:
        assert state.keys is not None
        assert state.values is not None
        keys, values = state.keys.clone(), state.values.clone()
        keys[:, head], values[:, head] = state.values[:, head], state.keys[:, head]
        return state.map_tensors(keys, values)

    return Change(f"keys and values of head {head} of layer {layer} swapped", cache=_in_layer(layer, swap))


def short_window(by: int = 1) -> Change:
    """Sliding layers look back ``by`` tokens less than they should."""

    @contextlib.contextmanager
    def shortened(model: PreTrainedModel) -> Iterator[None]:
        config = text_config(model)
        window = getattr(config, "sliding_window", None)
        if not isinstance(window, int):
            raise InvalidInput(f"{type(model).__name__} has no sliding layers")
        config.sliding_window = window - by
        try:
            yield
        finally:
            config.sliding_window = window

    return Change(f"sliding window {by} short", model=shortened, whole_run=True)


def stale_layer(layer: int) -> Change:
    """One layer still holds another request's keys and values."""

    def stale(snapshot: Snapshot, model: PreTrainedModel) -> Snapshot:
        other = capture(model, snapshot.token_ids.flip(1), attention_mask=snapshot.mask)
        layers = list(snapshot.layers)
        layers[layer] = replace(other.layers[layer], queries=None)
        return replace(snapshot, layers=tuple(layers))

    return Change(f"layer {layer} stale", cache=stale)


def perturbed_model(layer: int, factor: float = 1.02) -> Change:
    """The cache was built by a model whose value projection in one layer is ``factor`` times the right one."""

    @contextlib.contextmanager
    def perturbed(model: PreTrainedModel) -> Iterator[None]:
        weight: Tensor = attention_of(decoder_layers(model)[layer]).v_proj.weight  # type: ignore[union-attr, assignment]
        before = weight.detach().clone()
        try:
            with torch.no_grad():
                weight.mul_(factor)
            yield
        finally:
            with torch.no_grad():
                weight.copy_(before)

    return Change(f"value projection of layer {layer} times {factor:g}", model=perturbed)


def unmasked_padding() -> Change:
    """The mask of left padding was lost: everything attends to it. For an arm with ``left_padding``."""
    return Change("left padding unmasked", unmasked=True)


def quantised_layer(layer: int, spec: str = "sym4") -> Change:
    """Keys and values of one layer went through a quantiser that nobody declared."""

    def quantise(state: LayerState) -> LayerState:
        return state.map_tensors(_through(spec, state.keys), _through(spec, state.values))

    return Change(f"layer {layer} through {spec}", cache=_in_layer(layer, quantise))


def _through(spec: str, tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    method = quantizer(spec)
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for row, into in zip(tensor, out, strict=True):
        data = torch.empty(method.nbytes(row.shape[0], row.shape[1], row.shape[2], row.dtype), dtype=torch.uint8)
        method.encode(row, None, data)
        method.decode(data, None, into)
    return out


def _in_layer(
    layer: int, change: Callable[[LayerState], LayerState]
) -> Callable[[Snapshot, PreTrainedModel], Snapshot]:
    def changed(snapshot: Snapshot, model: PreTrainedModel) -> Snapshot:  # noqa: ARG001
        layers = list(snapshot.layers)
        layers[layer] = change(layers[layer])
        return replace(snapshot, layers=tuple(layers))

    return changed
