"""Some tokens of a cache computed anew by the model, on top of what the cache holds of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.capture import run
from kvferry.hf.compat import cache_argument, forward_parameters
from kvferry.hf.identity import identity_of
from kvferry.hf.tokens import positions_of
from kvferry.snapshot import Identity, LayerState, Snapshot


class _Replacing(DynamicLayer):  # type: ignore[misc]
    """A layer that holds all tokens; what the model brings takes the place of some of them."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor):
        super().__init__()
        self.keys, self.values, self.places = keys, values, places
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_more: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self.places] = key_states
        self.values[:, :, self.places] = value_states
        return self.keys, self.values


def prefill(
    model: PreTrainedModel, identity: Identity, token_ids: Int[Tensor, "batch seq_len"], mask: Tensor | None = None
) -> Snapshot:
    """`kvferry.hf.capture.capture` for who knows the model's identity already: hashing the weights takes as long as the
    prefill of some dozen tokens.

    Args:
        model: the model.
        identity: its own, of full and sliding layers.
        token_ids: the prompt.
        mask: 0 on left padding.
    """
    present = torch.ones(token_ids.shape, dtype=torch.bool) if mask is None else mask.cpu().bool()
    positions = positions_of(present)
    cache = DynamicCache(config=model.config)
    run(model, cache, token_ids, present, positions)
    length = token_ids.shape[1]
    layers = tuple(
        LayerState(
            geometry.kind,
            layer.keys[:, :, -geometry.kind.held(length) :].detach(),
            layer.values[:, :, -geometry.kind.held(length) :].detach(),
            length,
        )
        for geometry, layer in zip(identity.layers, cache.layers, strict=True)
    )
    made = replace(identity, construction=("prefill",))
    return Snapshot(made, token_ids.cpu(), positions, present, layers)


@torch.no_grad()
def recompute(
    model: PreTrainedModel,
    snapshot: Snapshot,
    tokens: Sequence[int] | Int[Tensor, " chosen"],
    *,
    check: bool = True,
) -> Snapshot:
    """``snapshot`` with the keys and values of ``tokens`` computed by ``model`` from the token ids.

    All chosen tokens go through the model together. Each attends, layer by layer, to the other chosen tokens as they
    are computed and to the cache for the rest; what it costs is a prefill of as many tokens as are chosen. As in
    CacheBlend (arXiv 2405.16444), but for any cache of the model.

    Args:
        model: the one that the cache is for.
        snapshot: stays as it is.
        tokens: indices into the sequence, the same for every sequence of the batch; masked ones are left out.
        check: require that the cache is for this model; a caller that has checked already may leave it out.

    Raises:
        IncompatibleIdentity: the cache is for another model.
        InvalidInput: an index outside of the sequence.
        UnsupportedCache: a sliding layer no longer holds what a chosen token attended to.
    """
    if check:
        snapshot.identity.require_compatible(identity_of(model))
    chosen = torch.unique(torch.as_tensor(tokens, dtype=torch.int64).cpu())
    if chosen.numel() and not 0 <= int(chosen[0]) <= int(chosen[-1]) < snapshot.seq_len:
        raise InvalidInput(f"tokens {int(chosen[0])}…{int(chosen[-1])} of a cache of {snapshot.seq_len}")
    if not chosen.numel():
        return snapshot
    rows = [_row(model, snapshot.select([row]), chosen) for row in range(snapshot.batch_size)]
    layers = tuple(
        replace(
            layer,
            keys=torch.cat([row[index].keys for row in rows]),  # type: ignore[misc]
            values=torch.cat([row[index].values for row in rows]),  # type: ignore[misc]
            queries=None,
        )
        for index, layer in enumerate(snapshot.layers)
    )
    identity = snapshot.identity.then(f"recomputed({chosen.numel()} of {snapshot.seq_len})")
    return replace(snapshot, identity=identity, layers=layers)


def _row(model: PreTrainedModel, snapshot: Snapshot, chosen: Tensor) -> tuple[LayerState, ...]:
    """Layers of a single sequence."""
    chosen = chosen[snapshot.mask[0, chosen].cpu()]
    if not chosen.numel():
        return snapshot.layers
    device = model.device
    cache = DynamicCache(config=model.config)
    masks: dict[str, Tensor] = {}
    for index, layer in enumerate(snapshot.layers):
        if layer.keys is None or layer.values is None or layer.kind.name not in ("full", "sliding"):
            raise UnsupportedCache(f"layer {index} ({layer.kind}): tokens of such a cache cannot be computed anew")
        _require_held(index, layer, int(chosen[0]))
        keys, values = (tensor.to(device, model.dtype).clone() for tensor in (layer.keys, layer.values))
        cache.layers[index] = _Replacing(keys, values, (chosen - layer.first).to(device))
        kind = "full_attention" if layer.kind.name == "full" else "sliding_attention"
        mask = _mask(layer, chosen, snapshot.mask[0].cpu(), model.dtype).to(device)
        if kind in masks and masks[kind].shape != mask.shape:
            raise UnsupportedCache(f"layer {index} ({layer.kind}) holds other tokens than those before it")
        masks[kind] = mask
    named: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        named["logits_to_keep"] = 1
    model(
        input_ids=snapshot.token_ids[:, chosen].to(device),
        position_ids=snapshot.positions[:, chosen].to(device),
        attention_mask=next(iter(masks.values())) if len(masks) == 1 else masks,
        **named,
    )
    return tuple(
        layer.map_tensors(done.keys, done.values) for layer, done in zip(snapshot.layers, cache.layers, strict=True)
    )


def _mask(layer: LayerState, chosen: Tensor, present: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of the chosen tokens over those that a layer holds."""
    places = torch.arange(layer.first, layer.seen)
    asking = chosen.unsqueeze(1)
    allowed = (places <= asking) & present[layer.first :]
    if layer.kind.name == "sliding" and layer.kind.argument is not None:
        allowed &= places > asking - layer.kind.argument
    mask = torch.zeros(allowed.shape, dtype=dtype)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def _require_held(index: int, layer: LayerState, first: int) -> None:
    needed = 0 if layer.kind.name == "full" else max(0, first - (layer.kind.argument or 0) + 1)
    if needed < layer.first:
        raise UnsupportedCache(
            f"layer {index} ({layer.kind}) holds tokens {layer.first}…{layer.seen - 1} only: token {first} attended to "
            f"{needed} on, so it cannot be computed anew; choose later tokens"
        )
