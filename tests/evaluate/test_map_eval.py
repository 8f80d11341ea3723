"""An evaluation of a mapper: its controls fail or hold as they must, and its numbers are those of their definitions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.map_arms import Arm, shuffled_arm
from kvferry.evaluate.map_choose import CHOOSERS, choose_tokens
from kvferry.evaluate.map_eval import MapEvalSettings, MapReport, evaluate_mapper
from kvferry.evaluate.map_gain import context_gain
from kvferry.evaluate.scores import TokenScores
from kvferry.hf.text import default_text
from kvferry.map.mapper import Mapper
from tests.hf import tiny
from tests.map import builders

ARMS = (
    Arm("mapped"),
    Arm("none native", native_prefix=0),
    Arm("last", recompute_last=16),
    Arm("error", chooser="error", share=0.3),
    Arm("all", recompute_last=96),
)


@pytest.fixture(scope="module")
def report(trio: tuple[Any, Any, Any, Mapper]) -> MapReport:
    source, target, tokenizer, mapper = trio
    settings = MapEvalSettings(windows=3, prefix=96, suffix=32, arms=ARMS)
    return evaluate_mapper(mapper, source, target, tokenizer, default_text()[50_000:70_000], settings)


def test_identity_is_exact(report: MapReport) -> None:
    row = report.row("identity")
    assert report.identity_exact
    assert (row.fidelity.kl_max, row.fidelity.top1_agreement) == (0.0, 1.0)
    assert row.perplexity.ppl == row.perplexity.ppl_full
    assert row.gain.recovered == pytest.approx(1.0)


def test_the_mapped_cache_beats_every_control(report: MapReport) -> None:
    mapped = report.row("mapped").fidelity.kl_mean
    for name in ("source", "no_prefix", "zero", "shuffled", "other_document"):
        assert report.row(name).fidelity.kl_mean > 3 * mapped
    assert report.row("no_prefix").gain.recovered == 0.0


def test_what_is_computed_anew_is_nearer_and_counted(report: MapReport) -> None:
    mapped = report.row("mapped")
    assert mapped.share == pytest.approx(4 / 96)
    assert report.row("none native").share == 0
    assert report.row("last").share == pytest.approx(20 / 96)
    assert report.row("error").fidelity.kl_mean < mapped.fidelity.kl_mean
    assert report.row("all").share == 1.0
    assert report.row("all").fidelity.kl_mean < 1e-3 * mapped.fidelity.kl_mean
    assert all(0.8 < value < 1.0001 for value in mapped.attention), mapped.attention


def test_r2_of_these_windows_is_its_definition(trio: tuple[Any, Any, Any, Mapper], report: MapReport) -> None:
    from kvferry.evaluate.windows import cut_windows
    from kvferry.hf.capture import capture

    source, target, tokenizer, mapper = trio
    rows: dict[str, list[torch.Tensor]] = {"x": [], "y": []}
    for window in cut_windows(tokenizer, default_text()[50_000:70_000], windows=3, prefix=96, suffix=32):
        made, own = mapper.map(capture(source, window.prefix_ids)), capture(target, window.prefix_ids)
        for key, snapshot in (("x", made), ("y", own)):
            keys = mapper.target_rotaries[1].strip(snapshot.layers[1].keys, snapshot.positions)
            rows[key].append(keys[0, :, 4:])
    x, y = (torch.cat(rows[key], dim=1).double() for key in ("x", "y"))
    whole = (y - y.mean(dim=1, keepdim=True)).square().sum(dim=(1, 2))
    want = (1 - (x - y).square().sum(dim=(1, 2)) / whole).mean()
    assert report.r2["keys"][1] == pytest.approx(float(want), abs=1e-5)
    assert all(0.5 < value <= 1 for side in report.r2.values() for value in side), report.r2


def test_few_controls(trio: tuple[Any, Any, Any, Mapper], report: MapReport) -> None:
    source, target, tokenizer, mapper = trio
    settings = MapEvalSettings(windows=3, prefix=96, suffix=32, arms=ARMS[:1], controls=())
    few = evaluate_mapper(mapper, source, target, tokenizer, default_text()[50_000:70_000], settings)
    assert [row.name for row in few.rows] == ["mapped", "no_prefix"]
    assert few.identity_exact
    assert few.row("mapped").gain == report.row("mapped").gain
    assert few.row("mapped").over_source is None
    assert report.row("mapped").over_source is not None
    settings = MapEvalSettings(windows=3, prefix=96, suffix=32, controls=("magic",))
    with pytest.raises(InvalidInput, match="unknown controls magic"):
        evaluate_mapper(mapper, source, target, tokenizer, default_text()[:20_000], settings)


def test_choosing_is_timed_and_an_oracle_says_that_it_is_one(trio: tuple[Any, Any, Any, Mapper]) -> None:
    source, target, tokenizer, mapper = trio
    arms = (Arm("mapped"), Arm("attention", chooser="attention", share=0.2), Arm("error", chooser="error", share=0.2))
    settings = MapEvalSettings(windows=2, prefix=64, suffix=16, arms=arms, controls=())
    found = evaluate_mapper(mapper, source, target, tokenizer, default_text()[50_000:70_000], settings)
    rows = found.to_json()["rows"]
    assert [("choose" in row["seconds"], row["oracle"]) for row in rows[:3]] == [
        (False, False), (True, False), (True, True),
    ]  # fmt: skip
    assert rows[1]["seconds"]["choose"] > 0


def test_the_report_is_json(report: MapReport) -> None:
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["rows"][0]["name"] == "mapped"
    assert data["ppl"] == report.row("mapped").perplexity.ppl
    assert data["seconds"]["speedup"] > 0
    assert [row["name"] for row in data["rows"][5:]] == [
        "identity", "source", "no_prefix", "zero", "shuffled", "other_document",
    ]  # fmt: skip


def test_wrong_uses(trio: tuple[Any, Any, Any, Mapper]) -> None:
    source, target, tokenizer, mapper = trio
    text = default_text()[:20_000]

    def run(*pair: Any, **settings: Any) -> MapReport:
        return evaluate_mapper(mapper, *pair, tokenizer, text, MapEvalSettings(prefix=40, suffix=8, **settings))

    with pytest.raises(IncompatibleIdentity, match="mapper's target"):
        run(source, source)
    with pytest.raises(IncompatibleIdentity, match="mapper's source"):
        run(target, target)
    with pytest.raises(InvalidInput, match="two windows"):
        run(source, target, windows=1)
    with pytest.raises(InvalidInput, match="name of its own"):
        run(source, target, arms=(Arm("identity"),))


def scores(*nll: float) -> TokenScores:
    values = np.array(nll, dtype=np.float32)
    return TokenScores(values, np.zeros_like(values), np.full_like(values, np.nan))


def test_context_gain() -> None:
    full, none = [scores(1, 1), scores(2, 0)], [scores(3, 2), scores(3, 1)]
    assert context_gain(full, full, none).recovered == 1.0
    assert context_gain(none, full, none).recovered == 0.0
    half = context_gain([scores(2, 1.5), scores(2.5, 0.5)], full, none)
    assert (half.recovered, half.ci, half.gain) == (0.5, (0.5, 0.5), 1.25)
    worse = context_gain([scores(9, 9), scores(3, 1)], full, none)
    assert worse.recovered is not None
    assert worse.ci is not None
    assert worse.ci[0] <= worse.recovered < 0
    assert context_gain(full[:1], full[:1], none[:1]).ci is None
    assert context_gain(full, none, full).recovered is None
    assert context_gain([scores(np.nan, 1), full[1]], full, none).recovered is None
    with pytest.raises(InvalidInput):
        context_gain(full[:1], full, none)


def test_shuffling_moves_what_keys_say_and_not_where_they_say_it() -> None:
    source, target, mapper = builders.pair()
    mapped = mapper.map(builders.cached(source, torch.randperm(100)[None, :40] + 3))
    shuffled = shuffled_arm(mapper, mapped, seed=0)
    for layer, want, rotary in zip(shuffled.layers, mapped.layers, mapper.target_rotaries, strict=True):
        one, other = (rotary.strip(part.keys, mapped.positions)[0, 0] for part in (layer, want))
        distance = torch.cdist(one, other)
        assert sorted(distance.argmin(dim=1).tolist()) == list(range(40))
        assert float(distance.min(dim=1).values.max()) < 0.01
        assert not torch.allclose(layer.keys, want.keys, atol=0.1)
    assert shuffled.to_cache(target).get_seq_length() == 40


def test_choosers() -> None:
    mapper = builders.pair()[2]
    cache = builders.cached(builders.pair()[0], tiny.prompt(1, 100, seed=5), query_window=16)
    own = builders.cached(builders.pair()[1], cache.token_ids)
    for name in CHOOSERS:
        chosen = choose_tokens(name, 0.2, mapper, cache, own)
        assert len(chosen) == 20
        assert torch.equal(chosen, chosen.unique())
    assert choose_tokens("last", 0.1, mapper, cache).tolist() == list(range(90, 100))
    gaps = choose_tokens("spread", 0.1, mapper, cache).diff()
    assert 5 <= int(gaps.min()) <= int(gaps.max()) <= 17
    wrong = own.layers[1].keys.clone()
    wrong[:, :, 33] += 50
    from dataclasses import replace

    layers = (own.layers[0], replace(own.layers[1], keys=wrong), *own.layers[2:])
    assert choose_tokens("error", 0.01, mapper, cache, replace(own, layers=layers)).tolist() == [33]
    for arguments, message in (
        (("magic", 0.1, mapper, cache), "unknown chooser"),
        (("last", 1.5, mapper, cache), "share of 1.5"),
        (("error", 0.1, mapper, cache), "own cache"),
        (("attention", 0.1, mapper, own), "no queries"),
    ):
        with pytest.raises(InvalidInput, match=message):
            choose_tokens(*arguments)
