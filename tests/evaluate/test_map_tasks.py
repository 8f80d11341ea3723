"""Tasks on mapped caches: the answers are those of whole prompts, and rates are kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.map_arms import Arm
from kvferry.evaluate.map_tasks import TaskResult, answer, judge_choices, judge_needles, read_choices
from kvferry.evaluate.needle import NeedleGrid
from kvferry.hf.text import default_text
from kvferry.map.mapper import Mapper

ENDS = ["moves to the other model.", "is lost", "stays where it is for a while longer.", "x"]
ARMS = (Arm("mapped"), Arm("all computed", recompute_last=10**4))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    contexts = [default_text()[start : start + 60].replace("\n", " ").strip() for start in range(0, 20_000, 500)]
    rows = [{"ctx": context, "endings": ENDS, "label": place % 4} for place, context in enumerate(contexts)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_answers_are_those_of_whole_prompts(trio: tuple[Any, Any, Any, Mapper], questions: Path) -> None:
    source, _, tokenizer, _ = trio
    for question in read_choices(questions, tokenizer, 6):
        scores = []
        for end, size in zip(question.ends, question.lengths, strict=True):
            ids = torch.cat([question.context, torch.tensor([end])], dim=1)
            told = torch.log_softmax(source(input_ids=ids).logits[0, :-1].detach(), dim=-1)
            scores.append(float(told[-len(end) :].gather(1, torch.tensor(end)[:, None]).sum()) / size)
        cache = kv.capture(source, question.context[:, :-1])
        assert answer(source, cache, question) == max(range(4), key=scores.__getitem__)


def test_choices(trio: tuple[Any, Any, Any, Mapper], questions: Path) -> None:
    source, target, tokenizer, mapper = trio
    steps: list[str] = []
    mapped, native = judge_choices(
        mapper, source, target, read_choices(questions, tokenizer, 40), ARMS,
        on_step=lambda done, total, what: steps.append(what),
    )  # fmt: skip
    assert (mapped.n, mapped.chance, len(steps)) == (40, 0.25, 40)
    assert native.mapped == native.target == mapped.target
    assert native.difference_ci == (0.0, 0.0)
    assert native.p == 1.0
    assert native.retention == pytest.approx(1.0)
    assert mapped.mapped_ci[0] <= mapped.mapped <= mapped.mapped_ci[1]
    assert abs(mapped.mapped - mapped.target) <= 0.3
    assert json.loads(json.dumps(mapped.to_json()))["arm"] == "mapped"
    with pytest.raises(IncompatibleIdentity):
        judge_choices(mapper, source, source, read_choices(questions, tokenizer, 2), ARMS)
    with pytest.raises(InvalidInput, match="no questions"):
        judge_choices(mapper, source, target, [], ARMS)


def test_needles(trio: tuple[Any, Any, Any, Mapper]) -> None:
    source, target, tokenizer, mapper = trio
    grid = NeedleGrid(lengths=(200,), depths=(0.2, 0.8), needles=2)
    mapped, native = judge_needles(mapper, source, target, tokenizer, grid, ARMS)
    assert (mapped.name, mapped.n, mapped.chance) == ("needle", 4, 0.0)
    assert native.mapped == native.target


def test_retention() -> None:
    rate = (0.0, 1.0)
    result = TaskResult("t", "a", 100, 0.25, 0.3, 0.45, 0.4, rate, rate, rate, None, 1.0)
    assert result.retention == pytest.approx(0.4 / 0.45)
    assert result.retention_floor == pytest.approx(0.15 / 0.2)
    assert TaskResult("t", "a", 9, 0.25, 0.3, 0.2, 0.4, rate, rate, rate, None, 1.0).retention_floor is None
    assert TaskResult("t", "a", 9, 0.25, 0.3, 0.0, 0.4, rate, rate, rate, None, 1.0).retention is None


def test_files_that_hold_no_questions(trio: tuple[Any, Any, Any, Mapper], questions: Path, tmp_path: Path) -> None:
    tokenizer = trio[2]
    with pytest.raises(InvalidInput, match="40 questions, not 41"):
        read_choices(questions, tokenizer, 41)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_choices(tmp_path / "nothing", tokenizer, 1)
    bad = tmp_path / "bad"
    for line in (
        "{",
        "[]",
        '{"ctx": "a b", "endings": ["c"], "label": 1}',
        '{"ctx": "ab", "endings": [""], "label": 0}',
    ):
        bad.write_text(line)
        with pytest.raises(InvalidInput, match="line 1"):
            read_choices(bad, tokenizer, 1)
