"""A TCP proxy on the loopback interface that does to a connection what bad links do."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

Fault = Callable[["Flow", bytes], "bytes | None"]
"""Gets what is about to be passed on and returns what shall be; ``None`` cuts the connection."""


class Flow:
    """One direction of one connection: how much has passed, and a random source for its faults."""

    def __init__(self, number: int, down: bool, seed: int):
        self.number = number
        self.down = down
        self.passed = 0
        self.random = random.Random(f"{seed}/{number}/{down}")
        self.state: dict[str, int] = {}


class Proxy:
    """Passes connections on to ``target`` (``tcp://HOST:PORT``), through ``fault``."""

    def __init__(self, target: str, fault: Fault | None = None, seed: int = 0, block: int = 16 << 10):
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._fault = fault or (lambda flow, data: data)
        self._seed = seed
        self._block = block
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target, timeout=2)
            except OSError:
                near.close()
                continue
            number = self.connections
            self.connections += 1
            self._start(self._pass, near, far, number)

    def _pass(self, near: socket.socket, far: socket.socket, number: int) -> None:
        flows = {near: (far, Flow(number, False, self._seed)), far: (near, Flow(number, True, self._seed))}
        with near, far:
            while not self._stop.is_set():
                for source in select.select([near, far], [], [], 0.05)[0]:
                    target, flow = flows[source]
                    try:
                        data = source.recv(self._block)
                        kept = self._fault(flow, data) if data else None
                        if kept is None:
                            return
                        flow.passed += len(data)
                        target.sendall(kept)
                    except OSError:
                        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()


def cut(flow: Flow, data: bytes) -> bytes | None:
    """The connection ends in the middle of something, the first few times."""
    if flow.down and flow.number < 3:
        limit = flow.state.setdefault("limit", flow.random.randrange(1, 300_000))
        if flow.passed + len(data) > limit:
            return None
    return data


def stall(flow: Flow, data: bytes) -> bytes | None:
    """Nothing comes through any more, but the connection stands, the first two times."""
    if flow.number < 2 and flow.down:
        limit = flow.state.setdefault("limit", flow.random.randrange(1, 200_000))
        if flow.passed + len(data) > limit:
            return b""
    return data


def flip(flow: Flow, data: bytes) -> bytes | None:
    """One bit in about 200 kB is wrong, in both directions, on the first six connections."""
    if flow.number >= 6 or flow.random.random() > len(data) / 200_000:
        return data
    changed = bytearray(data)
    changed[flow.random.randrange(len(changed))] ^= 1 << flow.random.randrange(8)
    return bytes(changed)


def duplicate(flow: Flow, data: bytes) -> bytes | None:
    """A block comes twice, on the first three connections."""
    if flow.number < 3 and flow.passed > 50_000 and flow.random.random() < 0.1:
        return data + data
    return data


def drop(flow: Flow, data: bytes) -> bytes | None:
    """A block is lost, on the first three connections."""
    if flow.number < 3 and flow.passed > 20_000 and flow.random.random() < 0.1:
        return b""
    return data


FAULTS: dict[str, Fault] = {"cut": cut, "stall": stall, "flip": flip, "duplicate": duplicate, "drop": drop}
