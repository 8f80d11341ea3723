"""Hand-offs whose frames move by NIXL: the consumer reads them out of the producer's memory (RDMA, NVLink, TCP).

Everything else, from the header to the last word, goes over the socket channel, and is authenticated and encrypted as
there: a frame on that channel is a *ticket*, which says where the real one lies, how long it is, its checksum, and what
NIXL needs to reach it. So resuming, back-pressure and time-outs are the socket channel's. What NIXL moves is checked
against the ticket; the fabric itself encrypts nothing.

Needs the package ``nixl`` (`pip install --no-deps nixl nixl-cu12`), with or without a GPU.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from kvferry.channel.base import Arrival, Traffic, check_complete, check_frame, check_plan, new_handoff_name
from kvferry.channel.socket import (
    ConsumerKeys,
    ProducerKeys,
    SocketIncoming,
    SocketOutgoing,
    SocketReceiver,
    SocketSender,
)
from kvferry.errors import CorruptPacket, InvalidInput, TooLarge, TransferFailed

BACKEND = "UCX"
MAX_TICKET = 64 << 10
"""Most bytes of a ticket: NIXL's description of a piece of memory has some hundred."""

_TICKET = struct.Struct("<8sQQQ")  # magic, address, length, checksum; then NIXL's description
_MAGIC = b"kvfnixl1"
_NOTE = struct.Struct("<8sI")  # magic, number of limits; then the limits and the note
_READS = 3
"""Times that a frame is read whose bytes do not match its checksum."""


class NixlSender:
    """Serves hand-offs at ``address``, whose frames consumers read by NIXL.

    Args:
        address, keys: of the socket channel that carries everything else; see `kvferry.channel.socket.SocketSender`.
        max_bytes: most bytes of all hand-offs that are on offer at one time.
        backend: of NIXL.

    Raises `InvalidInput` where NIXL, or the backend, is missing, and for an address that cannot be used.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        keys: ProducerKeys | None = None,
        max_bytes: int = 16 << 30,
        backend: str = BACKEND,
    ):
        self._memory = _Memory(backend)
        self._control = SocketSender(address, keys=keys)
        self._max_bytes = max_bytes
        self._reserved: dict[NixlOutgoing, int] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._control.address

    def announce(self, handoff: str | None = None) -> NixlOutgoing:
        """Make a hand-off known; consumers that ask wait until it begins. Raises `InvalidInput` for a name in use."""
        return NixlOutgoing(self, self._control.announce(handoff), self._memory)

    def close(self) -> None:
        """Withdraw every hand-off, say so to whoever is connected, and free the link and the memory."""
        self._control.close()
        for offer in list(self._reserved):
            offer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, offer: NixlOutgoing, size: int) -> None:
        """Count ``size`` bytes against ``max_bytes``. Raises `TooLarge`."""
        with self._lock:
            taken = sum(self._reserved.values())
            if taken + size > self._max_bytes:
                raise TooLarge(
                    f"the hand-off {offer.handoff} may have {size:,} bytes; {taken:,} of {self._max_bytes:,} are on "
                    "offer"
                )
            self._reserved[offer] = size

    def forget(self, offer: NixlOutgoing) -> None:
        """Take ``offer`` off."""
        with self._lock:
            self._reserved.pop(offer, None)


class NixlOutgoing:
    """One hand-off on offer; see `kvferry.channel.base.Outgoing`. Made by `NixlSender.announce`."""

    def __init__(self, sender: NixlSender, control: SocketOutgoing, memory: _Memory):
        self.handoff = control.handoff
        self._sender, self._control, self._memory = sender, control, memory
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
        packed = _NOTE.pack(_MAGIC, len(limits)) + struct.pack(f"<{len(limits)}Q", *limits) + note
        self._control.begin(header, [MAX_TICKET] * len(limits), packed)
        self._limits = tuple(limits)

    def push(self, frame: bytes | memoryview) -> None:
        """Publish the next frame; it is read where it lies. Raises `TransferFailed` once the consumer has refused."""
        check_frame(self.handoff, len(self._pieces), frame, self._limits)
        piece = self._memory.register(np.frombuffer(frame, dtype=np.uint8))
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()


class NixlReceiver:
    """Fetches hand-offs from the producer at ``address``.

    Args:
        address, keys, timeout, stall, window: of the socket channel; see `kvferry.channel.socket.SocketReceiver`.
        max_message: most bytes of a frame; a larger one is refused.
        backend: of NIXL.

    Raises `InvalidInput` where NIXL is missing, and for settings that cannot be.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: ConsumerKeys | None = None,
        timeout: float = 60.0,
        stall: float = 5.0,
        window: int = 8,
        max_message: int = 64 << 20,
        backend: str = BACKEND,
    ):
        self._control = SocketReceiver(address, keys=keys, timeout=timeout, stall=stall, window=window)
        self._memory = _Memory(backend)
        self._timeout, self._max_message = timeout, max_message

    def fetch(self, handoff: str, *, timeout: float | None = None, max_bytes: int | None = None) -> NixlIncoming:
        """See `Receiver`; raises what `kvferry.channel.socket.SocketReceiver.fetch` does."""
        control = self._control.fetch(handoff, timeout=timeout)
        try:
            limits, note = _unpack_note(control.note, len(control.limits))
            check_plan(control.header, limits, note, max_bytes)
            if largest := [limit for limit in limits if limit > self._max_message]:
                raise TooLarge(f"a frame may have {largest[0]:,} bytes, more than {self._max_message:,}")
        except BaseException as error:
            control.refuse(error)
            control.close()
            raise
        return NixlIncoming(control, self._memory, limits, note, self._timeout)


class NixlIncoming:
    """One hand-off coming in; see `kvferry.channel.base.Incoming`. Made by `NixlReceiver.fetch`."""

    def __init__(self, control: SocketIncoming, memory: _Memory, limits: tuple[int, ...], note: bytes, timeout: float):
        self.handoff = control.handoff
        self.limits, self.note = limits, note
        self._control, self._memory, self._timeout = control, memory, timeout
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
        if len(ticket) < _TICKET.size:
            raise CorruptPacket(f"{what}: its ticket has {len(ticket)} bytes")
        magic, address, size, checksum = _TICKET.unpack_from(ticket)
        if magic != _MAGIC or size > self.limits[index]:
            raise CorruptPacket(f"{what}: its ticket is none, or of {size:,} bytes where {self.limits[index]:,} may be")
        for _ in range(_READS):
            data = self._memory.read(ticket[_TICKET.size :], address, size, self._timeout, what)
            if xxhash.xxh3_64_intdigest(data.data) == checksum:
                return data.data
        raise CorruptPacket(f"{what}: {_READS} times its bytes did not match its checksum")


class _Piece:
    """A frame that others may read, until it is freed."""

    def __init__(self, memory: _Memory, data: np.ndarray[Any, Any]):
        self.size = data.nbytes
        self._memory, self._data = memory, data
        self._registered: Any = None
        self._description = b""
        if self.size:
            self._registered, self._description = memory.open(data)

    def ticket(self) -> bytes:
        """What a consumer needs."""
        address = self._data.ctypes.data if self.size else 0
        return _TICKET.pack(_MAGIC, address, self.size, xxhash.xxh3_64_intdigest(self._data.data)) + self._description

    def free(self) -> None:
        """Let nobody read it any more."""
        registered, self._registered = self._registered, None
        if registered is not None:
            self._memory.shut(registered)


class _Memory:
    """One NIXL agent; calls are taken one at a time, and from any thread."""

    def __init__(self, backend: str):
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise InvalidInput(f"NIXL is missing ({error}): pip install --no-deps nixl nixl-cu12") from error
        # The agent's own progress thread serves readers while Python is elsewhere.
        settings = nixl_agent_config(backends=[backend], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent: Any = nixl_agent(f"kvferry-{new_handoff_name()}", settings)
        if backend not in self._agent.backends:
            raise InvalidInput(f"NIXL has no backend {backend!r} here: {', '.join(self._agent.plugin_list)} are")
        self._lock = threading.Lock()

    def register(self, data: np.ndarray[Any, Any]) -> _Piece:
        """Let consumers read ``data`` where it lies."""
        return _Piece(self, data)

    def open(self, data: np.ndarray[Any, Any]) -> tuple[Any, bytes]:
        """Register bytes; the handle, and what a consumer's agent needs to reach them."""
        with self._lock:
            registered = self._agent.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
            description = bytes(self._agent.get_partial_agent_metadata(registered, inc_conn_info=True))
        if len(description) > MAX_TICKET - _TICKET.size:
            raise InvalidInput(f"NIXL describes memory in {len(description):,} bytes, more than a ticket has")
        return registered, description

    def shut(self, registered: Any) -> None:
        """Take bytes off."""
        with self._lock:
            self._agent.deregister_memory(registered)

    def read(self, description: bytes, address: int, size: int, timeout: float, what: str) -> np.ndarray[Any, Any]:
        """Bytes of another agent's memory.

        Raises:
            CorruptPacket: NIXL makes nothing of the description.
            TransferFailed: it failed, or took longer than ``timeout`` seconds.
        """
        data = np.empty(size, dtype=np.uint8)
        if not size:
            return data
        with self._lock:
            own = self._agent.register_memory([(data.ctypes.data, size, 0, "")], "DRAM")
            try:
                self._pull(description, (data.ctypes.data, address), size, timeout, what)
            finally:
                self._agent.deregister_memory(own)
        return data

    def _pull(self, description: bytes, places: tuple[int, int], size: int, timeout: float, what: str) -> None:
        try:
            peer = self._agent.add_remote_agent(description)
            here, there = (self._agent.get_xfer_descs([(place, size, 0)], "DRAM") for place in places)
            handle = self._agent.initialize_xfer("READ", here, there, peer)
        except Exception as error:  # the bindings' classes have no common base
            raise CorruptPacket(f"{what}: NIXL cannot reach it: {error}") from error
        until, pause = time.monotonic() + timeout, 20e-6
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > until:
                    raise TransferFailed(f"waited {timeout:g} s for NIXL to read {what}")
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
                state = self._agent.check_xfer_state(handle)
        except TransferFailed:
            raise
        except Exception as error:
            raise TransferFailed(f"{what}: NIXL failed: {error}") from error
        finally:
            handle.release()
        if state != "DONE":
            raise TransferFailed(f"{what}: NIXL failed to read it: {state}")


def _unpack_note(packed: bytes, count: int) -> tuple[tuple[int, ...], bytes]:
    """Limits and note of a hand-off of ``count`` frames. Raises `CorruptPacket` where it is none of this channel."""
    end = _NOTE.size + 8 * count
    if len(packed) < end or _NOTE.unpack_from(packed) != (_MAGIC, count):
        raise CorruptPacket("this hand-off's frames do not move by NIXL: fetch it over the socket channel")
    return struct.unpack_from(f"<{count}Q", packed, _NOTE.size), packed[end:]
