"""The thread behind a fetched hand-off: one connection at a time, and the clocks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import zmq

from kvferry.channel import faults
from kvferry.channel.socket import message as wire
from kvferry.channel.socket.guard import LOOK_MS, Connections
from kvferry.channel.socket.security import ConsumerKeys, use_keys
from kvferry.channel.socket.transfer import Transfer
from kvferry.errors import TransferFailed

logger = logging.getLogger(__name__)

KEEPALIVE = 0.5
"""Seconds between two messages to the producer while nothing is awaited from it: the caller is at work."""

_SLACK = 16 << 20
_MOST_DAMAGED = 1_000
_MOST_SPOILED = 8
_MOST_CUT = 3


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How to reach the producer, and how patient to be; see `kvferry.channel.socket.SocketReceiver`."""

    address: str
    keys: ConsumerKeys | None
    timeout: float
    stall: float
    window: int
    max_message: int


class Link:
    """Fetches one `Transfer`. `run` returns when the last word is answered or the caller left; else it raises."""

    def __init__(self, context: zmq.Context[Any], transfer: Transfer, settings: LinkSettings, header_timeout: float):
        self._context = context
        self._transfer = transfer
        self._settings = settings
        self._header_timeout = header_timeout
        self._dealer: zmq.Socket[bytes] | None = None
        self._connections: Connections | None = None
        self._heard = self._progress = self._alive = self._told = time.monotonic()
        self._awaited: str | None = None
        self._said = False
        self._spoiled = 0  # damaged messages since the last good one
        self._failures = 0
        self._cut = 0
        self._shaken = False
        self._dropped_handshakes = 0

    def run(self) -> None:
        try:
            self._connect()
            while not self._transfer.closing and not self._transfer.ended.is_set():
                self._mind_the_clocks()
                self._step()
        finally:
            self._disconnect()

    def _connect(self) -> None:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, int("[" in self._settings.address))
        dealer.setsockopt(zmq.MAXMSGSIZE, self._settings.max_message + _SLACK)
        dealer.setsockopt(zmq.RCVHWM, 2 * self._settings.window + 16)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
        dealer.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if self._settings.keys is not None:
            use_keys(dealer, self._settings.keys)
        self._connections = Connections(dealer, self._allowance())
        dealer.connect(self._settings.address)
        self._dealer = dealer
        self._spoiled = 0
        self._shaken = False
        self._heard = time.monotonic()
        self._ask_again()

    def _allowance(self) -> int:
        """Bytes that one connection may bring: everything twice, for what is asked for again."""
        return 2 * (sum(self._transfer.limits) + self._settings.max_message) + _SLACK

    def _disconnect(self) -> None:
        if self._connections is not None:
            self._connections.close()
        if self._dealer is not None:
            self._dealer.close(linger=0)
        self._dealer = self._connections = None

    def _reconnect(self, why: str) -> None:
        logger.info("connecting anew to %s: %s", self._settings.address, why)
        self._disconnect()
        self._transfer.count("reconnects")
        self._failures += 1
        self._nap(min(1.0, 0.02 * 2 ** min(self._failures, 6)))
        self._connect()

    def _nap(self, seconds: float) -> None:
        """Wait before a new attempt, but not longer than the caller wants to."""
        poller = zmq.Poller()
        poller.register(self._transfer.wake_handle, zmq.POLLIN)
        until = time.monotonic() + seconds
        while not self._transfer.closing and (left := until - time.monotonic()) > 0:
            if poller.poll(int(left * 1_000) + 1):
                self._transfer.drain()

    def _send(self, kind: wire.Kind, payload: bytes = b"", index: int = 0) -> None:
        assert self._dealer is not None
        self._told = time.monotonic()
        parts = wire.pack(kind, self._transfer.key, index, payload)
        with contextlib.suppress(zmq.Again):  # a full queue is a dead link: the stall clock sees to it
            self._dealer.send_multipart(parts, zmq.NOBLOCK)
            self._transfer.count("sent", sum(map(len, parts)))

    def _ask_again(self) -> None:
        """Say everything that the producer needs to know to go on, on a new connection or after damage."""
        self._send(wire.Kind.HELLO, index=self._transfer.digest)
        if flying := self._transfer.flying:
            self._send(wire.Kind.WANT, wire.pack_ranges(sorted(flying)))
        self._say_last_word()

    def _say_last_word(self) -> None:
        if self._transfer.last_word is not None:
            self._said = True
            self._send(*self._transfer.last_word)

    def _step(self) -> None:
        """Wait for something to happen, a moment at most, and see to it."""
        assert self._dealer is not None
        assert self._connections is not None
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._transfer.wake_handle, zmq.POLLIN)
        poller.register(self._connections.monitor, zmq.POLLIN)
        ready = dict(poller.poll(LOOK_MS))
        if self._transfer.wake_handle in ready:
            self._transfer.drain()
        if self._dealer in ready:
            self._receive()
        lost = self._lost_connection(self._connections)
        if lost:
            self._receive()  # its last words came before it broke, and go with the socket
        if (lost or self._spoiled >= _MOST_SPOILED) and not self._transfer.ended.is_set():
            self._reconnect("the connection broke" if lost else "nothing makes sense any more")
        elif not self._said and self._transfer.last_word is not None:
            self._say_last_word()
        elif wanted := self._transfer.next_wanted():
            self._send(wire.Kind.WANT, wire.pack_ranges(wanted))
        elif self._awaited is None and time.monotonic() - self._told >= KEEPALIVE:
            self._send(wire.Kind.WANT)  # nothing: whoever takes the frames is at work

    def _lost_connection(self, connections: Connections) -> bool:
        events = connections.look()
        self._cut += connections.cut
        connections.cut = 0
        if self._cut > _MOST_CUT:
            raise TransferFailed(f"{self._settings.address} sends more than it announced, again and again")
        if zmq.EVENT_HANDSHAKE_FAILED_AUTH in events:
            raise TransferFailed(f"the producer at {self._settings.address} does not accept this consumer's key")
        lost = zmq.EVENT_DISCONNECTED in events
        self._shaken |= zmq.EVENT_HANDSHAKE_SUCCEEDED in events
        self._dropped_handshakes += lost and not self._shaken
        return lost

    def _receive(self) -> None:
        assert self._dealer is not None
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            parts = [frame.buffer for frame in frames]
            self._transfer.count("received", sum(map(len, parts)))
            try:
                self._handle(wire.unpack(parts))
            except wire.Damaged as reason:
                self._note_damage(str(reason))
            except wire.OtherVersion as version:
                raise TransferFailed(
                    f"the producer speaks version {version} of the socket protocol, this consumer version "
                    f"{wire.PROTOCOL_VERSION}"
                ) from version

    def _note_damage(self, reason: str) -> None:
        logger.debug("a message was lost: %s", reason)
        if self._transfer.count("damaged") > _MOST_DAMAGED:
            raise TransferFailed(f"over {_MOST_DAMAGED} messages from or to {self._settings.address} were damaged")
        self._spoiled += 1
        if self._spoiled < _MOST_SPOILED:
            self._ask_again()

    def _handle(self, got: wire.Message) -> None:
        if got.kind == wire.Kind.REPEAT:
            self._note_damage("the producer could not read it")
            return
        if got.kind == wire.Kind.ERROR and got.handoff in (self._transfer.key, bytes(16)):
            error = faults.from_bytes(bytes(got.payload))
            error.add_note(f"said by the producer at {self._settings.address} about hand-off {self._transfer.handoff}")
            raise error
        if got.handoff != self._transfer.key:
            raise wire.Damaged("about another hand-off")
        self._heard = self._alive = time.monotonic()
        self._spoiled = 0
        if got.kind == wire.Kind.HEADER:
            self._transfer.take_header(got)
            if self._connections is not None:
                self._connections.allowance = self._allowance()
        elif got.kind == wire.Kind.FRAME:
            self._transfer.take_frame(got)
            self._progress = self._heard
            self._failures = 0
        elif got.kind == wire.Kind.BYE:
            if self._transfer.last_word is not None:
                self._transfer.ended.set()
        elif got.kind != wire.Kind.WAIT:
            raise wire.Damaged(f"a producer sent {got.kind.name}")

    def _mind_the_clocks(self) -> None:
        """Raise `TransferFailed` for what has been awaited too long; connect anew after silence."""
        now = time.monotonic()
        transfer, longest = self._transfer, self._settings.timeout
        awaited, what = None, ""
        if not transfer.begun.is_set():
            awaited, what, longest = "header", "the header", self._header_timeout
        elif transfer.last_word is not None:
            awaited, what = "bye", "the producer's last word"
        elif flying := transfer.flying:
            awaited, what = "frames", f"frame {flying[0]} of {len(transfer.limits)}"
        if awaited != self._awaited:  # a new wait begins
            self._awaited, self._progress, self._heard = awaited, now, now
        if awaited is None:
            return
        if now - self._progress > longest:
            raise TransferFailed(self._too_long(what, longest))
        if math.isinf(longest) and now - self._alive > self._settings.timeout:
            raise TransferFailed(self._too_long(f"a sign of life before {what}", self._settings.timeout))
        if now - self._heard > self._settings.stall:
            self._reconnect(f"{self._settings.stall:g} s of silence")

    def _too_long(self, what: str, longest: float) -> str:
        traffic = self._transfer.traffic
        text = (
            f"waited {longest:g} s for {what} of hand-off {self._transfer.handoff} from {self._settings.address}: "
            f"{traffic.frames} frames came, {traffic.reconnects} connections were made anew"
        )
        if self._dropped_handshakes and not traffic.received:
            text += f", {self._dropped_handshakes} of them dropped before they were set up: are the keys right?"
        return text
