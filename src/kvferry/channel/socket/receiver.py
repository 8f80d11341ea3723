"""Consumer's end of the socket channel: asks for what it lacks, until it has everything or time is up.

One thread a hand-off owns the connection, so that frames come in while earlier ones are being decoded. It asks for at
most ``window`` frames ahead of whoever takes them (that bounds memory and is the back-pressure), and whenever the link
is silent, broken or damages a message it asks again for what is missing, over a new connection where need be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import zmq

from kvferry.channel import faults
from kvferry.channel.base import Arrival, Traffic, check_name
from kvferry.channel.socket import message as wire
from kvferry.channel.socket.link import Link, LinkSettings
from kvferry.channel.socket.security import ConsumerKeys, check_address
from kvferry.channel.socket.transfer import Transfer
from kvferry.errors import InvalidInput, KVFerryError, TransferFailed

logger = logging.getLogger(__name__)


class SocketReceiver:
    """Fetches hand-offs from the producer at ``address``.

    Args:
        address: as `SocketSender.address` says it; loopback only unless ``keys`` are given.
        keys: this consumer's key pair and the producer's public key.
        timeout: longest wait, in seconds, for any one thing: the header, the next frame, the last word.
        stall: seconds of silence after which the connection is made anew.
        window: frames asked for, or here, ahead of whoever takes them.
        max_message: most bytes of one message, that is of a header or a frame; a larger one is refused.

    Raises `InvalidInput` for settings that cannot be.
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
    ):
        if timeout <= 0 or stall <= 0 or not 1 <= window <= wire.MAX_WANTED or max_message < 1:
            raise InvalidInput(
                f"timeout {timeout} s, stall {stall} s, window {window} and max_message {max_message}: all must be "
                f"positive, the window at most {wire.MAX_WANTED}"
            )
        check_address(address, keys=keys is not None)
        self.settings = LinkSettings(address, keys, timeout, stall, window, max_message)

    def fetch(self, handoff: str, *, timeout: float | None = None, max_bytes: int | None = None) -> SocketIncoming:
        """Ask for ``handoff`` and return when its header is here, which may take ``timeout`` seconds.

        With ``math.inf`` only silence counts: the header may take any time while the producer says that it is there,
        which it does by itself, and `TransferFailed` comes after the receiver's own ``timeout`` without a word.

        Raises `TransferFailed`, `UnsupportedVersion`, `TooLarge` (beyond ``max_bytes`` of header and frames, or a frame
        beyond ``max_message``), `CorruptPacket`, or what the producer aborted with.
        """
        incoming = SocketIncoming(self.settings, check_name(handoff), timeout or self.settings.timeout, max_bytes)
        try:
            incoming.start()
        except BaseException:
            incoming.close()
            raise
        return incoming


class SocketIncoming:
    """One hand-off coming in; see `kvferry.channel.base.Incoming`. Made by `SocketReceiver.fetch`."""

    def __init__(self, settings: LinkSettings, handoff: str, header_timeout: float, max_bytes: int | None):
        self.handoff = handoff
        self._transfer = Transfer(handoff, settings.window, settings.max_message, max_bytes)
        self._context: zmq.Context[Any] = zmq.Context()
        self._link = Link(self._context, self._transfer, settings, header_timeout)
        self._thread = threading.Thread(target=self._run, name="kvferry-receiver", daemon=True)
        self._closed = False

    @property
    def header(self) -> bytes:
        return self._transfer.header

    @property
    def note(self) -> bytes:
        return self._transfer.note

    @property
    def limits(self) -> Sequence[int]:
        return self._transfer.limits

    @property
    def traffic(self) -> Traffic:
        return self._transfer.traffic

    def start(self) -> None:
        """Ask, and return when the header is here."""
        self._thread.start()
        self._transfer.begun.wait()
        self._transfer.check()

    def frames(self, have: Collection[int] = ()) -> Iterator[Arrival]:
        """Every frame whose index is not in ``have``, as they come, each once.

        Raises `TransferFailed` when none comes within the receiver's ``timeout``, or what the producer aborted with.
        """
        held = frozenset(have)
        wanted = [index for index in range(len(self.limits)) if index not in held]
        self._transfer.want(wanted)
        for _ in wanted:
            arrival = self._transfer.arrivals.get()
            if isinstance(arrival, BaseException):
                raise arrival
            self._transfer.taken()
            yield arrival

    def confirm(self) -> None:
        """Tell the producer that all is well. Where it cannot be told any more, the frames are here all the same."""
        self._say(wire.Kind.DONE, b"")

    def refuse(self, error: BaseException) -> None:
        """Tell the producer why this hand-off is not taken; one that cannot be told finds out by its time-out."""
        self._say(wire.Kind.ERROR, faults.to_bytes(error))

    def close(self) -> None:
        """Leave the link; nothing more comes out of `frames`."""
        if self._closed:
            return
        self._closed = True
        self._transfer.closing = True
        self._transfer.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.term()
        self._transfer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._transfer.ended.is_set():
            self.refuse(error)
        self.close()

    def _say(self, kind: wire.Kind, payload: bytes) -> None:
        self._transfer.say(kind, payload)
        self._transfer.ended.wait()
        try:
            self._transfer.check()
        except KVFerryError as error:
            logger.warning("the producer did not hear the last word about %s: %s", self.handoff, error)

    def _run(self) -> None:
        transfer = self._transfer
        try:
            self._link.run()
        except KVFerryError as error:
            transfer.fail(error)
        except BaseException as error:
            logger.exception("the receiver of %s failed", self.handoff)
            transfer.fail(TransferFailed(f"the receiver of {self.handoff} failed: {error!r}"))
        else:
            if not transfer.ended.is_set():
                transfer.fail(TransferFailed(f"the hand-off {self.handoff} was closed"))
