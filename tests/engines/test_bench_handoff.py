"""The benchmark of hand-offs: what is measured, what it is held against, and how it is told."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import pytest

from kvferry.cli.common import plain
from kvferry.cli.main import cli
from kvferry.engines.handoff import bench
from kvferry.engines.handoff.bench import Arm, HandoffBenchSettings, Spread, run_bench
from kvferry.errors import InvalidInput
from kvferry.evidence.log import digest
from kvferry.report.bench_handoff import render_bench
from tests.cli.models import environment, kvferry, result_of


def digest_of(settings: HandoffBenchSettings) -> str:
    return digest(asdict(replace(settings, repeats=1)))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "log.jsonl"


@pytest.fixture(scope="module")
def measured(llama_folder: str, log: Path):
    """Two budgets, one of them impossible, both modes, on the loopback interface."""
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    told: list[tuple[int, int, str]] = []
    settings = HandoffBenchSettings(
        llama_folder,
        (80,),
        ("loopback",),
        (Arm(1.0), Arm(0.05, "greedy"), Arm(0.7, "uniform_int8", True)),
        repeats=3,
        threads=1,
    )
    return run_bench(settings, lambda *progress: told.append(progress), log), told


def test_every_combination_has_its_row_and_its_sample(measured) -> None:
    result, told = measured
    assert [(row.budget_asked, row.policy, row.pipelined) for row in result.rows] == [
        (1.0, "auto", False),
        (1.0, "auto", True),
        (0.7, "uniform_int8", False),
        (0.7, "uniform_int8", True),
    ]
    for row in result.rows:
        assert (row.n, row.tokens, row.layers, row.link) == (3, 80, 2, "loopback")
        assert row.budget == row.packet_bytes / row.full_bytes <= row.budget_asked
        assert set(row.seconds) == {"prefill", "encode", "wire", "decode", "install", "first_token", "ttft"}
        for spread in row.seconds.values():
            assert len(spread.sample) == 3
            assert spread.median == median(spread.sample)
            assert min(spread.sample) <= spread.quartiles[0] <= spread.median <= spread.quartiles[1]
        assert row.transfer_share == row.seconds["wire"].median / row.seconds["ttft"].median
        assert (row.wire_computed, row.link_bytes) == (None, None)
        assert (row.refined is not None) == row.progressive == (row.budget_asked == 0.7)
        if row.refined is not None:
            assert row.refined["exact"].median > row.seconds["ttft"].median
    assert len(result.skipped) == 2
    assert all("least budget" in each["reason"] for each in result.skipped)
    assert [done for done, _, _ in told] == list(range(2 + 3 * 6))


def test_a_stopped_run_goes_on_where_it_was(measured, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = measured
    ran: list[str] = []

    class Counting(bench.Session):
        def run(self, job, on_stage=None):
            ran.append(f"{job.budget} {job.pipeline}")
            return super().run(job, on_stage)

    monkeypatch.setattr(bench, "Session", Counting)
    settings = replace(result.settings, arms=(Arm(1.0), Arm(0.7, "uniform_int8", True)))
    lines = log.read_text().splitlines(keepends=True)
    text = "".join(lines).replace(digest_of(result.settings), digest_of(settings))
    log.write_text(text)
    assert run_bench(settings, None, log).rows == result.rows
    assert ran == []
    log.write_text("".join(text.splitlines(keepends=True)[:-1]))
    again = run_bench(settings, None, log)
    assert len(ran) == 2 + 1  # both modes are warmed up, and the last one is done
    assert sum(a != b for a, b in zip(again.rows, result.rows, strict=True)) >= 1


def test_a_pipelined_row_is_held_against_the_plain_ones(measured) -> None:
    result, _ = measured
    rows = {(row.budget_asked, row.pipelined): row for row in result.rows}
    alone = [value for row in result.rows if not row.pipelined for value in row.seconds["prefill"].sample]
    for budget in (1.0, 0.7):
        row, beside = rows[budget, True], rows[budget, False]
        assert beside.bound is None
        bound = row.bound
        assert bound.prefill == median(alone)
        assert bound.wire == beside.seconds["wire"].median
        assert bound.tail == beside.seconds["install"].median + beside.seconds["first_token"].median
        long, short = max(bound.prefill, bound.wire), min(bound.prefill, bound.wire)
        assert bound.seconds == pytest.approx(1.1 * (long + short / 2) + bound.tail)
        assert bound.met_by in (0, 1 / 3, 2 / 3, 1)
        assert row.packet_bytes == beside.packet_bytes
        assert (row.policy_used, row.quantizer, row.scorer) == (beside.policy_used, beside.quantizer, beside.scorer)
        assert bound.met == (row.seconds["ttft"].median <= bound.seconds)


def test_orders_differ_between_repetitions_and_hang_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, link): ...

        def __enter__(self): ...

        def __exit__(self, *_): ...

        link = None

        def run(self, job):
            from kvferry.errors import BudgetTooSmall

            raise BudgetTooSmall("no", job.budget, 1.0)

    monkeypatch.setattr(bench, "Session", Failing)

    def order(seed: int) -> list[str]:
        told: list[str] = []
        settings = HandoffBenchSettings("x", links=("loopback",), repeats=2, seed=seed)
        run_bench(settings, lambda done, total, what: told.append(what))
        return told

    first = order(0)
    assert first == order(0) != order(1)
    assert sorted(first[8:40]) == sorted(first[40:])
    assert first[8:40] != first[40:]


def test_tables_hold_what_was_measured(measured) -> None:
    result, _ = measured
    text = render_bench(json.loads(json.dumps(plain(result.to_json()), allow_nan=False)), {"cpu": "Some CPU"})
    assert "### 80 tokens" in text
    lines = [line for line in text.splitlines() if line.startswith("| loopback")]
    assert len(lines) == 4
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    met = sum(row.bound.met for row in result.rows if row.bound)
    assert f"met in {met} of 2" in text
    assert "0.7 uniform_int8 progressive, exact at" in lines[2]
    assert text.count("least budget") == 2


def test_arms_are_read_and_told() -> None:
    arms = {"1": "1", "0.28+": "0.28 progressive", "0.5:greedy": "0.5 greedy", "0.5:greedy+": "0.5 greedy progressive"}
    assert {text: str(Arm.parse(text)) for text in arms} == arms


def test_spreads() -> None:
    assert Spread.of([2.0]) == Spread(2.0, (2.0, 2.0), (2.0,))
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]).quartiles == (2.0, 4.0)


def test_settings_that_make_no_sense_are_refused_at_once() -> None:
    good = HandoffBenchSettings("x")
    for changes in ({"tokens": ()}, {"links": ("fast",)}, {"arms": (Arm(0.0),)}, {"repeats": 0}, {"tokens": (1,)}):
        with pytest.raises(InvalidInput):
            replace(good, **changes)
    for arguments in (("--tokens", "many"), ("--links", "1gbps"), ("--budgets", "a:b"), ("--budgets", "")):
        with pytest.raises(InvalidInput):
            cli.main(["bench", "handoff", "x", *arguments], standalone_mode=False, obj=[])


def test_the_command_prints_rows_and_writes_tables(llama_folder: str, tmp_path: Path) -> None:
    table = tmp_path / "speed.md"
    content = result_of(
        kvferry(
            *("bench", "handoff", llama_folder, "--tokens", "60", "--links", "loopback", "--budgets", "1"),
            *("--mode", "pipelined", "--repeats", "1", "--threads", "1", "--markdown", table, "--json"),
        )
    )
    assert content["command"] == "bench handoff"
    (row,) = content["result"]["rows"]
    assert row["pipelined"]
    assert row["bound"] is None
    assert table.read_text().count("| loopback") == 1


def test_what_cannot_be_pipelined_is_measured_once() -> None:
    settings = HandoffBenchSettings("model", (80,), ("loopback",), (Arm(0.28), Arm(0.05, "klt")))
    modes = [(cell.arm.policy, cell.pipelined) for cell in settings.cells]
    assert modes == [("auto", False), ("auto", True), ("klt", False)]
    only = replace(settings, modes=(True,))
    assert [cell.arm.policy for cell in only.cells] == ["auto", "klt"], "the one way that was asked for"
