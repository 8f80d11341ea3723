"""Figures and tables of a sweep: they show its results, and nothing breaks them."""

from __future__ import annotations

import csv
import io
import math
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import InvalidInput
from kvferry.evaluate.bits import BitsMap
from kvferry.evaluate.method import Method
from kvferry.evaluate.needle import NeedleScore
from kvferry.evaluate.sweep import SweepResult, SweepRow, SweepSettings
from kvferry.report.sweep import as_csv, color_of, require_writable, write

GOOD = SweepRow(
    "greedy", "sym8+sym4 / sym8+sym4", 0.31, 0.3, 1000, 12.5, 12.0, 4.2, (3.0, 5.5), 0.02, 0.95,
    NeedleScore(9, 8, (0.6, 0.98), (0.7, 1.0), 9), Method("greedy", nominal_budget=0.3), full_bytes=3200,
    attention_cosine={"keys": [0.9, None], "values": [0.9, None], "both": [0.8, None]},
)  # fmt: skip
REFUSED = SweepRow(
    "auto", "", None, None, None, None, None, None, None, None, None, None, Method("auto", budget=0.01),
    reason="too, small",
)  # fmt: skip
BROKEN = SweepRow(
    "uniform_int4", "sym4 / sym4", 0.27, 0.25, 860, None, 12.0, None, None, 0.3, 0.5, None, Method("uniform_int4")
)


class Letters:
    def decode(self, tokens: list[int]) -> str:
        return {0: "<b>", 1: "&"}.get(tokens[0], "x")


def result() -> SweepResult:
    keys = np.array([[16.0, 4.0, 8.0], [np.nan, 4.0, 0.0]], np.float32)
    bits = BitsMap(keys, keys, (0, 1, 2))
    settings = SweepSettings((GOOD.asked, REFUSED.asked, BROKEN.asked), windows=2)
    return SweepResult((GOOD, REFUSED, BROKEN), (bits, None, None), settings, {"model": "m"}, 0, 6, 1.0)


def test_csv_has_a_line_a_method() -> None:
    good, refused, broken = csv.DictReader(io.StringIO(as_csv(result().rows)))
    assert (good["ppl_delta_ci_low"], good["ppl_delta_ci_high"]) == ("3.0", "5.5")
    assert (good["needle_hits"], good["needle_ci_clustered_high"]) == ("8", "1.0")
    assert good["asked_nominal_budget"] == "0.3"
    assert refused["reason"] == "too, small"
    assert broken["ppl"] == ""


def test_everything_is_written(tmp_path: Path) -> None:
    table, folder = tmp_path / "a" / "rows.csv", tmp_path / "plots"
    require_writable(str(table), str(folder))
    files = write(result(), Letters(), csv_path=str(table), plots=str(folder))
    assert [Path(path).name for path in files] == ["rows.csv", "quality.svg", "bits.svg", "tokens.html"]
    for name in ("quality.svg", "bits.svg"):
        xml.dom.minidom.parseString((folder / name).read_text())
    page = (folder / "tokens.html").read_text()
    assert "&lt;b&gt;" in page
    assert f'background:{color_of(16)}" title="16.00 bits"' in page
    assert f'background:{color_of(4)}" title="4.00 bits"' in page


def test_colors_lie_between_their_neighbors() -> None:
    assert color_of(8) == "#ccbb44"
    assert color_of(99) == "#ee6677"
    for bits in np.linspace(0, 16, 50).tolist():
        assert len(color_of(bits)) == 7
    assert not math.isclose(int(color_of(6)[1:3], 16), int(color_of(4)[1:3], 16))


def test_a_folder_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput):
        require_writable(None, str(tmp_path / "file"))
