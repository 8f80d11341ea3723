"""The gate opens for a good mapper and for no other, and what it does not let through is prefilled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.evaluate.map_fit import FitSettings, start_calibration
from kvferry.evaluate.map_gate import Guarded, accept, guarded_transfer
from kvferry.evaluate.map_run import transfer
from kvferry.hf.text import default_text
from kvferry.map.fit import fit_linear
from kvferry.map.gate import Acceptance, Floors, kept, load_acceptance, objections
from kvferry.map.mapper import Mapper, Recipe
from tests.map.test_mapper import same_bits

# Random models make nothing of a context, so its gain says nothing here.
FLOORS = Floors(context_gain=None)
TEXT = default_text()[50_000:60_000]


@pytest.fixture(scope="module")
def acceptance(trio: tuple[Any, Any, Any, Mapper]) -> Acceptance:
    return judged(trio, trio[3])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))


def judged(trio: tuple[Any, Any, Any, Mapper], mapper: Mapper, floors: Floors = FLOORS) -> Acceptance:
    source, target, tokenizer, _ = trio
    return accept(mapper, source, target, tokenizer, TEXT, floors=floors, windows=2, prefix=80, suffix=24)


def handed_over(trio: tuple[Any, Any, Any, Mapper], mapper: Mapper, **settings: Any) -> tuple[Guarded, Any]:
    source, target, tokenizer, _ = trio
    ids = torch.tensor([tokenizer(TEXT[3000:3120]).input_ids])
    cache = kv.capture(source, ids)
    return guarded_transfer(mapper, target, cache, floors=FLOORS, **settings), cache


def assert_prefilled(guarded: Guarded, trio: tuple[Any, Any, Any, Mapper], cache: Any, because: str) -> None:
    assert not guarded.mapped
    assert guarded.share == 1.0
    assert any(because in reason for reason in guarded.reasons), guarded.reasons
    assert same_bits(guarded.snapshot, kv.capture(trio[1], cache.token_ids))
    assert guarded.snapshot.to_cache(trio[1]).get_seq_length() == cache.seq_len


def test_a_good_mapper_is_accepted_and_used(trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance) -> None:
    assert acceptance.reasons == ()
    assert acceptance.accepted
    assert acceptance.measured.control_kl > 2 * acceptance.measured.kl
    guarded, cache = handed_over(trio, trio[3], acceptance=acceptance)
    assert guarded.mapped, guarded.reasons
    assert guarded.check is not None
    assert guarded.check.cosine > guarded.check.control
    assert guarded.share == pytest.approx(24 / cache.seq_len)
    assert same_bits(guarded.snapshot, transfer(trio[3], trio[1], cache, native_prefix=24).snapshot)


def test_a_kept_record_opens_the_gate(trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance) -> None:
    guarded, cache = handed_over(trio, trio[3])
    assert_prefilled(guarded, trio, cache, "nobody has judged this mapper")
    path = acceptance.save()
    assert kept(trio[3], trio[3].target) == acceptance
    assert handed_over(trio, trio[3])[0].mapped
    path.write_text("{}")
    with pytest.raises(CorruptPacket):
        handed_over(trio, trio[3])


def test_a_map_of_shuffled_tokens_is_rejected(trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance) -> None:
    source, target, tokenizer, _ = trio
    made = start_calibration(source, target, Recipe(top_k=2), settings=FitSettings(stride=1))
    text = default_text()
    for index in range(25):
        ids = torch.tensor([tokenizer(text[index * 200 : index * 200 + 200]).input_ids])
        want = kv.capture(target, ids)
        shuffled = tuple(
            replace(layer, keys=layer.keys.roll(77, 2), values=layer.values.roll(77, 2)) for layer in want.layers
        )
        made.add(kv.capture(source, ids), replace(want, layers=shuffled), held=index % 5 == 4)
    bad = fit_linear(made, {})
    record = judged(trio, bad)
    assert not record.accepted
    assert any("does not tell them apart" in reason or "below the floor" in reason for reason in record.reasons)
    guarded, cache = handed_over(trio, bad, acceptance=record)
    assert_prefilled(guarded, trio, cache, "floor")
    # Under the record of the good one, it is another mapper; under a forged one, its caches give it away.
    guarded, cache = handed_over(trio, bad, acceptance=acceptance)
    assert_prefilled(guarded, trio, cache, "another mapper")
    guarded, cache = handed_over(trio, bad, acceptance=replace(acceptance, mapper=bad.digest))
    assert_prefilled(guarded, trio, cache, "serve nearly as well")


def test_a_map_that_says_the_same_of_every_token_serves_no_better_than_other_tokens(
    trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance
) -> None:
    """Its keys differ by their positions alone: other tokens, moved to the same ones, have the very same cache."""
    parts = []
    for part in trio[3].parts:
        assert part.affine is not None
        parts.append(replace(part, affine=(torch.zeros_like(part.affine[0]), part.affine[1])))
    blind = replace(trio[3], parts=tuple(parts))
    guarded, cache = handed_over(trio, blind, acceptance=replace(acceptance, mapper=blind.digest))
    assert_prefilled(guarded, trio, cache, "serve nearly as well")
    assert guarded.check is not None
    assert guarded.check.control == pytest.approx(guarded.check.cosine, abs=1e-5)


def test_weights_under_another_name_are_rejected(trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance) -> None:
    source, target, _, mapper = trio
    part = mapper.parts[0]
    assert part.affine is not None
    other = replace(mapper, parts=(replace(part, affine=(-part.affine[0], part.affine[1])), *mapper.parts[1:]))
    guarded, cache = handed_over(trio, other, acceptance=acceptance)
    assert_prefilled(guarded, trio, cache, "another mapper")
    guarded = guarded_transfer(mapper, source, cache, acceptance=acceptance, floors=FLOORS)
    assert not guarded.mapped
    assert "another target" in guarded.reasons[0]
    assert same_bits(guarded.snapshot, cache)
    guarded = guarded_transfer(
        mapper, target, kv.capture(target, cache.token_ids), acceptance=acceptance, floors=FLOORS
    )
    assert not guarded.mapped
    assert "mapper's source" in guarded.reasons[0]


def test_what_a_record_says_of_its_floors_does_not_count(
    trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance
) -> None:
    """Neither an artifact nor a record can lower the receiver's bar."""
    low = Floors(attention_cosine=-1, kl=1e9, agreement=0, context_gain=None, control_margin=1)
    forged = replace(acceptance, floors=low, measured=replace(acceptance.measured, kl=3.0, agreement=0.1), reasons=())
    guarded, cache = handed_over(trio, trio[3], acceptance=forged)
    assert_prefilled(guarded, trio, cache, "KL 3.000")
    boastful = replace(trio[3], made={"floors": low.to_json(), "accepted": True})
    guarded, cache = handed_over(trio, boastful, acceptance=acceptance)
    assert_prefilled(guarded, trio, cache, "another mapper")


def test_caches_that_cannot_be_looked_at_are_prefilled(
    trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance
) -> None:
    source, target, _, mapper = trio
    ids = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(0))
    for cache, because in ((kv.capture(source, ids), "one sequence"), (kv.capture(source, ids[:1, :30]), "too few")):
        guarded = guarded_transfer(mapper, target, cache, acceptance=acceptance, floors=FLOORS)
        assert because in guarded.reasons[0]
        assert same_bits(guarded.snapshot, kv.capture(target, cache.token_ids))


def test_what_the_target_prefills_itself_says_nothing_for_a_map(
    trio: tuple[Any, Any, Any, Mapper], acceptance: Acceptance
) -> None:
    """A mapper that leaves a whole prefix to the target would score as well as the target, whatever it maps."""
    lazy = replace(trio[3], recipe=replace(trio[3].recipe, native_prefix=1 << 10))
    record = replace(acceptance, mapper=lazy.digest)
    guarded, cache = handed_over(trio, lazy, acceptance=record)
    assert_prefilled(guarded, trio, cache, "leaves the first 1024 tokens to the target")


def test_floors() -> None:
    good = load_measured()
    assert objections(good, Floors()) == ()
    for changes, words in (
        ({"identity_exact": False}, "nothing measured here counts"),
        ({"attention_cosine": 0.5}, "attention cosine 0.500"),
        ({"attention_cosine": None}, "attention cosine unknown"),
        ({"agreement": float("nan")}, "agreement nan"),
        ({"kl": 0.6}, "KL 0.600, above 0.5"),
        ({"kl": None}, "KL unknown"),
        ({"context_gain_low": 0.05}, "context gain"),
        ({"context_gain_low": None}, "context gain"),
        ({"control_kl": 0.12}, "does not tell them apart"),
        ({"control_kl": None}, "does not tell them apart"),
    ):
        assert any(words in reason for reason in objections(replace(good, **changes), Floors())), changes
    with pytest.raises(InvalidInput):
        Floors(kl=float("nan"))
    with pytest.raises(InvalidInput):
        Floors(control_margin=0.5)


def load_measured() -> Any:
    from kvferry.map.gate import Measured

    return Measured(100, True, 0.95, 0.1, 0.9, 0.5, 0.4, 0.8)


def test_records_on_disk(acceptance: Acceptance, tmp_path: Path) -> None:
    path = acceptance.save(tmp_path / "record.json")
    assert load_acceptance(path) == acceptance
    data = json.loads(path.read_text())
    for name, value in (("mapper", 3), ("source", ["x"]), ("floors", {"kl": "low"}), ("measured", []), ("reasons", 1)):
        path.write_text(json.dumps({**data, name: value}))
        with pytest.raises(CorruptPacket):
            load_acceptance(path)
    path.write_text(json.dumps({**data, "measured": {**data["measured"], "n": True}}))
    with pytest.raises(CorruptPacket):
        load_acceptance(path)
    with pytest.raises(InvalidInput):
        load_acceptance(tmp_path / "nothing")
