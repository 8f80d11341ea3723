"""Hand-offs whose frames move by NIXL: the consumer reads them out of the producer's memory (RDMA, NVLink, TCP).

Everything else goes over the socket channel; see `kvferry.channel.tickets`. Needs the package ``nixl``
(`pip install --no-deps nixl nixl-cu12`), with or without a GPU.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from kvferry.channel.base import new_handoff_name
from kvferry.channel.socket import ConsumerKeys, ProducerKeys
from kvferry.channel.tickets import MAX_BYTES, MAX_MESSAGE, Bytes, TicketReceiver, TicketSender
from kvferry.errors import CorruptPacket, InvalidInput, TransferFailed

BACKEND = "UCX"


class NixlSender(TicketSender):
    """A `TicketSender` whose frames consumers read by NIXL.

    Raises `InvalidInput` where NIXL, or its ``backend``, is missing, and for an address that cannot be used.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        keys: ProducerKeys | None = None,
        max_bytes: int = MAX_BYTES,
        backend: str = BACKEND,
    ):
        super().__init__(_Nixl(backend), address, keys=keys, max_bytes=max_bytes)


class NixlReceiver(TicketReceiver):
    """A `TicketReceiver` that reads frames by NIXL.

    Raises `InvalidInput` where NIXL, or its ``backend``, is missing, and for settings that cannot be.
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
        backend: str = BACKEND,
    ):
        super().__init__(
            _Nixl(backend), address, keys=keys, timeout=timeout, stall=stall, window=window, max_message=max_message
        )


class _Nixl:
    """One NIXL agent, as an `Engine`; takes calls one at a time."""

    name = "NIXL"
    magic = b"kvfnixl1"

    def __init__(self, backend: str):
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
            from nixl._bindings import nixlRemoteDisconnectError
        except ImportError as error:
            raise InvalidInput(f"NIXL is missing ({error}): pip install --no-deps nixl nixl-cu12") from error
        # The agent's own progress thread serves readers while Python is elsewhere.
        settings = nixl_agent_config(backends=[backend], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent: Any = nixl_agent(f"kvferry-{new_handoff_name()}", settings)
        if backend not in self._agent.backends:
            raise InvalidInput(f"NIXL has no backend {backend!r} here: {', '.join(self._agent.plugin_list)} are")
        self._disconnected: type[Exception] = nixlRemoteDisconnectError
        self._lock = threading.Lock()

    def open(self, data: Bytes) -> tuple[Any, Bytes, bytes]:
        """See `Engine`."""
        with self._lock:
            registered = self._agent.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
            description = bytes(self._agent.get_partial_agent_metadata(registered, inc_conn_info=True))
        return registered, data, description

    def shut(self, handle: Any) -> None:
        """See `Engine`."""
        with self._lock:
            self._agent.deregister_memory(handle)

    def read(self, description: bytes, address: int, size: int, timeout: float, what: str) -> Bytes:
        """See `Engine`."""
        data = np.empty(size, dtype=np.uint8)
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
        except self._disconnected as error:
            raise TransferFailed(f"{what}: NIXL's producer is gone: {error}") from error
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
