"""Frames that move by a transfer engine, over every engine: out of real memory, between processes, each checked."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.channel import ends
from kvferry.channel.socket import SocketSender
from kvferry.channel.tickets import MAX_TICKET, NOTE, TICKET
from kvferry.engines.handoff import HandoffJob, Session
from kvferry.errors import CorruptPacket, InvalidInput, TooLarge, TransferFailed
from tests.channel.engines import MODULES, need
from tests.channel.serve import frame
from tests.channel.test_socket_faults import serve
from tests.channel.test_socket_hostile import resident
from tests.cli import models
from tests.hf import tiny

MAGIC = {"mooncake": b"kvfmoon1", "nixl": b"kvfnixl1"}
Start = Callable[[int, int], tuple["subprocess.Popen[str]", str]]


@pytest.fixture(params=sorted(MODULES))
def channel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    need(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def both(channel: str) -> tuple[Any, Any]:
    """Classes of the channel's ends."""
    return ends(channel)


@pytest.fixture
def started(channel: str) -> Iterator[Start]:
    """Starts a producer's process with so many frames of so many bytes, and ends it."""
    processes = []

    def start(frames: int, size: int) -> tuple[subprocess.Popen[str], str]:
        process, address = serve(1, frames, size, channel)
        processes.append(process)
        return process, address

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_without_the_package_it_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mooncake", "mooncake.engine", "nixl", "nixl._api", "nixl._bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("kvferry.channel.mooncake._engines", {})
    sender, receiver = ends(name)
    with pytest.raises(InvalidInput, match=f"pip install --no-deps {name}"):
        sender()
    with pytest.raises(InvalidInput, match=f"pip install --no-deps {name}"):
        receiver("tcp://127.0.0.1:1")
    with pytest.raises(InvalidInput, match="shaped link"):
        Session("1gbit", channel=name)


def test_channels_that_are_not_there_are_named() -> None:
    with pytest.raises(InvalidInput, match="unknown channel 'pigeon'; there are mooncake, nixl, socket"):
        Session(channel="pigeon")


def test_caches_go_from_process_to_process(channel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([models.environment()["PYTHONPATH"], *filter(None, sys.path)]))
    model = models.save(tiny.llama(max_position_embeddings=2048), tmp_path)
    job = HandoffJob(model, model, 1.0, max_tokens=300, max_new=8, threads=1, dtype="float32", channel=channel)
    with Session(channel=channel) as session:
        whole = session.run(job)
        half = session.run(replace(job, budget=0.5))
    assert whole.tokens_equal
    assert whole.kl_mean == 0.0
    assert whole.wire_bytes > whole.packet_bytes
    assert half.wire_bytes > half.packet_bytes
    assert half.packet_bytes <= 0.5 * half.full_bytes


def test_memory_stays_bounded_however_much_goes_through(both: tuple[Any, Any], started: Start) -> None:
    size, count = 8 << 20, 24
    _, address = started(count, size)
    with both[1](address).fetch("h0") as incoming:
        arrivals = incoming.frames()
        next(arrivals)
        before = most = resident(os.getpid())
        for arrival in arrivals:
            assert arrival.data == frame("h0", arrival.index, size)
            most = max(most, resident(os.getpid()))
        incoming.confirm()
    assert most - before < 8 * size, "frames that were taken are still held"


def test_a_consumer_goes_on_where_another_stopped(both: tuple[Any, Any], started: Start) -> None:
    _, address = started(12, 50_000)
    with both[1](address).fetch("h0") as incoming:
        arrivals = incoming.frames()
        first = {next(arrivals).index for _ in range(5)}
    with both[1](address).fetch("h0") as incoming:
        rest = {arrival.index: bytes(arrival.data) for arrival in incoming.frames(have=first)}
        incoming.confirm()
    assert sorted([*first, *rest]) == list(range(12))
    assert all(data == frame("h0", index, 50_000) for index, data in rest.items())


def test_a_killed_producer_is_an_error_in_time(both: tuple[Any, Any], started: Start) -> None:
    process, address = started(400, 100_000)
    with both[1](address, timeout=1.5, stall=0.3, window=4).fetch("h0") as incoming:
        arrivals = incoming.frames()
        for _ in range(20):
            arrival = next(arrivals)
            assert arrival.data == frame("h0", arrival.index, 100_000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        with pytest.raises(TransferFailed, match="frame"):
            list(arrivals)
    assert time.monotonic() - killed < 10.0


def test_what_was_changed_after_it_was_pushed_is_noticed(both: tuple[Any, Any]) -> None:
    data = bytearray(b"x" * 10_000)
    with both[0]() as sender, sender.announce("a") as outgoing:
        outgoing.begin(b"h", [10_000])
        outgoing.push(memoryview(data))
        data[5_000] = 0
        with (
            pytest.raises(CorruptPacket, match="did not match its checksum"),
            both[1](sender.address, timeout=5.0).fetch("a") as incoming,
        ):
            list(incoming.frames())
        with pytest.raises(TransferFailed, match="refused"):
            outgoing.finish(5.0)


def test_bytes_can_be_on_offer_twice_and_in_part(both: tuple[Any, Any]) -> None:
    data = bytes(range(256)) * 400
    with both[0]() as sender:
        for name in ("a", "b"):
            outgoing = sender.announce(name)
            outgoing.begin(b"h", [len(data)] * 3)
            for piece in (memoryview(data), memoryview(data), memoryview(data)[1_000:90_000]):
                outgoing.push(piece)
        for name in ("a", "b"):
            with both[1](sender.address, timeout=5.0).fetch(name) as incoming:
                found = {arrival.index: bytes(arrival.data) for arrival in incoming.frames()}
                incoming.confirm()
            assert found == {0: data, 1: data, 2: data[1_000:90_000]}


@pytest.mark.parametrize("kind", ["empty", "zeros", "too large", "no description", "no text"])
def test_tickets_that_make_no_sense_are_refused(channel: str, both: tuple[Any, Any], kind: str) -> None:
    magic = MAGIC[channel]
    ticket = {
        "empty": b"",
        "zeros": bytes(32),
        "too large": TICKET.pack(magic, 64, 1 << 40, 0),
        "no description": TICKET.pack(magic, 64, 16, 0),
        "no text": TICKET.pack(magic, 64, 16, 0) + b"\xff\x00no description",
    }[kind]
    note = NOTE.pack(magic, 1) + struct.pack("<Q", 100)
    with SocketSender() as sender, sender.announce("a") as outgoing:
        outgoing.begin(b"h", [MAX_TICKET], note)
        outgoing.push(ticket)
        with (
            pytest.raises((CorruptPacket, TransferFailed), match="frame 0"),
            both[1](sender.address, timeout=5.0).fetch("a") as incoming,
        ):
            list(incoming.frames())


def test_hand_offs_of_other_channels_are_told_apart(both: tuple[Any, Any]) -> None:
    with SocketSender() as sender, sender.announce("a") as outgoing:
        outgoing.begin(b"h", [1])
        with pytest.raises(CorruptPacket, match="do not move by"):
            both[1](sender.address, timeout=5.0).fetch("a")


def test_sizes_are_bounded_on_both_sides(both: tuple[Any, Any]) -> None:
    with both[0](max_bytes=1_000) as sender:
        first = sender.announce("a")
        first.begin(b"h", [600])
        with pytest.raises(TooLarge, match="601 of 1,000"):
            sender.announce("b").begin(b"h", [600])
        with pytest.raises(TooLarge, match="600 bytes"):
            both[1](sender.address, max_message=500).fetch("a")
        first.close()
        sender.announce("c").begin(b"h", [600])


def test_a_producer_that_closes_is_an_error_at_once(both: tuple[Any, Any]) -> None:
    sender = both[0]()
    sender.announce("a").begin(b"h", [1])
    with both[1](sender.address).fetch("a") as incoming:
        sender.close()
        with pytest.raises(TransferFailed, match="has closed"):
            list(incoming.frames())
