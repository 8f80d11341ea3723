"""Tokens computed anew on top of a cache are what a prefill would have made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.errors import IncompatibleIdentity, InvalidInput, UnsupportedCache
from kvferry.hf.capture import capture
from kvferry.hf.compat import cache_argument
from kvferry.hf.recompute import recompute
from kvferry.snapshot import Snapshot
from tests.hf import tiny


def noisy(snapshot: Snapshot, tokens: list[int]) -> Snapshot:
    """Other numbers at some tokens."""

    def wrong(layer: Any) -> Any:
        where = torch.tensor([token - layer.first for token in tokens if token >= layer.first], dtype=torch.int64)
        return replace(layer, keys=layer.keys.index_fill(2, where, 3.0), values=layer.values.index_fill(2, where, -2.0))

    return replace(snapshot, layers=tuple(map(wrong, snapshot.layers)))


def furthest(one: Snapshot, other: Snapshot) -> float:
    return max(
        float((getattr(a, side) - getattr(b, side)).abs().max())
        for a, b in zip(one.layers, other.layers, strict=True)
        for side in ("keys", "values")
    )


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [tiny.llama, tiny.gemma3])
def test_what_is_wrong_in_a_few_tokens_is_put_right(family: Any, attn: str) -> None:
    """Their own rows do not depend on what stood there, so those that only they got wrong come back whole."""
    model = family(attn=attn)
    ids = tiny.prompt(2, 7 if family is tiny.gemma3 else 60)  # within the window of gemma3
    own = capture(model, ids, copy=True)
    chosen = [2, 3, 6] if family is tiny.gemma3 else [5, 17, 18, 40, 59]
    damaged = noisy(own, chosen)
    before = damaged.clone()
    mended = recompute(model, damaged, chosen)
    assert furthest(damaged, own) > 1
    assert furthest(mended, own) < 1e-4
    assert furthest(damaged, before) == 0
    assert mended.identity.construction == ("prefill", f"recomputed({len(chosen)} of {ids.shape[1]})")
    assert furthest(recompute(model, damaged, []), damaged) == 0


def test_the_others_are_attended_to_as_they_are() -> None:
    """The last tokens on a wrong cache are what the model makes of them when it goes on from that cache."""
    model = tiny.llama()
    ids = tiny.prompt(1, 50)
    wrong = noisy(capture(model, ids), [7, 30])
    cache = wrong.crop(44).to_cache(model)
    model(input_ids=ids[:, 44:], use_cache=True, **{cache_argument(model): cache})
    made = recompute(model, wrong, torch.arange(44, 50))
    for layer, want in zip(made.layers, cache.layers, strict=True):
        assert torch.allclose(layer.keys, want.keys, atol=1e-4)
        assert torch.allclose(layer.values, want.values, atol=1e-4)
    assert furthest(made, capture(model, ids)) > 0.5


def test_padding_is_left_out() -> None:
    model = tiny.llama()
    ids, mask = tiny.prompt(2, 30), torch.ones(2, 30, dtype=torch.int64)
    mask[1, :10] = 0
    own = capture(model, ids, attention_mask=mask)
    mended = recompute(model, noisy(own, [20, 25]), [4, 20, 25])
    for a, b in zip(mended.layers, own.layers, strict=True):
        real = mask.bool()[:, None, :, None].expand_as(a.keys)
        assert torch.allclose(a.keys[real], b.keys[real], atol=1e-4)


def test_windows_that_have_moved_on() -> None:
    model = tiny.gemma3()
    own = capture(model, tiny.prompt(1, 30))
    with pytest.raises(UnsupportedCache, match=r"layer 0 \(sliding\(8\)\) holds tokens 23…29 only"):
        recompute(model, own, [29])
    with pytest.raises(InvalidInput, match="30…30 of a cache of 30"):
        recompute(model, own, [30])
    with pytest.raises(IncompatibleIdentity):
        recompute(tiny.gemma3(seed=1), own, [29])
    shared = tiny.gemma3n()
    with pytest.raises(UnsupportedCache, match=r"shared"):
        recompute(shared, capture(shared, tiny.prompt(1, 5)), [4])
