"""The page of the engines' studies, from what they write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.vllm_engine import Answers
from benchmarks.vllm_results import Study, row
from kvferry.errors import InvalidInput
from kvferry.report.engines_page import write_engines_page

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def answers(
    first: list[int], finish: tuple[str, ...] = ("length",) * 3, one_by_one: tuple[float, ...] = (), **counters: float
) -> Answers:
    """What an engine would have said: the first tokens are given, the second is 11."""
    alone = len(one_by_one)
    first, finish = [*first, *first[:alone]], (*finish, *("length",) * alone)
    return Answers(
        tokens=[[token, 11] for token in first],
        finish=list(finish),
        cached=[128, 0, 128],
        logprobs=[[{token: math.log(0.75), 99: math.log(0.125)}] for token in first],
        first_token=[0.3, 0.1, 0.2, *one_by_one],
        seconds=[2.0, *one_by_one],
        counters=counters,
    )


@pytest.fixture
def page(tmp_path: Path) -> str:
    study = Study("folder", PROMPTS, tmp_path)
    reference = answers([21, 22, 23])
    loaded = {"vllm:kvferry_loaded_tokens": 256.0, "vllm:num_preemptions": 2.0}
    other = answers([21, 24, 23], ("length", "length", "error"), (0.5, 0.7), **loaded)
    rows = [row("aggregated", study, reference, reference), row("consumer", study, other, reference)]
    rows[1]["store_bytes"] = 1_234_567
    result: dict[str, Any] = {
        "model": "a-model",
        "prompts": 3,
        "prompt_tokens": 9,
        "rows": rows,
        "refusal": {"error": "IdentityMismatch", "differences": ["layers", "model_id"]},
    }
    record.write(tmp_path / "engines-vllm.json", "vllm_results", result, seed=0)
    scores = {
        "budget": 0.28,
        "hellaswag": {
            "n": 400,
            "harness": 0.43,
            "harness_ci": (0.382, 0.479),
            "own": 0.43,
            "items_that_differ": 0,
            "won_and_lost_against_first_budget": (3, 5),
            "p_against_first_budget": 0.7266,
            "shipped": {},
        },
        "gsm8k": {
            "n": 60,
            "harness": 0.05,
            "harness_ci": (0.017, 0.137),
            "texts_checked": 10,
            "texts_that_differ": 1,
            "shipped": {},
        },
    }
    record.write(tmp_path / "engines-harness.json", "lm-eval", {"model": "a-model", "rows": [scores]}, seed=0)
    written = Path(write_engines_page(tmp_path, sorted(tmp_path.glob("engines-*.json"))))
    assert written == tmp_path / "engines.md"
    return written.read_text(encoding="utf-8")


def cells(page: str, first: str) -> list[list[str]]:
    """The rows that begin so."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line] for line in lines]


def test_answers_are_counted_among_those_that_came(page: str) -> None:
    consumer = cells(page, "consumer")[0]
    assert consumer[1:5] == ["1 of 2", "1", "1.79, 1.79", "1"]  # log(0.75 / 0.125)
    assert consumer[5].startswith("0.500 [")
    assert consumer[7:] == ["256", "2", "1,234,567", "4", "0.200", "0.600 [0.500, 0.700]"]
    assert cells(page, "aggregated")[0][1:4] == ["3 of 3", "3", ""]


def test_counters_are_those_of_the_connector(page: str) -> None:
    assert "| engine | loaded tokens |" in page
    assert cells(page, "consumer")[1] == ["consumer", "256"]


def test_a_refusal_is_told(page: str) -> None:
    assert "raises `IdentityMismatch`, which names layers, model_id." in page


def test_both_evaluators_are_side_by_side(page: str) -> None:
    shown = cells(page, "0.28")[0]
    assert shown[1:5] == ["0.430 [0.382, 0.479]", "0.430", "0 of 400", "0.7266"]
    assert shown[5:] == ["0.050 [0.017, 0.137]", "1 of 10"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "engines-vllm.json").write_text("[]")
    with pytest.raises(InvalidInput, match="no result of a kvferry command"):
        write_engines_page(tmp_path, [tmp_path / "engines-vllm.json"])
    record.write(tmp_path / "engines-vllm.json", "ship sweep", {"rows": []}, seed=0)
    with pytest.raises(InvalidInput, match="no result of a study of engines"):
        write_engines_page(tmp_path, [tmp_path / "engines-vllm.json"])
