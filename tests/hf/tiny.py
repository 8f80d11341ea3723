"""Small models with random weights, made from a configuration alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma3TextConfig, LlamaConfig

VOCABULARY = 128


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa", **changes: Any) -> Any:
    """Two layers, four heads, two kv heads of 16."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return build(LlamaConfig(**settings), seed, dtype, attn)


def gemma3(seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa", **changes: Any) -> Any:
    """Three layers, of which two slide over eight tokens; two rotary bases."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **changes,
    }
    return build(Gemma3TextConfig(**settings), seed, dtype, attn)


def gemma3n(seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa", **changes: Any) -> Any:
    """Six layers; the last two use the keys and values of layers before them."""
    settings = {
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size": 64,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [128] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "laurel_rank": 8,
        "max_position_embeddings": 256,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        **changes,
    }
    return build(Gemma3nTextConfig(**settings), seed, dtype, attn)


def build(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa") -> Any:
    """A causal language model of this configuration, weights drawn from ``seed``, large enough to tell tokens apart."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
    finally:
        torch.random.set_rng_state(state)
    return model.eval()


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids that are neither padding nor an end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
