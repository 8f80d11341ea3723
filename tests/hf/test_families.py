"""Families of models whose layers differ in window, rotary embedding, heads or head size: each goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import StaticCache

import kvferry as kv
from kvferry.hf.capture import snapshot_from_cache
from tests.hf import tiny
from tests.hf.generation import generate, native, same

COMMON: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Name -> configuration; kinds of its layers; layers whose keys are rotated.
FAMILIES: dict[str, tuple[Callable[[], Any], list[str], list[bool]]] = {
    "qwen2": (
        lambda: transformers.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=2),
        ["full", "full", "sliding(8)", "sliding(8)"],
        [True] * 4,
    ),
    "qwen3": (lambda: transformers.Qwen3Config(**GROUPED, head_dim=32), ["full"] * 4, [True] * 4),
    "mistral": (lambda: transformers.MistralConfig(**GROUPED, sliding_window=8), ["sliding(8)"] * 4, [True] * 4),
    "phi": (lambda: transformers.PhiConfig(**GROUPED, partial_rotary_factor=0.5), ["full"] * 4, [True] * 4),
    "gpt_neox": (lambda: transformers.GPTNeoXConfig(**COMMON, rotary_pct=0.25), ["full"] * 4, [True] * 4),
    "gpt2": (lambda: transformers.GPT2Config(vocab_size=tiny.VOCABULARY, **GPT2), ["full"] * 2, [False] * 2),
    "smollm3": (
        lambda: transformers.SmolLM3Config(**GROUPED, no_rope_layers=[1, 1, 0, 1]),
        ["full"] * 4,
        [True, True, False, True],
    ),
    "cohere2": (
        lambda: transformers.Cohere2Config(**GROUPED, sliding_window=8),
        ["sliding(8)", "sliding(8)", "sliding(8)", "full"],
        [True, True, True, False],
    ),
    "exaone4": (
        lambda: transformers.Exaone4Config(**GROUPED, sliding_window=8, sliding_window_pattern=2),
        ["sliding(8)", "full", "sliding(8)", "full"],
        [True, False, True, False],
    ),
    "mixtral": (lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=2), ["full"] * 4, [True] * 4),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_goes_on_bit_for_bit(name: str) -> None:
    make, kinds, rotated = FAMILIES[name]
    model, ids = tiny.build(make()), tiny.prompt(2, 30)
    snapshot = kv.capture(model, ids[:, :-1], query_window=3)
    assert [str(layer.kind) for layer in snapshot.layers] == kinds
    assert [layer.rope is not None for layer in snapshot.identity.layers] == rotated
    expected = generate(model, native(model, ids[:, :-1]), ids, new=10)
    assert same(expected, generate(model, snapshot.to_cache(model), ids, new=10))
    static = native(model, ids[:, :-1], StaticCache(config=model.config, max_cache_len=48))
    again = snapshot_from_cache(static, model, ids[:, :-1], copy=True).to_cache(model, kind="static", max_cache_len=48)
    assert same(generate(model, static, ids, new=10), generate(model, again, ids, new=10))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt2"])  # it adds positions to embeddings
def test_layers_said_to_have_no_positions_have_none(name: str) -> None:
    """Keys of a first layer depend on the position exactly where it rotates (deeper ones inherit what came before)."""
    make, _, rotated = FAMILIES[name]
    config = make()
    for layer, rotates in enumerate(rotated):
        model = tiny.build(config)
        attention = [module for module in model.modules() if getattr(module, "layer_idx", None) == layer]
        seen: list[torch.Tensor] = []

        class Cache(transformers.DynamicCache):
            def update(self, keys: torch.Tensor, values: torch.Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
                if index == layer:  # noqa: B023
                    seen.append(keys)  # noqa: B023
                return super().update(keys, values, index, *args, **kwargs)

        assert attention
        inputs = torch.full((1, 4), 5)
        with torch.no_grad():
            for positions in (torch.arange(4)[None], torch.arange(7, 11)[None]):
                native_positions(model, inputs, positions, Cache(config=config))
        # One token throughout: without rotation, and with every earlier layer relative, all its keys are the same.
        unrotated = torch.allclose(seen[0], seen[1], atol=1e-4)
        assert unrotated == (not rotates), (name, layer)


def native_positions(model: Any, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> None:
    from kvferry.hf.compat import cache_argument

    model(ids, position_ids=positions, use_cache=True, **{cache_argument(model): cache})
