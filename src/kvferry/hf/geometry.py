"""What a model's configuration says of each layer's cache: kind, heads, dimensions, rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from kvferry.errors import UnsupportedCache
from kvferry.snapshot import FULL, LayerGeometry, LayerKind, RopeSpec

_RECURRENT = ("linear_attention", "conv", "mamba", "mamba2", "hybrid", "hybrid_sliding", "recurrent")
_ROTATED_IN_WINDOWS = ("afmoe", "cohere2", "exaone4", "exaone_moe", "flint", "kolibri1")
"""Model types whose layers of full attention, beside sliding ones, have no positions; their configuration is silent."""
_SAID_APART = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Configuration of the decoder that keeps the cache (the text part of a multimodal model)."""
    return model.config.get_text_config(decoder=True)


def geometry_of(model: PreTrainedModel) -> tuple[LayerGeometry, ...]:
    """Geometry of every decoder layer.

    Raises:
        UnsupportedCache: the model is an encoder-decoder, keeps latent (MLA) or recurrent state, or has a layer of a
            kind that kvferry does not carry; names it and the layer.
    """
    config = text_config(model)
    _refuse(model, config)
    kinds = layer_kinds(config)
    layers = []
    for index, kind in enumerate(kinds):
        kind.require_supported(index)
        source = kind.argument if kind.name == "shared" else index
        assert source is not None
        own = _layer_config(config, source)
        kv_heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        layers.append(
            LayerGeometry(
                kind=kind,
                kv_heads=int(kv_heads),
                head_dim=int(head_dim),
                value_head_dim=int(getattr(own, "v_head_dim", None) or head_dim),
                rope=rope_of(config, index),
            )
        )
    return tuple(layers)


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """Kind of each layer, read the way that transformers' own caches are built from a configuration."""
    types = layer_types(config)
    shared_from = len(types) - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = []
    for index, name in enumerate(types):
        if index >= shared_from > 0:
            earlier = [other for other in range(shared_from) if types[other] == name]
            if not earlier:
                raise UnsupportedCache(f"layer {index} ({name}) shares the cache of no layer before it")
            kinds.append(LayerKind("shared", earlier[-1]))
            continue
        own = _layer_config(config, index)
        if name == "full_attention":
            kinds.append(FULL)
        elif name == "sliding_attention":
            kinds.append(LayerKind("sliding", int(own.sliding_window)))
        elif name == "chunked_attention":
            kinds.append(LayerKind("chunked", int(own.attention_chunk_size)))
        elif name in _RECURRENT:
            kinds.append(LayerKind("recurrent"))
        else:
            raise UnsupportedCache(f"layer {index} is of type {name!r}, whose cache kvferry does not carry")
    return tuple(kinds)


def layer_types(config: PreTrainedConfig) -> Sequence[str]:
    """transformers' name for the attention of each layer; where a configuration has none, what its fields imply."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return tuple(types)
    implied = []
    for index in range(config.num_hidden_layers):
        own = _layer_config(config, index)
        if getattr(own, "sliding_window", None) is not None:
            implied.append("sliding_attention")
        elif getattr(own, "attention_chunk_size", None) is not None:
            implied.append("chunked_attention")
        else:
            implied.append("full_attention")
    return tuple(implied)


def rope_of(config: PreTrainedConfig, layer: int) -> RopeSpec | None:
    """Rotary embedding of one layer; ``None`` where it has none."""
    if not _rotates(config, layer):
        return None
    parameters: Any = getattr(config, "rope_parameters", None)
    if (
        isinstance(parameters, Mapping)
        and parameters
        and all(isinstance(value, Mapping) for value in parameters.values())
    ):
        parameters = parameters.get(layer_types(config)[layer])
    if not parameters:
        theta = getattr(config, "rope_theta", None)
        if theta is None:
            return None
        parameters = {**(getattr(config, "rope_scaling", None) or {}), "rope_theta": theta}
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return RopeSpec(
        type=str(parameters.get("rope_type") or parameters.get("type") or "default"),
        theta=float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0),
        partial=float(partial),
        scaling=tuple(
            (name, tuple(value) if isinstance(value, list | tuple) else value)
            for name, value in sorted(parameters.items())
            if name not in _SAID_APART and value is not None
        ),
    )


def context_length(config: PreTrainedConfig) -> int | None:
    """Positions that the model was made for, rotary scaling included; ``None`` where the configuration is silent."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        return None
    rope = rope_of(config, 0)
    scaling = {} if rope is None else dict(rope.scaling)
    factor = scaling.get("factor")
    if rope is None or rope.type not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return length
    return max(length, int(factor * scaling.get("original_max_position_embeddings", length)))


def _rotates(config: PreTrainedConfig, layer: int) -> bool:
    """Whether a layer rotates its keys at all; parameters of a rotary embedding do not say that it does."""
    listed = getattr(config, "no_rope_layers", None)
    if listed and not listed[layer]:  # the list says 1 where a layer does rotate
        return False
    if getattr(config, "position_embedding_type", None) in ("nope", "alibi") or getattr(config, "alibi", False):
        return False
    windowed = getattr(config, "sliding_window", None) is not None
    return not (
        config.model_type in _ROTATED_IN_WINDOWS and windowed and layer_types(config)[layer] == "full_attention"
    )


def _refuse(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    what = f"{type(model).__name__} (model type {config.model_type!r})"
    if model.config.is_encoder_decoder:
        raise UnsupportedCache(f"{what} is an encoder-decoder; kvferry does not carry cross-attention caches yet")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedCache(f"{what} has multi-head latent attention; kvferry does not carry latent caches yet")
    if getattr(config, "num_attention_heads", None) is None or getattr(model, "_is_stateful", False):
        raise UnsupportedCache(f"{what} keeps a recurrent state; kvferry does not carry recurrent caches yet")


def _layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The configuration as layer ``layer`` sees it (newer transformers let layers differ)."""
    each = getattr(config, "per_layer_config", None)
    return config if each is None else each[layer]
