"""Results of any command on one page."""

from __future__ import annotations

import json
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import run
from kvferry.errors import InvalidInput
from kvferry.report.page import read, render, tables_of

RESULT = {
    "model": "a | b <c>",
    "bytes": 1234567,
    "good": True,
    "seconds": {"wire": 0.25, "parts": {"deep": 1}},
    "none": None,
    "rows": [{"x": 1.5, "ci": [0.1, 0.2], "tokens": [1, 2, 3]}, {"x": 2.5, "only": "here"}],
}


def content(result: Any, **more: Any) -> dict[str, Any]:
    environment = {"arguments": ["ship", "sweep"], "git_revision": "abc", "torch": "2", "seed": 0}
    return {"kvferry": "0", "command": "ship sweep", "environment": environment, "result": result, **more}


def test_scalars_and_lists_of_objects_are_tables() -> None:
    (_, head, plain), (title, columns, rows) = tables_of(RESULT)
    assert head == ["", ""]
    assert ["seconds.parts.deep", "1"] in plain
    assert ["bytes", "1,234,567"] in plain
    assert ["good", "yes"] in plain
    assert title == "rows"
    assert columns == ["x", "ci", "only"]
    assert rows == [["1.5", "[0.1, 0.2]", ""], ["2.5", "", "here"]]


def test_long_lists_say_that_they_are_cut() -> None:
    (title, _, rows) = tables_of({"rows": [{"x": index} for index in range(1000)]})[-1]
    assert title == "rows, the first 400 of 1000"
    assert len(rows) == 400
    wide = {f"c{index:02d}": index for index in range(1, 30)}
    (title, columns, _) = tables_of({"rows": [wide]})[-1]
    assert (title, len(columns)) == ("rows, 15 more columns in the file", 14)


def test_a_page_of_either_kind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.json").write_text(json.dumps(content(RESULT)))
    failed = content(None, error={"type": "TooLarge", "message": "<too> large"})
    (tmp_path / "two.json").write_text(json.dumps(failed))
    files = [str(tmp_path / name) for name in ("one.json", "two.json")]
    assert run(["report", *files, "-o", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "## ship sweep: one" in page
    assert "a / b <c>" in page
    assert "failed: TooLarge: <too> large" in page
    assert "git_revision abc" in page
    assert run(["report", *files, "-o", str(tmp_path / "page.html"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["result"]["failed"] == ["two"]
    text = (tmp_path / "page.html").read_text()
    assert "a | b &lt;c&gt;" in text
    assert "<too>" not in text
    xml.dom.minidom.parseString(text.replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))


def test_real_results_are_shown() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "results"
    results = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    assert results
    page = render(results, html=False)
    assert all(name in page for name in results)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kvferry": 1, "command": 1, "environment": {}, "result": 3}'])
def test_other_files_are_refused(tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidInput, match="no result of a kvferry command"):
        read(tmp_path / "x.json")
    assert run(["report", str(tmp_path / "x.json"), "-o", str(tmp_path / "page.html")]) == 2
    assert run(["report", str(tmp_path / "missing"), "-o", str(tmp_path / "page.html")]) == 2
    assert run(["report", str(tmp_path / "x.json"), "-o", str(tmp_path / "page.pdf")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
