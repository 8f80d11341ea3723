"""One hand-off on offer over a socket: what the producer's threads and the server's thread share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.channel import faults
from kvferry.channel.base import Offered, Traffic, check_complete, check_frame, check_plan
from kvferry.channel.socket import message as wire
from kvferry.errors import InvalidInput, TransferFailed


class Server(Protocol):
    """What an offer needs of the server that it is on."""

    address: str
    moved: threading.Condition

    def reserve(self, offer: SocketOutgoing, size: int) -> None:
        """Count ``size`` bytes against ``max_bytes``; the lock is held."""

    def forget(self, offer: SocketOutgoing) -> None:
        """Take ``offer`` off."""

    def check(self) -> None:
        """Raise `TransferFailed` unless the server runs; the lock is held."""

    def wake(self) -> None:
        """Make the server's thread look at what is to be sent."""


class Peer:
    """One connection of a consumer that asked for a hand-off."""

    def __init__(self, address: bytes) -> None:
        self.address = address
        self.wanted: dict[int, None] = {}
        self.wants_header = False
        self.knows_header = 0
        self.heard = time.monotonic()
        self.told = 0.0


class SocketOutgoing(Offered):
    """One hand-off on offer; see `kvferry.channel.base.Outgoing`. Made by `SocketSender.announce`."""

    def __init__(self, sender: Server, handoff: str):
        self.handoff = handoff
        self.key = wire.handoff_key(handoff)
        self.header: bytes | None = None
        self.header_digest = 0
        self.frames: list[bytes | memoryview] = []
        self.delivered: set[int] = set()
        self.error: bytes | None = None
        self.refusal: Exception | None = None
        self.confirmed = False
        self.heard: float | None = None
        self.greeted = False
        self.peers: dict[bytes, Peer] = {}
        self.counts = dict.fromkeys(("sent", "received", "frames", "repeated", "damaged", "reconnects"), 0)
        self.reserved = 0
        self._limits: Sequence[int] = ()
        self._sender = sender
        self._moved = sender.moved

    @property
    def traffic(self) -> Traffic:
        with self._moved:
            return Traffic(**self.counts)

    @property
    def count(self) -> int:
        """Number of frames, once `begin` has been called."""
        return len(self._limits)

    def wait_consumer(self, timeout: float) -> None:
        """Return when a consumer has asked for this hand-off; raise `TransferFailed` after ``timeout`` seconds."""
        with self._moved:
            self._wait(lambda: self.heard is not None, timeout, "a consumer to ask for it")

    def begin(self, header: bytes, limits: Sequence[int], note: bytes = b"") -> None:
        """Publish header, size limits and note. Raises `TooLarge` beyond the sender's ``max_bytes``."""
        most = check_plan(header, limits, note, None)
        payload = wire.pack_header(header, limits, note)
        with self._moved:
            if self.header is not None:
                raise InvalidInput(f"the hand-off {self.handoff} has begun already")
            self._sender.reserve(self, most)
            self._limits = tuple(limits)
            self.header, self.header_digest = payload, wire.digest(payload)
        self._sender.wake()

    def push(self, frame: bytes | memoryview) -> None:
        """Publish the next frame. Raises `TransferFailed` once the consumer has refused."""
        with self._moved:
            self._check()
            check_frame(self.handoff, len(self.frames), frame, self._limits)
            self.frames.append(frame)
        self._sender.wake()

    def finish(self, timeout: float) -> Traffic:
        """Return when a consumer has confirmed the whole; `TransferFailed` after ``timeout`` seconds of silence."""
        with self._moved:
            check_complete(self.handoff, len(self.frames), self._limits, begun=self.header is not None)
            self._wait(lambda: self.confirmed, timeout, "the consumer to confirm it")
            return Traffic(**self.counts)

    def abort(self, error: BaseException) -> None:
        """Give up: whoever fetches, now or later, gets ``error``."""
        with self._moved:
            self.error = faults.to_bytes(error)
        self._sender.wake()

    def close(self) -> None:
        """Forget the hand-off and its frames; a consumer that still asks is told so."""
        self._sender.forget(self)

    def _check(self) -> None:
        if self.refusal is not None:
            raise TransferFailed(f"the consumer refused the hand-off {self.handoff}: {self.refusal}") from self.refusal
        self._sender.check()

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        """With the lock held: until ``done()``, or `TransferFailed` when the consumer is silent for ``timeout``."""
        began = time.monotonic()
        while not done():
            self._check()
            left = max(began, self.heard or 0.0) + timeout - time.monotonic()
            if left <= 0:
                raise TransferFailed(
                    f"waited {timeout:g} s for {what}: hand-off {self.handoff} at {self._sender.address}, "
                    f"{len(self.delivered)} of {len(self._limits)} frames sent"
                )
            self._moved.wait(left)
