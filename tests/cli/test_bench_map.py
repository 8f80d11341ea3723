"""``kvferry bench map``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli.main import run
from kvferry.hf.text import default_text
from tests.cli import models
from tests.map import builders


def test_map_beside_prefill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = builders.llama()
    names = models.save(source, tmp_path / "a"), models.save(builders.without_layer(source, 2), tmp_path / "b")
    (tmp_path / "text").write_text(default_text()[:4000])
    fit = (
        "map",
        "fit",
        *names,
        "--text",
        tmp_path / "text",
        "-o",
        tmp_path / "m",
        "--length",
        80,
        "--dtype",
        "float32",
    )
    assert run([str(word) for word in fit]) == 0
    bench = ("bench", "map", tmp_path / "m", "--text", tmp_path / "text", "--lengths", "40,300", "--repeats", 3)
    capfd.readouterr()
    assert run([str(word) for word in (*bench, "--recompute-last", 5, "--json")]) == 0
    result = json.loads(capfd.readouterr()[0])["result"]
    assert [row["tokens"] for row in result["rows"]] == [40, 300]
    for row in result["rows"]:
        assert 0 < row["map"] < row["transfer"]
        assert row["transfer_range"][0] <= row["transfer"] <= row["transfer_range"][1]
        assert row["speedup"] == pytest.approx(row["prefill"] / (row["transfer"] + row["install"]))
        assert row["cold_range"][0] <= row["cold"] <= row["cold_range"][1]
        assert row["cold_repeats"] == 3
        assert min(row["install"], row["source_prefill"]) > 0
        assert (row["native_prefix"], row["recompute_last"]) == (4, 5)
    assert run([str(word) for word in bench]) == 0
    assert "own prefill" in capfd.readouterr()[0]
    for wrong in ("0", "ten", "5000", ""):
        assert run([str(word) for word in (*bench, "--lengths", wrong)]) == 2
