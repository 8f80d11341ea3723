"""Producer's end of the socket channel: a server that any number of consumers pull hand-offs from.

One thread owns the socket. Producers push frames from threads of their own; a frame is kept, not copied, until the
hand-off is closed, so that a consumer whose connection broke can ask for it again. Nothing that a consumer sends makes
the server allocate: requests are bounded in size and number, and what is not understood is counted and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from typing import Any, Self

import zmq

from kvferry.channel import faults
from kvferry.channel.base import check_name, new_handoff_name
from kvferry.channel.socket import message as wire
from kvferry.channel.socket.guard import LOOK_MS, Connections
from kvferry.channel.socket.offer import Peer, SocketOutgoing
from kvferry.channel.socket.security import Gatekeeper, ProducerKeys, check_address
from kvferry.errors import InvalidInput, TooLarge, TransferFailed, UnsupportedVersion

logger = logging.getLogger(__name__)

HEARTBEAT = 0.5
"""Seconds between two WAIT messages to a consumer that has nothing to receive."""

_PARTING = 1.0
"""Most seconds that a closing server waits for its peers to hear the last word and leave."""

_MAX_PEERS = 8
_REMEMBERED = 1024
_ENOUGH_AT_ONCE = 256
_QUEUED_REQUESTS = 8
_CONNECTION_BYTES = 16 << 20


class SocketSender:
    """Serves hand-offs at ``address``.

    Args:
        address: ``tcp://HOST:PORT`` (port ``*``: any free one) or ``ipc://PATH``; loopback only unless ``keys`` are
            given.
        keys: this producer's key pair and the consumers that may come in.
        max_bytes: most bytes of all hand-offs that are on offer at one time.

    Raises `InvalidInput` for an address that cannot be used.
    """

    def __init__(
        self, address: str = "tcp://127.0.0.1:*", *, keys: ProducerKeys | None = None, max_bytes: int = 16 << 30
    ):
        check_address(address, keys=keys is not None)
        self.moved = threading.Condition()
        self.damaged = 0
        self._max_bytes = max_bytes
        self._offers: dict[bytes, SocketOutgoing] = {}
        self._parting: list[SocketOutgoing] = []
        self._ended: dict[bytes, bytes | None] = {}
        self._failure: BaseException | None = None
        self._closing = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._gatekeeper = None if keys is None else Gatekeeper(self._context, keys)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.IPV6, int("[" in address))
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.RCVHWM, _QUEUED_REQUESTS)
        self._router.setsockopt(zmq.RCVBUF, 64 << 10)
        self._router.setsockopt(zmq.SNDHWM, 2 * wire.MAX_WANTED)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
        self._router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._connections = Connections(self._router, _CONNECTION_BYTES)
        if self._gatekeeper is not None:
            self._gatekeeper.guard(self._router)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._free()
            raise InvalidInput(f"cannot listen at {address}: {error}") from error
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._thread = threading.Thread(target=self._run, name="kvferry-sender", daemon=True)
        self._thread.start()

    def announce(self, handoff: str | None = None) -> SocketOutgoing:
        """Make a hand-off known; consumers that ask wait until it begins. Raises `InvalidInput` for a name in use."""
        name = new_handoff_name() if handoff is None else check_name(handoff)
        offer = SocketOutgoing(self, name)
        with self.moved:
            self.check()
            if offer.key in self._offers:
                raise InvalidInput(f"the hand-off {name} is on offer already")
            self._offers[offer.key] = offer
            self._ended.pop(offer.key, None)
        return offer

    def close(self) -> None:
        """Withdraw every hand-off, say so to whoever is connected, and free the socket when they have left.

        A connection that is shut while its peer still speaks may take the last word with it, so peers get a second.
        """
        with self.moved:
            if self._closing:
                return
            withdrawn = faults.to_bytes(TransferFailed("the producer has closed"))
            for offer in self._offers.values():
                if not offer.confirmed and offer.error is None:
                    offer.error = withdrawn
            self._closing = True
        self.wake()
        self._thread.join()
        self._free()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- called by SocketOutgoing ---

    def reserve(self, offer: SocketOutgoing, size: int) -> None:
        """Count ``size`` bytes against ``max_bytes``; the lock is held."""
        taken = sum(other.reserved for other in self._offers.values())
        if taken + size > self._max_bytes:
            raise TooLarge(
                f"the hand-off {offer.handoff} may have {size:,} bytes; {taken:,} of {self._max_bytes:,} are on offer"
            )
        offer.reserved = size

    def forget(self, offer: SocketOutgoing) -> None:
        """Take ``offer`` off; its peers are told why unless one of them confirmed."""
        with self.moved:
            if self._offers.pop(offer.key, None) is None:
                return
            if offer.error is None and not offer.confirmed:
                offer.error = faults.to_bytes(TransferFailed("the producer withdrew this hand-off"))
            self._ended[offer.key] = offer.error
            while len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            offer.frames.clear()
            self._parting.append(offer)
        self.wake()

    def check(self) -> None:
        """Raise `TransferFailed` unless the server runs; the lock is held."""
        if self._failure is not None:
            raise TransferFailed(f"the server at {self.address} failed: {self._failure!r}") from self._failure
        if self._closing:
            raise TransferFailed(f"the server at {self.address} is closed")

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_in, b"w")

    # --- the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        busy, leave_by = False, math.inf
        try:
            while time.monotonic() < leave_by:
                ready = dict(poller.poll(10 if busy or self._closing else LOOK_MS))
                if self._wake_out in ready:
                    os.read(self._wake_out, 4096)
                if self._router in ready:
                    self._receive()
                self._connections.look()
                with self.moved:
                    busy = not self._serve()
                    if self._closing:
                        if not self._connections:
                            break
                        leave_by = min(leave_by, time.monotonic() + _PARTING)
        except BaseException as error:
            logger.exception("the server at %s failed", self.address)
            with self.moved:
                self._failure = error
                self.moved.notify_all()
        finally:
            with self.moved:
                self._closing = True
                self.moved.notify_all()
            self._connections.close()
            self._router.close(linger=1_000)

    def _receive(self) -> None:
        for _ in range(_ENOUGH_AT_ONCE):
            try:
                address, *parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            size = sum(map(len, parts))
            with self.moved:
                try:
                    self._handle(address, wire.unpack(parts), size)
                except wire.Foreign:
                    self.damaged += 1
                    continue
                except wire.Damaged as reason:
                    self.damaged += 1
                    logger.debug("dropped a message: %s", reason)
                    self._reply(address, None, wire.Kind.REPEAT)
                except wire.OtherVersion as version:
                    error = UnsupportedVersion(
                        f"the producer speaks version {wire.PROTOCOL_VERSION} of the socket protocol, not {version}"
                    )
                    self._reply(address, None, wire.Kind.ERROR, faults.to_bytes(error))
                self.moved.notify_all()

    def _handle(self, address: bytes, got: wire.Message, size: int) -> None:
        offer = self._offers.get(got.handoff)
        if offer is None:
            self._answer_for_ended(address, got)
            return
        offer.counts["received"] += size
        offer.heard = time.monotonic()
        peer = offer.peers.get(address)
        if got.kind == wire.Kind.HELLO:
            if peer is None:
                peer = self._admit(offer, address)
            peer.wants_header, peer.knows_header = True, got.index
        elif got.kind == wire.Kind.WANT:
            wanted = wire.unpack_ranges(got.payload, offer.count)
            if peer is None:
                return  # a connection that has not said HELLO
            if len(peer.wanted | dict.fromkeys(wanted)) > wire.MAX_WANTED:
                raise wire.Damaged("wants more frames than are allowed at once")
            peer.wanted.update(dict.fromkeys(wanted))
        elif got.kind == wire.Kind.DONE:
            offer.confirmed = True
            self._reply(address, offer, wire.Kind.BYE)
        elif got.kind == wire.Kind.ERROR:
            offer.refusal = faults.from_bytes(bytes(got.payload))
            self._reply(address, offer, wire.Kind.BYE)
        else:
            raise wire.Damaged(f"a consumer sent {got.kind.name}")
        if peer is not None:
            peer.heard = offer.heard

    def _admit(self, offer: SocketOutgoing, address: bytes) -> Peer:
        if len(offer.peers) >= _MAX_PEERS:
            quietest = min(offer.peers.values(), key=lambda peer: peer.heard)
            del offer.peers[quietest.address]
        offer.counts["reconnects"] += offer.greeted
        offer.greeted = True
        peer = offer.peers[address] = Peer(address)
        return peer

    def _answer_for_ended(self, address: bytes, got: wire.Message) -> None:
        known = got.handoff in self._ended
        error = self._ended.get(got.handoff)
        if known and error is None and got.kind in (wire.Kind.DONE, wire.Kind.ERROR):
            self._reply(address, None, wire.Kind.BYE, key=got.handoff)
            return
        if error is None:
            state = "has ended that hand-off" if known else "has no such hand-off"
            error = faults.to_bytes(TransferFailed(f"the producer {state}"))
        self._reply(address, None, wire.Kind.ERROR, error, key=got.handoff)

    def _serve(self) -> bool:
        """Send all that can be sent now; whether nothing is left that only waits for room in a queue."""
        emptied = True
        now = time.monotonic()
        for offer in [*self._parting, *self._offers.values()]:
            if offer.error is not None:
                for address in list(offer.peers):
                    self._reply(address, offer, wire.Kind.ERROR, offer.error)
                offer.peers.clear()
            for peer in list(offer.peers.values()):
                emptied &= self._serve_peer(offer, peer, now)
        self._parting.clear()
        return emptied

    def _serve_peer(self, offer: SocketOutgoing, peer: Peer, now: float) -> bool:
        if peer.wants_header and offer.header is not None:
            same = peer.knows_header == offer.header_digest
            if not self._reply(
                peer.address, offer, wire.Kind.HEADER, b"" if same else offer.header, index=offer.header_digest
            ):
                return False
            peer.wants_header, peer.told = False, now
        for index in [index for index in peer.wanted if index < len(offer.frames)]:
            if not self._reply(peer.address, offer, wire.Kind.FRAME, offer.frames[index], index=index):
                return False
            if peer.address not in offer.peers:
                break
            del peer.wanted[index]
            peer.told = now
            offer.counts["repeated" if index in offer.delivered else "frames"] += 1
            offer.delivered.add(index)
        if (peer.wanted or peer.wants_header) and now - peer.told >= HEARTBEAT:
            peer.told = now
            self._reply(peer.address, offer, wire.Kind.WAIT, index=len(offer.frames))
        return True

    def _reply(
        self,
        address: bytes,
        offer: SocketOutgoing | None,
        kind: wire.Kind,
        payload: bytes | memoryview = b"",
        *,
        index: int = 0,
        key: bytes = bytes(16),
    ) -> bool:
        """Give one message to the socket; ``False`` when the peer's queue is full. A peer that left is forgotten."""
        parts = wire.pack(kind, key if offer is None else offer.key, index, payload)
        try:
            self._router.send_multipart([address, *parts], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.ENOTCONN):
                raise
            if offer is not None:
                offer.peers.pop(address, None)
            return True
        if offer is not None:
            offer.counts["sent"] += sum(map(len, parts))
        return True

    def _free(self) -> None:
        self._connections.close()
        self._router.close(linger=0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()
