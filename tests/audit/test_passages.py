"""Tasks out of a file, and files that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.audit.passages import passages_of_tasks
from kvferry.errors import InvalidInput
from kvferry.snapshot import files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tasks.jsonl cannot be read as UTF-8 text: No such file"),
        (b"\xff\xfe", "cannot be read as UTF-8 text"),
        (b'{"question": "1?"}\n', 'line 1: no object with "question" and "answer"'),
        (b"not json\n", "line 1: no object"),
        (b"\n", "holds no text"),
        (b"x" * 200, "more than 100 characters"),
    ],
)
def test_a_file_that_holds_no_tasks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(files, "MOST_CHARACTERS", 100)
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_bytes(content)

    def tokenizer(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is to be tokenised")

    with pytest.raises(InvalidInput, match=message) as caught:
        passages_of_tasks(tokenizer, path)
    assert str(caught.value).count("tasks.jsonl") == 1
