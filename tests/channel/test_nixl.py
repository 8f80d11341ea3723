"""Frames that move by NIXL: out of real memory, between real processes, each checked."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import pytest

from kvferry.channel import nixl as own
from kvferry.channel.nixl import NixlReceiver, NixlSender
from kvferry.channel.socket import SocketSender
from kvferry.engines.handoff import HandoffJob, Session, run_handoff
from kvferry.errors import CorruptPacket, InvalidInput, TooLarge, TransferFailed
from tests.cli import models
from tests.hf import tiny

WHY = "nixl is not installed: pip install --no-deps nixl nixl-cu12"


@pytest.fixture
def with_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason=WHY)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(InvalidInput, match="pip install --no-deps nixl"):
        NixlSender()
    with pytest.raises(InvalidInput, match="pip install --no-deps nixl"):
        NixlReceiver("tcp://127.0.0.1:1")
    with pytest.raises(InvalidInput, match="unknown channel"):
        Session(channel="pigeon")
    with pytest.raises(InvalidInput, match="shaped link"):
        Session("1gbit", channel="nixl")


@pytest.mark.usefixtures("with_nixl")
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_a_cache_goes_from_process_to_process(budget: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([models.environment()["PYTHONPATH"], *filter(None, sys.path)]))
    model = models.save(tiny.llama(max_position_embeddings=2048), tmp_path)
    result = run_handoff(
        HandoffJob(model, model, budget, max_tokens=300, max_new=8, threads=1, dtype="float32", channel="nixl")
    )
    assert result.wire_bytes > result.packet_bytes
    if budget == 1.0:
        assert result.tokens_equal
        assert result.kl_mean == 0.0
    else:
        assert result.packet_bytes <= budget * result.full_bytes


@pytest.mark.usefixtures("with_nixl")
def test_what_was_changed_after_it_was_pushed_is_noticed() -> None:
    frame = bytearray(b"x" * 10_000)
    with NixlSender() as sender, sender.announce("a") as outgoing:
        outgoing.begin(b"h", [10_000])
        outgoing.push(memoryview(frame))
        frame[5_000] = 0
        with (
            pytest.raises(CorruptPacket, match="did not match its checksum"),
            NixlReceiver(sender.address, timeout=5.0).fetch("a") as incoming,
        ):
            list(incoming.frames())
        with pytest.raises(TransferFailed, match="refused"):
            outgoing.finish(5.0)


@pytest.mark.usefixtures("with_nixl")
@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"x" * 32,
        own._TICKET.pack(own._MAGIC, 64, 1 << 40, 0),
        own._TICKET.pack(own._MAGIC, 64, 16, 0) + b"no description",
    ],
)
def test_tickets_that_make_no_sense_are_refused(ticket: bytes) -> None:
    note = own._NOTE.pack(own._MAGIC, 1) + struct.pack("<Q", 100)
    with SocketSender() as sender, sender.announce("a") as outgoing:
        outgoing.begin(b"h", [own.MAX_TICKET], note)
        outgoing.push(ticket)
        with (
            pytest.raises(CorruptPacket, match="frame 0"),
            NixlReceiver(sender.address, timeout=5.0).fetch("a") as incoming,
        ):
            list(incoming.frames())


@pytest.mark.usefixtures("with_nixl")
def test_hand_offs_of_the_socket_channel_are_told_apart() -> None:
    with SocketSender() as sender, sender.announce("a") as outgoing:
        outgoing.begin(b"h", [1])
        with pytest.raises(CorruptPacket, match="do not move by NIXL"):
            NixlReceiver(sender.address, timeout=5.0).fetch("a")


@pytest.mark.usefixtures("with_nixl")
def test_sizes_are_bounded_on_both_sides() -> None:
    with NixlSender(max_bytes=1_000) as sender:
        first = sender.announce("a")
        first.begin(b"h", [600])
        with pytest.raises(TooLarge, match="601 of 1,000"):
            sender.announce("b").begin(b"h", [600])
        with pytest.raises(TooLarge, match="600 bytes"):
            NixlReceiver(sender.address, max_message=500).fetch("a")
        first.close()
        sender.announce("c").begin(b"h", [600])


@pytest.mark.usefixtures("with_nixl")
def test_a_producer_that_closes_is_an_error_at_once() -> None:
    sender = NixlSender()
    sender.announce("a").begin(b"h", [1])
    with NixlReceiver(sender.address).fetch("a") as incoming:
        sender.close()
        with pytest.raises(TransferFailed, match="has closed"):
            list(incoming.frames())


@pytest.mark.usefixtures("with_nixl")
def test_a_backend_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidInput, match="no backend 'TELEPATHY'"):
        NixlSender(backend="TELEPATHY")
