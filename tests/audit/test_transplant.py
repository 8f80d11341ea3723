"""Transplants of caches: what is grafted, what is left, and that the same cache is decoded once for both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.audit import transplant as room
from kvferry.audit.arm import Arm, Change
from kvferry.audit.generate import build_cache
from kvferry.audit.models import ModelSet
from kvferry.audit.settings import Settings
from kvferry.audit.transplant import PARTS, Part, transplant_cache
from kvferry.snapshot import Snapshot
from tests.hf import tiny


def caches(make: Any, length: int = 14) -> tuple[Snapshot, Snapshot]:
    """A recipient, and a donor of the same tokens all of whose numbers are others."""
    models, ids = ModelSet(make(dtype=torch.float32)), tiny.prompt(1, length)
    own = build_cache(models, Arm(), ids)
    layers = [
        layer if layer.keys is None or layer.values is None else layer.map_tensors(layer.keys + 1, layer.values - 1)
        for layer in own.layers
    ]
    return own, replace(own, layers=tuple(layers)).clone()


def expected(own: Snapshot, donor: Snapshot, part: Part) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token by token, written out."""
    found = []
    count = len(own.layers)
    for index, (mine, theirs) in enumerate(zip(own.layers, donor.layers, strict=True)):
        assert mine.keys is not None
        assert mine.values is not None
        assert theirs.keys is not None
        assert theirs.values is not None
        keys, values = mine.keys.clone(), mine.values.clone()
        begin, end = part.tokens
        begin = begin + own.seq_len if begin < 0 else begin
        end = own.seq_len if end is None else end + own.seq_len if end < 0 else end
        if round(part.layers[0] * count) <= index < round(part.layers[1] * count):
            for slot in range(keys.shape[2]):
                if begin <= mine.first + slot < end:
                    keys[:, :, slot] = theirs.keys[:, :, slot] if part.keys else keys[:, :, slot]
                    values[:, :, slot] = theirs.values[:, :, slot] if part.values else values[:, :, slot]
        found.append((keys, values))
    return found


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3])  # gemma3's sliding layers have forgotten the first tokens
@pytest.mark.parametrize("part", [*PARTS.values(), Part(tokens=(2, 5)), Part(tokens=(9, 40))])
def test_a_part_is_grafted_and_nothing_else(make: Any, part: Part) -> None:
    own, donor = caches(make)
    before = [layer.keys.clone() for layer in own.layers if layer.keys is not None]
    part = replace(part, tokens=tuple(t if t is None or abs(t) < 16 else t // 4 for t in part.tokens))  # type: ignore[arg-type]
    found = transplant_cache(own, donor, part)
    for layer, (keys, values) in zip(found.layers, expected(own, donor, part), strict=True):
        assert layer.keys is not None
        assert layer.values is not None
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    for layer, kept, theirs in zip(own.layers, before, found.layers, strict=True):
        assert layer.keys is not None
        assert theirs.keys is not None
        assert torch.equal(layer.keys, kept)
        assert layer.keys.data_ptr() != theirs.keys.data_ptr()


def far() -> Arm:
    """A donor whose trajectories part from a prefill's."""

    def moved(own: Snapshot, _model: Any) -> Snapshot:
        layers = []
        for layer in own.layers:
            assert layer.keys is not None
            assert layer.values is not None
            layers.append(layer.map_tensors(layer.keys.flip(2), -3 * layer.values))
        return replace(own, layers=tuple(layers))

    return Arm(change=Change("moved", cache=moved))


def test_both_ways_share_what_is_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(dtype=torch.float32)
    decoded = []
    real = room.generate

    def counted(*given: Any, **named: Any) -> Any:
        decoded.append(named["until_split_from"])
        return real(*given, **named)

    monkeypatch.setattr(room, "generate", counted)
    monkeypatch.setattr(room, "DONOR", far())
    settings = Settings(new_tokens=6, explain=0, ranges=0, parted=1, resamples=100)
    forth, back = kv.audit(model, tiny.prompt(3, 20), protocols=["transplant"], start=16, settings=settings)
    assert forth.detail["parted"] == forth.detail["screened"] == 1, "enough after the first that parts"
    # Both runs and both replicas; then whole (own cache the other way) and keys (values the other way), twice each.
    assert [targets is None for targets in decoded] == [True] * 4 + [False] * 4
    for one in (forth, back):
        matrix = one.detail["matrix"]
        assert set(matrix) == {name for name in matrix if "control" in name} | {"whole", "keys", "values"}
        assert (matrix["whole"]["exact"], matrix["whole"]["recovered"], matrix["whole"]["n"]) == (1, 1, 1)


def test_what_does_not_part_is_counted_and_not_transplanted() -> None:
    settings = Settings(new_tokens=2, explain=0, parted=4, resamples=100)
    model = tiny.llama(dtype=torch.float32)
    (forth, _) = kv.audit(model, tiny.prompt(2, 20), protocols=["transplant"], start=16, settings=settings)
    assert (forth.detail["screened"], forth.detail["parted"], forth.n) == (2, 0, 0)
    assert forth.measures["trajectories_differing"].ci is not None
    assert "nothing to carry" in forth.reasons[0]
