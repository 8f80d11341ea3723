"""Hand-offs whose frames a consumer reads out of the producer's memory: what all transfer engines share.

Everything else, from the header to the last word, goes over the socket channel, and is authenticated and encrypted as
there: a frame on that channel is a *ticket*, which says where the real one lies, how long it is, its checksum, and what
the engine needs to reach it. So resuming, back-pressure and time-outs are the socket channel's. What an engine moves is
checked against the ticket; the fabric itself encrypts nothing.

A channel over another engine is an `Engine` and two short classes, as in `kvferry.channel.nixl`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import xxhash

from kvferry.channel.base import Arrival, Offered, Traffic, check_complete, check_frame, check_plan
from kvferry.channel.socket import (
    ConsumerKeys,
    ProducerKeys,
    SocketIncoming,
    SocketOutgoing,
    SocketReceiver,
    SocketSender,
)
from kvferry.errors import CorruptPacket, InvalidInput, TooLarge

MAX_TICKET = 64 << 10
"""Most bytes of a ticket: an engine's description of a piece of memory has some hundred."""
MAX_BYTES = 16 << 30
"""Most bytes that a sender has on offer at one time, unless told."""
MAX_MESSAGE = 64 << 20
"""Most bytes of a frame that a receiver takes, unless told."""

TICKET = struct.Struct("<8sQQQ")  # magic, address, length, checksum; then the engine's description
NOTE = struct.Struct("<8sI")  # magic, number of limits; then the limits and the note
_READS = 3
"""Times that a frame is read whose bytes do not match its checksum."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Engine(Protocol):
    """What moves the frames. Its methods are called from any thread, with sizes above 0.

    Attributes:
        name: for messages.
        magic: eight bytes that tell its tickets from another engine's.
    """

    name: str
    magic: bytes

    def open(self, data: Bytes) -> tuple[Any, Bytes, bytes]:
        """Let consumers read ``data``: a handle, the bytes that they read (these or a copy), and how to reach them."""

    def shut(self, handle: Any) -> None:
        """Let nobody read it any more."""

    def read(self, description: bytes, address: int, size: int, timeout: float, what: str) -> Bytes:
        """Bytes of a producer's memory; ``what`` names them in errors.

        Raises:
            CorruptPacket: the description makes no sense.
            TransferFailed: it failed, or took longer than ``timeout`` seconds.
        """


class TicketSender:
    """Serves hand-offs at ``address``, whose frames consumers read by ``engine``.

    Args:
        engine: what moves the frames.
        address, keys: of the socket channel that carries everything else; see `kvferry.channel.socket.SocketSender`.
        max_bytes: most bytes of all hand-offs that are on offer at one time.

    Raises `InvalidInput` for an address that cannot be used.
    """

    def __init__(self, engine: Engine, address: str, *, keys: ProducerKeys | None, max_bytes: int):
        self._engine = engine
        self._control = SocketSender(address, keys=keys)
        self._max_bytes = max_bytes
        self._reserved: dict[TicketOutgoing, int] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._control.address

    def announce(self, handoff: str | None = None) -> TicketOutgoing:
        """Make a hand-off known; consumers that ask wait until it begins. Raises `InvalidInput` for a name in use."""
        return TicketOutgoing(self, self._control.announce(handoff), self._engine)

    def close(self) -> None:
        """Withdraw every hand-off, say so to whoever is connected, and free the link and the memory."""
        self._control.close()
        for offer in list(self._reserved):
            offer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, offer: TicketOutgoing, size: int) -> None:
        """Count ``size`` bytes against ``max_bytes``. Raises `TooLarge`."""
        with self._lock:
            taken = sum(self._reserved.values())
            if taken + size > self._max_bytes:
                raise TooLarge(
                    f"the hand-off {offer.handoff} may have {size:,} bytes; {taken:,} of {self._max_bytes:,} are on "
                    "offer"
                )
            self._reserved[offer] = size

    def forget(self, offer: TicketOutgoing) -> None:
        """Take ``offer`` off."""
        with self._lock:
            self._reserved.pop(offer, None)


class TicketOutgoing(Offered):
    """One hand-off on offer; see `kvferry.channel.base.Outgoing`. Made by `TicketSender.announce`."""

    def __init__(self, sender: TicketSender, control: SocketOutgoing, engine: Engine):
        self.handoff = control.handoff
        self._sender, self._control, self._engine = sender, control, engine
        self._limits: tuple[int, ...] = ()
        self._pieces: list[_Piece] = []

    @property
    def traffic(self) -> Traffic:
        """Of both links; a frame counts when its ticket has gone out."""
        told = self._control.traffic
        read = sum(self._pieces[index].size for index in list(self._control.delivered) if index < len(self._pieces))
        return replace(told, sent=told.sent + read)

    def wait_consumer(self, timeout: float) -> None:
        """See `Outgoing`."""
        self._control.wait_consumer(timeout)

    def begin(self, header: bytes, limits: Sequence[int], note: bytes = b"") -> None:
        """Publish header, size limits and note. Raises `TooLarge` beyond the sender's ``max_bytes``."""
        if self._control.header is not None:  # what is reserved already stays
            raise InvalidInput(f"the hand-off {self.handoff} has begun already")
        self._sender.reserve(self, check_plan(header, limits, note, None))
        packed = NOTE.pack(self._engine.magic, len(limits)) + struct.pack(f"<{len(limits)}Q", *limits) + note
        self._control.begin(header, [MAX_TICKET] * len(limits), packed)
        self._limits = tuple(limits)

    def push(self, frame: bytes | memoryview) -> None:
        """Publish the next frame; it is read where it lies. Raises `TransferFailed` once the consumer has refused."""
        check_frame(self.handoff, len(self._pieces), frame, self._limits)
        piece = _Piece(self._engine, np.frombuffer(frame, dtype=np.uint8))
        self._pieces.append(piece)
        self._control.push(piece.ticket())

    def finish(self, timeout: float) -> Traffic:
        """Return when a consumer has confirmed the whole; `TransferFailed` after ``timeout`` seconds of silence."""
        check_complete(self.handoff, len(self._pieces), self._limits, begun=self._control.header is not None)
        self._control.finish(timeout)
        return self.traffic

    def abort(self, error: BaseException) -> None:
        """Give up: whoever fetches, now or later, gets ``error``."""
        self._control.abort(error)

    def close(self) -> None:
        """Forget the hand-off; its frames cannot be read any more."""
        self._control.close()
        self._sender.forget(self)
        for piece in self._pieces:
            piece.free()


class TicketReceiver:
    """Fetches hand-offs from the producer at ``address``.

    Args:
        engine: what moves the frames.
        address, keys, timeout, stall, window: of the socket channel; see `kvferry.channel.socket.SocketReceiver`.
        max_message: most bytes of a frame; a larger one is refused.

    Raises `InvalidInput` for settings that cannot be.
    """

    def __init__(
        self,
        engine: Engine,
        address: str,
        *,
        keys: ConsumerKeys | None,
        timeout: float,
        stall: float,
        window: int,
        max_message: int,
    ):
        self._control = SocketReceiver(address, keys=keys, timeout=timeout, stall=stall, window=window)
        self._engine = engine
        self._timeout, self._max_message = timeout, max_message

    def fetch(self, handoff: str, *, timeout: float | None = None, max_bytes: int | None = None) -> TicketIncoming:
        """See `Receiver`; raises what `kvferry.channel.socket.SocketReceiver.fetch` does."""
        control = self._control.fetch(handoff, timeout=timeout)
        try:
            limits, note = _unpack_note(control.note, len(control.limits), self._engine)
            check_plan(control.header, limits, note, max_bytes)
            if largest := [limit for limit in limits if limit > self._max_message]:
                raise TooLarge(f"a frame may have {largest[0]:,} bytes, more than {self._max_message:,}")
        except BaseException as error:
            control.refuse(error)
            control.close()
            raise
        return TicketIncoming(control, self._engine, limits, note, self._timeout)


class TicketIncoming:
    """One hand-off coming in; see `kvferry.channel.base.Incoming`. Made by `TicketReceiver.fetch`."""

    def __init__(self, control: SocketIncoming, engine: Engine, limits: tuple[int, ...], note: bytes, timeout: float):
        self.handoff = control.handoff
        self.limits, self.note = limits, note
        self._control, self._engine, self._timeout = control, engine, timeout
        self._read = 0

    @property
    def header(self) -> bytes:
        return self._control.header

    @property
    def traffic(self) -> Traffic:
        told = self._control.traffic
        return replace(told, received=told.received + self._read)

    def frames(self, have: Collection[int] = ()) -> Iterator[Arrival]:
        """Every frame whose index is not in ``have``, as they come, each once.

        Raises `TransferFailed` when none comes, or none can be read, within the receiver's ``timeout``; `CorruptPacket`
        for a ticket that makes no sense or bytes that do not match it; or what the producer aborted with.
        """
        for arrival in self._control.frames(have):
            data = self._fetch(arrival.index, bytes(arrival.data))
            self._read += len(data)
            yield Arrival(arrival.index, data, arrival.sent_ns, time.monotonic_ns())

    def confirm(self) -> None:
        """See `Incoming`."""
        self._control.confirm()

    def refuse(self, error: BaseException) -> None:
        """See `Incoming`."""
        self._control.refuse(error)

    def close(self) -> None:
        """Leave the link."""
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.__exit__(kind, error, trace)

    def _fetch(self, index: int, ticket: bytes) -> memoryview:
        what = f"frame {index} of hand-off {self.handoff}"
        if len(ticket) < TICKET.size:
            raise CorruptPacket(f"{what}: its ticket has {len(ticket)} bytes")
        magic, address, size, checksum = TICKET.unpack_from(ticket)
        if magic != self._engine.magic or size > self.limits[index]:
            raise CorruptPacket(f"{what}: its ticket is none, or of {size:,} bytes where {self.limits[index]:,} may be")
        for _ in range(_READS):
            data = np.empty(0, dtype=np.uint8)
            if size:
                data = self._engine.read(ticket[TICKET.size :], address, size, self._timeout, what)
            if xxhash.xxh3_64_intdigest(data.data) == checksum:
                return data.data
        raise CorruptPacket(f"{what}: {_READS} times its bytes did not match its checksum")


class _Piece:
    """A frame that others may read, until it is freed."""

    def __init__(self, engine: Engine, data: Bytes):
        self.size = data.nbytes
        self._engine, self._data = engine, data
        self._handle: Any = None
        self._description = b""
        if self.size:
            self._handle, self._data, self._description = engine.open(data)
            if len(self._description) > MAX_TICKET - TICKET.size:
                self.free()
                raise InvalidInput(f"{engine.name} describes memory in more bytes than a ticket has")

    def ticket(self) -> bytes:
        """What a consumer needs."""
        address = self._data.ctypes.data if self.size else 0
        checksum = xxhash.xxh3_64_intdigest(self._data.data)
        return TICKET.pack(self._engine.magic, address, self.size, checksum) + self._description

    def free(self) -> None:
        """Let nobody read it any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._engine.shut(handle)


def _unpack_note(packed: bytes, count: int, engine: Engine) -> tuple[tuple[int, ...], bytes]:
    """Limits and note of a hand-off of ``count`` frames. Raises `CorruptPacket` where it is none of this engine's."""
    end = NOTE.size + 8 * count
    if len(packed) < end or NOTE.unpack_from(packed) != (engine.magic, count):
        raise CorruptPacket(
            f"this hand-off's frames do not move by {engine.name}: fetch it over the channel that it is offered on"
        )
    return struct.unpack_from(f"<{count}Q", packed, NOTE.size), packed[end:]
