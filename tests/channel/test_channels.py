"""What every channel must do, over each one in the table."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.channel import CHANNELS, Receiver, Sender, ends
from kvferry.errors import BudgetTooSmall, InvalidInput, TooLarge, TransferFailed
from tests.channel.engines import need

FRAMES = [b"", b"x", bytes(range(256)) * 300, b"last" * 20_000]
LIMITS = [0, 5, 80_000, 80_000]


@pytest.fixture(params=sorted(CHANNELS))
def channel(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Sender, Receiver]]:
    need(request.param, monkeypatch)
    make_sender, make_receiver = ends(request.param)
    with contextlib.ExitStack() as stack:
        address = [str(tmp_path / "folder")] if request.param == "file" else []
        sender = stack.enter_context(make_sender(*address))
        yield sender, make_receiver(sender.address, timeout=5.0)


def test_a_handoff_arrives_as_it_was_sent(channel: tuple[Sender, Receiver]) -> None:
    sender, receiver = channel
    outgoing = sender.announce("one")

    def produce() -> None:
        outgoing.begin(b"the header", LIMITS, b"the note")
        for frame in FRAMES:
            outgoing.push(memoryview(frame))
        outgoing.finish(5.0)

    thread = threading.Thread(target=produce)
    thread.start()
    with receiver.fetch("one") as incoming:
        assert (incoming.header, incoming.note, list(incoming.limits)) == (b"the header", b"the note", LIMITS)
        arrivals = list(incoming.frames())
        incoming.confirm()
        received = incoming.traffic
    thread.join()
    assert {arrival.index: bytes(arrival.data) for arrival in arrivals} == dict(enumerate(FRAMES))
    assert all(arrival.sent_ns <= arrival.received_ns for arrival in arrivals)
    assert received.frames == outgoing.traffic.frames == len(FRAMES)
    assert received.received == outgoing.traffic.sent > sum(map(len, FRAMES))
    outgoing.close()


def test_what_is_here_already_is_not_sent_again(channel: tuple[Sender, Receiver]) -> None:
    sender, receiver = channel
    outgoing = sender.announce("two")

    def produce() -> None:
        outgoing.begin(b"h", LIMITS)
        for frame in FRAMES:
            outgoing.push(frame)
        outgoing.finish(5.0)

    thread = threading.Thread(target=produce)
    thread.start()
    with receiver.fetch("two") as incoming:
        assert sorted(arrival.index for arrival in incoming.frames(have={0, 2})) == [1, 3]
        incoming.confirm()
    thread.join()
    outgoing.close()


def test_the_producer_s_error_reaches_the_consumer_typed(channel: tuple[Sender, Receiver]) -> None:
    sender, receiver = channel
    with pytest.raises(BudgetTooSmall), sender.announce("three"):
        raise BudgetTooSmall("no plan fits; the least budget is 0.27", 0.1, 0.27)
    with pytest.raises(BudgetTooSmall, match=r"0\.27") as caught:
        receiver.fetch("three")
    assert (caught.value.budget, caught.value.least_budget) == (0.1, 0.27)


def test_more_than_the_limit_is_refused(channel: tuple[Sender, Receiver]) -> None:
    sender, receiver = channel
    outgoing = sender.announce("four")
    outgoing.begin(b"h", [3])
    outgoing.push(b"abc")
    if sender.address.startswith("tcp"):
        with pytest.raises(TooLarge):
            receiver.fetch("four", max_bytes=3)
    else:
        outgoing.finish(1.0)
        with pytest.raises(TooLarge):
            receiver.fetch("four", max_bytes=3)


def test_an_unknown_handoff_is_an_error_in_time(channel: tuple[Sender, Receiver]) -> None:
    with pytest.raises(TransferFailed, match=r"no such hand-off|to appear"):
        channel[1].fetch("nobody", timeout=0.3)


def test_frames_must_keep_to_the_plan(channel: tuple[Sender, Receiver]) -> None:
    outgoing = channel[0].announce("five")
    with pytest.raises(InvalidInput):
        outgoing.push(b"before the header")
    outgoing.begin(b"h", [2])
    with pytest.raises(InvalidInput, match="3 bytes"):
        outgoing.push(b"abc")
    with pytest.raises(InvalidInput, match="0 of 1"):
        outgoing.finish(1.0)
    outgoing.push(b"ab")
    with pytest.raises(InvalidInput, match="no more"):
        outgoing.push(b"ab")
    with pytest.raises(InvalidInput, match="begun already"):
        outgoing.begin(b"h", [2])


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 300, "nul\0"])
def test_bad_names_are_refused(channel: tuple[Sender, Receiver], name: str) -> None:
    with pytest.raises(InvalidInput):
        channel[0].announce(name)
    with pytest.raises(InvalidInput):
        channel[1].fetch(name)
