"""How a hand-off over a socket ends when its producer leaves: the last word arrives, and nobody waits for long."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import zmq

from kvferry.channel import faults
from kvferry.channel.socket import SocketReceiver, SocketSender
from kvferry.channel.socket import message as wire
from kvferry.channel.socket.guard import Connections
from kvferry.errors import TransferFailed
from tests.channel.test_socket import take_all


def test_a_withdrawn_handoff_fails_its_consumer_at_once() -> None:
    with SocketSender() as sender:
        outgoing = sender.announce("gone")
        outgoing.begin(b"h", [1])
        with pytest.raises(TransferFailed, match="withdrew"):
            take_all(SocketReceiver(sender.address), "gone", outgoing.close)


def test_a_closing_server_fails_its_consumers_at_once() -> None:
    sender = SocketSender()
    sender.announce("gone").begin(b"h", [1])
    with pytest.raises(TransferFailed, match="has closed"):
        take_all(SocketReceiver(sender.address), "gone", sender.close)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "ipc://{}/socket"])
def test_a_closing_server_waits_until_its_peers_have_left(address: str, tmp_path: Path) -> None:
    sender = SocketSender(address.format(tmp_path))
    sender.announce("gone").begin(b"h", [1])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(sender.address)
        dealer.send_multipart(wire.pack(wire.Kind.HELLO, wire.handoff_key("gone")))
        assert wire.unpack(dealer.recv_multipart()).kind == wire.Kind.HEADER
        closing = threading.Thread(target=sender.close)
        closing.start()
        said = wire.unpack(dealer.recv_multipart())
        assert (said.kind, b"has closed" in said.payload) == (wire.Kind.ERROR, True)
        closing.join(0.3)
        assert closing.is_alive()
    closing.join(0.5)
    assert not closing.is_alive()


def test_a_peer_that_stays_delays_a_closing_server_by_a_second_at_most() -> None:
    sender = SocketSender()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(sender.address)
        dealer.send_multipart(wire.pack(wire.Kind.HELLO, wire.handoff_key("none")))
        assert wire.unpack(dealer.recv_multipart()).kind == wire.Kind.ERROR
        began = time.monotonic()
        sender.close()
        assert time.monotonic() - began < 3.0


def test_the_last_word_is_read_though_the_connection_broke_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def header_then_error_then_gone() -> None:
            address, *_ = router.recv_multipart()
            header = wire.pack_header(b"h", [1], b"")
            key = wire.handoff_key("gone")
            router.send_multipart([address, *wire.pack(wire.Kind.HEADER, key, wire.digest(header), header)])
            while wire.unpack(router.recv_multipart()[1:]).kind != wire.Kind.WANT:
                pass
            error = faults.to_bytes(TransferFailed("the producer has closed"))
            router.send_multipart([address, *wire.pack(wire.Kind.ERROR, key, 0, error)])
            router.close(linger=1_000)

        looks = Connections.look

        def late(connections: Connections) -> list[int]:
            time.sleep(0.2)  # so that both come between the two, where a busy machine puts them now and then
            return looks(connections)

        monkeypatch.setattr(Connections, "look", late)
        thread = threading.Thread(target=header_then_error_then_gone)
        thread.start()
        with pytest.raises(TransferFailed, match="has closed"):
            take_all(SocketReceiver(f"tcp://127.0.0.1:{port}", timeout=3.0), "gone")
        thread.join()
