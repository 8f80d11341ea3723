"""Mapped caches that are shipped, shipped caches that are mapped, and a mapper fitted on what arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import InvalidInput
from kvferry.evaluate.map_fit import FitSettings, fit
from kvferry.hf.text import default_text
from kvferry.snapshot import Snapshot
from tests.map import builders


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    return builders.saved_pair(tmp_path_factory.mktemp("pair"))


def shipped(snapshot: Snapshot) -> Snapshot:
    return kv.decode(kv.encode(snapshot, policy="uniform_int4"))


def missed(made: Snapshot, want: Snapshot) -> float:
    pairs = [(a.keys, b.keys) for a, b in zip(made.layers, want.layers, strict=True)]
    pairs += [(a.values, b.values) for a, b in zip(made.layers, want.layers, strict=True)]
    return sum(float((x - y)[:, :, 4:].square().sum() / y[:, :, 4:].var(dim=2).sum()) for x, y in pairs)


def test_both_orders(trio: tuple[Any, Any, Any], tmp_path: Path) -> None:
    source, target, tokenizer = trio
    settings = FitSettings(sequences=30, length=200, stride=1)
    text = default_text()
    plain = fit(source, target, text[:20_000], top_k=2, settings=settings)
    aware = fit(source, target, text[:20_000], top_k=2, settings=settings, through=shipped)
    ids = torch.tensor([tokenizer(text[40_000:40_200]).input_ids])
    cache, want = kv.capture(source, ids), kv.capture(target, ids)
    first, last = plain.map(shipped(cache)), shipped(plain.map(cache))
    for made in (first, last):
        assert made.to_cache(target).get_seq_length() == 200
        assert missed(made, want) > missed(plain.map(cache), want)
    assert [stage.partition("(")[0] for stage in first.identity.construction] == ["prefill", "packet", "mapped"]
    assert [stage.partition("(")[0] for stage in last.identity.construction] == ["prefill", "mapped", "packet"]
    # Fitted on what it really gets, the map leans on it as far as it can be trusted.
    assert missed(aware.map(shipped(cache)), want) < missed(first, want)
    with pytest.raises(InvalidInput, match="trained on caches as they are"):
        fit(source, target, text, variant="mlp", through=shipped, settings=settings)
    with pytest.raises(InvalidInput, match="not kept on disk"):
        fit(source, target, text, resume=tmp_path, through=shipped, settings=settings)
    assert not list(tmp_path.iterdir())
