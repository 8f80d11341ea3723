"""Our own decoding loop: the same tokens as ``generate``, and positions that stay where they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache

import kvferry as kv
from kvferry.hf.compat import cache_argument
from kvferry.hf.decode import continue_greedy, teacher_forced_logits, teacher_forced_steps
from tests.hf import tiny
from tests.hf.generation import bits, generate, native, real_prompt

MODELS = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma3n": tiny.gemma3n}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cut", [1, 12, 19])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_and_logits_are_those_of_generate(name: str, cut: int, padded: bool) -> None:
    model, ids = MODELS[name](), tiny.prompt(2, 20)
    mask = torch.ones_like(ids)
    if padded and cut > 1:
        mask[1, : cut // 2] = 0
    snapshot = kv.capture(model, ids[:, :cut], attention_mask=mask[:, :cut])
    expected = generate(model, snapshot.to_cache(model), ids, new=15, attention_mask=mask)
    for cache in (snapshot, snapshot.to_cache(model)):
        ours = continue_greedy(model, cache, ids, max_new_tokens=15, mask=mask, eos=None, keep_logits=True)
        assert torch.equal(ours.token_ids, expected.sequences[:, 20:])
        assert ours.logits is not None
        assert torch.equal(bits(ours.logits), bits(expected.logits))
        assert 0 < ours.first_token_seconds <= ours.seconds
    assert torch.equal(continue_greedy(model, snapshot, ids, max_new_tokens=15, eos=None).token_ids, ours.token_ids)


def test_static_caches_decode_too_and_say_when_they_are_full() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 20)

    def cache() -> Cache:
        return native(model, ids[:, :-1], StaticCache(config=model.config, max_cache_len=32))

    expected = generate(model, cache(), ids, new=13).sequences[:, 20:]
    assert torch.equal(continue_greedy(model, cache(), ids, max_new_tokens=13, eos=None).token_ids, expected)
    with pytest.raises(kv.InvalidInput, match="room for 32 tokens, but 33"):
        continue_greedy(model, cache(), ids, max_new_tokens=14)


@pytest.mark.model
def test_real_models_decode_as_generate_does(smollm2: tuple[Any, Any], gemma3: tuple[Any, Any]) -> None:
    for (model, tokenizer), length in ((smollm2, 65), (gemma3, 521)):
        ids = real_prompt(tokenizer, length)
        snapshot = kv.capture(model, ids[:, :-1])
        expected = model.generate(
            ids, max_new_tokens=24, do_sample=False, **{cache_argument(model): snapshot.to_cache(model)}
        )
        ours = continue_greedy(model, snapshot, ids, max_new_tokens=24)
        assert torch.equal(ours.token_ids, expected[:, length:])


@pytest.mark.parametrize("form", ["model", "one", "several"])
def test_rows_end_where_generate_ends_them(form: str) -> None:
    model, ids = tiny.llama(), tiny.prompt(3, 10)
    snapshot = kv.capture(model, ids[:, :-1])
    free = continue_greedy(model, snapshot, ids, max_new_tokens=20, eos=None).token_ids
    ends = [int(free[0, 4]), int(free[1, 9]), int(free[2, 2])]
    if form == "one":
        ends = ends[:1]
    eos: Any = ends[0] if form == "one" else ends
    expected = generate(model, snapshot.to_cache(model), ids, new=20, eos_token_id=ends).sequences[:, 10:]
    if form == "model":
        model.generation_config.eos_token_id, eos = ends, "model"
    ours = continue_greedy(model, snapshot, ids, max_new_tokens=20, eos=eos).token_ids
    assert torch.equal(ours, expected)
    assert (ours.shape[1] < 20) == (form != "one" or bool((free == ends[0]).any(dim=1).all()))


def test_a_dropped_token_is_skipped_and_shifts_nothing() -> None:
    model, ids = tiny.gemma3(), tiny.prompt(1, 16)
    whole = kv.capture(model, ids[:, :12])
    mask = whole.mask.clone()
    mask[0, 3:6] = False
    dropped = replace(whole, mask=mask)
    ours = continue_greedy(model, dropped, ids, max_new_tokens=8, eos=None, keep_logits=True)

    attention = torch.ones(1, 16, dtype=torch.int64)
    attention[0, 3:6] = 0
    cache = dropped.to_cache(model)
    with torch.no_grad():
        first = model(
            ids[:, 12:],
            attention_mask=attention,
            position_ids=torch.arange(12, 16)[None],
            **{cache_argument(model): cache},
        ).logits
    assert ours.logits is not None
    torch.testing.assert_close(ours.logits[:, 0], first[:, -1])
    # What the dropped tokens held must not matter at all …
    for layer in dropped.layers:
        if layer.kind.name == "full":
            layer.keys[:, :, 3:6] = 1e4
            layer.values[:, :, 3:6] = -1e4
    again = continue_greedy(model, dropped, ids, max_new_tokens=8, eos=None, keep_logits=True)
    assert torch.equal(again.token_ids, ours.token_ids)
    torch.testing.assert_close(again.logits, ours.logits)
    # … and the positions after them must: counted over the mask, as `generate` does, the logits are others.
    shifted = generate(model, dropped.to_cache(model), ids, new=1, attention_mask=attention)
    assert not torch.allclose(shifted.logits[0], ours.logits[:, 0], atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [None, 1, 4])
def test_teacher_forcing_scores_every_token_of_the_tail(name: str, step: int | None) -> None:
    model, ids = MODELS[name](), tiny.prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    snapshot = kv.capture(model, ids[:, :11], attention_mask=mask[:, :11])
    ours = teacher_forced_logits(model, snapshot, ids, step=step)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    assert ours.shape == (2, 9, tiny.VOCABULARY)
    torch.testing.assert_close(ours, whole[:, 11:])
    pieces = list(teacher_forced_steps(model, snapshot, ids, step=4))
    assert [(begin, logits.shape[1]) for begin, logits in pieces] == [(11, 4), (15, 4), (19, 1)]


def test_teacher_forced_argmax_follows_the_decoded_tokens() -> None:
    model, ids = tiny.llama(), tiny.prompt(1, 12)
    snapshot = kv.capture(model, ids[:, :-1])
    decoded = continue_greedy(model, snapshot, ids, max_new_tokens=10, eos=None, keep_logits=True)
    forced = torch.cat([ids, decoded.token_ids[:, :-1]], dim=1)
    logits = teacher_forced_logits(model, snapshot, forced, step=1)
    assert torch.equal(bits(logits), bits(decoded.logits))


def test_the_snapshot_stays_and_the_cache_grows() -> None:
    model, ids = tiny.llama(), tiny.prompt(1, 12)
    snapshot = kv.capture(model, ids[:, :-1])
    before, cache = snapshot.clone(), snapshot.to_cache(model)
    continue_greedy(model, snapshot, ids, max_new_tokens=3, eos=None)
    continue_greedy(model, cache, ids, max_new_tokens=3, eos=None)
    assert int(cache.get_seq_length()) == 14
    for layer, kept in zip(snapshot.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, kept.keys)


def test_a_row_that_is_padding_so_far_begins_at_position_zero() -> None:
    model, ids = tiny.llama(), tiny.prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    long = kv.capture(model, ids[:, :10], attention_mask=mask[:, :10])
    expected = continue_greedy(model, long, ids, max_new_tokens=6, eos=None)
    ours = continue_greedy(model, long.crop(6), ids, max_new_tokens=6, eos=None, mask=mask)
    assert torch.equal(ours.token_ids, expected.token_ids)


def test_bad_continuations_are_refused() -> None:
    model, ids = tiny.llama(), tiny.prompt(1, 12)
    snapshot = kv.capture(model, ids)
    for cache in (snapshot, snapshot.to_cache(model)):
        with pytest.raises(kv.InvalidInput, match="12 tokens and the prompt has 12"):
            continue_greedy(model, cache, ids, max_new_tokens=3)
    longer = torch.cat([ids, ids], dim=1)
    with pytest.raises(kv.InvalidInput, match="max_new_tokens"):
        continue_greedy(model, snapshot, longer, max_new_tokens=0)
    with pytest.raises(kv.InvalidInput, match="eos"):
        continue_greedy(model, snapshot, longer, max_new_tokens=3, eos="none")  # type: ignore[arg-type]
    with pytest.raises(kv.InvalidInput, match="positions"):
        continue_greedy(model, snapshot, longer, max_new_tokens=3, positions=torch.arange(12)[None])
    with pytest.raises(kv.InvalidInput, match="step"):
        teacher_forced_logits(model, snapshot, longer, step=0)
    other = longer.clone()
    other[0, 7] += 1
    with pytest.raises(kv.IncompatibleIdentity, match=r"token_ids\[0, 7\]"):
        continue_greedy(model, snapshot, other, max_new_tokens=3)
    with pytest.raises(kv.IncompatibleIdentity, match="weights"):
        continue_greedy(tiny.llama(seed=1), snapshot, longer, max_new_tokens=3)
    empty = DynamicCache(config=model.config)
    assert continue_greedy(model, empty, ids, max_new_tokens=1).token_ids.shape == (1, 1)
