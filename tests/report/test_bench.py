"""The page of speeds is made of the benchmarks' own files, and says where a goal was missed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvferry.errors import InvalidInput
from kvferry.evaluate import bench_codec
from kvferry.evaluate.codec_peers import PEERS
from kvferry.report.bench import goals, plot, render, write_page
from kvferry.report.bench_handoff import _verdict

ENVIRONMENT = {
    "cpu": "some processor", "cpus": 2, "python": "3.11", "torch": "2", "git_revision": "abc+", "seed": 0,
    "arguments": ["python", "-m", "benchmarks.x"],
}  # fmt: skip


@pytest.fixture(scope="module")
def codec() -> dict[str, Any]:
    settings = bench_codec.CodecBenchSettings(
        quantizers=("sym8", "sym4"), dtypes=("bfloat16", "float32"), threads=(1,), megabytes=(0.5,), rounds=2
    )
    found = bench_codec.run(settings, {"torch_eager": PEERS["torch_eager"], "fbgemm": PEERS["fbgemm"]}).to_json()
    found["skipped"] = [{"peer": "moon", "dtype": "float32", "reason": "it is far"}]
    return {"command": "bench codec", "environment": ENVIRONMENT, "result": json.loads(json.dumps(found))}


def row(quantizer: str, op: str, ratio: float) -> dict[str, Any]:
    return {
        "peer": "kvferry", "quantizer": quantizer, "op": op, "ratio": ratio, "threads": 1, "megabytes": 1,
        "dtype": "bfloat16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("quantizer", "encode", "decode", "asked", "met"),
    [
        ("sym8", 0.9, 0.81, "0.8", "yes"),
        ("sym8", 0.9, 0.79, "0.8", "**no**"),
        ("asym4g64", 0.61, 0.9, "0.6", "yes"),
        ("chan5b128", 0.59, 2.0, "0.6", "**no**"),
        ("mixed", 0.6, 0.6, "0.6", "yes"),
    ],
)
def test_goals_are_judged_by_the_slower_work(
    quantizer: str, encode: float, decode: float, asked: str, met: str
) -> None:
    lines = goals([row(quantizer, "encode", encode), row(quantizer, "decode", decode)])
    assert lines[-2].endswith(f"| {asked} | {met} |")


def test_every_row_is_on_the_page(codec: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "speed-codec.json"
    source.write_text(json.dumps(codec))
    written = write_page(tmp_path, [source])
    assert [Path(path).name for path in written] == ["speed.md", "speed.svg"]
    page = (tmp_path / "speed.md").read_text()
    for each in codec["result"]["rows"]:
        assert f"{each['gb_per_s']:.2f} ({each['ratio']:.2f};" in page
    assert "- moon, float32: it is far" in page
    assert "some processor" in page
    assert "`python -m benchmarks.x`" in page
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in page.splitlines() if line.startswith("|")]
    tables = re.split(r"\n(?!\|)", page)
    for table in tables:
        counts = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(counts) <= 1
    assert columns


def test_the_plot_has_a_bar_a_work(codec: dict[str, Any]) -> None:
    rows = codec["result"]["rows"]
    drawn = ElementTree.fromstring(plot(rows))
    titles = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(each["dtype"] == "bfloat16" for each in rows)


def test_sections_of_memory_faults_and_fuzz() -> None:
    memory = {
        "rows": [
            {"work": "encode", "packet": "auto", "peak_bytes": 3 << 20, "bound_bytes": 2 << 20, "within": False,
             "parts": {"source": 2 << 20}},
        ],
        "flat": [
            {"end": "producer", "handoffs": 100, "cache_bytes": 1 << 20, "growth_bytes": 0, "threads_more": 0,
             "files_more": 0, "within": True},
        ],
    }  # fmt: skip
    outcomes = {"right": 3, "error": 1, "wrong": 0, "hang": 0, "leak": 0, "crash": 0}
    faults = {
        "n": 4,
        "settings": {"timeout": 3.0, "stall": 0.5, "grace": 2.0},
        "rows": [
            {"fault": "cut", "n": 4, **outcomes, "errors": {"TransferFailed": 1}, "reconnects": 5,
             "median_seconds": 0.1, "longest_wait": 0.2},
        ],
        "hostile": [
            {"peer": "no key", "tries": 9, "got": 0, "honest": 7, "right": 7, "longest_seconds": 0.1,
             "memory_growth_mib": 1.0, "good": True},
        ],
    }  # fmt: skip
    fuzz = {
        "n": 10,
        "rows": [
            {"target": "frame, signed", "n": 10, "outcomes": {"refused": 6, "accepted, harmless": 4}, "faults": 0,
             "slowest_seconds": 0.1, "memory_growth_mib": 2.0},
        ],
    }  # fmt: skip
    commands = {"bench fuzz": fuzz, "bench memory": memory, "bench faults": faults}
    page = render([{"command": name, "environment": ENVIRONMENT, "result": each} for name, each in commands.items()])
    assert page.index("## Memory") < page.index("## 4 faults") < page.index("## 10 fuzzed inputs")
    assert "| encode | auto | 3.0 | 2.0 | source 2.0 | **no** |" in page
    assert "| cut | 4 | 3 | 1 | 0 | 0 | 0 | 0 | TransferFailed 1 | 5 | 0.10 | 0.20 |" in page
    assert "| all | 4 | 3 | 1 |" in page
    assert "| frame, signed | 10 | 6 | accepted, harmless: 4 | 0 |" in page


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"command": "demo", "result": {}}'):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(InvalidInput, match=r"x\.json"):
            write_page(tmp_path, [path])


def test_what_links_cost_is_said_in_words() -> None:
    def row(budget: float, ttft: float, wire: float, **more: Any) -> dict[str, Any]:
        told = {"tokens": 512, "link": "1gbit", "policy": "auto", "pipelined": False, "progressive": False, "n": 2}
        seconds = {"ttft": {"median": ttft}, "wire": {"median": wire}}
        return {**told, "budget_asked": budget, "seconds": seconds, "transfer_share": wire / ttft, "bound": None} | more

    bound = {"met": False, "met_by": 0.5}
    rows = [row(1.0, 2.0, 1.0), row(0.25, 1.25, 0.25), row(0.25, 1.5, 0.3, progressive=True)]
    rows.append(row(0.25, 1.0, 0.2, pipelined=True, bound=bound))
    said = _verdict(rows)
    assert "met in 0 of 1 combinations, by the medians of n = 2 or more; with a hand-off's own" in said[0]
    assert "by 1 of 2 hand-offs" in said[0]
    assert "after 1.20 of the time" in said[1]
    assert "0.25: 0.25 and 0.40." in said[2]
    assert _verdict([]) == []
