"""Hand-offs whose frames move by Mooncake's Transfer Engine: the consumer reads them out of the producer's memory.

Mooncake takes RDMA where it finds it, else TCP, and needs no metadata server here. Everything but the frames goes over
the socket channel; see `kvferry.channel.tickets`. Its own listeners are open on every interface of the host: whoever
reaches them may read, and overwrite, the frames on offer. So it is for networks whose machines are all trusted.

Needs the package ``mooncake-transfer-engine-non-cuda`` (or ``mooncake-transfer-engine`` beside CUDA) and libibverbs.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvferry.channel.socket import ConsumerKeys, ProducerKeys
from kvferry.channel.tickets import MAX_BYTES, MAX_MESSAGE, Bytes, TicketReceiver, TicketSender
from kvferry.errors import CorruptPacket, InvalidInput, TransferFailed

INSTALL = "pip install --no-deps mooncake-transfer-engine-non-cuda, and libibverbs1 of the distribution"
_DONE, _FAILED = 1, -1
_OVERLAP = -7
_LOOPBACK = "127.0.0.1"


class MooncakeSender(TicketSender):
    """A `TicketSender` whose frames consumers read by Mooncake.

    ``host`` is the name or number by which consumers reach this machine; by default that of ``address``.

    Raises `InvalidInput` where Mooncake is missing, and for an address that cannot be used.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        keys: ProducerKeys | None = None,
        max_bytes: int = MAX_BYTES,
        host: str | None = None,
    ):
        host = host or _host_of(address)
        if host in ("*", "0.0.0.0", "[::]"):
            raise InvalidInput(f"{address} names no host that consumers could read from: give it as host")
        super().__init__(_engine(host), address, keys=keys, max_bytes=max_bytes)


class MooncakeReceiver(TicketReceiver):
    """A `TicketReceiver` that reads frames by Mooncake.

    ``host`` is the name or number of this machine; by default that of the interface that leads to ``address``.

    Raises `InvalidInput` where Mooncake is missing, and for settings that cannot be.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: ConsumerKeys | None = None,
        timeout: float = 60.0,
        stall: float = 5.0,
        window: int = 8,
        max_message: int = MAX_MESSAGE,
        host: str | None = None,
    ):
        engine = _engine(host or _interface(_host_of(address)))
        super().__init__(
            engine, address, keys=keys, timeout=timeout, stall=stall, window=window, max_message=max_message
        )


class _Mooncake:
    """One transfer engine, as an `Engine`. Takes calls from many threads at once."""

    name = "Mooncake"
    magic = b"kvfmoon1"

    def __init__(self, host: str):
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it tells of every start
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise InvalidInput(f"Mooncake is missing ({error}): {INSTALL}") from error
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):  # "tcp": no memory of a fabric's own
            raise InvalidInput(f"Mooncake cannot start as {host}; it says why on standard error")
        self._place = f"{host}:{self._engine.get_rpc_port()}".encode()
        self._offered: dict[int, Bytes] = {}  # what others may read has to stay where it is

    def open(self, data: Bytes) -> tuple[Any, Bytes, bytes]:
        """See `Engine`."""
        state = self._engine.register_memory(data.ctypes.data, data.nbytes)
        if state == _OVERLAP:  # it offers no byte twice: these are a frame's already
            data = data.copy()
            state = self._engine.register_memory(data.ctypes.data, data.nbytes)
        if state:
            raise TransferFailed(f"Mooncake cannot offer {data.nbytes:,} bytes: error {state}")
        self._offered[data.ctypes.data] = data
        return data.ctypes.data, data, self._place

    def shut(self, handle: Any) -> None:
        """See `Engine`."""
        self._engine.unregister_memory(handle)
        del self._offered[handle]

    def read(self, description: bytes, address: int, size: int, timeout: float, what: str) -> Bytes:
        """See `Engine`."""
        try:
            place = description.decode("ascii")
        except UnicodeDecodeError as error:
            raise CorruptPacket(f"{what}: its ticket names no place") from error
        ended: Future[str] = Future()
        data = np.empty(size, dtype=np.uint8)
        # Mooncake keeps its own time-outs, and may write into the bytes until they are over: a thread keeps them.
        arguments = (self._engine, place, address, data, ended)
        threading.Thread(target=_pull, args=arguments, name="kvferry-mooncake", daemon=True).start()
        try:
            problem = ended.result(timeout)
        except TimeoutError as error:
            raise TransferFailed(f"waited {timeout:g} s for Mooncake to read {what}") from error
        if problem:
            raise TransferFailed(f"{what}: Mooncake {problem}")
        return data


def _pull(engine: Any, place: str, address: int, data: Bytes, ended: Future[str]) -> None:
    """Read into ``data``, and set what went wrong, or nothing."""
    try:
        ended.set_result(_transfer(engine, place, address, data))
    except BaseException as error:
        ended.set_exception(error)


def _transfer(engine: Any, place: str, address: int, data: Bytes) -> str:
    own, size = data.ctypes.data, data.nbytes
    if state := engine.register_memory(own, size):
        return f"cannot take {size:,} bytes: error {state}"
    try:
        if not (batch := engine.batch_transfer_async_read(place, [own], [address], [size])):
            return f"cannot reach {place}"
        pause = 20e-6
        while (state := engine.transfer_check_status(batch)) not in (_DONE, _FAILED):
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
    finally:
        engine.unregister_memory(own)
    return "" if state == _DONE else f"failed to read it from {place}"


_engines: dict[str, _Mooncake] = {}
_starting = threading.Lock()


def _engine(host: str) -> _Mooncake:
    """The one of this process: to stop one takes a second, in which nothing else runs."""
    with _starting:
        if host not in _engines:
            _engines[host] = _Mooncake(host)
        return _engines[host]


def _host_of(address: str) -> str:
    """Host of the socket channel's address, as in ``tcp://HOST:PORT``; of a path, this one."""
    scheme, _, place = address.partition("://")
    return place.rpartition(":")[0] if scheme == "tcp" else _LOOPBACK


def _interface(host: str) -> str:
    """This machine's own address on the way to ``host``. Nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidInput(f"no way leads to {host!r}: {error}") from error
    return f"[{found}]" if family == socket.AF_INET6 else found
