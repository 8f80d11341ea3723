"""Bad links and dying processes: the right frames or a typed error, in time, and a server that goes on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.channel.socket import SocketReceiver, SocketSender
from kvferry.errors import KVFerryError, TransferFailed
from tests.channel.proxy import FAULTS, Proxy
from tests.channel.serve import frame
from tests.channel.test_socket import take_all

FRAMES, SIZE = 40, 20_000


@pytest.fixture(scope="module")
def sender() -> Iterator[SocketSender]:
    with SocketSender() as server:
        outgoing = server.announce("h0")
        outgoing.begin(b"header", [SIZE] * FRAMES, b"note")
        for index in range(FRAMES):
            outgoing.push(frame("h0", index, SIZE))
        yield server


def fetch_all(address: str, **settings: float) -> tuple[dict[int, bytes], int]:
    """All frames of ``h0`` by index, and how often the connection was made anew."""
    with SocketReceiver(address, timeout=5.0, stall=0.3, **settings).fetch("h0") as incoming:  # type: ignore[arg-type]
        assert (incoming.header, incoming.note) == (b"header", b"note")
        got = {arrival.index: bytes(arrival.data) for arrival in incoming.frames()}
        return got, incoming.traffic.reconnects


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_bad_link_costs_time_and_nothing_else(sender: SocketSender, fault: str, seed: int) -> None:
    with Proxy(sender.address, FAULTS[fault], seed) as proxy:
        began = time.monotonic()
        got, reconnects = fetch_all(proxy.address)
        assert got == {index: frame("h0", index, SIZE) for index in range(FRAMES)}
        assert time.monotonic() - began < 10.0
    if fault in ("cut", "stall"):
        assert reconnects > 0


def test_a_link_that_stays_dead_is_an_error_in_time(sender: SocketSender) -> None:
    def die(flow, data: bytes) -> bytes:
        return data if flow.number == 0 and flow.passed < 100_000 else b""

    with Proxy(sender.address, die) as proxy:
        began = time.monotonic()
        with pytest.raises(TransferFailed, match=r"waited 1 s for frame \d+ of 40"):
            take_all(SocketReceiver(proxy.address, timeout=1.0, stall=0.2), "h0")
        assert time.monotonic() - began < 6.0


def test_a_link_that_damages_everything_is_an_error_in_time(sender: SocketSender) -> None:
    def spoil(flow, data: bytes) -> bytes:
        return data if flow.passed < 2_000 or not flow.down else bytes([data[0] ^ 255]) + data[1:]

    with Proxy(sender.address, spoil) as proxy, pytest.raises(KVFerryError):
        take_all(SocketReceiver(proxy.address, timeout=1.0, stall=0.2), "h0")


def test_a_consumer_goes_on_where_another_stopped(sender: SocketSender) -> None:
    with SocketReceiver(sender.address).fetch("h0") as incoming:
        arrivals = incoming.frames()
        first = {next(arrivals).index for _ in range(17)}
    with SocketReceiver(sender.address).fetch("h0") as incoming:
        rest = [arrival.index for arrival in incoming.frames(have=first)]
    assert sorted([*first, *rest]) == list(range(FRAMES))


def serve(*arguments: object) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("serve.py")), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, next(line.strip() for line in process.stdout if line.startswith("tcp://"))  # NIXL logs there, too


def test_a_killed_producer_is_an_error_in_time() -> None:
    process, address = serve(1, 400, 100_000)
    try:
        incoming = SocketReceiver(address, timeout=1.5, stall=0.3, window=4).fetch("h0")
        arrivals = incoming.frames()
        for _ in range(20):
            arrival = next(arrivals)
            assert bytes(arrival.data) == frame("h0", arrival.index, 100_000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(TransferFailed, match=r"waited 1\.5 s for frame"):
            list(arrivals)
        incoming.close()
    finally:
        process.kill()
        process.communicate()


def test_killed_consumers_leave_the_server_whole(sender: SocketSender) -> None:
    script = (
        "import sys, time\n"
        "from kvferry.channel.socket import SocketReceiver\n"
        "with SocketReceiver(sys.argv[1]).fetch('h0') as incoming:\n"
        "    for arrival in incoming.frames():\n"
        "        print(arrival.index, flush=True)\n"
        "        time.sleep(0.001)\n"
    )
    for seed in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", script, sender.address], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert process.stdout is not None
        for _ in range(random.Random(seed).randrange(1, 30)):
            process.stdout.readline()
        process.kill()
        process.communicate()
    assert len(fetch_all(sender.address)[0]) == FRAMES


def test_threads_and_sockets_are_gone_after_a_hundred_handoffs() -> None:
    def handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with SocketSender() as server:
        threads, open_before = 0, 0
        for number in range(100):
            with server.announce() as outgoing:
                outgoing.begin(b"h", [10])
                outgoing.push(b"0123456789")
                with SocketReceiver(server.address).fetch(outgoing.handoff) as incoming:
                    assert [bytes(arrival.data) for arrival in incoming.frames()] == [b"0123456789"]
                    incoming.confirm()
                outgoing.finish(1.0)
            if number == 5:
                threads, open_before = threading.active_count(), handles()
        assert threading.active_count() == threads
        assert handles() <= open_before + 4
