"""The socket channel between an honest producer and an honest consumer."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
import zmq

from kvferry.channel.socket import (
    ConsumerKeys,
    KeyPair,
    ProducerKeys,
    SocketOutgoing,
    SocketReceiver,
    SocketSender,
    consumer_keys,
    producer_keys,
)
from kvferry.channel.socket import message as wire
from kvferry.errors import (
    IncompatibleIdentity,
    InvalidInput,
    KVFerryError,
    TooLarge,
    TransferFailed,
    UnsupportedVersion,
)


@pytest.fixture
def sender() -> Iterator[SocketSender]:
    with SocketSender() as server:
        yield server


def push_all(outgoing: SocketOutgoing, frames: list[bytes]) -> None:
    for frame in frames:
        outgoing.push(frame)


def take_all(receiver: SocketReceiver, name: str, between: Callable[[], None] = lambda: None) -> list[bytes]:
    """Fetch ``name``, do ``between``, and return the frames in order."""
    with receiver.fetch(name) as incoming:
        between()
        arrivals = {arrival.index: bytes(arrival.data) for arrival in incoming.frames()}
        incoming.confirm()
    return [arrivals[index] for index in sorted(arrivals)]


def offer(sender: SocketSender, name: str, frames: list[bytes], **options: float) -> threading.Thread:
    """Push ``frames`` from a thread of its own, and wait there for the consumer's word."""
    outgoing = sender.announce(name)

    def produce() -> None:
        with outgoing:
            outgoing.begin(name.encode(), [len(frame) for frame in frames])
            for frame in frames:
                outgoing.push(frame)
                if "pause" in options:
                    time.sleep(options["pause"])
            outgoing.finish(10.0)

    thread = threading.Thread(target=produce)
    thread.start()
    return thread


def test_frames_come_while_later_ones_are_still_being_made(sender: SocketSender) -> None:
    outgoing = sender.announce("slow")
    received = []
    with outgoing:
        outgoing.begin(b"h", [1] * 3)
        with SocketReceiver(sender.address).fetch("slow") as incoming:
            frames = incoming.frames()
            for index in range(3):
                outgoing.push(b"%d" % index)
                received.append(bytes(next(frames).data))
            incoming.confirm()
        outgoing.finish(1.0)
    assert received == [b"0", b"1", b"2"]


def test_a_consumer_that_is_early_waits_for_the_header(sender: SocketSender) -> None:
    outgoing = sender.announce("later")

    def produce() -> None:
        outgoing.wait_consumer(5.0)
        time.sleep(1.2)  # longer than the receiver's patience with silence: only the server's signs of life help
        outgoing.begin(b"here", [])
        outgoing.finish(5.0)
        outgoing.close()

    thread = threading.Thread(target=produce)
    thread.start()
    with SocketReceiver(sender.address, stall=0.8).fetch("later") as incoming:
        assert incoming.header == b"here"
        assert incoming.traffic.reconnects == 0
        incoming.confirm()
    thread.join()


def test_a_consumer_may_come_before_the_server() -> None:
    with SocketSender() as first:
        address = first.address
    late: list[SocketSender] = []

    def start() -> None:
        time.sleep(0.5)
        late.append(SocketSender(address))
        offer(late[0], "early", [b"x"]).join()

    thread = threading.Thread(target=start)
    thread.start()
    with _patiently(lambda: SocketReceiver(address).fetch("early")) as incoming:
        assert [bytes(arrival.data) for arrival in incoming.frames()] == [b"x"]
        incoming.confirm()
    thread.join()
    late[0].close()


def test_many_handoffs_at_once(sender: SocketSender) -> None:
    content = {f"h{i}": [os.urandom(1 + 997 * j * i) for j in range(20)] for i in range(8)}
    producers = [offer(sender, name, frames) for name, frames in content.items()]
    got: dict[str, list[bytes]] = {}

    def consume(name: str) -> None:
        with SocketReceiver(sender.address, window=3).fetch(name) as incoming:
            arrivals = {arrival.index: bytes(arrival.data) for arrival in incoming.frames()}
            incoming.confirm()
        got[name] = [arrivals[index] for index in range(20)]

    consumers = [threading.Thread(target=consume, args=(name,)) for name in content]
    for thread in consumers:
        thread.start()
    for thread in consumers + producers:
        thread.join(20)
    assert got == content


def test_a_slow_consumer_holds_the_producer_back(sender: SocketSender) -> None:
    outgoing = sender.announce("eager")
    with outgoing:
        outgoing.begin(b"h", [1000] * 50)
        for _ in range(50):
            outgoing.push(bytes(1000))
        with SocketReceiver(sender.address, window=4).fetch("eager") as incoming:
            frames = incoming.frames()
            for taken in range(1, 50):
                next(frames)
                time.sleep(0.005)
                assert outgoing.traffic.frames <= taken + 4 + 1
            next(frames)
            incoming.confirm()
        outgoing.finish(1.0)


def test_a_refusal_stops_the_producer(sender: SocketSender) -> None:
    outgoing = sender.announce("refused")
    outgoing.begin(b"h", [1] * 1000)
    with pytest.raises(IncompatibleIdentity), SocketReceiver(sender.address).fetch("refused"):
        raise IncompatibleIdentity("made for another model", {"weights": ("a", "b")})
    with pytest.raises(TransferFailed, match=r"refused.*another model.*weights"):
        push_all(outgoing, [b"x"] * 1000)


@pytest.mark.parametrize("awaited", ["header", "frame"])
def test_a_wait_ends_and_says_for_what(sender: SocketSender, awaited: str) -> None:
    outgoing = sender.announce("stuck")
    if awaited == "frame":
        outgoing.begin(b"h", [1, 1])
        outgoing.push(b"x")
    began = time.monotonic()
    with pytest.raises(TransferFailed, match=rf"waited 0\.7 s for.*{awaited}.*stuck.*{sender.address}"):
        take_all(SocketReceiver(sender.address, timeout=0.7), "stuck")
    assert time.monotonic() - began < 3.0


def test_a_server_that_is_not_there_is_an_error_in_time() -> None:
    with SocketSender() as gone:
        address = gone.address
    with pytest.raises(TransferFailed, match=r"waited 0\.5 s for the header"):
        SocketReceiver(address, timeout=0.5).fetch("x")


def test_a_consumer_that_never_comes_or_never_ends_is_an_error_in_time(sender: SocketSender) -> None:
    outgoing = sender.announce("lonely")
    with pytest.raises(TransferFailed, match=r"waited 0\.3 s for a consumer to ask"):
        outgoing.wait_consumer(0.3)
    outgoing.begin(b"h", [])
    with pytest.raises(TransferFailed, match=r"waited 0\.3 s for the consumer to confirm"):
        outgoing.finish(0.3)


def test_too_much_on_offer_is_refused() -> None:
    with SocketSender(max_bytes=1_000) as sender:
        first = sender.announce()
        first.begin(b"h", [600])
        with pytest.raises(TooLarge, match="601 of 1,000"):
            sender.announce().begin(b"h", [600])
        first.close()
        sender.announce().begin(b"h", [600])


def test_a_frame_larger_than_the_receiver_takes_is_refused(sender: SocketSender) -> None:
    sender.announce("large").begin(b"h", [10, 2_000])
    with pytest.raises(TooLarge, match="2,000"):
        SocketReceiver(sender.address, max_message=1_000).fetch("large")


def test_a_name_is_offered_once(sender: SocketSender) -> None:
    sender.announce("twice")
    with pytest.raises(InvalidInput, match="on offer already"):
        sender.announce("twice")


def test_an_address_in_use_or_impossible_is_refused(sender: SocketSender) -> None:
    with pytest.raises(InvalidInput, match="in use"):
        SocketSender(sender.address)
    for address in ("tcp://127.0.0.1:99999", "127.0.0.1:5", "udp://127.0.0.1:5", "tcp://", ""):
        with pytest.raises(InvalidInput):
            SocketSender(address)
        with pytest.raises(InvalidInput):
            SocketReceiver(address)


@pytest.mark.parametrize(
    "settings", [{"timeout": 0}, {"stall": -1}, {"window": 0}, {"window": 10**6}, {"max_message": 0}]
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        SocketReceiver("tcp://127.0.0.1:1", **settings)  # type: ignore[arg-type]


def of_version(version: int, head: bytes, payload: bytes) -> bytes:
    """The head as another version would write it, checksum included."""
    changed = head[:4] + version.to_bytes(2, "little") + head[6:-8]
    return changed + xxhash.xxh3_64_intdigest(changed + payload).to_bytes(8, "little")


def test_other_protocol_versions_are_refused_by_name(sender: SocketSender) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(sender.address)
        head, payload = wire.pack(wire.Kind.HELLO, wire.handoff_key("x"))
        dealer.send_multipart([of_version(7, bytes(head), bytes(payload)), payload])
        assert dealer.poll(2_000)
        answer = wire.unpack(dealer.recv_multipart())
    assert answer.kind == wire.Kind.ERROR
    assert b"UnsupportedVersion" in answer.payload
    assert b"not 7" in answer.payload


def test_a_producer_of_another_version_is_refused_by_name() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            address, head, payload = router.recv_multipart()
            router.send_multipart([address, of_version(7, head, payload), payload])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((TransferFailed, UnsupportedVersion), match="version 7"):
            SocketReceiver(f"tcp://127.0.0.1:{port}", timeout=3.0).fetch("x")
        thread.join()


def test_ipv6_and_ipc_work_without_keys(tmp_path: Path) -> None:
    for address in ("tcp://[::1]:*", f"ipc://{tmp_path}/socket"):
        with SocketSender(address) as sender:
            thread = offer(sender, "x", [b"frame"])
            assert take_all(SocketReceiver(sender.address), "x") == [b"frame"]
            thread.join()


# --- keys ---


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:5555", "tcp://example.org:5555"])
def test_without_keys_nothing_leaves_the_machine(address: str) -> None:
    with pytest.raises(InvalidInput, match="without keys"):
        SocketSender(address)
    with pytest.raises(InvalidInput, match="without keys"):
        SocketReceiver(address)


@pytest.fixture
def pairs() -> tuple[KeyPair, KeyPair, KeyPair]:
    return KeyPair.generate(), KeyPair.generate(), KeyPair.generate()


def test_with_keys_the_right_consumer_gets_in_and_others_do_not(pairs: tuple[KeyPair, KeyPair, KeyPair]) -> None:
    server, friend, stranger = pairs
    with SocketSender("tcp://0.0.0.0:*", keys=ProducerKeys(server, frozenset({friend.public}))) as sender:
        address = sender.address.replace("0.0.0.0", "127.0.0.1")
        thread = offer(sender, "secret", [b"frame"] * 10)
        with pytest.raises(TransferFailed, match="does not accept this consumer's key"):
            SocketReceiver(address, keys=ConsumerKeys(stranger, server.public), timeout=3.0).fetch("secret")
        with pytest.raises(TransferFailed, match="waited"):  # no key at all
            SocketReceiver(address, timeout=0.8).fetch("secret")
        with pytest.raises(TransferFailed, match="are the keys right"):  # the wrong server key
            SocketReceiver(address, keys=ConsumerKeys(friend, stranger.public), timeout=0.8).fetch("secret")
        with SocketReceiver(address, keys=ConsumerKeys(friend, server.public)).fetch("secret") as incoming:
            assert len(list(incoming.frames())) == 10
            incoming.confirm()
        thread.join()


def test_keys_go_through_files(tmp_path: Path, pairs: tuple[KeyPair, KeyPair, KeyPair]) -> None:
    server, friend, _ = pairs
    server_public, server_secret = server.save(tmp_path / "server")
    friend_public, friend_secret = friend.save(tmp_path / "friend")
    assert server_secret.stat().st_mode & 0o777 == 0o600
    assert producer_keys(server_secret, [friend_public]) == ProducerKeys(server, frozenset({friend.public}))
    assert consumer_keys(friend_secret, server_public) == ConsumerKeys(friend, server.public)
    assert str(friend.secret) not in repr(friend)
    with pytest.raises(InvalidInput, match="no secret key"):
        KeyPair.load(server_public)
    for bad in (tmp_path / "missing", tmp_path, __file__):
        with pytest.raises(InvalidInput):
            KeyPair.load(bad)
    with pytest.raises(InvalidInput):
        KeyPair(server.public, friend.secret)
    with pytest.raises(InvalidInput):
        ConsumerKeys(friend, b"short")


def test_no_torch_is_needed() -> None:
    script = "import sys, kvferry.channel.socket, kvferry.channel.file; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def _patiently(ask, tries: int = 100):
    for attempt in range(tries):
        try:
            return ask()
        except KVFerryError:
            if attempt == tries - 1:
                raise
            time.sleep(0.05)
    return None


def test_a_consumer_at_work_is_not_silent() -> None:
    """It has everything and takes its time; the producer's patience is far shorter."""
    with SocketSender() as sender, sender.announce() as outgoing:
        outgoing.begin(b"h", [3, 3])
        outgoing.push(b"abc")
        outgoing.push(b"def")
        with SocketReceiver(sender.address, timeout=5.0).fetch(outgoing.handoff) as incoming:
            assert len(list(incoming.frames())) == 2
            timer = threading.Timer(2.5, incoming.confirm)
            timer.start()
            assert outgoing.finish(1.0).frames == 2
            timer.join()


def test_a_producer_at_work_is_waited_for_and_a_dead_one_is_not() -> None:
    with SocketSender() as sender:
        outgoing = sender.announce()

        def begin() -> None:
            outgoing.begin(b"late", [])

        timer = threading.Timer(2.5, begin)
        timer.start()
        receiver = SocketReceiver(sender.address, timeout=1.0, stall=1.0)
        with receiver.fetch(outgoing.handoff, timeout=math.inf) as incoming:
            assert incoming.header == b"late"
        timer.join()
        silent = sender.address
    with pytest.raises(TransferFailed, match="sign of life"):
        SocketReceiver(silent, timeout=1.0, stall=0.5).fetch("anything", timeout=math.inf)
