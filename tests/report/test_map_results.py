"""The map's study asks its commands for what they know, each once, and in parts that can be run alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import click
import pytest

from benchmarks import map_results
from kvferry.cli import bench_map, map_eval, map_explain, pair
from kvferry.cli import map as map_cli
from kvferry.map.train import VARIANTS

COMMANDS: dict[tuple[str, str], click.Command] = {
    ("pair", "make"): pair.make,
    ("map", "fit"): map_cli.fit,
    ("map", "eval"): map_eval.evaluate,
    ("map", "explain"): map_explain.explain,
    ("bench", "map"): bench_map.bench_map,
}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, ...]]]:
    """What each part asks for."""
    for name in ("openstax/biology.txt", "openstax/psychology.txt", "wikitext2/test.txt", "hellaswag/val_a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("words")
    monkeypatch.chdir(tmp_path)
    found: dict[str, list[tuple[str, ...]]] = {}
    part = ""

    def call(*arguments: str) -> str:
        found.setdefault(part, []).append(arguments)
        return json.dumps({"result": 1})

    monkeypatch.setattr(map_results, "call", call)
    monkeypatch.setattr(map_results, "is_kept", lambda path, _asked, _code: path.exists())
    given = argparse.Namespace(
        folder=tmp_path / "results", data=tmp_path, parent="m", directions="up,down", dtype=None, minutes=1.0,
        tokens=10, sequences=160, windows=16, items=400, threads=2, best="ridge+e2e",
    )  # fmt: skip
    study = map_results.Study(given)
    for part in map_results.PARTS:
        if part not in ("turns", "gate"):
            study.run(part)
    return found


def test_every_command_is_understood(asked: dict[str, list[tuple[str, ...]]]) -> None:
    for part, commands in asked.items():
        for words in commands:
            command = COMMANDS[words[0], words[1]]
            with command.make_context("x", list(words[2:])) as context:
                assert context.params, part


def test_parts_are_what_they_say(asked: dict[str, list[tuple[str, ...]]]) -> None:
    fits = {part: [c for c in commands if c[:2] == ("map", "fit")] for part, commands in asked.items()}
    assert {part: len(own) for part, own in fits.items() if own} == {
        "linear": 12, "e2e": 2, "residual": 2, "mlp": 2, "ablations": 10, "residual-e2e": 2,
    }  # fmt: skip
    variants = {words[words.index("--variant") + 1] for own in fits.values() for words in own if "--variant" in words}
    assert variants == {"head_local", *VARIANTS}
    assert all("--resume" in words for own in fits.values() for words in own)
    items = [words for words in asked["tasks"] if "--items" in words]
    assert [words[words.index("--items") + 1] for words in items] == ["400"] * 3
    assert all("--log" in words for words in items)


def test_one_dtype_for_all_parts(tmp_path: Path) -> None:
    path = tmp_path / "pairs" / "dtype"
    name = map_results.faster_dtype(path)
    assert name in ("bfloat16", "float32")
    other = {"bfloat16": "float32", "float32": "bfloat16"}[name]
    path.write_text(other)
    assert map_results.faster_dtype(path) == other
