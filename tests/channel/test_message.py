"""The socket channel's messages: what is packed comes back, what is damaged is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.channel import faults
from kvferry.channel.socket import message as wire
from kvferry.errors import (
    BudgetTooSmall,
    CorruptPacket,
    IncompatibleIdentity,
    KVFerryError,
    TransferFailed,
    UnsupportedVersion,
)

KEY = wire.handoff_key("a")


@given(st.sampled_from(list(wire.Kind)), st.integers(0, 2**64 - 1), st.binary(max_size=200))
def test_a_message_comes_back(kind: wire.Kind, index: int, payload: bytes) -> None:
    got = wire.unpack(wire.pack(kind, KEY, index, payload))
    assert (got.kind, got.handoff, got.index, got.payload) == (kind, KEY, index, payload)
    assert got.size == wire.HEAD_BYTES + len(payload)
    assert got.stamp > 0


@given(st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject) -> None:
    head, payload = wire.pack(wire.Kind.FRAME, KEY, 7, b"some payload of a frame")
    place = data.draw(st.integers(0, 8 * (len(head) + len(payload)) - 1))
    whole = bytearray(bytes(head) + bytes(payload))
    whole[place // 8] ^= 1 << place % 8
    with pytest.raises(wire.Damaged):  # also where it is the version's: that is a link's fault, not the other side's
        wire.unpack([bytes(whole[: len(head)]), bytes(whole[len(head) :])])


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_arbitrary_parts_are_damaged_and_nothing_else(parts: list[bytes]) -> None:
    with pytest.raises((wire.Damaged, wire.OtherVersion)):
        wire.unpack(parts)


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 9)
    parts = wire.pack(wire.Kind.HELLO, KEY)
    monkeypatch.undo()
    for other in (parts, [parts[0]], [parts[0], b"more"], [bytes(parts[0]) + b"longer", b""], [bytes(parts[0])[:6]]):
        with pytest.raises(wire.OtherVersion, match="9"):
            wire.unpack(other)


@given(st.sets(st.integers(0, 999), max_size=wire.MAX_WANTED))
def test_ranges_come_back(indices: set[int]) -> None:
    assert wire.unpack_ranges(wire.pack_ranges(sorted(indices)), 1_000) == sorted(indices)


@given(st.binary(max_size=64))
def test_arbitrary_ranges_ask_for_little_or_are_damaged(payload: bytes) -> None:
    try:
        wanted = wire.unpack_ranges(payload, 1_000)
    except wire.Damaged:
        return
    assert len(wanted) <= wire.MAX_WANTED
    assert all(0 <= index < 1_000 for index in wanted)


def test_a_range_over_everything_is_not_unrolled() -> None:
    with pytest.raises(wire.Damaged):
        wire.unpack_ranges((0).to_bytes(4, "little") + (2**32 - 1).to_bytes(4, "little"), 2**32 - 1)


@given(st.binary(max_size=80), st.lists(st.integers(0, 2**64 - 1), max_size=9), st.binary(max_size=80))
def test_a_header_comes_back(header: bytes, limits: list[int], note: bytes) -> None:
    assert wire.unpack_header(wire.pack_header(header, limits, note)) == (header, tuple(limits), note)


@given(st.binary(max_size=100))
def test_arbitrary_headers_are_refused_or_consistent(payload: bytes) -> None:
    try:
        header, limits, note = wire.unpack_header(payload)
    except CorruptPacket:
        return
    assert wire.pack_header(header, limits, note) == payload


@pytest.mark.parametrize(
    "error",
    [
        KVFerryError("plain"),
        CorruptPacket("frame 3 is damaged"),
        UnsupportedVersion("version 9"),
        BudgetTooSmall("too small", 0.1, 0.27),
        IncompatibleIdentity(
            "another model", {"weights": ("aa", "bb"), "layers[0].kv_heads": (3, 1), "rope": (None, 2)}
        ),
    ],
)
def test_a_typed_error_survives_the_wire(error: KVFerryError) -> None:
    back = faults.from_bytes(faults.to_bytes(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_an_untyped_error_is_a_failed_transfer_that_names_it() -> None:
    back = faults.from_bytes(faults.to_bytes(ZeroDivisionError("x / 0")))
    assert type(back) is TransferFailed
    assert "ZeroDivisionError: x / 0" in str(back)


def test_an_endless_error_is_cut() -> None:
    error = IncompatibleIdentity("x" * 10**6, {f"field{i}": ("y" * 1_000, i) for i in range(2_000)})
    assert len(faults.to_bytes(error)) <= faults.MAX_FAULT_BYTES
    assert type(faults.from_bytes(faults.to_bytes(error))) is IncompatibleIdentity


@given(st.binary(max_size=100) | st.from_regex(rb"\{.*\}", fullmatch=True))
def test_arbitrary_bytes_are_read_as_some_error(data: bytes) -> None:
    assert isinstance(faults.from_bytes(data), KVFerryError)


@pytest.mark.parametrize(
    "fault", [None, [], {"type": "IncompatibleIdentity", "differences": 3}, {"type": "BudgetTooSmall", "budget": "x"}]
)
def test_odd_faults_are_read_as_some_error(fault: object) -> None:
    assert isinstance(faults.revive(fault), KVFerryError)
