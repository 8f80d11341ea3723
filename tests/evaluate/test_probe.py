"""The paper's probe and the calibrated one, on a model that bears INT4 rows badly and one that nearly does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import InvalidInput
from kvferry.evaluate.probe import FOUR_BITS, LADDER, ProbeSettings, error_rates, paper_trials, probe
from kvferry.evaluate.sprt import Sprt

pytestmark = pytest.mark.model

SMALL = ProbeSettings(prefix=192, suffix=96, prompts=4, spacing=3, needle_length=160)
SHORT = replace(SMALL, ladder=LADDER[-1:], four_bits=0, prompts=1, least_prompts=1, prefix=64, suffix=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probes")


def test_gemma_fails_symmetric_int4_and_the_ladder_rescues_it(gemma3: tuple[Any, Any], folder: Path) -> None:
    result = probe(*gemma3, SMALL, cache=folder)
    first = result.rungs[0]
    assert first.quantizer == "sym8/sym4"
    assert first.decision == "reject"
    assert first.kl_mean is not None
    assert first.kl_mean > 2 * SMALL.most_kl
    assert result.int4_allowed
    assert LADDER.index(result.quantizer) in range(1, FOUR_BITS)
    assert result.kl is not None
    assert result.kl < SMALL.most_kl / 2
    assert result.trials.trials == 3
    assert result.trials.full_hits == 3


def test_an_answer_is_kept_and_bound_to_the_model(smollm2: tuple[Any, Any], folder: Path) -> None:
    before = set(folder.iterdir())
    result = probe(*smollm2, SMALL, cache=folder)
    assert result.int4_allowed
    assert [rung.passed for rung in result.rungs] == [False] * (len(result.rungs) - 1) + [True]
    (kept,) = set(folder.iterdir()) - before
    told: list[str] = []
    assert probe(*smollm2, SMALL, cache=folder, on_progress=told.append) == result
    assert not told  # nothing was asked of the model
    json.dumps(result.to_json(), allow_nan=False)
    short = replace(SHORT, prompts=2, least_prompts=2)
    other = probe(*smollm2, short, cache=folder)
    assert not other.int4_allowed
    assert other.quantizer == LADDER[-1]
    (second,) = set(folder.iterdir()) - before - {kept}
    second.write_text(second.read_text()[:100])
    assert probe(*smollm2, short, cache=folder, on_progress=told.append) == other
    assert told, "a damaged answer is found anew"


def test_a_model_that_bears_nothing_gets_the_last_rung(smollm2: tuple[Any, Any]) -> None:
    strict = replace(SHORT, bad_kl=1e-9, prompts=2, ladder=("sym8/sym4", "sym8/sym8"), four_bits=1)
    result = probe(*smollm2, strict, cache=False)
    assert not result.int4_allowed
    assert result.quantizer == "sym8/sym8"
    assert [rung.decision for rung in result.rungs] == ["reject", "reject"]


def test_the_papers_trials(smollm2: tuple[Any, Any]) -> None:
    trials = paper_trials(smollm2[1], length=160)
    assert [trial.depth for trial in trials] == [0.1, 0.5, 0.9]
    assert len({trial.answer for trial in trials}) == 3


def test_error_rates_are_stated() -> None:
    rates = error_rates(Sprt())
    assert (rates["alpha"], rates["beta"]) == (0.05, 0.05)
    curve = {point["rate"]: point["accept"] for point in rates["operating_characteristic"]}
    assert curve[0.01] > 0.94
    assert curve[0.05] < 0.06
    paper = {point["needle_rate"]: point["accept"] for point in rates["paper_operating_characteristic"]}
    assert paper[0.5] == pytest.approx(0.5)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(InvalidInput):
        ProbeSettings(prompts=1)
    with pytest.raises(InvalidInput):
        ProbeSettings(ladder=())


def test_an_answer_that_cannot_be_kept_is_still_given(
    smollm2: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("no folder")
    assert probe(*smollm2, SHORT, cache=blocked).quantizer == LADDER[-1]
    assert "cannot be kept" in caplog.text
