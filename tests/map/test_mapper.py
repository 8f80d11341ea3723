"""What a mapper makes of a cache: the target's, of the same tokens, the same bits however it is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.hf.decode import continue_greedy
from kvferry.map.blocks import Block
from kvferry.map.fit import fit_linear, r2_table
from kvferry.map.mapper import Mapper, Recipe
from kvferry.snapshot import Snapshot
from tests.hf import tiny
from tests.map import builders


def same_bits(one: Snapshot, other: Snapshot) -> bool:
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) and a.seen == b.seen
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def missed(made: Snapshot, want: Snapshot, first: int = 2) -> list[float]:
    """Relative error of keys and values, layer by layer, the first tokens left out."""
    found = []
    for a, b in zip(made.layers, want.layers, strict=True):
        for made_all, want_all in ((a.keys, b.keys), (a.values, b.values)):
            x, y = made_all[:, :, first:].float(), want_all[:, :, first:].float()
            found.append(float((x - y).norm() / (y - y.mean(dim=2, keepdim=True)).norm()))
    return found


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Mapper]:
    return builders.pair()


def test_it_makes_the_targets_cache(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    ids = tiny.prompt(2, 200, seed=1000)
    made, want = mapper.map(builders.cached(source, ids)), builders.cached(target, ids)
    assert made.identity.differences(want.identity) == {}
    assert made.identity.construction[-1] == f"mapped({mapper.source.model}, {mapper.digest[:16]})"
    assert torch.equal(made.token_ids, ids)
    errors = missed(made, want)
    assert max(errors[:2]) < 1e-4  # the first layer is the same in both
    assert max(errors[:4]) < 0.15  # the second sees another rotation, the third another layer below it
    assert max(errors) < 0.8
    shuffled = replace(want, layers=tuple(map(roll, want.layers)))
    assert min(missed(shuffled, want)) > 1
    given = torch.cat([ids, tiny.prompt(2, 2, seed=7)], dim=1)
    assert continue_greedy(target, made, given, max_new_tokens=3).token_ids.shape == (2, 3)


def roll(layer: Any) -> Any:
    return replace(layer, keys=layer.keys.roll(7, 2), values=layer.values.roll(7, 2))


@pytest.mark.parametrize("sources", ["same", "both"])
@pytest.mark.parametrize("variant", ["ridge", "head_local"])
def test_a_model_is_mapped_to_itself(variant: str, sources: str) -> None:
    model = builders.llama(3)
    recipe = Recipe(variant, top_k=1, sources=sources, native_prefix=2)
    mapper = fit_linear(builders.calibrated(model, model, recipe), {})
    assert min(mapper.measures["r2"]["keys"] + mapper.measures["r2"]["values"]) > 1 - 1e-5
    assert all(part.sources[0].layer == part.target.layer for part in mapper.parts)
    snapshot = builders.cached(model, tiny.prompt(1, 300, seed=55))
    assert max(missed(mapper.map(snapshot), snapshot)) < 2e-3


def test_both_sides_know_more_than_one(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    both = fit_linear(builders.calibrated(source, target, Recipe(top_k=2, sources="both", native_prefix=2)), {})
    for side in ("keys", "values"):
        assert sum(both.measures["r2"][side]) > sum(mapper.measures["r2"][side])
    assert both.parameters > 1.9 * mapper.parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extending_equals_mapping_at_once(dtype: torch.dtype) -> None:
    source = builders.llama(dtype=dtype)
    target = builders.without_layer(source, 1, dtype=dtype)
    mapper = fit_linear(builders.calibrated(source, target, sequences=10, length=64), {})
    snapshot = builders.cached(source, tiny.prompt(2, 400, seed=3))
    at_once = mapper.map(snapshot)
    grown = mapper.map(snapshot.crop(1))
    for length in (2, 127, 128, 129, 130, 300, 400, 400):
        grown = mapper.extend(grown, snapshot.crop(length))
        assert same_bits(grown, mapper.map(snapshot.crop(length)))
    assert same_bits(grown, at_once)
    assert grown.identity.construction == at_once.identity.construction


def test_what_the_target_has_stays_as_it_is(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    ids = tiny.prompt(1, 150, seed=9)
    own = builders.cached(target, ids[:, :60])
    grown = mapper.extend(own, builders.cached(source, ids))
    assert same_bits(grown.crop(60), own)
    assert grown.identity.construction == (
        "prefill",
        mapper.map(builders.cached(source, ids)).identity.construction[-1],
    )
    at_once = mapper.map(builders.cached(source, ids))
    assert torch.equal(grown.layers[1].keys[:, :, 60:], at_once.layers[1].keys[:, :, 60:])


def test_left_padding(pair: tuple[Any, Any, Mapper]) -> None:
    source, _, mapper = pair
    ids = tiny.prompt(2, 90, seed=11)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    padded = mapper.map(builders.cached(source, ids, attention_mask=mask))
    alone = mapper.map(builders.cached(source, ids[1:, 17:]))
    assert torch.equal(padded.mask, mask.bool())
    for a, b in zip(padded.layers, alone.layers, strict=True):
        assert a.keys.isfinite().all()
        assert torch.allclose(a.keys[1:, :, 17:], b.keys, atol=2e-4)
        assert torch.allclose(a.values[1:, :, 17:], b.values, atol=2e-4)


def test_nothing_masked_spreads(pair: tuple[Any, Any, Mapper]) -> None:
    source, _, mapper = pair
    ids = tiny.prompt(1, 40)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    snapshot = builders.cached(source, ids, attention_mask=mask)
    bad = tuple(
        replace(layer, values=layer.values.index_fill(2, torch.arange(5), torch.nan)) for layer in snapshot.layers
    )
    for layer in mapper.map(replace(snapshot, layers=bad)).layers:
        assert layer.values.isfinite().all()


def test_windows_of_the_target_and_of_the_source() -> None:
    source = builders.calm(tiny.gemma3(max_position_embeddings=1024, sliding_window=32))
    target = builders.calm(tiny.gemma3(seed=1, max_position_embeddings=1024, sliding_window=24))
    mapper = fit_linear(builders.calibrated(source, target, sequences=10, length=30), {})
    for part in mapper.parts:
        if part.target.layer == 1:  # of full attention: a window of the source has lost what it needs
            assert {block.layer for block in part.sources} == {1}
    snapshot = builders.cached(source, tiny.prompt(1, 300, seed=4))
    made = mapper.map(snapshot)
    assert [layer.held for layer in made.layers] == [23, 300, 23]
    assert [layer.seen for layer in made.layers] == [300] * 3
    short = builders.cached(source, tiny.prompt(1, 300, seed=4)[:, :290])
    grown = mapper.extend(mapper.map(short), snapshot)
    assert [layer.held for layer in grown.layers] == [23, 300, 23]
    for a, b in zip(grown.layers, made.layers, strict=True):
        assert torch.equal(a.keys[:, :, -10:], b.keys[:, :, -10:])
        assert torch.allclose(a.values, b.values, atol=1e-3)
    back = tiny.gemma3(seed=1, max_position_embeddings=1024, sliding_window=40)
    with pytest.raises(InvalidInput, match=r"sliding\(40\)"):
        builders.calibrated(tiny.gemma3(layer_types=["sliding_attention"] * 3), back, sequences=1)


def test_caches_of_other_models_are_refused(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    ids = tiny.prompt(1, 30)
    other = builders.llama(seed=5)
    with pytest.raises(IncompatibleIdentity, match="mapper's source") as raised:
        mapper.map(builders.cached(other, ids))
    assert "weights" in raised.value.differences
    with pytest.raises(IncompatibleIdentity, match="num_layers"):
        mapper.map(builders.cached(target, ids))
    with pytest.raises(IncompatibleIdentity, match="mapper's target"):
        mapper.extend(builders.cached(source, ids), builders.cached(source, ids))
    with pytest.raises(IncompatibleIdentity, match="other tokens"):
        mapper.extend(builders.cached(target, tiny.prompt(1, 20, seed=8)), builders.cached(source, ids))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(IncompatibleIdentity, match="other positions"):
        mapper.extend(builders.cached(target, ids[:, :20]), builders.cached(source, ids, attention_mask=mask))


def test_parts_cover_the_target_once(pair: tuple[Any, Any, Mapper]) -> None:
    mapper = pair[2]
    with pytest.raises(InvalidInput, match="not each once"):
        replace(mapper, parts=mapper.parts[1:])
    with pytest.raises(InvalidInput, match="not each once"):
        replace(mapper, parts=(*mapper.parts, mapper.parts[0]))
    with pytest.raises(InvalidInput, match="layer 9"):
        replace(mapper, parts=(*mapper.parts, replace(mapper.parts[0], target=Block(9, "keys"))))
    with pytest.raises(InvalidInput, match="do not take"):
        replace(mapper, parts=(replace(mapper.parts[0], sources=mapper.parts[0].sources[:1]), *mapper.parts[1:]))


def test_what_is_not_stripped_is_worse(pair: tuple[Any, Any, Mapper]) -> None:
    source, target, mapper = pair
    for changes in ({"strip": False}, {"reapply": False}):
        ablated = fit_linear(builders.calibrated(source, target, Recipe(top_k=2, native_prefix=2, **changes)), {})
        assert sum(ablated.measures["r2"]["keys"]) < sum(mapper.measures["r2"]["keys"]) - 0.2
        snapshot = builders.cached(source, tiny.prompt(1, 100, seed=1001))
        want = builders.cached(target, snapshot.token_ids)
        assert sum(missed(ablated.map(snapshot), want)[::2]) > sum(missed(mapper.map(snapshot), want)[::2])


def test_what_to_choose_by(pair: tuple[Any, Any, Mapper]) -> None:
    table = r2_table(builders.calibrated(*pair[:2], sequences=20), [1, 2, None], [0.01, 1e6])
    assert [(row["top_k"], row["ridge"]) for row in table] == [(k, r) for r in (0.01, 1e6) for k in (1, 2, None)]
    assert table[1]["keys"] > table[4]["keys"]
    assert table[1]["values"] > table[0]["values"] - 0.05


def test_what_float16_cannot_hold_is_refused() -> None:
    source = builders.llama(dtype=torch.float16)
    mapper = fit_linear(builders.calibrated(source, source, sequences=10, length=64), {})
    snapshot = builders.cached(source, tiny.prompt(1, 40))
    assert mapper.map(snapshot).layers[0].keys.dtype == torch.float16
    part = mapper.parts[0]
    assert part.affine is not None
    loud = replace(part, affine=(part.affine[0] * 1e6, part.affine[1]))
    with pytest.raises(InvalidInput, match="beyond float16"):
        replace(mapper, parts=(loud, *mapper.parts[1:])).map(snapshot)
