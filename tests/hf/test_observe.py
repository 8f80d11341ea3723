"""Observed queries are those that the model used, and nothing shows that they were observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvferry as kv
from kvferry.hf.compat import cache_argument
from kvferry.hf.observe import observe_queries
from tests.hf import tiny
from tests.hf.generation import bits, native, real_prompt

MODELS = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma3n": tiny.gemma3n}


def attention_of(queries: torch.Tensor, keys: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Attention paid by the last queries, from what a snapshot holds: ``(batch, heads, queries, tokens)``."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = queries @ keys.float().transpose(2, 3)
    count, length = queries.shape[2], keys.shape[2]
    place, token = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    hidden = (token > place) | (token <= place - window if window else torch.zeros(1, 1, dtype=torch.bool))
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("construction", ["prefill", "chunked(3)", "incremental"])
def test_queries_reproduce_the_attention_that_was_paid(name: str, construction: str) -> None:
    model, ids = MODELS[name](attn="eager"), tiny.prompt(2, 8)  # within the window: the cache holds every key
    snapshot = kv.capture(model, ids, query_window=5, construction=construction)
    with torch.no_grad():
        paid = model(ids, output_attentions=True).attentions
    for index, layer in enumerate(snapshot.layers):
        source = snapshot.layers[layer.kind.argument or 0] if layer.kind.name == "shared" else layer
        assert layer.queries is not None
        assert source.keys is not None
        assert layer.queries.dtype == torch.float32
        assert layer.queries.shape == (2, 4, 5, 16)
        held = source.held
        queries = layer.queries[:, :, -min(5, held) :]
        torch.testing.assert_close(
            attention_of(queries, source.keys)[:, :, -1], _renormalised(paid[index][:, :, -1, -held:])
        )


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_library_may_wrap_what_is_registered(attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvpress does, at import, and hands the dropout on by its place."""
    model, ids = tiny.llama(attn=attn), tiny.prompt(1, 12)
    name = f"kvferry_observed_{attn}"
    inner = ALL_ATTENTION_FUNCTIONS[name]

    def wrapper(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: Any, **kwargs: Any) -> Any:
        return inner(module, query, key, value, attention_mask, dropout, **kwargs)

    want = kv.capture(model, ids, query_window=4)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, wrapper)
    got = kv.capture(model, ids, query_window=4)
    for one, other in zip(want.layers, got.layers, strict=True):
        assert one.queries is not None
        assert other.queries is not None
        assert torch.equal(one.queries, other.queries)
        assert one.keys is not None
        assert other.keys is not None
        assert torch.equal(bits(one.keys), bits(other.keys))


def _renormalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


def test_queries_of_a_full_layer_reproduce_every_row() -> None:
    model, ids = tiny.llama(attn="eager"), tiny.prompt(2, 30)
    snapshot = kv.capture(model, ids, query_window=12)
    with torch.no_grad():
        paid = model(ids, output_attentions=True).attentions
    for layer, weights in zip(snapshot.layers, paid, strict=True):
        assert layer.queries is not None
        torch.testing.assert_close(attention_of(layer.queries, layer.keys), weights[:, :, -12:])


def test_a_window_longer_than_the_prompt_holds_all_queries() -> None:
    snapshot = kv.capture(tiny.llama(), tiny.prompt(1, 6), query_window=50)
    assert {layer.queries.shape[2] for layer in snapshot.layers if layer.queries is not None} == {6}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_are_bit_identical(name: str, attn: str, padded: bool) -> None:
    model, ids = MODELS[name](attn=attn, dtype=torch.bfloat16), tiny.prompt(2, 30)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            cache = {cache_argument(model): DynamicCache(config=model.config)}
            first = model(ids[:, :20], attention_mask=mask[:, :20], **cache).logits
            return torch.cat([first, model(ids[:, 20:], attention_mask=mask, **cache).logits], dim=1)

    before = outputs()
    with observe_queries(model, 4) as queries:
        during = outputs()
        assert model.config._attn_implementation != attn
    assert torch.equal(bits(before), bits(during))
    assert torch.equal(bits(before), bits(outputs()))
    assert model.config._attn_implementation == attn
    assert set(queries) == set(range(model.config.num_hidden_layers))


@pytest.mark.model
def test_real_models_are_bit_identical(smollm2: tuple[Any, Any], gemma3: tuple[Any, Any]) -> None:
    for model, tokenizer in (smollm2, gemma3):
        ids = real_prompt(tokenizer, 150)
        snapshot = kv.capture(model, ids, query_window=32)
        for layer, own in zip(snapshot.layers, native(model, ids).layers, strict=True):
            assert torch.equal(layer.keys, own.keys)
            assert torch.equal(layer.values, own.values)
            assert layer.queries is not None
            assert layer.queries.shape[2] == 32


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model = tiny.llama()

    def fail(act: Callable[[], Any]) -> None:
        with observe_queries(model, 4):
            act()

    with pytest.raises(IndexError):
        fail(lambda: model(torch.tensor([[tiny.VOCABULARY + 5]])))
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(kv.InvalidInput, match="being observed already"):
        fail(lambda: fail(lambda: None))
    assert model.config._attn_implementation == "sdpa"
    with observe_queries(model, 2) as queries:
        model(tiny.prompt(1, 4))
    assert len(queries) == 2


def test_two_models_are_observed_apart() -> None:
    one, other = tiny.llama(), tiny.llama(seed=1)
    with observe_queries(one, 4) as first, observe_queries(other, 4) as second:
        one(tiny.prompt(1, 6))
        assert not second
        other(tiny.prompt(1, 6))
    assert not torch.equal(first[0], second[0])


def test_what_cannot_be_observed_is_said() -> None:
    with pytest.raises(kv.InvalidInput, match="window is 0"), observe_queries(tiny.llama(), 0):
        pass
    with pytest.raises(kv.InvalidInput, match="flex_attention"), observe_queries(tiny.llama(attn="flex_attention"), 4):
        pass
