"""Hand-offs at rest: one file each in a folder that both sides see, whole or not there.

The file is a valid safetensors file of kind ``handoff`` (see `kvferry.snapshot.container`): tensors of bytes
``header``, ``note`` and ``frames.{i}``, and the name of the hand-off and the frames' size limits in its metadata; or no
tensors and an ``error``, when the producer gave up.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvferry.channel import faults
from kvferry.channel.base import (
    MAX_FRAMES,
    Arrival,
    Offered,
    Traffic,
    check_complete,
    check_frame,
    check_name,
    check_plan,
    new_handoff_name,
)
from kvferry.errors import CorruptPacket, InvalidInput, TransferFailed

if TYPE_CHECKING:
    from kvferry.snapshot.container import Container

logger = logging.getLogger(__name__)

KIND = "handoff"
SUFFIX = ".handoff.safetensors"
_LOOK_SECONDS = 0.02


class FileSender:
    """Writes hand-offs into ``folder``, which is made where it is missing."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"{self._folder} cannot hold hand-offs: {error}") from error

    @property
    def address(self) -> str:
        return str(self._folder)

    def announce(self, handoff: str | None = None) -> FileOutgoing:
        """A hand-off whose file appears when it is finished. Raises `InvalidInput` where one of that name lies."""
        name = new_handoff_name() if handoff is None else check_name(handoff)
        path = self._folder / f"{name}{SUFFIX}"
        if path.exists():
            raise InvalidInput(f"{path} is there already: take another name or remove it")
        return FileOutgoing(name, path)

    def close(self) -> None:
        """Nothing to free: what was finished stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileOutgoing(Offered):
    """One hand-off on its way to disk; see `kvferry.channel.base.Outgoing`."""

    def __init__(self, handoff: str, path: Path):
        self.handoff = handoff
        self._path = path
        self._header: bytes | None = None
        self._note = b""
        self._limits: Sequence[int] = ()
        self._frames: list[bytes | memoryview] = []
        self._traffic = Traffic()
        self._ended = False

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    def wait_consumer(self, timeout: float) -> None:
        """A file waits for its reader: returns at once."""

    def begin(self, header: bytes, limits: Sequence[int], note: bytes = b"") -> None:
        """Set header, size limits and note."""
        check_plan(header, limits, note, None)
        if self._header is not None:
            raise InvalidInput(f"the hand-off {self.handoff} has begun already")
        self._header, self._limits, self._note = header, tuple(limits), note

    def push(self, frame: bytes | memoryview) -> None:
        """Keep the next frame until `finish`."""
        check_frame(self.handoff, len(self._frames), frame, self._limits)
        self._frames.append(frame)

    def finish(self, timeout: float = 0.0) -> Traffic:  # noqa: ARG002
        """Write the file, whole or not at all; nobody needs to confirm.

        Raises `InvalidInput` where another producer has put a file of that name there meanwhile: it stays.
        """
        check_complete(self.handoff, len(self._frames), self._limits, begun=self._header is not None)
        assert self._header is not None
        tensors: dict[str, bytes | memoryview] = {"header": self._header, "note": self._note}
        tensors |= {f"frames.{index}": frame for index, frame in enumerate(self._frames)}
        size = self._write(tensors, {"limits": json.dumps(list(self._limits), separators=(",", ":"))})
        self._traffic = Traffic(sent=size, frames=len(self._frames))
        return self._traffic

    def abort(self, error: BaseException) -> None:
        """Leave a file that says why there is nothing to fetch, unless another producer's lies there."""
        if not self._ended:
            try:
                self._write({}, {"error": faults.to_bytes(error).decode("ascii")})
            except InvalidInput as taken:
                logger.warning("nobody is told that this hand-off was given up: %s", taken)

    def close(self) -> None:
        """Free the frames."""
        self._frames.clear()

    def _write(self, tensors: dict[str, Any], metadata: dict[str, str]) -> int:
        from kvferry.snapshot.container import write_container

        self._ended = True
        whole = self._path.with_name(f".{self.handoff[:100]}.{secrets.token_hex(8)}.tmp")
        try:
            size = write_container(whole, KIND, tensors, {"handoff": self.handoff, **metadata})
            os.link(whole, self._path)  # unlike a rename, it takes no other file's place
        except FileExistsError as error:
            raise InvalidInput(
                f"{self._path} was put there meanwhile by another producer: take another name"
            ) from error
        except OSError as error:
            raise TransferFailed(f"cannot write {self._path}: {error.strerror}") from error
        finally:
            whole.unlink(missing_ok=True)
        return size


class FileReceiver:
    """Reads hand-offs from ``folder``, waiting up to ``timeout`` seconds for one that is not there yet."""

    def __init__(self, folder: str | os.PathLike[str], *, timeout: float = 60.0):
        self._folder = Path(folder)
        self._timeout = timeout

    def fetch(self, handoff: str, *, timeout: float | None = None, max_bytes: int | None = None) -> FileIncoming:
        """The hand-off of that name, every byte checked.

        Raises `TransferFailed` when it does not appear in time, what the producer gave up with, and what
        `kvferry.snapshot.container.read_container` raises.
        """
        from kvferry.snapshot.container import read_container

        path = self._folder / f"{check_name(handoff)}{SUFFIX}"
        longest = self._timeout if timeout is None else timeout
        until = time.monotonic() + longest
        while not path.exists():
            if time.monotonic() >= until:
                raise TransferFailed(f"waited {longest:g} s for hand-off {handoff} to appear as {path}")
            time.sleep(_LOOK_SECONDS)
        return FileIncoming(handoff, read_container(path, kind=KIND, max_bytes=max_bytes), path)


class FileIncoming:
    """One hand-off read from disk; see `kvferry.channel.base.Incoming`."""

    def __init__(self, handoff: str, container: Container, path: Path):
        if container.metadata.get("handoff") != handoff:
            raise CorruptPacket(f"{path} holds the hand-off {container.metadata.get('handoff')!r}, not {handoff}")
        if (error := container.metadata.get("error")) is not None:
            raise faults.from_bytes(error.encode())
        self.handoff = handoff
        self.limits = _parse_limits(container.metadata.get("limits", ""), path)
        expected = {"header", "note", *(f"frames.{index}" for index in range(len(self.limits)))}
        odd = [tensor for tensor in container.tensors.values() if tensor.dim() != 1 or tensor.element_size() != 1]
        if container.tensors.keys() != expected or odd:
            raise CorruptPacket(f"{path} does not hold a header, a note and the {len(self.limits)} frames announced")
        parts = {name: tensor.numpy().data for name, tensor in container.tensors.items()}
        for index, limit in enumerate(self.limits):
            if len(parts[f"frames.{index}"]) > limit:
                raise CorruptPacket(
                    f"{path}: frame {index} has {len(parts[f'frames.{index}']):,} bytes, {limit:,} were announced"
                )
        self.header = bytes(parts["header"])
        self.note = bytes(parts["note"])
        self._frames = [parts[f"frames.{index}"] for index in range(len(self.limits))]
        self._received = container.nbytes

    @property
    def traffic(self) -> Traffic:
        return Traffic(received=self._received, frames=len(self._frames))

    def frames(self, have: Collection[int] = ()) -> Iterator[Arrival]:
        """Every frame whose index is not in ``have``."""
        for index, frame in enumerate(self._frames):
            if index not in have:
                now = time.monotonic_ns()
                yield Arrival(index, frame, now, now)

    def confirm(self) -> None:
        """Nobody listens; the file stays."""

    def refuse(self, error: BaseException) -> None:
        """Nobody listens; the file stays."""

    def close(self) -> None:
        """Let go of the file."""
        self._frames = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parse_limits(text: str, path: Path) -> tuple[int, ...]:
    from kvferry.snapshot.strict_json import parse_json

    limits = parse_json(text, f"{path}: the list of the frames' size limits", most=MAX_FRAMES + 1)
    if (
        not isinstance(limits, list)
        or len(limits) > MAX_FRAMES
        or not all(type(limit) is int and 0 <= limit < 1 << 62 for limit in limits)
    ):
        raise CorruptPacket(f"{path}: the frames' size limits are no list of sizes")
    return tuple(limits)
