"""What every channel does: one side offers a hand-off, the other fetches it. Knows bytes only.

A **hand-off** is a header and a fixed number of frames. The header comes first and bounds every frame's size; frames
are produced one after another, and are sent as they come. Whoever fetches gets frames in any order, each with its
index, none twice, and can be interrupted and go on with those that it lacks.

A new way to move bytes is a class with the methods of `Sender` and one with those of `Receiver`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Protocol, Self

from kvferry.errors import InvalidInput, TooLarge

MAX_FRAMES = 1 << 20
MAX_NOTE_BYTES = 1 << 20
MAX_HANDOFF_NAME = 200


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went through one end of one hand-off.

    Attributes:
        sent: bytes given to the link, message headers included; the link's own framing and encryption are not.
        received: bytes taken from the link, likewise.
        frames: frames sent (producer) or received for the first time (consumer).
        repeated: frames sent again, or received though they were there already.
        damaged: messages dropped because they failed their checksum or made no sense.
        reconnects: connections made again after the first.
    """

    sent: int = 0
    received: int = 0
    frames: int = 0
    repeated: int = 0
    damaged: int = 0
    reconnects: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One frame at the consumer. The times are of the monotonic clock, which all processes of one host share.

    Attributes:
        index: place of the frame in the hand-off, from 0.
        data: the frame, byte for byte as it was pushed.
        sent_ns: when the producer gave it to the link, in nanoseconds.
        received_ns: when it was whole at the consumer, in nanoseconds.
    """

    index: int
    data: bytes | memoryview
    sent_ns: int
    received_ns: int


class Outgoing(Protocol):
    """The producer's side of one hand-off."""

    @property
    def handoff(self) -> str:
        """Name that the consumer asks for."""

    @property
    def traffic(self) -> Traffic:
        """What has gone out so far."""

    def wait_consumer(self, timeout: float) -> None:
        """Return when a consumer has asked for this hand-off; raise `TransferFailed` after ``timeout`` seconds."""

    def begin(self, header: bytes, limits: Sequence[int], note: bytes = b"") -> None:
        """Publish the header, an upper bound in bytes of each frame, and a short note beside the packet."""

    def push(self, frame: bytes | memoryview) -> None:
        """Publish the next frame. Kept, not copied: do not change it afterwards."""

    def finish(self, timeout: float) -> Traffic:
        """Return when a consumer has confirmed the whole; `TransferFailed` after ``timeout`` seconds of silence.

        A consumer that works on what it has got, before it confirms, is not silent.
        """

    def abort(self, error: BaseException) -> None:
        """Give up: whoever fetches gets ``error``, typed."""

    def close(self) -> None:
        """Forget the hand-off and its frames."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception abort with it first."""


class Offered(ABC):
    """What ``with`` does for every `Outgoing`."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """See `Outgoing`."""

    @abstractmethod
    def close(self) -> None:
        """See `Outgoing`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()


class Sender(Protocol):
    """A producer's end of a channel: several hand-offs at once."""

    @property
    def address(self) -> str:
        """Where a `Receiver` finds it."""

    def announce(self, handoff: str | None = None) -> Outgoing:
        """Make a hand-off known, before its header is; ``None`` names it at random."""

    def close(self) -> None:
        """Withdraw every hand-off and free the link."""


class Incoming(Protocol):
    """The consumer's side of one hand-off."""

    @property
    def header(self) -> bytes:
        """The packet's header."""

    @property
    def note(self) -> bytes:
        """What the producer said beside the packet."""

    @property
    def limits(self) -> Sequence[int]:
        """Upper bound in bytes of each frame."""

    @property
    def traffic(self) -> Traffic:
        """What has come in so far."""

    def frames(self, have: Collection[int] = ()) -> Iterator[Arrival]:
        """Every frame whose index is not in ``have``, as they come, each once."""

    def confirm(self) -> None:
        """Tell the producer that everything arrived and was good."""

    def refuse(self, error: BaseException) -> None:
        """Tell the producer why this hand-off is not taken."""

    def close(self) -> None:
        """Leave the link."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception refuse with it first."""


class Receiver(Protocol):
    """A consumer's end of a channel."""

    def fetch(self, handoff: str, *, timeout: float | None = None, max_bytes: int | None = None) -> Incoming:
        """Ask for a hand-off and return when its header is here.

        ``timeout=math.inf`` waits for as long as the producer shows that it is there: what it computes may take its
        time. Raises `TransferFailed` when that takes longer than ``timeout`` seconds or the producer knows no such
        hand-off, `TooLarge` when header and frames may exceed ``max_bytes``.
        """


def new_handoff_name() -> str:
    """A name that nobody guesses."""
    return secrets.token_hex(16)


def check_name(handoff: str) -> str:
    """``handoff``, or `InvalidInput`: names are printable text that can also be a file's name."""
    if not 1 <= len(handoff) <= MAX_HANDOFF_NAME or not all(c.isalnum() or c in "._-" for c in handoff):
        raise InvalidInput(
            f"{handoff[:40]!r} cannot name a hand-off: at most {MAX_HANDOFF_NAME} letters, digits, '.', '_', '-' can"
        )
    if handoff.startswith("."):
        raise InvalidInput(f"{handoff[:40]!r} cannot name a hand-off: it begins with a dot")
    return handoff


def check_frame(handoff: str, index: int, frame: bytes | memoryview, limits: Sequence[int]) -> None:
    """Raise `InvalidInput` unless ``frame`` may be the ``index``-th of a hand-off with these limits."""
    if index >= len(limits):
        raise InvalidInput(f"the hand-off {handoff} takes {len(limits)} frames, no more")
    if len(frame) > limits[index]:
        raise InvalidInput(f"frame {index} has {len(frame):,} bytes; it was announced as {limits[index]:,}")


def check_complete(handoff: str, pushed: int, limits: Sequence[int], *, begun: bool) -> None:
    """Raise `InvalidInput` where a hand-off has not begun, or frames of it are missing."""
    if not begun or pushed < len(limits):
        raise InvalidInput(f"{pushed} of {len(limits)} frames were pushed to {handoff}")


def check_plan(header: bytes, limits: Sequence[int], note: bytes, max_bytes: int | None) -> int:
    """Most bytes that the hand-off can have; raises `InvalidInput` or `TooLarge`."""
    if len(limits) > MAX_FRAMES or len(note) > MAX_NOTE_BYTES:
        raise InvalidInput(
            f"a hand-off of {len(limits):,} frames and a note of {len(note):,} bytes: at most {MAX_FRAMES:,} frames "
            f"and {MAX_NOTE_BYTES:,} bytes can be offered"
        )
    if any(limit < 0 for limit in limits):
        raise InvalidInput("a frame's size limit is negative")
    most = len(header) + sum(limits)
    if max_bytes is not None and most > max_bytes:
        raise TooLarge(f"the hand-off may have {most:,} bytes, more than the limit of {max_bytes:,}")
    return most
