"""The pages of ``docs/results`` are what their JSON files give: nobody has edited them, or forgotten to make them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.report import audit_page, bench, engines_page, map_page, ship_page

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def ship(folder: Path) -> Any:
    return ship_page.write_ship_page(folder, sorted(folder.glob("ship-*-*.json")))


def speed(folder: Path) -> Any:
    return bench.write_page(folder, sorted(folder.glob("speed-*.json")))


def maps(folder: Path) -> Any:
    return map_page.write_map_page(folder, sorted(folder.glob("map-*.json")))


def engines(folder: Path) -> Any:
    return engines_page.write_engines_page(folder, sorted(folder.glob("engines-*.json")))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "ship": ship,
    "speed": speed,
    "audit": lambda folder: audit_page.write(str(folder)),
    "map": maps,
    "engines": engines,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_is_what_its_files_give(name: str, tmp_path: Path) -> None:
    files = sorted(RESULTS.glob(f"{name}-*.json"))
    page = RESULTS / f"{name}.md"
    assert page.exists() == bool(files)
    if not files:
        pytest.skip(f"there are no figures of {name}")
    for file in files:
        shutil.copy(file, tmp_path)
    WRITERS[name](tmp_path)
    assert (tmp_path / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_commands_can_be_given_anywhere() -> None:
    """What made a result is told by paths that mean the same in every checkout."""
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in files:
        words = json.loads(file.read_text(encoding="utf-8"))["environment"]["arguments"]
        assert [word for word in words if word.startswith(("/", "~"))] == [], file.name
