"""What a fetched hand-off and the thread that fetches it share: header, frames asked for and here, last word."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence

from kvferry.channel.base import Arrival, Traffic, check_plan
from kvferry.channel.socket import message as wire
from kvferry.errors import InvalidInput, TooLarge, TransferFailed


class Transfer:
    """State of one hand-off at the consumer; every method may be called from any thread.

    Attributes:
        begun: set when the header is here, or an error.
        ended: set when the producer has answered the last word, or an error.
        error: why it ended, if it failed.
        arrivals: frames as they come, and the error last.
        closing: the caller has left.
    """

    def __init__(self, handoff: str, window: int, max_message: int, max_bytes: int | None):
        self.handoff = handoff
        self.key = wire.handoff_key(handoff)
        self.header = b""
        self.note = b""
        self.limits: Sequence[int] = ()
        self.digest = 0
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.arrivals: queue.SimpleQueue[Arrival | BaseException] = queue.SimpleQueue()
        self.last_word: tuple[wire.Kind, bytes] | None = None
        self.closing = False
        self.wake_handle, self._wake_in = os.pipe()
        os.set_blocking(self.wake_handle, False)
        os.set_blocking(self._wake_in, False)
        self._window = window
        self._max_message = max_message
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("sent", "received", "frames", "repeated", "damaged", "reconnects"), 0)
        self._missing: list[int] = []  # to be asked for, the next one last
        self._flying: dict[int, None] = {}  # asked for, in this order
        self._waiting = 0  # here, not taken yet

    @property
    def traffic(self) -> Traffic:
        with self._lock:
            return Traffic(**self._counts)

    @property
    def flying(self) -> list[int]:
        """Frames that were asked for and are not here, the longest awaited first."""
        with self._lock:
            return list(self._flying)

    def count(self, what: str, number: int = 1) -> int:
        """Add to a field of `traffic`; returns the sum."""
        with self._lock:
            self._counts[what] += number
            return self._counts[what]

    def check(self) -> None:
        """Raise what the transfer failed with, if it did."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.arrivals.put(error)
        self.begun.set()
        self.ended.set()

    def wake(self) -> None:
        """Make the thread look at what is to be done."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_in, b"w")

    def drain(self) -> None:
        """The thread's side of `wake`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_handle, 4096)

    def want(self, indices: Sequence[int]) -> None:
        with self._lock:
            if self._missing or self._flying or self._waiting:
                raise InvalidInput(f"the frames of {self.handoff} are being taken already")
            self._missing = list(reversed(indices))
        self.wake()

    def say(self, kind: wire.Kind, payload: bytes) -> None:
        """Set the last word; nothing more is asked for."""
        with self._lock:
            self.last_word = (kind, payload)
            self._missing.clear()
        self.wake()

    def next_wanted(self) -> list[int]:
        """Frames to ask for now, within the window."""
        with self._lock:
            room = self._window - len(self._flying) - self._waiting
            fresh = [self._missing.pop() for _ in range(min(room, len(self._missing)))]
            self._flying.update(dict.fromkeys(fresh))
            return fresh

    def taken(self) -> None:
        """The caller has taken one arrival: there is room for another."""
        with self._lock:
            self._waiting -= 1
        self.wake()

    def take_header(self, got: wire.Message) -> None:
        if self.begun.is_set():
            if got.index != self.digest:
                raise TransferFailed(f"the producer began the hand-off {self.handoff} anew, with another header")
            return
        if wire.digest(got.payload) != got.index:
            raise wire.Damaged("a header without content")
        header, limits, note = wire.unpack_header(got.payload)
        check_plan(header, limits, note, self._max_bytes)
        if limits and max(limits) > self._max_message:
            raise TooLarge(
                f"the hand-off {self.handoff} has a frame of up to {max(limits):,} bytes; this receiver takes "
                f"{self._max_message:,} (max_message)"
            )
        self.header, self.limits, self.note, self.digest = header, limits, note, got.index
        self.begun.set()

    def take_frame(self, got: wire.Message) -> None:
        with self._lock:
            index = got.index
            if index not in self._flying:
                self._counts["repeated"] += 1
                return
            if len(got.payload) > self.limits[index]:
                raise TransferFailed(
                    f"frame {index} of {self.handoff} has {len(got.payload)} bytes, {self.limits[index]} were announced"
                )
            del self._flying[index]
            self._waiting += 1
            self._counts["frames"] += 1
        self.arrivals.put(Arrival(index, got.payload, got.stamp, time.monotonic_ns()))

    def close(self) -> None:
        """Free the wake pipe; the thread has ended."""
        os.close(self._wake_in)
        os.close(self.wake_handle)
