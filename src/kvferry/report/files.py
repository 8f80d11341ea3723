"""Files of a report: in a folder that can be written to, each whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvferry.errors import InvalidInput


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise `InvalidInput` where `writable_folder` would; nothing is made, as the work may yet fail."""
    folder = there = Path(path)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise InvalidInput(f"{folder} cannot be a folder: {there} is none")
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions do not tell: root has them all, also in /proc
            pass
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written to: nothing can be made in {there}") from error


def writable_folder(path: str | os.PathLike[str]) -> Path:
    """``path`` as a folder, made where it is missing. Raises `InvalidInput` where nothing can be written there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be a folder: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(f"{folder} cannot be written to")
    return folder
