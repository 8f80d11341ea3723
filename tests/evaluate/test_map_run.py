"""A transfer is the mapped cache but for what the target computes, and says what that costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.map_run import transfer
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot
from tests.hf import tiny
from tests.map import builders
from tests.map.test_mapper import missed, same_bits


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Mapper]:
    return builders.pair()


def same(one: Snapshot, other: Snapshot, tokens: slice) -> bool:
    return all(
        torch.equal(a.keys[:, :, tokens], b.keys[:, :, tokens])
        and torch.equal(a.values[:, :, tokens], b.values[:, :, tokens])
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def test_a_whole_native_prefix_is_the_targets_own_cache(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    ids = tiny.prompt(2, 60, seed=21)
    done = transfer(mapper, target, builders.cached(source, ids), native_prefix=60)
    assert same_bits(done.snapshot, builders.cached(target, ids))
    assert (done.computed, done.share) == (60, 1.0)


def test_first_tokens_from_the_target_and_the_rest_mapped(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    ids = tiny.prompt(1, 80, seed=22)
    cache = builders.cached(source, ids)
    done = transfer(mapper, target, cache)
    assert same(done.snapshot, builders.cached(target, ids[:, :2]), slice(0, 2))
    assert same(done.snapshot, mapper.map(cache), slice(2, None))
    assert (done.computed, done.share) == (2, 2 / 80)
    assert done.snapshot.identity.construction[-1] == "native(2)"
    assert set(done.seconds) == {"map", "native", "recompute"}
    assert same_bits(transfer(mapper, target, cache, native_prefix=0).snapshot, mapper.map(cache))


def test_recomputed_tokens_are_nearer_to_the_targets(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    ids = tiny.prompt(1, 80, seed=23)
    cache, want = builders.cached(source, ids), builders.cached(target, ids)
    plain = transfer(mapper, target, cache)
    more = transfer(mapper, target, cache, recompute_last=10, recompute_tokens=[1, 40, 79])
    assert more.computed == 2 + 11
    assert same(more.snapshot, plain.snapshot, slice(2, 40))
    assert same(more.snapshot, plain.snapshot, slice(41, 70))
    for where in (slice(40, 41), slice(70, 80)):
        assert sum(missed_at(more.snapshot, want, where)) < 0.7 * sum(missed_at(plain.snapshot, want, where))
    assert sum(missed(more.snapshot, want)) < sum(missed(plain.snapshot, want))
    every = transfer(mapper, target, cache, recompute_tokens=range(80))
    assert max(missed(every.snapshot, want)) < 1e-4


def missed_at(one: Snapshot, other: Snapshot, tokens: slice) -> list[float]:
    return [
        float((a.keys[:, :, tokens] - b.keys[:, :, tokens]).norm())
        for a, b in zip(one.layers, other.layers, strict=True)
    ]


def test_each_padded_sequence_has_a_prefix_of_its_own(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    ids, mask = tiny.prompt(2, 50, seed=24), torch.ones(2, 50, dtype=torch.int64)
    mask[1, :13] = 0
    cache = builders.cached(source, ids, attention_mask=mask)
    done = transfer(mapper, target, cache).snapshot
    own = builders.cached(target, ids, attention_mask=mask)
    plain = mapper.map(cache)
    for a, b, c in zip(done.layers, own.layers, plain.layers, strict=True):
        assert torch.allclose(a.keys[0, :, :2], b.keys[0, :, :2], atol=1e-4)
        assert torch.allclose(a.keys[1, :, 13:15], b.keys[1, :, 13:15], atol=1e-4)
        assert torch.equal(a.keys[0, :, 2:], c.keys[0, :, 2:])
        assert torch.equal(a.keys[1, :, 15:], c.keys[1, :, 15:])


def test_what_does_not_belong_together(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    cache = builders.cached(source, tiny.prompt(1, 20))
    with pytest.raises(IncompatibleIdentity, match="mapper's target"):
        transfer(mapper, source, cache)
    with pytest.raises(InvalidInput, match="negative"):
        transfer(mapper, target, cache, native_prefix=-1)
    with pytest.raises(InvalidInput, match="of a cache of 20"):
        transfer(mapper, target, cache, recompute_tokens=[25])
