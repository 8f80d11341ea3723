"""A cache put back into its model goes on bit for bit, and into no other model at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache

import kvferry as kv
from kvferry.errors import IncompatibleIdentity
from kvferry.hf.capture import snapshot_from_cache
from kvferry.hf.compat import cache_argument, output_cache
from kvferry.hf.identity import identity_of
from tests.hf import tiny
from tests.hf.generation import bits, generate, native, real_prompt, same

ModelFactory = Callable[..., tuple[Any, Any]]
MODELS = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma3n": tiny.gemma3n}


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize(("name", "length"), [("smollm2-135m", 129), ("gemma3-270m", 541)])
def test_round_trip_is_bit_exact(model_of: ModelFactory, name: str, length: int, dtype: str) -> None:
    model, tokenizer = model_of(name, dtype)
    ids = real_prompt(tokenizer, length)
    prefix = ids[:, :-1]
    cache = native(model, prefix)
    if dtype == "bfloat16":
        snapshot = kv.capture(model, prefix)
    else:  # the same without a second prefill, which takes long in these
        snapshot = snapshot_from_cache(cache, model, prefix, copy=True)
    for layer, own in zip(snapshot.layers, cache.layers, strict=True):
        assert layer.keys is not None
        assert torch.equal(bits(layer.keys), bits(own.keys))
    assert any(layer.held < layer.seen for layer in snapshot.layers) == (name == "gemma3-270m")  # beyond the window
    expected = generate(model, cache, ids)
    restored = generate(model, snapshot.to_cache(model), ids)
    assert expected.sequences.shape[1] == length + 64
    assert same(expected, restored)
    has_nan = bool(torch.stack(expected.logits).isnan().any())
    assert has_nan == (name == "gemma3-270m" and dtype == "float16")  # this model overflows float16


@pytest.mark.model
@pytest.mark.parametrize(("name", "length"), [("smollm2-135m", 129), ("gemma3-270m", 541)])
def test_static_round_trip_is_bit_exact(model_of: ModelFactory, name: str, length: int) -> None:
    model, tokenizer = model_of(name)
    ids = real_prompt(tokenizer, length)
    cache = native(model, ids[:, :-1], StaticCache(config=model.config, max_cache_len=length + 20))
    snapshot = snapshot_from_cache(cache, model, ids[:, :-1], copy=True)
    restored = snapshot.to_cache(model, kind="static", max_cache_len=length + 20)
    assert same(generate(model, cache, ids, new=16), generate(model, restored, ids, new=16))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_left_padded_batch_of_prompts(model_of: ModelFactory, name: str) -> None:
    model, tokenizer = model_of(name)
    tokenizer.padding_side = "left"
    texts = ["The capital of France is", "Water boils at a temperature of about one hundred", "Once upon a time,"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ids, mask = batch.input_ids, batch.attention_mask
    assert not bool(mask.all())
    cache = native(model, ids[:, :-1], mask=mask[:, :-1])
    snapshot = kv.capture(model, ids[:, :-1], attention_mask=mask[:, :-1])
    restored = snapshot.to_cache(model)
    options = {"new": 24, "attention_mask": mask}
    assert same(generate(model, cache, ids, **options), generate(model, restored, ids, **options))


@pytest.mark.model
@pytest.mark.parametrize(("name", "length"), [("smollm2-135m", 65), ("gemma3-270m", 530)])
def test_beam_search_and_prompt_lookup_after_injection(model_of: ModelFactory, name: str, length: int) -> None:
    model, tokenizer = model_of(name)
    ids = real_prompt(tokenizer, length)
    snapshot = kv.capture(model, ids[:, :-1])

    def beams(cache: Cache) -> Any:
        cache.batch_repeat_interleave(3)
        options = {cache_argument(model): cache, "max_new_tokens": 12, "num_beams": 3, "do_sample": False}
        return model.generate(ids, **options)

    assert torch.equal(beams(native(model, ids[:, :-1])), beams(snapshot.to_cache(model)))

    def lookup(cache: Cache) -> Any:
        options = {cache_argument(model): cache, "max_new_tokens": 24, "prompt_lookup_num_tokens": 4}
        return model.generate(ids, do_sample=False, **options)

    assert torch.equal(lookup(native(model, ids[:, :-1])), lookup(snapshot.to_cache(model)))


@pytest.mark.parametrize("name", MODELS)
def test_beams_and_an_assistant_model_after_injection(name: str) -> None:
    model, assistant, ids = MODELS[name](), MODELS[name](seed=1), tiny.prompt(1, 30)
    snapshot = kv.capture(model, ids[:, :-1])

    def run(cache: Cache, **options: Any) -> Any:
        return model.generate(ids, max_new_tokens=12, do_sample=False, **{cache_argument(model): cache}, **options)

    assisted = [
        run(cache, assistant_model=assistant) for cache in (native(model, ids[:, :-1]), snapshot.to_cache(model))
    ]
    assert torch.equal(*assisted)
    caches = native(model, ids[:, :-1]), snapshot.to_cache(model)
    for cache in caches:
        cache.batch_repeat_interleave(4)
    beams = [run(cache, num_beams=4) for cache in caches]
    assert torch.equal(*beams)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [4, 8, 9, 30])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_every_layer_kind_length_and_padding(name: str, length: int, padded: bool, kind: str) -> None:
    model, ids = MODELS[name](), tiny.prompt(2, length)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : length // 3] = 0
    room = {"max_cache_len": length + 20} if kind == "static" else {}
    empty = StaticCache(config=model.config, **room) if kind == "static" else DynamicCache(config=model.config)
    cache = native(model, ids[:, :-1], empty, mask[:, :-1] if padded else None)
    # Prefilled into a static cache, attention runs over its empty slots too: other shapes, other rounding.
    snapshot = (
        kv.capture(model, ids[:, :-1], attention_mask=mask[:, :-1])
        if kind == "dynamic"
        else snapshot_from_cache(cache, model, ids[:, :-1], attention_mask=mask[:, :-1], copy=True)
    )
    restored = snapshot.to_cache(model, kind=kind, **room)
    assert int(restored.get_seq_length()) == length - 1
    options = {"new": 12, "attention_mask": mask}
    assert same(generate(model, cache, ids, **options), generate(model, restored, ids, **options))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("room", [40, 64])
def test_static_room_smaller_than_a_window(name: str, room: int) -> None:
    model, ids = MODELS[name](sliding_window=48) if name != "llama" else tiny.llama(), tiny.prompt(1, 30)
    cache = native(model, ids[:, :-1], StaticCache(config=model.config, max_cache_len=room))
    restored = snapshot_from_cache(cache, model, ids[:, :-1], copy=True).to_cache(
        model, kind="static", max_cache_len=room
    )
    assert same(generate(model, cache, ids, new=10), generate(model, restored, ids, new=10))


def test_a_turn_of_several_tokens_after_injection() -> None:
    for make in MODELS.values():
        model, ids = make(), tiny.prompt(1, 40)
        for cut in (5, 30):
            snapshot = kv.capture(model, ids[:, :cut])
            assert same(
                generate(model, native(model, ids[:, :cut]), ids), generate(model, snapshot.to_cache(model), ids)
            )


def test_a_cache_taken_after_generation_goes_on() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 12)
    first = generate(model, native(model, ids[:, :-1]), ids, new=10)
    cache, tokens = output_cache(first), first.sequences
    snapshot = snapshot_from_cache(cache, model, tokens[:, :-1], construction=("prefill", "decoded(9)"), copy=True)
    assert snapshot.identity.construction == ("prefill", "decoded(9)")
    assert same(generate(model, cache, tokens, new=12), generate(model, snapshot.to_cache(model), tokens, new=12))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_two_restores_share_no_storage(kind: str) -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 20)
    room = {"max_cache_len": 40} if kind == "static" else {}
    snapshot = kv.capture(model, ids[:, :-1])
    before = snapshot.clone()
    one, other = snapshot.to_cache(model, kind=kind, **room), snapshot.to_cache(model, kind=kind, **room)
    storages = [
        tensor.untyped_storage().data_ptr()
        for layers in (snapshot.layers, one.layers, other.layers)
        for layer in layers
        for tensor in (layer.keys, layer.values)
    ]
    assert len(set(storages)) == len(storages)
    generate(model, one, ids, new=8)
    for layer, kept in zip(snapshot.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, kept.keys)


def test_crop_is_what_transformers_crops() -> None:
    model, ids = tiny.llama(), tiny.prompt(1, 30)
    cache = native(model, ids)
    snapshot = snapshot_from_cache(cache, model, ids)
    cache.crop(-11)
    cropped = snapshot.crop(19).to_cache(model)
    assert same(generate(model, cache, ids[:, :20]), generate(model, cropped, ids[:, :20]))
    with pytest.raises(kv.UnsupportedCache, match="layer 0"):
        kv.capture(tiny.gemma3(), ids).crop(19)
    short = kv.capture(tiny.gemma3(), ids[:, :7]).crop(5)
    assert short.seq_len == 5


def test_rows_of_a_batch_go_on_alone() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(3, 20)
    snapshot = kv.capture(model, ids[:, :-1])
    both = native(model, ids[:, :-1])
    both.batch_select_indices(torch.tensor([2, 0]))
    picked = ids[[2, 0]]
    assert same(generate(model, both, picked), generate(model, snapshot.select([2, 0]).to_cache(model), picked))


def test_a_segment_of_a_context_is_no_cache() -> None:
    model, ids = tiny.llama(), tiny.prompt(2, 12)
    snapshot = kv.capture(model, ids)
    with pytest.raises(kv.InvalidInput, match="token 0 of sequence 0 stands at position 8"):
        replace(snapshot, positions=snapshot.positions + 8).to_cache(model, check=False)
    padded = torch.ones(2, 12, dtype=torch.bool)
    padded[1, :5] = False
    kv.capture(model, ids, attention_mask=padded).to_cache(model)


@pytest.mark.model
def test_another_model_is_refused_by_the_fields_that_differ(smollm2: tuple[Any, Any], gemma3: tuple[Any, Any]) -> None:
    snapshot = kv.capture(smollm2[0], torch.tensor([[10, 11, 12]]))
    with pytest.raises(kv.IncompatibleIdentity) as caught:
        snapshot.to_cache(gemma3[0])
    differences = caught.value.differences
    assert differences["model"] == ("smollm2-135m", "gemma3-270m")
    assert differences["num_layers"] == (30, 18)
    assert {"weights", "tokenizer"} <= set(differences)
    with pytest.raises(kv.IncompatibleIdentity, match="num_layers"):
        snapshot.to_cache(gemma3[0], check=False)


@pytest.mark.model
def test_one_middle_weight_scaled_is_refused(smollm2: tuple[Any, Any]) -> None:
    model = smollm2[0]
    snapshot = kv.capture(model, torch.tensor([[10, 11, 12]]))
    weight = model.model.layers[15].mlp.up_proj.weight
    kept = weight.detach().clone()
    try:
        weight.data.mul_(1.01)
        with pytest.raises(kv.IncompatibleIdentity) as caught:
            snapshot.to_cache(model)
        assert set(caught.value.differences) == {"weights"}
    finally:
        weight.data.copy_(kept)
    snapshot.to_cache(model)


def test_another_dtype_or_rotary_base_is_refused() -> None:
    ids = tiny.prompt(1, 5)
    snapshot = kv.capture(tiny.llama(), ids)
    with pytest.raises(kv.IncompatibleIdentity) as caught:
        snapshot.to_cache(tiny.llama(dtype=torch.bfloat16))
    assert caught.value.differences["dtype"] == ("float32", "bfloat16")
    with pytest.raises(kv.IncompatibleIdentity, match=r"layers\[0\]\.rope\.theta"):
        snapshot.to_cache(tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    with pytest.raises(kv.IncompatibleIdentity, match=r"layers\[0\]\.kind"):
        kv.capture(tiny.gemma3(sliding_window=16), ids).to_cache(tiny.gemma3())


def test_without_the_check_only_the_layout_must_fit() -> None:
    ids = tiny.prompt(1, 12)
    donor, recipient = tiny.gemma3(), tiny.gemma3(seed=1, dtype=torch.bfloat16)
    cache = kv.capture(donor, ids[:, :-1]).to_cache(recipient, check=False)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    generate(recipient, cache, ids, new=4)
    with pytest.raises(kv.IncompatibleIdentity, match="kv_heads"):
        kv.capture(donor, ids).to_cache(tiny.gemma3(num_key_value_heads=2), check=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "quantized"}, "quantized"),
        ({"kind": "static"}, "needs max_cache_len"),
        ({"kind": "static", "max_cache_len": 8}, "at least the snapshot's 9 tokens"),
        ({"max_cache_len": 100}, "static"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = tiny.llama()
    snapshot = kv.capture(model, tiny.prompt(1, 9))
    with pytest.raises(kv.InvalidInput, match=message):
        snapshot.to_cache(model, **options)


def with_an_unsampled_change(**settings: Any) -> tuple[Any, Any]:
    """Two models that differ in one element which the sample of the weights does not look at."""
    one, other = tiny.llama(**settings), tiny.llama(**settings)
    weight = other.model.layers[0].mlp.up_proj.weight.data.view(-1)
    before = identity_of(one).weights
    for index in range(1, weight.numel()):
        kept = weight[index].clone()
        weight[index] += 1.0
        if identity_of(other).weights == before:
            return one, other
        weight[index] = kept
    raise AssertionError("every element is sampled")


def test_a_full_hash_is_compared_where_the_snapshot_carries_one(tmp_path: Path) -> None:
    one, other = with_an_unsampled_change(intermediate_size=512)
    ids = tiny.prompt(1, 9)
    kv.capture(one, ids).to_cache(other)  # the sample does not show it
    snapshot = kv.capture(one, ids, full_hash=True)
    packet = kv.encode(snapshot, budget=1.0)
    snapshot.save(tmp_path / "snapshot")
    for carried in (snapshot, kv.Snapshot.load(tmp_path / "snapshot"), kv.decode(packet)):
        assert carried.identity.full_weights is not None
        carried.to_cache(one)
        with pytest.raises(IncompatibleIdentity) as caught:
            carried.to_cache(other)
        assert set(caught.value.differences) == {"full_weights"}
        carried.to_cache(other, check=False)
    cache = native(one, ids)
    taken = snapshot_from_cache(cache, one, ids, full_hash=True)
    assert taken.identity.full_weights == snapshot.identity.full_weights
