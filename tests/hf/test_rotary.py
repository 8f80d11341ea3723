"""Rotations read off models are the models' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.capture import capture
from kvferry.hf.compat import cache_argument
from kvferry.hf.rotary import rotaries_of
from kvferry.snapshot.rope import Rotary
from tests.hf import tiny
from tests.hf.rotary_models import FAMILIES, TYPES, before_rotation, llama4, llama_of

INTERLEAVED = ("cohere, interleaved", "cohere2, some layers without", "glm, interleaved and partial")
ROTATED = {
    "gemma4, proportional": [8, 16], "gpt_neox, partial": [4, 4], "phi, partial": [4, 4], "stablelm, a quarter": [2, 2],
    "cohere2, some layers without": [8, 0], "glm, interleaved and partial": [4, 4], "gptj, tables of its own": [4, 4],
    "smollm3, some layers without": [8, 0],
}  # fmt: skip
"""Pairs of channels by layer; elsewhere all eight of them."""


def far(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / want.norm())


def check(model: PreTrainedModel, name: str, ids: Tensor, rotaries: tuple[Rotary, ...]) -> None:
    """What is stripped of captured keys is what there was before; what is put back on is what was captured."""
    snapshot = capture(model, ids)
    for layer, own, want in zip(snapshot.layers, rotaries, before_rotation(model, ids, name), strict=True):
        held, places = want[:, :, layer.first :], snapshot.positions[:, layer.first :]
        stripped = own.strip(layer.keys, places)
        assert far(stripped, held) < 1e-6
        assert far(own.apply(held, places), layer.keys) < 1e-6
        assert far(own.apply(stripped, places), layer.keys) < 1e-6


def test_every_type_that_transformers_has_is_among_those_tested() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= set(TYPES)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("single", [False, True], ids=["meant", "as the model"])
def test_what_is_stripped_is_the_models_own_rotation(name: str, single: bool) -> None:
    make, module = FAMILIES[name]
    model = make()
    rotaries = rotaries_of(model, model.config.num_hidden_layers, single=single)
    check(model, module, tiny.prompt(2, 60), rotaries)
    pairs = [own.inv_freq.numel() for own in rotaries]
    assert pairs == ROTATED.get(name, [8] * len(pairs))
    turning = [own for own in rotaries if own.inv_freq.numel()]
    assert {own.interleaved for own in turning} == {name in INTERLEAVED or name.startswith("gptj")}
    assert {own.single for own in turning} == {single}


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_angles_as_the_models_own_are_exact_far_along(name: str) -> None:
    model = llama_of(name)
    ids = tiny.prompt(1, 250)
    check(model, "k_proj", ids, rotaries_of(model, 2, single=True))
    snapshot, want = capture(model, ids), before_rotation(model, ids, "k_proj")
    meant, own = (rotaries_of(model, 2, single=single)[0] for single in (False, True))
    keys = snapshot.layers[0].keys
    assert far(own.strip(keys, snapshot.positions), want[0]) < far(meant.strip(keys, snapshot.positions), want[0])


def test_gemma_has_two_bases_and_yarn_a_factor() -> None:
    first, second, third = rotaries_of(tiny.gemma3(), 3)
    assert torch.equal(first.inv_freq, third.inv_freq)
    assert second.inv_freq[-1] < first.inv_freq[-1]
    assert rotaries_of(llama_of("yarn"), 2)[0].scale == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1)
    assert rotaries_of(tiny.llama(), 2)[0].scale == 1.0


@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_bit_models_have_the_same_rotations(name: str) -> None:
    wide, narrow = (FAMILIES[name][0](dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    layers = wide.config.num_hidden_layers
    for own, other in zip(rotaries_of(wide, layers), rotaries_of(narrow, layers), strict=True):
        torch.testing.assert_close(own.inv_freq, other.inv_freq, rtol=0.02 if name.startswith("gptj") else 0, atol=0)
        assert (own.scale, own.interleaved, own.limit) == (other.scale, other.interleaved, other.limit)


def test_partial_rotation_leaves_the_other_channels_alone() -> None:
    model = FAMILIES["gpt_neox, partial"][0]()
    snapshot = capture(model, tiny.prompt(1, 30))
    for layer, own in zip(snapshot.layers, rotaries_of(model, 2), strict=True):
        stripped = own.strip(layer.keys, snapshot.positions)
        assert torch.equal(stripped[..., 8:], layer.keys[..., 8:])
        assert not torch.allclose(stripped[..., :8], layer.keys[..., :8], atol=0.1)


def test_tables_of_complex_numbers() -> None:
    model = llama4()
    first, second = rotaries_of(model, 2)
    assert (first.inv_freq.numel(), first.interleaved, second.inv_freq.numel()) == (8, True, 0)
    ids, cache = tiny.prompt(1, 40), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, **{cache_argument(model): cache})
    for layer, own, want in zip(cache.layers, (first, second), before_rotation(model, ids, "k_proj"), strict=True):
        assert far(own.strip(layer.keys, torch.arange(40)[None]), want) < 1e-6


def test_models_without_rotation() -> None:
    config = GPT2Config(vocab_size=tiny.VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=40)
    assert [own.inv_freq.numel() for own in rotaries_of(tiny.build(config), 2)] == [0, 0]


def test_layers_that_use_anothers_keys_have_no_rotation_of_their_own() -> None:
    model = tiny.gemma3n()
    rotaries = rotaries_of(model, 6)
    assert [own.inv_freq.numel() for own in rotaries] == [8, 8, 8, 8, 0, 0]
    snapshot = capture(model, tiny.prompt(1, 30))
    want = before_rotation(model, tiny.prompt(1, 30), "k_norm")
    for layer, own, held in zip(snapshot.layers[:4], rotaries[:4], want[:4], strict=True):
        assert far(own.strip(layer.keys, snapshot.positions[:, layer.first :]), held[:, :, layer.first :]) < 1e-6


@pytest.mark.parametrize(("name", "longest", "limit"), [("dynamic", 400, 400), ("longrope", 100, None)])
def test_frequencies_chosen_by_the_length_of_the_prefill(name: str, longest: int, limit: int | None) -> None:
    model = llama_of(name)
    short, long = rotaries_of(model, 2)[0], rotaries_of(model, 2, length=longest)[0]
    assert torch.equal(short.inv_freq, rotaries_of(model, 2, length=50)[0].inv_freq)
    assert (short.limit, long.limit) == ({"dynamic": 256, "longrope": 64}[name], limit)
    assert not torch.allclose(short.inv_freq, long.inv_freq, rtol=0.01)
    ids = tiny.prompt(1, longest)
    check(model, "k_proj", ids, rotaries_of(model, 2, length=longest, single=True))
    keys, places = capture(llama_of(name), ids).layers[0].keys, torch.arange(longest)[None]
    with pytest.raises(UnsupportedCache, match="mixes several"):
        short.strip(keys, places)
    assert short.strip(keys[:, :, :60], places[:, :60]).shape == (1, 2, 60, 16)
    if limit is not None:
        with pytest.raises(UnsupportedCache, match="mixes several"):
            long.strip(keys[:, :, :1], torch.tensor([[limit]]))


def test_a_cache_that_grew_beyond_its_frequencies_is_refused() -> None:
    """Of keys turned by two sets, neither takes off all; their positions alone say that there may be two."""
    model = llama_of("longrope")
    ids, cache = tiny.prompt(1, 80), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :60], **{cache_argument(model): cache})
        model(input_ids=ids[:, 60:], **{cache_argument(model): cache})
    keys, places = cache.layers[0].keys, torch.arange(80)[None]
    want = before_rotation(llama_of("longrope"), ids, "k_proj")[0]
    with pytest.raises(UnsupportedCache, match="mixes several"):
        rotaries_of(model, 2)[0].strip(keys, places)
    assert far(rotaries_of(model, 2, length=80)[0].strip(keys, places), want) > 0.1


def test_a_model_that_has_seen_a_longer_prompt_says_so() -> None:
    model = llama_of("dynamic")
    with torch.no_grad():
        model(input_ids=tiny.prompt(1, 500))
    with pytest.raises(UnsupportedCache, match="load it anew"):
        rotaries_of(model, 2, length=400)
    check(model, "k_proj", tiny.prompt(1, 500), rotaries_of(model, 2, length=500, single=True))
    assert torch.equal(rotaries_of(model, 2)[0].inv_freq, rotaries_of(llama_of("dynamic"), 2)[0].inv_freq)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "default"])
@pytest.mark.parametrize("before", [20, 300])
def test_the_model_is_left_as_it_was(name: str, before: int) -> None:
    model, untouched = llama_of(name), llama_of(name)
    ids = tiny.prompt(1, before)
    with torch.no_grad():
        for own in (model, untouched):
            own(input_ids=ids)
        rotaries_of(model, 2)
        rotaries_of(model, 2, length=350 if name == "dynamic" else 250)
        rotary, other = (own.model.rotary_emb for own in (model, untouched))
        assert torch.equal(rotary.inv_freq, other.inv_freq)
        assert rotary.max_seq_len_cached == other.max_seq_len_cached
        later = tiny.prompt(1, 290, seed=1)
        assert torch.equal(model(input_ids=later).logits, untouched(input_ids=later).logits)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_rotation_that_is_none_of_pairs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q, k * cos.unsqueeze(1)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turn)
    with pytest.raises(UnsupportedCache, match="layer 0 rotates"):
        rotaries_of(tiny.llama(), 2)


@pytest.mark.parametrize("length", [0, -3, 5_000])
def test_lengths_that_make_no_sense(length: int) -> None:
    with pytest.raises(InvalidInput):
        rotaries_of(llama_of("dynamic"), 2, length=length)


def test_lengths_mean_nothing_to_other_models() -> None:
    given: dict[str, Any] = {"length": 100_000}
    assert torch.equal(rotaries_of(tiny.llama(), 2, **given)[0].inv_freq, rotaries_of(tiny.llama(), 2)[0].inv_freq)
