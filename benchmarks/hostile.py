"""Peers that mean harm, or have no business here: what they get, and whether honest hand-offs go on beside them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from kvferry.channel.socket import ConsumerKeys, KeyPair, ProducerKeys, SocketReceiver, SocketSender
from kvferry.channel.socket import message as wire
from kvferry.errors import KVFerryError
from tests.channel.serve import frame
from tests.channel.test_socket_faults import serve
from tests.channel.test_socket_hostile import ATTACKS, resident

FRAMES, SIZE = 100, 30_000
SECONDS = 3.0
_ATTACKERS = 2


@dataclass
class Tally:
    """What attackers got, over all of them."""

    tries: int = 0
    refusals: int = 0
    frames: int = 0


def run() -> list[dict[str, Any]]:
    """A row a kind of peer."""
    return [*_keyed(), *_plain()]


def _plain() -> Iterator[dict[str, Any]]:
    """The attacks of the test suite on a server without keys, in a process of its own."""
    process, address = serve(1, FRAMES, SIZE)
    try:
        for attack in ATTACKS:
            yield _beside(attack.__name__.replace("_", " "), attack, SocketReceiver(address, timeout=10.0), process.pid)
    finally:
        process.communicate("")


def _keyed() -> Iterator[dict[str, Any]]:
    """A server with keys; what comes with others, or none."""
    own, honest, stranger = (KeyPair.generate() for _ in range(3))
    with SocketSender(keys=ProducerKeys(own, frozenset({honest.public}))) as sender:
        outgoing = sender.announce("h0")
        outgoing.begin(b"header", [SIZE] * FRAMES)
        for index in range(FRAMES):
            outgoing.push(frame("h0", index, SIZE))
        receiver = SocketReceiver(sender.address, keys=ConsumerKeys(honest, own.public), timeout=10.0)
        tally = Tally()

        def wrong_key(address: str, stop: threading.Event) -> None:
            keys = ConsumerKeys(stranger, own.public)
            _try(SocketReceiver(address, keys=keys, timeout=0.5, stall=0.3), stop, tally)

        def wrong_server_key(address: str, stop: threading.Event) -> None:
            keys = ConsumerKeys(honest, stranger.public)
            _try(SocketReceiver(address, keys=keys, timeout=0.5, stall=0.3), stop, tally)

        def no_key(address: str, stop: threading.Event) -> None:
            _try(SocketReceiver(address, timeout=0.5, stall=0.3), stop, tally)

        def no_key_raw(address: str, stop: threading.Event) -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
                peer.linger = 0
                peer.connect(address)
                while not stop.wait(0.01):
                    tally.tries += 1
                    with contextlib.suppress(zmq.Again):
                        peer.send_multipart(wire.pack(wire.Kind.HELLO, wire.handoff_key("h0")), zmq.NOBLOCK)
                    with contextlib.suppress(zmq.Again):
                        peer.recv_multipart(zmq.NOBLOCK)
                        tally.frames += 1

        for attack in (wrong_key, wrong_server_key, no_key, no_key_raw):
            tally.tries = tally.refusals = tally.frames = 0
            row = _beside(attack.__name__.replace("_", " "), attack, receiver, os.getpid())
            row |= {"tries": tally.tries, "refusals": tally.refusals, "got": tally.frames}
            row["good"] = row["good"] and tally.tries > 0 and tally.frames == 0
            yield row


def _try(receiver: SocketReceiver, stop: threading.Event, tally: Tally) -> None:
    while not stop.is_set():
        tally.tries += 1
        try:
            with receiver.fetch("h0") as incoming:
                tally.frames += sum(1 for _ in incoming.frames())
        except KVFerryError:
            tally.refusals += 1


def _beside(
    name: str, attack: Callable[[str, threading.Event], None], receiver: SocketReceiver, pid: int
) -> dict[str, Any]:
    """Honest hand-offs, one after another, while two attackers are at work."""
    stop = threading.Event()
    address = receiver.settings.address
    attackers = [threading.Thread(target=attack, args=(address, stop), daemon=True) for _ in range(_ATTACKERS)]
    before = peak = resident(pid)
    for attacker in attackers:
        attacker.start()
    until, right, failures = time.monotonic() + SECONDS, 0, []
    longest = 0.0
    try:
        while not right + len(failures) or time.monotonic() < until:
            began = time.monotonic()
            try:
                with receiver.fetch("h0") as incoming:
                    got = {arrival.index: bytes(arrival.data) for arrival in incoming.frames()}
                good = got == {index: frame("h0", index, SIZE) for index in range(FRAMES)}
                right += good
                failures += [] if good else ["wrong frames"]
            except KVFerryError as error:
                failures.append(f"{type(error).__name__}: {error}")
            longest = max(longest, time.monotonic() - began)
            peak = max(peak, resident(pid))
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join(15)
    return {
        "peer": name,
        "honest": right + len(failures),
        "right": right,
        "failures": failures[:3],
        "longest_seconds": longest,
        "memory_growth_mib": (peak - before) / 2**20,
        "good": right > 0 and not failures and not any(attacker.is_alive() for attacker in attackers),
    }
