"""Bounds what one connection may pour into a ØMQ socket, and tells what happens to connections.

``MAXMSGSIZE`` bounds one part of a message and the high-water mark the number of whole messages, but a peer can send a
message of endlessly many parts, which libzmq gathers in memory until the last one comes. So the bytes that the kernel
has received on each TCP connection are looked at twenty times a second, and a connection beyond its allowance is shut
down; what libzmq had gathered is freed with it. An honest peer that was cut off connects again and goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket as sockets
import struct
import sys
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

LOOK_MS = 50
"""Milliseconds between two looks."""

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
)
_OPENED = (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED)
_ENDED = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info, since 4.1
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # so that the kernel does not wait for the peer to end either
_names = itertools.count()

Peer = tuple[Any, Any]


class Connections:
    """The TCP connections of one ØMQ socket. Used by the thread that owns the socket; make it before bind or connect.

    Attributes:
        allowance: bytes that may arrive on one connection.
        cut: connections that were shut down for exceeding it.
    """

    def __init__(self, socket: zmq.Socket[Any], allowance: int):
        self.allowance = allowance
        self.cut = 0
        self._socket = socket
        self._handles: set[int] = set()
        self._open: dict[int, Peer] = {}
        address = f"inproc://kvferry-monitor-{next(_names)}"
        socket.monitor(address, _EVENTS)
        self.monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would block libzmq's own thread
        self.monitor.connect(address)

    def __len__(self) -> int:
        """Connections, of any transport, that were open at the last look."""
        return len(self._handles)

    def look(self) -> list[int]:
        """Shut down the connections beyond their allowance; returns the events since the last look."""
        events = list(self._events())
        for handle, peer in list(self._open.items()):
            with _borrowed(handle) as connection:
                if connection is None or _peer(connection) != peer:
                    del self._open[handle]
                elif _received(connection) > self.allowance:
                    logger.warning("a peer sent more than %d bytes over one connection: it is cut", self.allowance)
                    self.cut += 1
                    del self._open[handle]
                    connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET_AT_CLOSE)
                    connection.shutdown(sockets.SHUT_RDWR)
        return events

    def close(self) -> None:
        """Stop looking; the socket itself stays."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close()

    def _events(self) -> Any:
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind, handle = int(event["event"]), int(event["value"])
            if kind in _OPENED:
                self._handles.add(handle)
                with _borrowed(handle) as connection:
                    peer = None if connection is None else _peer(connection)
                if peer is not None:
                    self._open[handle] = peer
            elif kind in _ENDED:
                self._handles.discard(handle)
                self._open.pop(handle, None)
            yield kind


@contextlib.contextmanager
def _borrowed(handle: int) -> Any:
    """A socket object for libzmq's file descriptor for a moment, or ``None`` when that is no TCP connection (any more).

    The descriptor may have been closed and given to something else meanwhile, so whoever uses it compares both ends.
    """
    try:
        connection = sockets.socket(fileno=os.dup(handle))
    except OSError:
        yield None
        return
    with connection:
        yield connection if connection.family in (sockets.AF_INET, sockets.AF_INET6) else None


def _peer(connection: sockets.socket) -> Peer | None:
    try:
        return connection.getsockname(), connection.getpeername()
    except OSError:
        return None


def _received(connection: sockets.socket) -> int:
    if not sys.platform.startswith("linux"):
        return 0  # no such count elsewhere: there, keys are what keeps strangers out
    try:
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 256)
    except OSError:
        return 0
    return int(struct.unpack_from("<Q", info, _BYTES_RECEIVED)[0]) if len(info) >= _BYTES_RECEIVED + 8 else 0
