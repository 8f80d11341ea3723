"""Every setting that changes what a model computes is in the hash of its weights; bookkeeping is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    MptConfig,
    OlmoConfig,
    PreTrainedConfig,
)

from kvferry.hf.facts import config_facts, is_ignored
from kvferry.hf.identity import identity_of
from tests.hf import tiny

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("kind", "setting", "values"),
    [
        (GPTNeoXConfig, "use_parallel_residual", (True, False)),
        (OlmoConfig, "clip_qkv", (None, 0.05)),
    ],
)
def test_equal_weights_under_another_behaviour_are_another_model(kind: Any, setting: str, values: Any) -> None:
    one, other = (tiny.build(kind(**SMALL, **{setting: value})) for value in values)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    ids = tiny.prompt(1, 8)
    with torch.no_grad():
        assert not torch.equal(one(ids).logits, other(ids).logits)
    assert set(identity_of(one).differences(identity_of(other))) == {"weights"}


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (LlamaConfig, "hidden_act", "gelu"),
        (LlamaConfig, "rms_norm_eps", 1e-3),
        (LlamaConfig, "max_position_embeddings", 4096),
        (LlamaConfig, "a_setting_of_the_future", "on"),
        (LlamaConfig, "residual_scales", [1.0, 0.5]),
        (Gemma3TextConfig, "attn_logit_softcapping", 30.0),
        (Gemma3TextConfig, "final_logit_softcapping", 20.0),
        (Gemma3TextConfig, "query_pre_attn_scalar", 128),
        (Gemma3TextConfig, "use_bidirectional_attention", True),
        (Gemma3TextConfig, "sliding_window", 1024),
        (GPTNeoXConfig, "layer_norm_eps", 1e-3),
        (GPTNeoXConfig, "hidden_act", "relu"),
        (CohereConfig, "logit_scale", 0.5),
        (GraniteConfig, "attention_multiplier", 0.5),
        (GraniteConfig, "embedding_multiplier", 2.0),
        (GraniteConfig, "logits_scaling", 2.0),
        (GraniteConfig, "residual_multiplier", 0.5),
        (MixtralConfig, "num_experts_per_tok", 1),
        (GPT2Config, "scale_attn_weights", False),
        (GPT2Config, "scale_attn_by_inverse_layer_idx", True),
        (GPT2Config, "activation_function", "relu"),
        (FalconConfig, "parallel_attn", False),
        (FalconConfig, "alibi", True),
    ],
)
def test_every_behaviour_counts(kind: type[PreTrainedConfig], setting: str, value: Any) -> None:
    config = kind()
    before = config_facts(config)
    setattr(config, setting, value)
    assert config_facts(config) != before


def test_settings_in_a_configuration_of_their_own_count() -> None:
    config = MptConfig()
    before = config_facts(config)
    config.attn_config.clip_qkv = 0.05
    assert config_facts(config) != before


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("name_or_path", "elsewhere"),
        ("_name_or_path", "elsewhere"),
        ("architectures", ["LlamaForCausalLM"]),
        ("dtype", "bfloat16"),
        ("pad_token_id", 7),
        ("eos_token_id", [3, 4]),
        ("use_cache", False),
        ("output_attentions", True),
        ("attention_dropout", 0.5),
        ("initializer_range", 0.5),
        ("gradient_checkpointing", True),
        ("_attn_implementation", "eager"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
        ("id2label", {0: "yes"}),
        ("a_setting_of_the_future", None),
        ("a_setting_of_the_future", False),
        ("settings_of_the_future", []),
        ("rms_norm_eps", 9.999999974752427e-07),
    ],
)
def test_bookkeeping_and_what_is_switched_off_do_not_count(setting: str, value: Any) -> None:
    config = LlamaConfig(rms_norm_eps=1e-6)
    before = config_facts(config)
    setattr(config, setting, value)
    assert config_facts(config) == before


@pytest.mark.parametrize("name", ["hidden_act", "clip_qkv", "use_parallel_residual", "num_experts_per_tok", "top_k"])
def test_names_that_must_never_be_ignored(name: str) -> None:
    assert not is_ignored(name)


def test_built_in_models_have_the_facts_that_they_always_had(smollm2: tuple[Any, Any]) -> None:
    """Written down, since they must be the same under every supported version of transformers."""
    assert config_facts(smollm2[0].config) == {
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "rms_norm_eps": 1e-05,
        "vocab_size": 49152,
    }


def test_gemma_has_the_facts_that_it_always_had(gemma3: tuple[Any, Any]) -> None:
    assert config_facts(gemma3[0].config) == {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "sliding_window": 512,
        "vocab_size": 262144,
    }


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3, tiny.gemma3n])
def test_a_model_saved_and_loaded_by_path_is_the_same(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert identity_of(loaded).weights == identity_of(model).weights
    assert config_facts(copy.deepcopy(loaded.config)) == config_facts(model.config)
