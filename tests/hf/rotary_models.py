"""A tiny model of each way in which transformers rotates keys, and its keys before that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma4TextConfig,
    GlmConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

from tests.hf import tiny

CONTEXT = 256
COMMON = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}
ORIGINAL = {"original_max_position_embeddings": 64}
THETA = {"rope_theta": 1e4}

TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 3.0, **THETA},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **THETA, **ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, **THETA},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)], **THETA, **ORIGINAL,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, **THETA},
}  # fmt: skip
"""Parameters of every type that transformers has a function for, and of the plain one."""


def llama_of(name: str, **own: Any) -> PreTrainedModel:
    return tiny.llama(rope_parameters=dict(TYPES[name]), **own)


FAMILIES: dict[str, tuple[Callable[..., PreTrainedModel], str]] = {
    **{name: (partial(llama_of, name), "k_proj") for name in TYPES},
    "qwen2": (lambda **own: tiny.build(Qwen2Config(**COMMON, num_key_value_heads=2), **own), "k_proj"),
    "qwen3": (lambda **own: tiny.build(Qwen3Config(**GROUPED), **own), "k_norm"),
    "gemma3, two bases": (tiny.gemma3, "k_norm"),
    "gemma4, proportional": (
        lambda **own: tiny.build(
            Gemma4TextConfig(
                **GROUPED, vocab_size_per_layer_input=tiny.VOCABULARY, hidden_size_per_layer_input=0, sliding_window=8,
                layer_types=["sliding_attention", "full_attention"], global_head_dim=32, num_kv_shared_layers=0,
            ), **own),
        "k_norm",
    ),
    "gpt_neox, partial": (lambda **own: tiny.build(GPTNeoXConfig(**COMMON, rotary_pct=0.5), **own), "query_key_value"),
    "phi, partial": (lambda **own: tiny.build(PhiConfig(**COMMON, partial_rotary_factor=0.5), **own), "k_proj"),
    "stablelm, a quarter": (lambda **own: tiny.build(StableLmConfig(**COMMON, num_key_value_heads=2), **own), "k_proj"),
    "phi3, longrope": (
        lambda **own: tiny.build(
            Phi3Config(**COMMON, num_key_value_heads=2, rope_parameters=dict(TYPES["longrope"]), **ORIGINAL), **own
        ),
        "qkv_proj",
    ),
    "cohere, interleaved": (lambda **own: tiny.build(CohereConfig(**COMMON, num_key_value_heads=2), **own), "k_proj"),
    "cohere2, some layers without": (
        lambda **own: tiny.build(
            Cohere2Config(**GROUPED, sliding_window=300, layer_types=["sliding_attention", "full_attention"]), **own),
        "k_proj",
    ),
    "glm, interleaved and partial": (lambda **own: tiny.build(GlmConfig(**GROUPED), **own), "k_proj"),
    "gptj, tables of its own": (
        lambda **own: tiny.build(
            GPTJConfig(vocab_size=tiny.VOCABULARY, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=CONTEXT),
            attn="eager",
            **own,
        ),
        "k_proj",
    ),
    "gpt_oss, yarn and sinks": (
        lambda **own: tiny.build(
            GptOssConfig(
                **GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=300,
                rope_parameters=dict(TYPES["yarn"]),
            ),
            attn="eager", **own),
        "k_proj",
    ),
    "smollm3, some layers without": (
        lambda **own: tiny.build(SmolLM3Config(**COMMON, num_key_value_heads=2, no_rope_layers=[1, 0]), **own),
        "k_proj",
    ),
}  # fmt: skip
"""Name -> what makes a model, and the end of the name of the module whose output holds its keys before rotation."""


def llama4() -> PreTrainedModel:
    """Tables of complex numbers; its cache in chunks is none that `capture` takes."""
    return tiny.build(
        Llama4TextConfig(
            **GROUPED, intermediate_size_mlp=128, num_local_experts=2, no_rope_layers=[1, 0], use_qk_norm=False,
            attention_chunk_size=300,
        )
    )  # fmt: skip


def before_rotation(model: PreTrainedModel, ids: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Keys before RoPE by layer, ``(batch, kv_heads, tokens, dim)``, from hooks on the modules of that name."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, given, out: found.append(out.detach()))
        for path, module in model.named_modules()
        if path.endswith(f".{name}")
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return [_keys_in(model, index, out, name, ids) for index, out in enumerate(found)]


def _keys_in(model: PreTrainedModel, layer: int, out: torch.Tensor, name: str, ids: torch.Tensor) -> torch.Tensor:
    batch, tokens = ids.shape
    if name == "query_key_value":  # a head's three parts beside one another
        return out.view(batch, tokens, 4, 3, 16)[:, :, :, 1].transpose(1, 2)
    if name == "qkv_proj":
        out = out[..., 64 : 64 + 32]
    if out.dim() == 3:
        heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        out = out.view(batch, tokens, heads, -1)
    return out.transpose(1, 2) if out.shape[1] == tokens else out
