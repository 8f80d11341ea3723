"""Tasks on mapped caches: the answers are those of whole prompts, and rates are kept apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.map_arms import Arm
from kvferry.evaluate.map_rates import Item, TaskResult, task_results
from kvferry.evaluate.map_tasks import _other_context, answer, judge_choices, judge_needles, read_choices
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
    assert (mapped.share, native.share) == (pytest.approx(4 / 59, abs=0.02), 1.0)
    assert mapped.source_p is not None
    with pytest.raises(IncompatibleIdentity):
        judge_choices(mapper, source, source, read_choices(questions, tokenizer, 2), ARMS)
    with pytest.raises(InvalidInput, match="no questions"):
        judge_choices(mapper, source, target, [], ARMS)


def test_controls_are_of_the_same_questions(trio: tuple[Any, Any, Any, Mapper], questions: Path) -> None:
    source, target, tokenizer, mapper = trio
    asked = read_choices(questions, tokenizer, 12)
    rows = judge_choices(mapper, source, target, asked, ARMS[:1], controls=8)
    found = {row.arm: row for row in rows}
    assert list(found) == ["mapped", "identity", "no_prefix", "zero", "shuffled", "other_document"]
    assert [row.n for row in rows] == [12, *[8] * 5]
    identity = found["identity"]
    assert identity.mapped == identity.target
    assert identity.difference_ci == (0.0, 0.0)
    assert identity.share is None
    bare = [replace(question, context=question.context[:, -1:]) for question in asked[:8]]
    right = sum(answer(target, None, one) == one.label for one in bare)
    assert found["no_prefix"].mapped == right / 8


def test_other_contexts_are_as_long_and_not_ones_own() -> None:
    contexts = [torch.arange(10 * place, 10 * place + size)[None] for place, size in enumerate((9, 3, 4))]
    assert _other_context(contexts, 0, 8).tolist() == [[10, 11, 12, 20, 21, 22, 23, 0]]
    assert _other_context(contexts, 1, 3).tolist() == [[20, 21, 22]]


def test_answers_that_are_there_are_not_asked_for_again(
    trio: tuple[Any, Any, Any, Mapper], questions: Path, tmp_path: Path
) -> None:
    source, target, tokenizer, mapper = trio
    asked, log = read_choices(questions, tokenizer, 9), tmp_path / "answers.jsonl"

    class Killed(Exception):
        pass

    def stop(done: int, _total: int, _what: str) -> None:
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        judge_choices(mapper, source, target, asked, ARMS, controls=3, log=log, on_step=stop)
    assert len(log.read_text().splitlines()) == 5
    again = judge_choices(mapper, source, target, asked, ARMS, controls=3, log=log)
    assert len(log.read_text().splitlines()) == 9
    assert again == judge_choices(mapper, source, target, asked, ARMS, controls=3)


def test_an_arm_of_a_share_is_of_that_share_in_every_context() -> None:
    arm = Arm("last 10%", last_share=0.1)
    assert [arm.last_of(tokens) for tokens in (10, 512)] == [1, 51]
    assert Arm("last", recompute_last=64).last_of(512) == 64
    assert (Arm("a", chooser="error").oracle, Arm("b", chooser="attention").oracle) == (True, False)


def test_retention_has_an_interval_by_clusters() -> None:
    items = [Item({"a": hit, "target": True, "source": False}, {"a": 0.1}, 0.25, place // 5)
             for place, hit in enumerate([True] * 60 + [False] * 20)]  # fmt: skip
    (row,) = task_results("t", items, {"a": False}, ())
    assert row.retention_floor == pytest.approx((0.75 - 0.25) / 0.75)
    assert row.retention_floor_ci is not None
    low, high = row.retention_floor_ci
    assert low < row.retention_floor < high
    alone = task_results("t", [replace(item, cluster=None) for item in items], {"a": False}, ())[0].retention_floor_ci
    assert alone is not None
    assert high - low > 1.5 * (alone[1] - alone[0]), "answers that hang together say less"
    assert row.over_source_ci is not None
    assert row.over_source_ci[0] > 0.3
    assert row.source_p == pytest.approx(2 * 0.5**60)
    assert row.share == pytest.approx(0.1)


def test_needles(trio: tuple[Any, Any, Any, Mapper]) -> None:
    source, target, tokenizer, mapper = trio
    grid = NeedleGrid(lengths=(200,), depths=(0.2, 0.8), needles=2)
    mapped, native = judge_needles(mapper, source, target, tokenizer, grid, ARMS)
    assert (mapped.name, mapped.n, mapped.chance) == ("needle", 4, 0.0)
    assert native.mapped == native.target
    rows = judge_needles(mapper, source, target, tokenizer, grid, ARMS[:1], controls=4)
    assert [row.arm for row in rows] == ["mapped", "identity", "no_prefix", "zero", "shuffled", "other_document"]
    assert rows[1].mapped == rows[1].target


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
