"""The report's page: whole, self-contained, and careful with what it is given."""

from __future__ import annotations

import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidInput
from kvferry.report.files import check_folder, writable_folder
from kvferry.report.handoff import PARTS, render, write_report
from kvferry.report.svg import ticks, timeline
from kvferry.snapshot.files import write_text


def row(**changes: Any) -> dict[str, Any]:
    spans = {part: (0.1 * index, 0.1 * index + 0.15) for index, part in enumerate(PARTS)}
    return {
        "budget": 0.2799,
        "budget_asked": 0.28,
        "nominal_budget": 0.26,
        "packet_bytes": 123_456,
        "full_bytes": 456_789,
        "policy": "greedy",
        "quantizer": "raw+sym4 / raw+sym4",
        "prompt_tokens": 1536,
        "seconds": {**dict.fromkeys(PARTS, 0.15), "ttft": 0.65},
        "timeline": spans,
        "local_seconds": {"first_token": 0.1, "ttft": 0.5},
        "kl_mean": 0.0123,
        "top1_agreement": 0.97,
        "tokens_equal": False,
        "first_difference": 7,
        "fidelity": {"kl_p95": 0.05, "n": 64},
        "text": {"prompt_end": "<script>alert(1)</script>", "local": "a & b", "shipped": "c < d"},
        "producer": {"model": "smollm2-135m"},
        **changes,
    }


def test_the_page_holds_the_numbers_and_fetches_nothing() -> None:
    page = render([row(), row(budget_asked=None, kl_mean=None, tokens_equal=True)], {"python": "3.11"})
    for words in ("0.2799", "123,456", "650.0", "0.0123", "nominal 0.26", "none", "other tokens from number 7"):
        assert words in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_drawing_is_well_formed_and_to_scale() -> None:
    drawing = timeline([("one", {"prefill": (0.0, 1.0), "wire": (0.5, 2.0)}), ("<two>", {})], PARTS)
    document = xml.dom.minidom.parseString(drawing)
    widths = [float(rect.getAttribute("width")) for rect in document.getElementsByTagName("rect")]
    assert widths[1] == pytest.approx(1.5 * widths[0], abs=0.2)


@given(st.floats(1e-9, 1e9))
def test_ticks_are_round_and_within(longest: float) -> None:
    marks = ticks(longest)
    assert marks[0] == 0
    assert 2 <= len(marks) <= 9
    assert marks == sorted(marks)
    assert marks[-1] <= longest * (1 + 1e-9)


def test_files_are_written_whole(tmp_path: Path) -> None:
    folder = writable_folder(tmp_path / "new" / "folder")
    paths = write_report(folder, [row()], {})
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "results.json"]
    assert [Path(path).parent for path in paths] == [folder, folder]
    with pytest.raises(UnicodeEncodeError):
        write_text(folder / "report.html", "\ud800")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInput):
            writable_folder(path)
        with pytest.raises(InvalidInput):
            check_folder(path)


def test_looking_at_a_folder_makes_none(tmp_path: Path) -> None:
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "folder")
    check_folder("relative/folder")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match="/proc"):
        check_folder("/proc/new/folder")
