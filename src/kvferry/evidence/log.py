"""Results on disk as they come, so that a killed run goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from kvferry.errors import InvalidInput

_BEGIN = b'{"key":"'


class ResultLog:
    """A file of JSON lines ``{"key": …, "value": …}``; each is on disk before the next result is worked on.

    What a killed writer left half written at the end is cut off; a damaged line anywhere else is an error.

    Args:
        path: the file; ``None`` keeps results in memory only.

    Raises:
        InvalidInput: another process writes to it, it cannot be written, or it is no such file.
    """

    def __init__(self, path: str | os.PathLike[str] | None):
        self.path = None if path is None else Path(path)
        self._values: dict[str, Any] = {}
        self._lock: FileLock | None = None

    def __enter__(self) -> ResultLog:
        if self.path is None:
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(f"{self.path}.lock")
            old = beside.exists()
            lock = FileLock(beside, timeout=0)
            lock.acquire()
        except Timeout:
            raise InvalidInput(
                f"{self.path} is being written by another process: wait for it, or give another --log"
            ) from None
        except OSError as error:
            raise InvalidInput(f"{self.path} cannot be written: {error.strerror}") from error
        self._lock = lock
        try:
            self._read(self.path)
        except BaseException:
            lock.release()
            if not old:
                beside.unlink(missing_ok=True)  # nothing is left beside what is no log
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep one result, flushed to the disk."""
        self._values[key] = dict(value)
        if self.path is None:
            return
        line = json.dumps({"key": key, "value": value}, allow_nan=False, separators=(",", ":"))
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                self._values[record["key"]] = record["value"]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(
                    f"{path}, line {number}: this is no result log; remove it or name another"
                ) from error
        rest = data[whole:]
        if rest:
            if not rest.startswith(_BEGIN[: len(rest)]):
                raise InvalidInput(f"{path} ends in what is no result; remove it or name another")
            os.truncate(path, whole)


def digest(content: Any) -> str:
    """Digest of anything that JSON can hold, independent of the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, allow_nan=False).encode())


@cache
def code_digest(*rooms: str) -> str:
    """Digest of kvferry's own files that results depend on: results of other code are never taken up.

    Args:
        rooms: folders of the package whose files count, beside the native kernels and this room.
    """
    root = Path(__file__).resolve().parents[1]
    state = xxhash.xxh3_128()
    files = [path for room in ("evidence", *rooms) for path in (root / room).rglob("*.py")]
    for path in sorted([*files, *root.glob("_native*")]):
        state.update(str(path.relative_to(root)).encode())
        state.update(path.read_bytes())
    return state.hexdigest()
