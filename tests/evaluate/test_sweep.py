"""A sweep's rows, and going on after a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import InvalidInput
from kvferry.evaluate.sweep import SweepResult, SweepSettings, sweep
from kvferry.evidence.log import ResultLog
from kvferry.hf.text import default_text
from tests.evaluate.sweeping import METHODS, settings

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result(smollm2: tuple[Any, Any]) -> SweepResult:
    return sweep(*smollm2, default_text(), settings())


def rows(result: SweepResult) -> list[dict[str, Any]]:
    return [row.to_json() for row in result.rows]


def test_rows_hold_what_the_contract_names(result: SweepResult) -> None:
    full, zero, auto, small, adaptive = json.loads(json.dumps(rows(result), allow_nan=False))
    for row in (full, zero, auto, small, adaptive):
        assert row.keys() >= {
            "policy", "quantizer", "budget", "nominal_budget", "bytes", "ppl", "ppl_full", "ppl_delta_pct",
            "ppl_delta_ci", "kl_mean", "top1_agreement", "needle",
        }  # fmt: skip
    assert (full["budget"], full["ppl_delta_pct"], full["kl_mean"], full["top1_agreement"]) == (1.0, 0.0, 0.0, 1.0)
    assert full["ppl"] == full["ppl_full"] == auto["ppl_full"]
    assert full["needle"]["hits"] == full["needle"]["n"] == 1
    assert zero["bytes"] == 0
    assert zero["needle"]["hits"] == 0
    assert zero["ppl_delta_ci"][0] > 50
    assert auto["budget"] <= 0.3
    assert auto["bytes"] == pytest.approx(auto["budget"] * auto["full_bytes"], abs=1)
    assert 0 < auto["kl_mean"] < zero["kl_mean"]
    assert len(auto["attention_cosine"]["keys"]) == 30
    assert small["ppl"] is None
    assert "0.05" in small["reason"]
    assert adaptive["quantizer"] == "sym8 / sym8"
    assert result.maps[2] is not None
    assert result.maps[1] is None


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path, smollm2: tuple[Any, Any], result: SweepResult) -> None:
    path = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "tests.evaluate.killed_sweep", str(path), "7", "smollm2-135m"]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=300).returncode == 9
    told: list[str] = []
    with ResultLog(path) as log:
        again = sweep(
            *smollm2,
            default_text(),
            settings(),
            results=log,
            on_progress=lambda done, total, what: told.append(f"{done}/{total} {what}"),
        )
    assert again.resumed == 7
    assert again.steps == len(told) == 3 * len(METHODS)
    assert told[7].startswith("7/15 window 2")
    assert rows(again) == rows(result)
    # Once more: nothing is left to do. Another seed or more windows keep what is the same.
    with ResultLog(path) as log:
        assert sweep(*smollm2, default_text(), settings(), results=log).resumed == again.steps
        more = sweep(*smollm2, default_text(), replace(settings(), windows=3, methods=METHODS[:1]), results=log)
    assert (more.resumed, more.steps) == (3, 4)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(InvalidInput):
        SweepSettings(())
    with pytest.raises(InvalidInput):
        SweepSettings(METHODS, windows=0)
