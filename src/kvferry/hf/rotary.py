"""What a model's own rotary modules do, held against the keys that it really caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.compat import cache_argument
from kvferry.hf.geometry import context_length, rope_of, text_config
from kvferry.hf.observe import _layer_index as layer_index
from kvferry.snapshot.rope import Rotary

_PROBED = (0, 1, 2, 61, 509)
"""Positions whose keys are looked at, those of them that the model has."""

_TOLERANCE = {torch.float64: 2e-3, torch.float32: 2e-3}
"""Largest relative difference between keys of one token once their rotation is off; `_ROUGH` in 16 bit."""
_ROUGH = 0.04


@torch.no_grad()
def rotaries_of(
    model: PreTrainedModel, layers: int, *, length: int | None = None, single: bool = False
) -> tuple[Rotary, ...]:
    """The rotation of each layer.

    One token is run at a few positions, each alone: its keys before RoPE are then the same at all of them, in every
    layer. Frequencies are the buffers of the model's rotary modules, the order of pairs is either of the two that
    there are, and what is taken is what makes those keys the same again; so whatever a model does to its tables on the
    way is in it.

    Where the frequencies hang on the length (dynamic scaling, LongRoPE), all of a cache's keys are turned by one set
    as long as it was prefilled in one go and is not longer than what that set is for: `Rotary.limit`.

    Args:
        model: any causal model.
        layers: how many it has.
        length: positions of the prefill, where frequencies hang on it; ``None``: within the length that the model was
            first trained on. Without meaning for other models.
        single: angles rounded as the model's own; see `Rotary`.

    Raises:
        UnsupportedCache: keys that no rotation of pairs explains, or a rotary module that an earlier, longer prompt
            has left in another state than a prefill of ``length`` would.
        InvalidInput: ``length`` is not positive, or beyond the model's context.
    """
    config = text_config(model)
    if not _may_rotate(model, layers):
        return (Rotary(torch.empty(0)),) * layers
    sets = [_set_for(config, index, length) for index in range(layers)]
    with _left_as_it_was(model):
        seen = _probe(model, sets)
        return tuple(_rotary(index, seen, own, single) for index, own in enumerate(sets))


@dataclass(frozen=True, slots=True)
class _Set:
    """Which set of frequencies a layer is asked for.

    Attributes:
        longest: positions that the probe has to pretend to; 0: any.
        limit: of the `Rotary`: where there is one beside ``longest``, each length has a set of its own.
    """

    longest: int = 0
    limit: int | None = None


@dataclass(slots=True)
class _Seen:
    """What the probe gave.

    Attributes:
        positions: int64 ``(places, 1)``.
        keys: of each layer with keys of its own, ``(places, kv_heads, 1, head_dim)``, float32.
        scales: factor of the tables that each layer's attention was handed.
        frequencies: every set that the model's rotary modules held just then.
        factors: attention factors that they state.
        tolerance: of the keys' dtype.
    """

    positions: Int[Tensor, "places 1"]
    tolerance: float
    keys: dict[int, Float[Tensor, "places kv_heads 1 head_dim"]] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    frequencies: list[Float[Tensor, " n"]] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


def _may_rotate(model: PreTrainedModel, layers: int) -> bool:
    """Whether anything in the model turns keys: a configuration that says so, or tables of sines."""
    config = text_config(model)
    return any(rope_of(config, index) is not None for index in range(layers)) or bool(_frequencies(model))


def _set_for(config: Any, layer: int, length: int | None) -> _Set:
    if length is not None and length < 1:
        raise InvalidInput(f"a prefill of {length} positions: it must be at least 1")
    spec = rope_of(config, layer)
    if spec is None or spec.type not in ("dynamic", "longrope"):
        return _Set()
    first = dict(spec.scaling).get("original_max_position_embeddings") if spec.type == "longrope" else None
    original = int(first or config.max_position_embeddings)
    if length is None or length <= original:
        return _Set(0, original)
    return _Set(length, length if spec.type == "dynamic" else None)


@contextmanager
def _left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Put the state of the model's rotary modules back on the way out: dynamic scaling remembers the longest prompt."""
    before: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None], dict[str, Tensor]]] = []
    for module in model.modules():
        names = [name for name in module._buffers if name.endswith("inv_freq")]
        if names:
            own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
            held = dict(module._buffers)
            before.append((module, own, held, {name: held[name].clone() for name in names if held[name] is not None}))
    try:
        yield
    finally:
        for module, own, held, values in before:
            module.__dict__.update(own)
            for name, buffer in held.items():
                if name in values and buffer is not None:
                    buffer.copy_(values[name])  # LongRoPE writes in place, dynamic scaling puts another there
            module._buffers.update(held)


def _probe(model: PreTrainedModel, sets: Sequence[_Set]) -> _Seen:
    """Run one token at each of a few positions, as the rows of a batch; the last of them is what scaling goes by."""
    longest = max(own.longest for own in sets)
    ends = [own.limit - 1 for own in sets if own.limit is not None and not own.longest]
    length = context_length(text_config(model))
    known = [place for place in _PROBED if length is None or place < length]
    if longest:
        if length is not None and longest > length:
            raise InvalidInput(f"a prefill of {longest} positions, but the model's context is {length} tokens")
        if any(own.limit == longest for own in sets):
            _require_fresh(model, longest)
        known = sorted({*(place for place in known if place < longest), longest - 1})
    elif ends:
        known = [place for place in known if place < min(ends)]
    places = torch.tensor(known, device=model.device).unsqueeze(1)
    seen = _Seen(places.cpu(), _TOLERANCE.get(model.dtype, _ROUGH))

    def watch(module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        factor = _factor(kwargs.get("position_embeddings"))
        if factor is not None:
            seen.scales[layer_index(module)] = factor

    hooks = [
        module.register_forward_pre_hook(watch, with_kwargs=True)
        for module in model.modules()
        if layer_index(module) >= 0
    ]
    cache = DynamicCache(config=model.config)
    try:
        ids = torch.full_like(places, _token(model))
        model(input_ids=ids, position_ids=places, use_cache=True, **{cache_argument(model): cache})
    finally:
        for hook in hooks:
            hook.remove()
    for index, layer in enumerate(cache.layers[: len(sets)]):
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            seen.keys[index] = layer.keys[:, :, -1:].float().cpu()
    seen.frequencies = _frequencies(model)
    seen.factors = [
        float(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, int | float)
    ]
    return seen


def _require_fresh(model: PreTrainedModel, length: int) -> None:
    """Raise where dynamic scaling still goes by a longer prompt than ``length``."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("max_seq_len_cached") and int(value) > length:
                raise UnsupportedCache(
                    f"the model has seen a prompt of {int(value)} positions, and turns one of {length} by that one's "
                    "frequencies since: load it anew, and capture the cache with it then"
                )


def _token(model: PreTrainedModel) -> int:
    """A token whose embedding is not that of padding, which is zero."""
    weight = model.get_input_embeddings().weight[:64]
    return int(weight.float().norm(dim=-1).argmax())


def _factor(tables: Any) -> float | None:
    """Length of the vectors (cosine, sine) that an attention is handed; ``None`` where it is handed none."""
    if isinstance(tables, Tensor) and tables.is_complex():
        return float(tables.abs().double().mean())
    if isinstance(tables, Sequence) and len(tables) == 2 and all(isinstance(part, Tensor) for part in tables):
        cos, sin = (part.double() for part in tables)
        return float(torch.hypot(cos, sin).mean())
    return None


def _frequencies(model: PreTrainedModel) -> list[Tensor]:
    """Every set of frequencies in the model: those of its rotary modules, else of tables of sines (GPT-J)."""
    found = [
        buffer.float().cpu().clone()  # LongRoPE goes on writing into it
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    if not found:
        for name, table in model.named_buffers():
            if name.endswith("embed_positions") and table.dim() == 2 and table.shape[0] > 1:
                sin, cos = table[1].double().cpu().chunk(2)
                found.append(torch.atan2(sin, cos).float())
                break  # each layer has its own copy
    return [own for place, own in enumerate(found) if not any(torch.equal(own, other) for other in found[:place])]


def _rotary(layer: int, seen: _Seen, wanted: _Set, single: bool) -> Rotary:
    """The rotation that leaves a layer's keys the same at every position."""
    keys = seen.keys.get(layer)
    if keys is None:  # it uses another layer's
        return Rotary(torch.empty(0))
    measured = seen.scales.get(layer, 1.0)
    stated = min((*seen.factors, 1.0), key=lambda factor: abs(factor - measured))
    scale = stated if abs(stated - measured) < 0.01 * stated else measured
    candidates = [Rotary(torch.empty(0), scale)] + [
        Rotary(own, scale, interleaved)
        for own, interleaved in product(seen.frequencies, (False, True))
        if 2 * own.numel() <= keys.shape[-1]
    ]
    best, error = min(((own, _spread(own, keys, seen.positions)) for own in candidates), key=lambda pair: pair[1])
    if not error < seen.tolerance:  # NaN, too
        raise UnsupportedCache(
            f"layer {layer} rotates its keys in a way that cannot be taken off: no rotation of pairs of channels by "
            f"the model's own frequencies gives one token the same key at every position (difference {error:.2g})"
        )
    if best.inv_freq.numel() == 0:
        return Rotary(best.inv_freq)  # it may be handed tables all the same, with their factor
    return Rotary(best.inv_freq, scale, best.interleaved, wanted.limit, single)


def _spread(rotary: Rotary, keys: Tensor, positions: Tensor) -> float:
    """Largest relative distance of a token's key, its rotation off, from that at the first position."""
    stripped = rotary.strip(keys, positions).flatten(1)
    return float(((stripped - stripped[:1]).norm(dim=1) / stripped[0].norm()).max())
