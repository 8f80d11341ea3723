"""What Mooncake alone does; what every engine does is in `test_tickets`."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kvferry.channel import mooncake
from kvferry.channel.mooncake import MooncakeReceiver, MooncakeSender
from kvferry.errors import InvalidInput, TransferFailed
from tests.channel.engines import need
from tests.channel.test_socket_faults import serve


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    need("mooncake", monkeypatch)


pytestmark = pytest.mark.usefixtures("_installed")


def test_a_closed_hand_off_cannot_be_read_any_more() -> None:
    with MooncakeSender() as sender, sender.announce("a") as outgoing:
        outgoing.begin(b"h", [1_000])
        outgoing.push(b"x" * 1_000)
        engine = mooncake._engine("127.0.0.1")
        (place,) = engine._offered
        assert bytes(engine.read(engine._place, place, 1_000, 5.0, "it")) == b"x" * 1_000
        with pytest.raises(TransferFailed, match="failed to read it"):
            engine.read(engine._place, place, 1_001, 5.0, "it")
    assert engine._offered == {}
    with pytest.raises(TransferFailed, match="failed to read it"):
        engine.read(engine._place, place, 1_000, 5.0, "it")


def test_a_place_where_nobody_listens_is_an_error() -> None:
    engine = mooncake._engine("127.0.0.1")
    for place in (b"127.0.0.1:1", b"nowhere", b""):
        with pytest.raises(TransferFailed, match="cannot reach"):
            engine.read(place, 64, 16, 5.0, "it")


def test_a_producer_that_hangs_is_an_error_in_time() -> None:
    """Its tickets are here; what they lead to does not come. Bytes that may still come have their place kept."""
    process, address = serve(1, 2, 4 << 20, "mooncake")
    try:
        with MooncakeReceiver(address, timeout=1.0, stall=0.3).fetch("h0") as incoming:
            arrivals = incoming.frames()
            next(arrivals)
            process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(TransferFailed, match="waited 1 s"):
                list(arrivals)
        assert time.monotonic() - stopped < 6.0
        (reader,) = (thread for thread in threading.enumerate() if thread.name == "kvferry-mooncake")
        process.kill()
        reader.join(10.0)
        assert not reader.is_alive()
    finally:
        process.kill()
        process.communicate()


def test_where_consumers_find_it() -> None:
    for address in ("tcp://0.0.0.0:*", "tcp://*:7000", "tcp://[::]:7000"):
        with pytest.raises(InvalidInput, match="names no host"):
            MooncakeSender(address)
    assert mooncake._host_of("tcp://[fd00::1]:70") == "[fd00::1]"
    assert mooncake._host_of("ipc:///tmp/it") == "127.0.0.1"
    assert mooncake._interface("127.0.0.1") == "127.0.0.1"
    with pytest.raises(InvalidInput, match="no way leads to"):
        MooncakeReceiver("tcp://no.such.host.invalid:1")


def test_one_engine_serves_a_process() -> None:
    began = time.monotonic()
    ends = [MooncakeSender() for _ in range(20)]
    for end in ends:
        end.close()
    assert len({id(end._engine) for end in ends}) == 1
    assert time.monotonic() - began < 10.0, "stopping one takes a second"
