"""The file channel: hostile files, and two producers of one name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.channel.file import KIND, SUFFIX, FileReceiver, FileSender
from kvferry.errors import BudgetTooSmall, CorruptPacket, InvalidInput
from kvferry.snapshot.container import write_container


def forge(folder: Path, limits: str, frames: list[bytes]) -> None:
    tensors = {"header": b"h", "note": b"", **{f"frames.{index}": frame for index, frame in enumerate(frames)}}
    write_container(folder / f"x{SUFFIX}", KIND, tensors, {"handoff": "x", "limits": limits})


def test_a_frame_larger_than_announced_is_refused(tmp_path: Path) -> None:
    forge(tmp_path, "[3,4]", [b"abc", b"defg"])
    assert list(FileReceiver(tmp_path).fetch("x").limits) == [3, 4]
    forge(tmp_path, "[3,3]", [b"abc", b"defg"])
    with pytest.raises(CorruptPacket, match="frame 1 has 4 bytes, 3 were announced"):
        FileReceiver(tmp_path).fetch("x")


@pytest.mark.parametrize(
    "limits",
    ["", "{}", "[1.0]", "[true]", "[-1]", "[NaN]", "[" * 5_000, "[9999999999999999999999]", '{"a":1,"a":1}', "[1,2]"],
)
def test_limits_have_one_meaning(limits: str, tmp_path: Path) -> None:
    forge(tmp_path, limits, [b"a"])
    with pytest.raises(CorruptPacket):
        FileReceiver(tmp_path).fetch("x")


def test_limits_are_counted_before_they_are_parsed(tmp_path: Path) -> None:
    forge(tmp_path, json.dumps([0] * ((1 << 20) + 5), separators=(",", ":")), [bytes(4 << 20)])
    with pytest.raises(CorruptPacket, match="JSON values"):
        FileReceiver(tmp_path).fetch("x")


def test_of_two_producers_of_one_name_the_first_to_finish_stays(tmp_path: Path) -> None:
    sender, other = FileSender(tmp_path), FileSender(tmp_path)
    first, second, third = sender.announce("x"), other.announce("x"), other.announce("x")
    for outgoing, frame in ((first, b"first"), (second, b"other")):
        outgoing.begin(b"h", [5])
        outgoing.push(frame)
    first.finish()
    with pytest.raises(InvalidInput, match="another producer"), second:
        second.finish()
    with pytest.raises(BudgetTooSmall), third:
        raise BudgetTooSmall("no", 0.1, 0.2)
    with FileReceiver(tmp_path).fetch("x") as incoming:
        assert [bytes(arrival.data) for arrival in incoming.frames()] == [b"first"]
    assert [path.name for path in tmp_path.iterdir()] == [f"x{SUFFIX}"]
