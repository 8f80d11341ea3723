"""The page of the mappers' studies, from what the commands and studies really print."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from benchmarks.map_studies import gate_rates, turns
from kvferry.cli.main import run
from kvferry.errors import InvalidInput
from kvferry.hf.text import default_text
from kvferry.report.map_page import write_map_page
from tests.map import builders

CONTROLS = ("identity", "source", "no_prefix", "zero", "shuffled", "other_document")


def keep(path: Path, *arguments: str) -> None:
    """Run a command in this very process; its JSON object becomes a file."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run([*arguments, "--json"]) == 0
    path.write_text(out.getvalue())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a tiny pair, both directions."""
    folder = tmp_path_factory.mktemp("study")
    builders.saved_pair(folder)
    results, text = folder / "results", folder / "text.txt"
    results.mkdir()
    text.write_text(default_text()[:60_000])
    ends = {"up": ("source", "target"), "down": ("target", "source")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(folder / "cache"))
        for direction, names in ends.items():
            models = [str(folder / name) for name in names]
            mapper = str(folder / direction)
            size = ["--sequences", "20", "--length", "160", "--stride", "1", "--dtype", "float32"]
            fitted = [*models, *size, "--top-k", "1,2", "--text", str(text), "-o", mapper]
            keep(results / f"map-{direction}-ridge-fit.json", "map", "fit", *fitted)
            judged = ["--windows", "2", "--prefix", "80", "--suffix", "24", "--text", str(text)]
            keep(results / f"map-{direction}-ridge-eval.json", "map", "eval", mapper, *judged)
            keep(results / f"map-{direction}-bench.json", "bench", "map", mapper, "--lengths", "64", "--repeats", "1")
        mappers = {direction: folder / direction for direction in ends}
        turns(mappers, results / "map-turns.json", text, starts=1)
        gate_rates(mappers, results / "map-gate.json", text, records=2, handoffs=3, log=folder / "gate.jsonl")
    return Path(write_map_page(results, sorted(results.glob("map-*.json")))).read_text(encoding="utf-8")


def test_every_part_is_on_the_page(page: str) -> None:
    for title in ("## Child to parent", "## Parent to child", "### Fits", "### Latency", "## Turns", "## The gate"):
        assert title in page
    for control in CONTROLS:
        assert page.count(f"| {control} |") == 2
    assert page.count("whole path: exact.") == 2
    assert page.count("Held-out R² of the tries of `ridge`") == 2
    assert page.count("revision ") == 8


def test_the_gate_keeps_out_what_it_must(page: str) -> None:
    for name, tries in {
        "fitted on shuffled tokens, judged": 2,
        "the same, under a record forged from the good one's": 3,
        "of the other direction, judged": 2,
        "of another source's weights, under a forged record": 3,
        "with floors of its own, judged": 2,
        "the same, under a record with those floors": 3,
        "the good one's weights turned round, under its record": 3,
        "the same, under a record forged to name it": 3,
    }.items():
        assert f"| {name} | {tries} | 0 [0.000, " in page


def test_turns_are_ten_a_side(page: str) -> None:
    section = page.partition("## Turns")[2].partition("## ")[0]
    assert section.count(" | 10 | ") == 2
    assert section.count(" | 11 | ") == 0


def test_extending_gives_the_same_bits(page: str) -> None:
    assert "mapped at once: the same to the last bit (10 tries)" in page


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text in ("", "{}", "[]", '{"result": 1, "environment": {}}'):
        (tmp_path / "map-pair.json").write_text(text)
        with pytest.raises(InvalidInput, match="no result of a kvferry command"):
            write_map_page(tmp_path, [tmp_path / "map-pair.json"])
