"""Taking a cache out: exactly the tokens given, by every way of building it, with no copy unless asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

import kvferry as kv
from kvferry.errors import InvalidInput
from kvferry.hf.capture import snapshot_from_cache
from kvferry.hf.compat import cache_argument
from tests.hf import tiny

MODELS = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma3n": tiny.gemma3n}


def filled(model: Any, ids: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None) -> Cache:
    """``cache`` after transformers itself ran the model over ``ids``."""
    positions = None if mask is None else (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{cache_argument(model): cache})
    return cache


def same(one: kv.Snapshot, other: kv.Snapshot) -> bool:
    """Same tokens, same bits."""
    pairs = zip(one.layers, other.layers, strict=True)
    return torch.equal(one.token_ids, other.token_ids) and all(
        (a.keys is None and b.keys is None) or (torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values))
        for a, b in pairs
    )


@pytest.mark.parametrize("name", MODELS)
def test_capture_is_what_transformers_builds(name: str) -> None:
    model, ids = MODELS[name](), tiny.prompt(2, 20)
    snapshot = kv.capture(model, ids)
    cache = filled(model, ids, DynamicCache(config=model.config))
    for layer, own in zip(snapshot.layers, cache.layers, strict=False):
        assert layer.seen == 20
        if layer.kind.name == "shared":
            assert layer.keys is None
            continue
        assert layer.held == (7 if layer.kind.name == "sliding" else 20)
        assert torch.equal(layer.keys, own.keys)
        assert torch.equal(layer.values, own.values)
    assert torch.equal(snapshot.token_ids, ids)
    assert torch.equal(snapshot.positions, torch.arange(20).expand(2, 20))
    assert bool(snapshot.mask.all())
    assert snapshot.identity.construction == ("prefill",)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("construction", ["chunked(7)", "chunked(100)", "incremental"])
def test_other_constructions_give_the_same_up_to_rounding(name: str, construction: str) -> None:
    model, ids = MODELS[name](), tiny.prompt(2, 20)
    whole, parts = kv.capture(model, ids), kv.capture(model, ids, construction=construction)
    assert parts.identity.construction == (construction,)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert one.kind == other.kind
        if one.keys is not None:
            torch.testing.assert_close(one.keys, other.keys)
            torch.testing.assert_close(one.values, other.values)


def test_chunks_really_are_chunks() -> None:
    model, lengths = tiny.llama(), []
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    kv.capture(model, tiny.prompt(1, 10), construction="chunked(4)")
    kv.capture(model, tiny.prompt(1, 3), construction="incremental")
    hook.remove()
    assert lengths == [4, 4, 2, 1, 1, 1]


@pytest.mark.parametrize("name", MODELS)
def test_left_padding_keeps_positions_and_tokens_apart(name: str) -> None:
    model, ids = MODELS[name](), tiny.prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    snapshot = kv.capture(model, ids, attention_mask=mask)
    assert torch.equal(snapshot.positions[0], torch.tensor([0] * 6 + list(range(14))))
    assert torch.equal(snapshot.mask, mask.bool())
    assert same(snapshot, snapshot_from_cache(filled(model, ids, DynamicCache(config=model.config), mask), model, ids))
    alone = kv.capture(model, ids[0, 6:])
    for padded, single in zip(snapshot.layers, alone.layers, strict=True):
        if single.keys is not None and padded.keys is not None:
            torch.testing.assert_close(padded.keys[:1, :, -single.held :], single.keys)


def test_one_dimension_is_a_batch_of_one() -> None:
    model, ids = tiny.llama(), tiny.prompt(1, 9)
    for given in (ids[0], ids[0].tolist(), ids[0].to(torch.int32)):
        assert same(kv.capture(model, given), kv.capture(model, ids))


def test_no_copy_unless_asked() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 20)
    cache = filled(model, ids, DynamicCache(config=model.config))
    view, copy = snapshot_from_cache(cache, model, ids), snapshot_from_cache(cache, model, ids, copy=True)
    for layer, shared, own in zip(cache.layers, view.layers, copy.layers, strict=True):
        assert shared.keys is not None
        assert own.keys is not None
        assert shared.keys.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()
        assert own.keys.untyped_storage().data_ptr() != layer.keys.untyped_storage().data_ptr()
        assert own.keys.untyped_storage().nbytes() == own.keys.numel() * own.keys.element_size()


def test_a_view_stays_while_its_dynamic_cache_goes_on() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 24)
    cache = filled(model, ids[:, :20], DynamicCache(config=model.config))
    snapshot = snapshot_from_cache(cache, model, ids[:, :20])
    before = snapshot.clone()
    filled(model, ids[:, 20:], cache)
    assert same(snapshot, before)


def test_the_callers_tensors_are_not_shared() -> None:
    model, ids = tiny.llama(), tiny.prompt(1, 9)
    mask = torch.ones_like(ids)
    snapshot = kv.capture(model, ids, attention_mask=mask)
    ids += 1
    mask.zero_()
    assert not torch.equal(snapshot.token_ids, ids)
    assert bool(snapshot.mask.all())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [3, 7, 8, 9, 20, 40])
@pytest.mark.parametrize("room", [40, 64])
def test_static_caches_hold_the_same(name: str, length: int, room: int) -> None:
    model, ids = MODELS[name](), tiny.prompt(2, length)
    cache = filled(model, ids, StaticCache(config=model.config, max_cache_len=room))
    static, dynamic = snapshot_from_cache(cache, model, ids), kv.capture(model, ids)
    for one, other in zip(static.layers, dynamic.layers, strict=True):
        if one.keys is not None and other.keys is not None and one.values is not None and other.values is not None:
            torch.testing.assert_close(one.keys, other.keys)
            torch.testing.assert_close(one.values, other.values)


def test_static_sliding_window_after_single_steps() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    for step in range(20):
        filled(model, ids[:, step : step + 1], cache)
    static, dynamic = snapshot_from_cache(cache, model, ids), kv.capture(model, ids, construction="incremental")
    for one, other in zip(static.layers, dynamic.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)


def test_a_cache_made_without_a_configuration_holds_more_than_a_window() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 20)
    plain = snapshot_from_cache(filled(model, ids, DynamicCache()), model, ids)
    assert same(plain, kv.capture(model, ids))


def test_a_cache_that_records_its_past_holds_more_than_a_window() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 20)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    assert same(snapshot_from_cache(filled(model, ids, cache), model, ids), kv.capture(model, ids))


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.empty(1, 0, dtype=torch.int64), {}, "empty"),
        ([], {}, "int64"),
        (torch.tensor([[1.0, 2.0]]), {}, "int64"),
        (torch.tensor([[True]]), {}, "int64"),
        (torch.ones(1, 2, 3, dtype=torch.int64), {}, "batch, seq_len"),
        ("a prompt", {}, "tensor of token ids"),
        (torch.tensor([[5, tiny.VOCABULARY]]), {}, f"token id {tiny.VOCABULARY}"),
        (torch.tensor([[5, -1]]), {}, "token id -1"),
        (tiny.prompt(1, 257), {}, "context is 256"),
        (tiny.prompt(1, 4), {"construction": "backwards"}, "construction 'backwards'"),
        (tiny.prompt(1, 4), {"construction": "chunked(0)"}, "chunked"),
        (tiny.prompt(1, 4), {"query_window": -1}, "query_window"),
        (tiny.prompt(1, 4), {"attention_mask": torch.ones(1, 3)}, "attention_mask is"),
        (tiny.prompt(1, 4), {"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "left padding"),
        (tiny.prompt(1, 4), {"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "left padding"),
        (tiny.prompt(1, 4), {"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "masks every token"),
        (tiny.prompt(1, 4), {"attention_mask": torch.tensor([[0.0, -1e9, 1, 1]])}, "only 0 and 1"),
    ],
)
def test_bad_prompts_are_refused(ids: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(kv.InvalidInput, match=message):
        kv.capture(tiny.llama(), ids, **options)


def test_a_model_that_drops_activations_is_refused() -> None:
    model = tiny.llama(attention_dropout=0.1)
    kv.capture(model, tiny.prompt(1, 4))
    with pytest.raises(kv.InvalidInput, match=r"model\.eval\(\)"):
        kv.capture(model.train(), tiny.prompt(1, 4))


def test_a_cache_of_another_length_or_model_is_refused() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 20)
    cache = filled(model, ids, DynamicCache(config=model.config))
    with pytest.raises(kv.InvalidInput, match="has seen 20 tokens, but 21"):
        snapshot_from_cache(cache, model, tiny.prompt(1, 21))
    with pytest.raises(kv.InvalidInput, match="empty"):
        snapshot_from_cache(DynamicCache(config=model.config), model, ids)
    with pytest.raises(kv.InvalidInput, match="3 layers, but the model has 2"):
        snapshot_from_cache(cache, tiny.llama(), ids)
    with pytest.raises(kv.InvalidInput, match="layer 0 attends to everything"):
        snapshot_from_cache(cache, tiny.llama(num_hidden_layers=3), ids)
    with pytest.raises(kv.InvalidInput, match="batch"):
        snapshot_from_cache(cache, model, tiny.prompt(2, 20))
    short = filled(model, tiny.prompt(1, 7), StaticCache(config=model.config, max_cache_len=4 + 3))
    with pytest.raises(kv.InvalidInput, match="has seen 7 tokens, but 6"):
        snapshot_from_cache(short, model, tiny.prompt(1, 6))


def test_layers_of_another_class_are_refused_by_name_and_index() -> None:
    class Rotated(DynamicLayer):
        """Somebody's layer that keeps something else than the model's keys."""

    model, ids = tiny.llama(), tiny.prompt(1, 6)
    layers = [DynamicLayer(), Rotated()]
    with pytest.raises(kv.UnsupportedCache, match="layer 1 is a Rotated"):
        snapshot_from_cache(filled(model, ids, Cache(layers=layers)), model, ids)
    double = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(kv.UnsupportedCache, match="EncoderDecoderCache"):
        snapshot_from_cache(double, model, ids)
    with pytest.raises(kv.UnsupportedCache, match="tuple"):
        snapshot_from_cache(((ids, ids),), model, ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(5),
        torch.arange(7).expand(3, 7),
        torch.arange(7).view(7, 1),
        torch.arange(7.0),
        torch.tensor(0),
        torch.arange(7) - 1,
        [[0], [1, 2]],
        "here",
    ],
)
def test_positions_that_do_not_fit_are_refused(positions: Any) -> None:
    model, ids = tiny.llama(), tiny.prompt(2, 7)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    with pytest.raises(InvalidInput, match="position"):
        snapshot_from_cache(cache, model, ids, positions=positions)
    for good in (torch.arange(7), torch.arange(7).view(1, 7), list(range(7)), torch.arange(7).expand(2, 7).int()):
        taken = snapshot_from_cache(cache, model, ids, positions=good)  # type: ignore[arg-type]
        assert torch.equal(taken.positions, torch.arange(7).expand(2, 7))
