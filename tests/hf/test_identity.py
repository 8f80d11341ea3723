"""A cache must be refused by any model but its own, and accepted by its own however that was loaded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.hf.facts import config_facts
from kvferry.hf.identity import SAMPLES, identity_of, named_weights, tokenizer_hash, weights_hash
from kvferry.snapshot import Identity
from tests.hf import tiny


def hash_of(model: Any, full: bool = False) -> str:
    return weights_hash(config_facts(model.config), named_weights(model), full=full)


def test_same_weights_same_hash_whatever_the_object() -> None:
    one, other = tiny.llama(seed=3), tiny.llama(seed=3)
    assert hash_of(one) == hash_of(other)
    assert hash_of(one) != hash_of(tiny.llama(seed=4))
    assert not identity_of(one).differences(identity_of(other))


@pytest.mark.parametrize("full", [False, True])
def test_every_tensor_counts(full: bool) -> None:
    model = tiny.llama()
    before = hash_of(model, full)
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        parameter.data.mul_(1.01)  # leaves no trace in torch's version counter
        assert hash_of(model, full) != before, name
        parameter.data.copy_(kept)
    assert hash_of(model, full) == before


def test_first_and_last_element_of_a_large_tensor_are_sampled() -> None:
    weight = torch.zeros(300, 401)
    assert weight.numel() > SAMPLES
    before = weights_hash({}, [("weight", weight)])
    for index in ((0, 0), (-1, -1)):
        changed = weight.clone()
        changed[index] = 1.0
        assert weights_hash({}, [("weight", changed)]) != before


def test_a_change_of_any_row_block_or_column_is_sampled() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1536, 576)
    before = weights_hash({}, [("weight", weight)])
    for column in range(0, 576, 23):
        changed = weight.clone()
        changed[:, column] += 1
        assert weights_hash({}, [("weight", changed)]) != before, column


def test_full_hash_sees_one_element() -> None:
    weight = torch.zeros(300, 401)
    changed = weight.clone()
    changed[1, 1] = 1.0
    assert weights_hash({}, [("w", weight)]) == weights_hash({}, [("w", changed)])
    assert weights_hash({}, [("w", weight)], full=True) != weights_hash({}, [("w", changed)], full=True)


def test_an_engine_that_fuses_projections_gets_the_same_hash() -> None:
    model = tiny.llama(hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    parts: list[tuple[str, torch.Tensor]] = []
    for name, weight in named_weights(model):
        if name.endswith("q_proj.weight"):
            stem = name.removesuffix("q_proj.weight")
            fused = torch.cat([model.get_parameter(f"{stem}{part}_proj.weight") for part in "qkv"]).detach()
            sizes = [256, 128, 128]
            parts += zip([f"{stem}{part}_proj.weight" for part in "qkv"], fused.split(sizes), strict=True)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            parts.append((name, weight.t().contiguous().t() if weight.dim() == 2 else weight))  # column-major
    parts.reverse()
    assert weights_hash(config_facts(model.config), parts) == hash_of(model)


def test_names_shapes_and_dtypes_count() -> None:
    weight = torch.zeros(4, 6)
    hashes = {
        weights_hash({}, [("a", weight)]),
        weights_hash({}, [("b", weight)]),
        weights_hash({}, [("a", weight.reshape(6, 4))]),
        weights_hash({}, [("a", weight.to(torch.bfloat16))]),
        weights_hash({"rms_norm_eps": 1e-5}, [("a", weight)]),
    }
    assert len(hashes) == 5


def test_tied_head_counts_once_and_wrappers_do_not_count() -> None:
    model = tiny.llama(tie_word_embeddings=True)
    names = [name for name, _ in named_weights(model)]
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in dict(named_weights(tiny.llama(tie_word_embeddings=False)))

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    assert [name for name, _ in named_weights(Wrapper())] == names  # type: ignore[arg-type]


def test_only_prefixes_of_wrappers_are_taken_off_names() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)
            self.part = nn.Linear(2, 2, bias=False)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Inner()
            self.layer.part = torch.compile(self.layer.part)

    names = {"layer.module.weight", "layer.part.weight"}
    assert {name for name, _ in named_weights(Outer())} == names  # type: ignore[arg-type]
    wrapped = nn.DataParallel(torch.compile(Outer()))  # type: ignore[arg-type]
    assert {name for name, _ in named_weights(wrapped)} == names  # type: ignore[arg-type]


def test_two_weights_of_one_name_are_refused() -> None:
    weight = torch.zeros(2)
    with pytest.raises(InvalidInput, match=r"'layer\.weight'"):
        weights_hash({}, [("layer.weight", weight), ("layer.weight", weight + 1)])


def test_settings_that_weights_do_not_show_are_in_the_hash() -> None:
    model = tiny.llama()
    before = hash_of(model)
    model.config.rms_norm_eps = 1e-3
    assert hash_of(model) != before


def test_rotary_settings_are_fields_of_their_own() -> None:
    one = tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    other = tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})
    differences = identity_of(one).differences(identity_of(other))
    assert differences == {f"layers[{layer}].rope.theta": (10_000.0, 20_000.0) for layer in (0, 1)}


def test_differences_name_the_fields_that_differ() -> None:
    base = identity_of(tiny.llama())
    assert set(base.differences(identity_of(tiny.llama(dtype=torch.bfloat16)))) == {"weights", "dtype"}
    wider = identity_of(tiny.llama(num_key_value_heads=4))
    assert {"weights", "layers[0].kv_heads", "layers[1].kv_heads"} == set(base.differences(wider))
    with pytest.raises(IncompatibleIdentity) as caught:
        base.require_compatible(identity_of(tiny.llama(num_hidden_layers=3)))
    assert caught.value.differences["num_layers"] == (2, 3)


def test_identity_survives_json() -> None:
    for model in (tiny.llama(), tiny.gemma3(), tiny.gemma3n()):
        identity = identity_of(model, construction=("chunked(8)", "decoded(3)"), full_hash=True)
        assert Identity.from_json(identity.to_json()) == identity


def test_identity_records_name_tokenizer_and_versions(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    identity = identity_of(model)
    assert identity.model == "smollm2-135m"
    assert identity.tokenizer == tokenizer_hash(tokenizer)
    assert identity.attention == "sdpa"
    assert identity.transformers
    assert identity.kvferry
    assert identity_of(tiny.llama()).tokenizer is None


def test_tokenizer_hash_sees_vocabulary_merges_and_special_tokens(smollm2: tuple[Any, Any]) -> None:
    import copy

    tokenizer = smollm2[1]
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=4)  # leaves state in the backend
    assert tokenizer_hash(copy.deepcopy(tokenizer)) == before
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(["<kvferry>"])
    assert tokenizer_hash(extended) != before
    other_end = copy.deepcopy(tokenizer)
    assert tokenizer_hash(other_end) == before
    other_end.eos_token = "<|im_start|>"
    assert tokenizer_hash(other_end) != before


def test_hash_is_the_same_in_another_process() -> None:
    script = (
        "from tests.hf import tiny; from kvferry.hf.identity import identity_of;"
        "print(identity_of(tiny.gemma3(seed=5)).weights)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == identity_of(tiny.gemma3(seed=5)).weights
