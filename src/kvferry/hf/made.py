"""Folders of models that kvferry made: whole or not at all, one maker at a time, with a record of how."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from kvferry.errors import InvalidInput
from kvferry.hf.quiet import quiet

RECORD = "kvferry-pair.json"
"""How what is in a folder was made."""


def existing(target: Path, recipe: str) -> dict[str, Any] | None:
    """The record in ``target`` where that was made by the recipe of this digest; ``None`` where there is no folder.

    Raises:
        InvalidInput: the folder holds something else.
    """
    if not target.exists():
        return None
    try:
        record: dict[str, Any] = json.loads((target / RECORD).read_text(encoding="utf-8"))
        same = record["digest"] == recipe
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise InvalidInput(f"{target} exists and was not made in this very way: remove it, or give another folder")
    return record


@contextmanager
def working_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` for what is not finished, held by this process alone; it stays after an exception.

    Raises:
        InvalidInput: no folder can be made there, or another process holds it.
    """
    work = target.with_name(f".{target.name}-unfinished")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot work in {target.parent}: {error.strerror}; give another folder") from error
    lock = FileLock(work / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InvalidInput(f"another process is making {target} right now: wait for it") from None
    try:
        yield work
        shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()


def put(
    work: Path, target: Path, models: Mapping[str, PreTrainedModel], tokenizer: Any, record: Mapping[str, Any]
) -> None:
    """Save models, each with the tokenizer, and the record; ``target`` appears with all of it at once.

    Args:
        work: from `working_folder`.
        target: the new folder.
        models: by the name of their folder within ``target``; an empty name: ``target`` itself.
        tokenizer: of all of them.
        record: anything that JSON can hold.
    """
    whole = Path(tempfile.mkdtemp(prefix="made-", dir=work))
    with quiet():
        for name, model in models.items():
            model.save_pretrained(whole / name)
            tokenizer.save_pretrained(whole / name)
    (whole / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    whole.chmod(0o755)  # a temporary folder is its maker's alone
    whole.rename(target)
