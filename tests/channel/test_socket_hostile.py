"""Peers that mean harm: they get nothing, cost little, and an honest hand-off goes on beside them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.channel.socket import SocketReceiver
from kvferry.channel.socket import message as wire
from kvferry.errors import KVFerryError
from tests.channel.serve import frame
from tests.channel.test_socket_faults import serve

FRAMES, SIZE = 300, 30_000
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, str]]:
    process, address = serve(1, FRAMES, SIZE)
    yield process.pid, address
    assert process.poll() is None, "the server died"
    process.communicate("")
    assert process.returncode == 0


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plain(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def greeted(address: str) -> socket.socket:
    """A connection that has gone through ZMTP's handshake."""
    connection = plain(address)
    connection.sendall(GREETING + READY)
    connection.recv(64)
    return connection


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(address)
        yield peer


def noise(address: str, stop: threading.Event) -> None:
    source = random.Random(1)
    while not stop.is_set():
        with contextlib.suppress(OSError), plain(address) as connection:
            connection.sendall(source.randbytes(source.randrange(1, 4_000)))


def noise_after_greeting(address: str, stop: threading.Event) -> None:
    source = random.Random(2)
    while not stop.is_set():
        with contextlib.suppress(OSError), greeted(address) as connection:
            connection.sendall(source.randbytes(source.randrange(1, 40_000)))


def oversized(address: str, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(OSError), greeted(address) as connection:
            connection.sendall(b"\x02" + struct.pack(">Q", 1 << 40) + bytes(1 << 20))
            time.sleep(0.01)


def endless_parts(address: str, stop: threading.Event) -> None:
    """One message of ever more parts, which libzmq would gather for ever."""
    block = (b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)) * 16
    while not stop.is_set():
        with contextlib.suppress(OSError), greeted(address) as connection:
            while not stop.is_set():
                connection.sendall(block)


def slow(address: str, stop: threading.Event) -> None:
    """Two hundred connections that say a byte now and then."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(plain(address)) for _ in range(200)]
        for byte in GREETING:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(bytes([byte]))
            if stop.wait(0.05):
                return
        stop.wait()


def strangers(address: str, stop: threading.Event) -> None:
    """Well-formed requests for hand-offs that do not exist, and answers never read."""
    with dealer(address) as peer:
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                peer.send_multipart(wire.pack(wire.Kind.HELLO, os.urandom(16)), zmq.NOBLOCK)


def greedy(address: str, stop: threading.Event) -> None:
    """A peer that knows the hand-off, asks for everything again and again, and never reads."""
    key = wire.handoff_key("h0")
    with dealer(address) as peer:
        peer.rcvhwm = 1
        while not stop.is_set():
            for start in range(0, FRAMES - 100, 100):
                with contextlib.suppress(zmq.Again):
                    peer.send_multipart(wire.pack(wire.Kind.HELLO, key), zmq.NOBLOCK)
                    wanted = wire.pack_ranges(range(start, start + 100))
                    peer.send_multipart(wire.pack(wire.Kind.WANT, key, payload=wanted), zmq.NOBLOCK)
            time.sleep(0.001)


def nonsense(address: str, stop: threading.Event) -> None:
    """Every kind of message with the right checksum and contents that make no sense."""
    key, source = wire.handoff_key("h0"), random.Random(3)
    with dealer(address) as peer:
        while not stop.is_set():
            kind = source.choice([kind for kind in wire.Kind if kind not in (wire.Kind.DONE, wire.Kind.ERROR)])
            payload = source.randbytes(source.randrange(300))
            parts = wire.pack(kind, key, source.randrange(2**64), payload)
            with contextlib.suppress(zmq.Again):
                peer.send_multipart(parts + [b"more"] * source.choice([0, 0, 1, 9]), zmq.NOBLOCK)
            with contextlib.suppress(zmq.Again):
                peer.recv_multipart(zmq.NOBLOCK)


ATTACKS = [noise, noise_after_greeting, oversized, endless_parts, slow, strangers, greedy, nonsense]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_honest_handoff_goes_on_beside(server: tuple[int, str], attack: Callable[..., None]) -> None:
    pid, address = server
    before = resident(pid)
    peak = before
    stop = threading.Event()
    attackers = [threading.Thread(target=attack, args=(address, stop), daemon=True) for _ in range(2)]
    for attacker in attackers:
        attacker.start()
    until = time.monotonic() + 1.5
    rounds = 0
    try:
        while rounds < 1 or time.monotonic() < until:
            with SocketReceiver(address, timeout=10.0).fetch("h0") as incoming:
                for arrival in incoming.frames():
                    assert bytes(arrival.data) == frame("h0", arrival.index, SIZE)
                    peak = max(peak, resident(pid))
            rounds += 1
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join(10)
    assert rounds >= 1
    assert peak - before < 200 << 20


def test_an_endless_message_of_a_false_producer_is_cut() -> None:
    """The consumer's side of `endless_parts`: the connection is cut before memory grows, and the wait ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def pour() -> None:
        listener.settimeout(0.1)
        block = (b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)) * 4
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(GREETING + READY.replace(b"\x06DEALER", b"\x06ROUTER"))
                    while not stop.is_set():
                        connection.sendall(block)

    thread = threading.Thread(target=pour)
    thread.start()
    before, peak = resident(os.getpid()), 0
    watching = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not watching.wait(0.01):
            peak = max(peak, resident(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        receiver = SocketReceiver(f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout=3.0, max_message=1 << 20)
        with pytest.raises(KVFerryError):
            receiver.fetch("h0")
    finally:
        stop.set()
        watching.set()
        thread.join()
        watcher.join()
        listener.close()
    assert peak - before < 400 << 20
