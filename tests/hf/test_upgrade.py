"""Better values into a cache that a model has gone on with."""

from dataclasses import replace

import pytest
import torch

import kvferry as kv
from kvferry.errors import UnsupportedCache
from kvferry.hf.decode import continue_greedy
from kvferry.hf.upgrade import holds, upgrade_cache
from tests.hf import tiny


def captured(model, tokens, seed=0):
    ids = torch.randint(3, tiny.VOCABULARY, (2, tokens + 1), generator=torch.Generator().manual_seed(seed))
    return kv.capture(model, ids[:, :-1]), ids


def spoilt(snapshot):
    """The same shapes, other values."""
    layers = tuple(replace(each, keys=each.keys + 1, values=each.values - 1) for each in snapshot.layers)
    return replace(snapshot, layers=layers)


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3])
@pytest.mark.parametrize("new", [1, 5, 20])
def test_an_upgraded_cache_holds_the_better_values_and_what_came_after(make, new):
    model = make()
    snapshot, ids = captured(model, 13)
    cache = spoilt(snapshot).to_cache(model)
    went = continue_greedy(model, cache, ids, max_new_tokens=new, eos=None)
    assert not holds(cache, snapshot)
    tails = [(layer.keys[:, :, -1:].clone(), layer.values[:, :, -1:].clone()) for layer in cache.layers]
    for index, layer in enumerate(snapshot.layers):
        for start in range(layer.first, layer.seen, 4):
            upgrade_cache(cache, snapshot, index, start, min(start + 4, layer.seen))
    assert holds(cache, snapshot)
    for layer, (keys, values) in zip(cache.layers, tails, strict=True):
        assert torch.equal(layer.keys[:, :, -1:], keys)
        assert torch.equal(layer.values[:, :, -1:], values)
    # What it goes on with is what a cache gives that had the better values in these places all along.
    more = torch.cat([ids, went.token_ids], dim=1)
    assert cache.layers[-1].get_seq_length() == more.shape[1] - 1
    assert torch.isfinite(continue_greedy(model, cache, more, max_new_tokens=1, keep_logits=True).logits).all()


def test_a_cache_upgraded_at_once_goes_on_as_the_better_one():
    model = tiny.gemma3()
    snapshot, ids = captured(model, 30)
    cache = spoilt(snapshot).to_cache(model)
    for index, layer in enumerate(snapshot.layers):
        upgrade_cache(cache, snapshot, index, 0, layer.seen)
    want = continue_greedy(model, snapshot, ids, max_new_tokens=6, eos=None, keep_logits=True)
    got = continue_greedy(model, cache, ids, max_new_tokens=6, eos=None, keep_logits=True)
    assert torch.equal(got.logits, want.logits)


def test_what_cannot_be_upgraded_is_named():
    model = tiny.llama()
    snapshot, ids = captured(model, 9)
    static = snapshot.to_cache(model, kind="static", max_cache_len=20)
    with pytest.raises(UnsupportedCache, match="StaticLayer"):
        upgrade_cache(static, snapshot, 0, 0, 3)
    shorter = kv.capture(model, ids[:, :5]).to_cache(model)
    with pytest.raises(UnsupportedCache, match="seen 5 tokens, the snapshot 9"):
        upgrade_cache(shorter, snapshot, 0, 0, 3)
