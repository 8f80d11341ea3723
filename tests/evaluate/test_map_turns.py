"""Turns of two models on one context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.map_fit import FitSettings, fit
from kvferry.evaluate.map_turns import take_turns
from kvferry.hf.text import default_text
from kvferry.map.mapper import Mapper
from tests.map import builders

Setting = tuple[tuple[Any, Any], tuple[Mapper, Mapper], torch.Tensor]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    a, b, tokenizer = builders.saved_pair(tmp_path_factory.mktemp("pair"))
    settings = FitSettings(sequences=25, length=200, stride=1)
    text = default_text()
    mappers = fit(a, b, text[:20_000], top_k=2, settings=settings), fit(b, a, text[:20_000], top_k=2, settings=settings)
    ids = torch.tensor([tokenizer(text[40_000:40_600]).input_ids])
    return (a, b), mappers, ids


def test_ten_turns(setting: Setting) -> None:
    turns = take_turns(*setting, first=100, turn=40)
    assert [turn.number for turn in turns] == list(range(1, 13))
    assert [turn.model for turn in turns[:4]] == [1, 0, 1, 0]
    assert [turn.native for turn in turns[:5]] == [4, 100, 44, 140, 84]
    assert [len(turn.scores.kl) for turn in turns] == [40] * 12
    rows = [turn.to_json() for turn in turns]
    assert all(0 < row["kl_mean"] < 0.3 and row["top1_agreement"] > 0.5 for row in rows)


def test_a_model_with_itself_drifts_by_nothing(setting: Setting) -> None:
    (a, _), _, ids = setting
    settings = FitSettings(sequences=25, length=200, stride=1)
    same = fit(a, a, default_text()[:20_000], top_k=1, settings=settings)
    turns = take_turns((a, a), (same, same), ids, first=100, turn=50)
    assert [len(turn.scores.kl) for turn in turns] == [50] * 9 + [49]
    assert max(float(turn.scores.kl.max()) for turn in turns) < 1e-3


def test_what_makes_no_sense(setting: Setting) -> None:
    both, mappers, ids = setting
    with pytest.raises(InvalidInput):
        take_turns(both, mappers, ids, first=590, turn=40)
    with pytest.raises(IncompatibleIdentity):
        take_turns(both, (mappers[1], mappers[0]), ids, first=100, turn=40)
