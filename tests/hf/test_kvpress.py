"""Scores of real presses of kvpress; skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.kvpress import press_layer_scores, press_scores
from kvferry.hf.text import default_text, tokens_of

pytestmark = pytest.mark.model

TOKENS = 600


class NormPress:
    """A press without kvpress: what its KnormPress computes."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return -keys.float().norm(dim=-1)


class BadShapePress:
    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return keys[..., :-1, 0]


class NanPress:
    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return keys[..., 0].float() / 0.0 * 0.0


class AngryPress:
    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        raise AssertionError("the prompt is too short")


@pytest.fixture(scope="module")
def kvpress() -> Any:
    return pytest.importorskip("kvpress", reason="kvpress is not installed: pip install --no-deps kvpress")


def ids_of(tokenizer: Any, count: int = TOKENS) -> torch.Tensor:
    return tokens_of(tokenizer, default_text(), count)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_press_sees_what_the_cache_holds(name: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = request.getfixturevalue(name)
    ids = ids_of(tokenizer)
    scores = press_layer_scores(model, NormPress(), ids)
    snapshot = kv.capture(model, ids)
    assert scores.shape == (len(snapshot.layers), 1, TOKENS)
    for index, layer in enumerate(snapshot.layers):
        assert layer.keys is not None
        assert scores[index, :, : layer.first].isnan().all()
        expected = -layer.keys.float().norm(dim=-1).mean(dim=1)
        torch.testing.assert_close(scores[index, :, layer.first :], expected)


def test_the_model_is_left_as_it_was(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(UnsupportedCache, match=r"AngryPress cannot score layer 0 .*too short"):
        press_scores(model, AngryPress(), ids_of(tokenizer, 20))
    with pytest.raises(UnsupportedCache, match="BadShapePress gave scores"):
        press_scores(model, BadShapePress(), ids_of(tokenizer, 20))
    with pytest.raises(UnsupportedCache, match="NanPress gave NaN for tokens of layer 0"):
        press_scores(model, NanPress(), ids_of(tokenizer, 20))
    with pytest.raises(InvalidInput, match="no score method"):
        press_scores(model, object(), ids_of(tokenizer, 20))  # type: ignore[arg-type]
    assert [name for name, _ in model.named_modules()] == names
    attention = model.model.layers[0].self_attn
    assert not hasattr(attention, "rotary_emb")
    assert not attention._forward_hooks


def test_ranks_are_by_layer(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = ids_of(tokenizer, 50)
    scores = press_scores(model, NormPress(), ids)
    assert scores.shape == (1, 50)
    assert 0 < float(scores.min()) < float(scores.max()) <= 1
    packet = kv.encode(kv.capture(model, ids), 0.4, "greedy", scores)
    assert packet.report["scorer"] == "given"
    assert len(packet) <= 0.4 * packet.full_bytes


@pytest.mark.parametrize("press", ["KnormPress", "SnapKVPress", "ExpectedAttentionPress", "TOVAPress", "KeyDiffPress"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_presses(kvpress: Any, press: str, name: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = request.getfixturevalue(name)
    ids = ids_of(tokenizer)
    scores = press_scores(model, getattr(kvpress, press)(), ids)
    assert scores.isfinite().all()
    assert len(scores.unique()) > TOKENS // 4
    packet = kv.encode(kv.capture(model, ids), 0.3, "greedy", scores)
    assert kv.decode(packet).mask.all()


def test_attention_weights_reach_a_press_that_needs_them(kvpress: Any, model_of: Any) -> None:
    model, tokenizer = model_of("smollm2-135m", attn="eager")
    scores = press_scores(model, kvpress.ObservedAttentionPress(), ids_of(tokenizer, 80))
    assert scores.isfinite().all()
    with pytest.raises(UnsupportedCache, match="eager"):
        press_scores(model_of("smollm2-135m")[0], kvpress.ObservedAttentionPress(), ids_of(tokenizer, 80))
