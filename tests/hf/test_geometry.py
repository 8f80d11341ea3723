"""What a configuration says of a layer's cache, for the shapes of configuration that real models have."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from kvferry.errors import UnsupportedCache
from kvferry.hf.geometry import context_length, geometry_of, layer_kinds, rope_of
from kvferry.snapshot import RopeSpec
from tests.hf import tiny


def test_llama_layers_are_full_and_share_one_rotary_embedding() -> None:
    layers = geometry_of(tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 12_345.0}))
    assert len(set(layers)) == 1
    assert (str(layers[0].kind), layers[0].kv_heads, layers[0].head_dim, layers[0].value_head_dim) == (
        "full",
        2,
        16,
        16,
    )
    assert layers[0].rope == RopeSpec("default", 12_345.0)


def test_gemma3_alternates_window_and_rotary_base() -> None:
    layers = geometry_of(tiny.gemma3())
    assert [str(layer.kind) for layer in layers] == ["sliding(8)", "full", "sliding(8)"]
    assert [layer.rope and layer.rope.theta for layer in layers] == [1e4, 1e6, 1e4]


def test_gemma3n_layers_share_the_last_own_layer_of_their_type() -> None:
    kinds = [str(layer.kind) for layer in geometry_of(tiny.gemma3n())]
    assert kinds == ["sliding(8)", "full", "sliding(8)", "full", "shared(2)", "shared(3)"]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            RopeSpec("linear", 1e4, 1.0, (("factor", 2.0),)),
        ),
        (
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            RopeSpec("dynamic", 1e4, 1.0, (("factor", 4.0),)),
        ),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            RopeSpec(
                "llama3",
                5e5,
                1.0,
                (
                    ("factor", 8.0),
                    ("high_freq_factor", 4.0),
                    ("low_freq_factor", 1.0),
                    ("original_max_position_embeddings", 64),
                ),
            ),
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
            RopeSpec("yarn", 1e6, 1.0, (("factor", 4.0), ("original_max_position_embeddings", 64))),
        ),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
            RopeSpec(
                "longrope",
                1e4,
                1.0,
                (
                    ("factor", 4.0),
                    ("long_factor", (2.0,) * 8),
                    ("original_max_position_embeddings", 64),
                    ("short_factor", (1.0,) * 8),
                ),
            ),
        ),
    ],
)
def test_rotary_scaling_is_kept_whole(parameters: dict[str, Any], expected: RopeSpec) -> None:
    model = tiny.llama(rope_parameters=parameters)
    assert {layer.rope for layer in geometry_of(model)} == {expected}


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 512),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_context_counts_rotary_scaling(parameters: dict[str, Any], limit: int) -> None:
    assert context_length(tiny.llama(rope_parameters=parameters).config) == limit


def test_partial_rotary_is_not_taken_for_whole() -> None:
    config = transformers.GPTNeoXConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, rotary_pct=0.25)
    rope = rope_of(config, 0)
    assert rope is not None
    assert rope.partial == 0.25


def test_layers_without_rotary_embedding_say_so() -> None:
    config = transformers.SmolLM3Config(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, no_rope_layers=[1, 1, 1, 0]
    )
    assert [rope_of(config, layer) is None for layer in range(4)] == [False, False, False, True]
    assert rope_of(transformers.GPT2Config(), 0) is None


def test_a_window_without_layer_types_slides_everywhere() -> None:
    config = transformers.MistralConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, sliding_window=32)
    assert [str(kind) for kind in layer_kinds(config)] == ["sliding(32)"] * 2


def small(config: type, **settings: Any) -> Any:
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return config(**{**common, **settings})


REFUSED = {
    "chunked attention": (
        lambda: small(
            transformers.Llama4TextConfig,
            intermediate_size=32,
            intermediate_size_mlp=32,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=2,
            attention_chunk_size=16,
            num_hidden_layers=4,
        ),
        r"layer 0 has a chunked\(16\) cache",
    ),
    "recurrent state": (
        lambda: transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
        "recurrent",
    ),
    "hybrid": (
        lambda: small(
            transformers.BambaConfig,
            intermediate_size=32,
            num_key_value_heads=2,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=1,
        ),
        "recurrent",
    ),
    "latent attention": (
        lambda: small(
            transformers.DeepseekV3Config,
            intermediate_size=32,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=2,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            num_key_value_heads=2,
        ),
        "latent",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_caches_of_another_kind_are_refused_by_name(case: str) -> None:
    make, message = REFUSED[case]
    model = transformers.AutoModelForCausalLM.from_config(make()).eval()
    with pytest.raises(UnsupportedCache, match=message):
        geometry_of(model)


def test_encoder_decoder_is_refused_by_name() -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedCache, match="encoder-decoder"):
        geometry_of(transformers.T5ForConditionalGeneration(config).eval())
