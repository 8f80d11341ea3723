"""Files that are written whole or not at all: the one way in which kvferry puts anything on disk."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from kvferry.errors import InvalidInput

MOST_CHARACTERS = 1 << 28
"""A text that is longer is not read: it may have no end."""

BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
"""What the system says of a path that is at fault, not of a disk that is."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[FileIO]:
    """A new file that takes the place of ``path`` when the block ends well, and is removed when it does not.

    Raises `InvalidInput` where ``path`` cannot be written; a full disk and the like stay an ``OSError``.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".kvferry-{secrets.token_hex(8)}.tmp")
    try:
        try:
            if target.exists() and not target.is_file():
                raise InvalidInput(f"{path} exists and is no regular file; choose another path")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
            file = FileIO(os.open(temporary, flags, 0o666), "wb")
        except OSError as error:
            if error.errno in BAD_PATH:
                raise InvalidInput(f"cannot write {path}: {error.strerror}") from error
            raise
        with file:
            yield file
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):  # there may be no such file yet; the error under way says why
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(path)  # of a full disk the system tells no name
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` last, where the system lets a folder be flushed."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8; a reader sees the old file or the new one. Errors as for `replacing`."""
    data = memoryview(text.encode())
    with replacing(path) as file:
        while data:
            data = data[file.write(data) :]


def read_text(path: str | os.PathLike[str]) -> str:
    """The text in ``path``; raises `InvalidInput` where the file is missing, empty, endless, or no UTF-8 text."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read as UTF-8 text: {reason}") from error
    if len(text) > MOST_CHARACTERS:
        raise InvalidInput(f"{path} holds more than {MOST_CHARACTERS:,} characters: give a part of it")
    if not text.strip():
        raise InvalidInput(f"{path} holds no text")
    return text
