"""Bad links for the fault table: each injects its fault at a random byte, or message, and says whether it did.

The links of `tests.channel.proxy` pass bytes on; `MessageProxy` passes on whole messages of the socket channel, which
checksums cannot tell from good ones.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq

from tests.channel.proxy import Flow

Message = list[bytes]


class Injector(ABC):
    """A fault of a byte stream, at byte ``place`` of one direction of the first ``times`` connections."""

    def __init__(self, seed: object, totals: tuple[int, int], *, times: int = 1, down_only: bool = False):
        self.random = random.Random(f"{seed}")
        self.down = down_only or self.random.random() < 0.8
        self.place = self.random.randrange(1, totals[0] if self.down else totals[1])
        self.times = self.random.randrange(1, times + 1)
        self.count = 0

    def __call__(self, flow: Flow, data: bytes) -> bytes | None:
        if flow.down != self.down or flow.number >= self.times:
            return data
        if flow.state.get("hit"):
            return self.after(flow, data)
        if flow.passed + len(data) <= self.place:
            return data
        flow.state["hit"] = 1
        self.count += 1
        return self.hit(flow, data, self.place - flow.passed)

    @abstractmethod
    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        """What becomes of the bytes that the fault falls into, at ``at``."""

    def after(self, flow: Flow, data: bytes) -> bytes | None:
        """What becomes of the bytes behind the fault."""
        return data


class Cut(Injector):
    """The connection ends."""

    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        flow.state["cut"] = 1
        return data[:at] or None

    def after(self, flow: Flow, data: bytes) -> bytes | None:
        return None


class Stall(Injector):
    """Nothing comes any more, and the connection stands."""

    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        return data[:at]

    def after(self, flow: Flow, data: bytes) -> bytes | None:
        return b""


class Flip(Injector):
    """One to three bits are wrong."""

    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        changed = bytearray(data)
        for place in {at, *(self.random.randrange(len(data)) for _ in range(self.random.randrange(3)))}:
            changed[place] ^= 1 << self.random.randrange(8)
        return bytes(changed)


class Duplicate(Injector):
    """Some bytes come twice."""

    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        return data[: at + self.random.randrange(1, 4_000)] + data[at:]


class Drop(Injector):
    """Some bytes are lost."""

    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        return data[:at] + data[at + self.random.randrange(1, 4_000) :]


class Reorder(Injector):
    """Some bytes come after those that followed them."""

    def __init__(self, seed: object, totals: tuple[int, int]):
        super().__init__(seed, totals)
        self.held = b""

    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        self.held = data[at : at + self.random.randrange(1, 4_000)]
        rest = data[at + len(self.held) :]
        return data[:at] + self._release(rest)

    def after(self, flow: Flow, data: bytes) -> bytes | None:
        return self._release(data)

    def _release(self, rest: bytes) -> bytes:
        if not rest or not self.held:
            return rest
        step = self.random.randrange(1, len(rest) + 1)
        held, self.held = self.held, b""
        return rest[:step] + held + rest[step:]


class Call(Injector):
    """At that byte something is done to the world: a process is killed."""

    def __init__(self, seed: object, totals: tuple[int, int]):
        super().__init__(seed, totals, down_only=True)
        self.act: Callable[[], object] | None = None

    def hit(self, flow: Flow, data: bytes, at: int) -> bytes | None:
        assert self.act is not None
        self.act()
        return data[:at]


BYTES: dict[str, Callable[[object, tuple[int, int]], Injector]] = {
    "cut": lambda seed, totals: Cut(seed, totals, times=3),
    "stall": lambda seed, totals: Stall(seed, totals, times=2),
    "flip": lambda seed, totals: Flip(seed, totals, times=3),
    "duplicate bytes": Duplicate,
    "drop bytes": Drop,
    "reorder bytes": Reorder,
}
"""Name -> the fault, from a seed and the bytes that an undisturbed hand-off has (down, up)."""


class MessageProxy:
    """Passes whole messages on, and treats number ``place`` of those from the producer as ``kind`` says.

    ``duplicate message``: comes again up to four messages later. ``reorder messages``: comes up to four messages late.
    ``drop message``: never comes.
    """

    def __init__(self, target: str, kind: str, seed: object, messages: int):
        self.random = random.Random(f"{seed}")
        self.kind = kind
        self.place = self.random.randrange(messages)
        self.late = self.random.randrange(1, 5)
        self.count = 0
        self._passed = 0
        self._later: list[tuple[int, Message]] = []
        self._target = target
        self._context: zmq.Context[Any] = zmq.Context()
        self._front: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.sndhwm = self._front.rcvhwm = 0
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(20))
            if self._front in ready:
                client, *parts = self._front.recv_multipart()
                if client not in backs:
                    backs[client] = self._context.socket(zmq.DEALER)
                    backs[client].linger = 0
                    backs[client].connect(self._target)
                    poller.register(backs[client], zmq.POLLIN)
                backs[client].send_multipart(parts)
            for client, back in backs.items():
                if back in ready:
                    for message in self._faulty(back.recv_multipart()):
                        self._front.send_multipart([client, *message])
        for socket in (self._front, *backs.values()):
            socket.close()

    def _faulty(self, message: Message) -> list[Message]:
        number, self._passed = self._passed, self._passed + 1
        due = [late for when, late in self._later if when <= number]
        self._later = [(when, late) for when, late in self._later if when > number]
        if number != self.place:
            return [message, *due]
        self.count += 1
        if self.kind != "drop message":
            self._later.append((number + self.late, message))
        return [message, *due] if self.kind == "duplicate message" else due

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5)
        self._context.term()


MESSAGES = ("duplicate message", "reorder messages", "drop message")
