"""The entropy coder: compiled and numpy are one, what was written is read, and nothing else is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import CorruptPacket
from kvferry.ship import native
from kvferry.ship.entropy import coder
from kvferry.ship.entropy.reference import HEAD, LANES, SCALE_BITS, Bank
from tests.ship.entropy.builders import EXTREMES, Case, cases, make_bank

BACKENDS = ["0", "1"] if native.available() else ["0"]
"""Values of ``KVFERRY_NATIVE``: numpy, compiled."""

GOLDEN = [
    "0300000006000000a1709d003f1a8ff8d2bf1300",
    "6e5fff9ffc3f07000000fcffffffffffff7f9cffffff12000000fdffffff",
]
"""The counts and the first three states; the words and the escaped values."""

GOLDEN_SHA256 = "de4ad4b292aad607a3bd3b86f0ff1b916bf2f76052df92a2fcd6111da85243f4"


def backend(patch: pytest.MonkeyPatch, name: str) -> None:
    patch.setenv("KVFERRY_NATIVE", name)
    assert native.available() == (name == "1")


def encoded(case: Case) -> bytes:
    return coder.encode(case.bank, torch.from_numpy(case.codes), *case.bins)


def decoded(case: Case, data: bytes) -> np.ndarray | str:
    """The codes, or what is said against the stream."""
    try:
        return coder.decode(case.bank, data, *case.codes.shape, *case.bins)
    except CorruptPacket as error:
        return str(error)


@settings(deadline=None, max_examples=250)
@given(cases())
def test_what_is_written_is_read_and_all_backends_write_the_same(case: Case) -> None:
    streams = []
    for name in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            backend(patch, name)
            streams.append(encoded(case))
    assert len(set(streams)) == 1
    for name in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            backend(patch, name)
            got = decoded(case, streams[0])
            assert isinstance(got, np.ndarray)
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, case.readable)


@settings(deadline=None, max_examples=150)
@given(cases(), st.data())
def test_damaged_streams_are_refused_by_all_or_are_what_an_encoder_writes(case: Case, data: st.DataObject) -> None:
    """A stream that is accepted is the very one that its codes have: there is no second way to write anything."""
    valid = encoded(case)
    raw = bytearray(valid)
    change = data.draw(st.sampled_from(["flip", "cut", "extend", "swap", "counts"]))
    if change == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif change == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    elif change == "extend":
        raw += data.draw(st.binary(min_size=1, max_size=6))
    elif change == "swap":
        one, two = (data.draw(st.integers(0, len(raw) - 1)) for _ in range(2))
        raw[one], raw[two] = raw[two], raw[one]
    else:  # words and escapes take turns in the counts, and the length stays right
        words, escapes = (int(count) for count in np.frombuffer(valid, "<u4", 2))
        if words >= 2:
            raw[:8] = np.array([words - 2, escapes + 1], "<u4").tobytes()
    found = []
    for name in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            backend(patch, name)
            found.append(decoded(case, bytes(raw)))
    if bytes(raw) != valid and change in ("cut", "extend", "counts"):
        assert all(isinstance(one, str) for one in found)
    for one in found:
        if isinstance(one, str):
            assert all(isinstance(other, str) and "entropy-coded stream" in other for other in found)
        else:
            np.testing.assert_array_equal(one, found[0])
            again = Case(case.bank, one, *case.bins)
            assert encoded(again) == bytes(raw)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_value_behind_the_escape_must_need_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend(monkeypatch, name)
    case = Case(make_bank([5]), np.array([[77, 0, -6]], np.int32), np.zeros(1, np.int16), np.zeros(3, np.int16))
    stream = encoded(case)
    assert stream[-8:] == np.array([77, -6], "<i4").tobytes()
    for value, good in ((6, True), (-(2**31), True), (5, False), (-5, False), (0, False)):
        got = decoded(case, stream[:-8] + np.array([value, -6], "<i4").tobytes())
        assert (got.tolist() == [[value, 0, -6]]) if good else isinstance(got, str)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("above", [1, 4, 5, 47, 48, 49, 200])
def test_codes_of_wide_cells_are_split(name: str, above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the last table no escape is needed for what is as wide as its bin says."""
    backend(monkeypatch, name)
    bank = make_bank([127] * 5, peaked=False)
    shift = min(-(-above // 4), SCALE_BITS)
    reach = 127 << shift
    codes = np.array([[0, 1, -1, reach, -reach, reach // 3, *EXTREMES]], np.int32)
    case = Case(bank, codes, np.array([4 + above], np.int16), np.zeros(codes.shape[1], np.int16))
    stream = encoded(case)
    assert int(np.frombuffer(stream, "<u4", 2)[1]) == len(EXTREMES)
    np.testing.assert_array_equal(decoded(case, stream), codes)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_escaped_value_of_a_split_code_must_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend(monkeypatch, name)
    case = Case(make_bank([5] * 4), np.array([[2**31 - 1]], np.int32), np.array([11], np.int16), np.zeros(1, np.int16))
    stream = encoded(case)  # two bits of it stand apart
    for value, good in ((2**29 - 1, True), (-(2**29), True), (2**29, False), (-(2**29) - 1, False), (2**31 - 1, False)):
        got = decoded(case, stream[:-4] + np.array([value], "<i4").tobytes())
        assert got == [[4 * value + 3]] if good else isinstance(got, str)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_stream_is_about_as_long_as_the_tables_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend(monkeypatch, name)
    rng = np.random.default_rng(0)
    bank = make_bank([9, 30], peaked=False)
    codes = rng.integers(-12, 13, (60, 500)).astype(np.int32)
    row_bin, column_bin = rng.integers(-1, 2, 60).astype(np.int16), np.zeros(500, np.int16)
    stream = encoded(Case(bank, codes, row_bin, column_bin))
    steps = torch.ones(500)
    got, bits = coder.quantize(bank, torch.from_numpy(codes).float(), row_bin, column_bin, steps, 0.5)
    assert got is not None
    np.testing.assert_array_equal(got.numpy(), np.where(row_bin[:, None] < 0, 0, codes))
    assert abs(8 * (len(stream) - HEAD) - bits) < 0.003 * bits + 16 * LANES
    told = coder.quantize(bank, torch.from_numpy(codes).float(), row_bin, column_bin, steps, 0.5, codes=False)
    assert told == (None, bits)


@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 0.55, 0.6]))
def test_quantising_is_the_same_everywhere(case: Case, seed: int, threshold: float) -> None:
    rng = np.random.default_rng(seed)
    shape = case.codes.shape
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    steps = (2.0 ** rng.uniform(-20, 12, shape[1])).astype(np.float32)
    # Values on the borders between two codes, where the last bit decides.
    near = rng.random(shape) < 0.5
    values[near] = ((rng.integers(0, 40, shape) + threshold) * steps).astype(np.float32)[near]
    if values.size:
        values.flat[0], values.flat[-1] = 3e38, -3e38
    found = []
    for name in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            backend(patch, name)
            found.append(
                coder.quantize(case.bank, torch.from_numpy(values), *case.bins, torch.from_numpy(steps), threshold)
            )
    for codes, bits in found:
        assert codes is not None
        np.testing.assert_array_equal(codes.numpy(), found[0][0].numpy())
        assert bits == pytest.approx(found[0][1], rel=1e-5)
        written = case.row_bin[:, None].astype(int) + case.column_bin[None] >= 0
        assert not codes.numpy()[~written].any()
        exact = np.abs(values.astype(np.float64)) / steps
        far = np.abs(np.abs(codes.numpy()) - exact)
        inside = written & (exact < 1e6)
        assert (far[inside] <= max(threshold, 0.5) + 0.1 + 1e-6 * exact[inside]).all()
        assert (np.abs(codes.numpy())[written & (exact > 2**30)] == 2**30).all()


def test_a_golden_stream() -> None:
    """The format, pinned: cells that are not coded and cells that are split, with escapes in both kinds."""
    freq = np.zeros((4, 256), np.uint16)
    freq[0, :4] = freq[1, :4] = 1, 4000, 90, 5
    freq[2, :8] = freq[3, :8] = 96, 200, 600, 2304, 600, 200, 90, 6
    bank = Bank(freq, np.array([1, 1, 3, 3], np.uint8))
    codes = np.array([[0, 0, 1, 7], [-3, 3, 2, -4], [0, 5, 9, 2**31 - 1], [1, -200, 37, -9]], np.int32)
    row_bin, column_bin = np.array([0, 2, -1, 7], np.int16), np.array([0, 0, 0, 1], np.int16)
    written = np.where(row_bin[:, None] + column_bin[None] < 0, 0, codes)
    for name in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            backend(patch, name)
            stream = coder.encode(bank, torch.from_numpy(codes), row_bin, column_bin)
            assert hashlib.sha256(stream).hexdigest() == GOLDEN_SHA256
            assert [stream[:20].hex(), stream[HEAD:].hex()] == GOLDEN
            np.testing.assert_array_equal(coder.decode(bank, stream, 4, 4, row_bin, column_bin), written)


@pytest.mark.parametrize("what", ["sum", "zero", "reach 0", "reach 128"])
def test_tables_that_are_none(what: str) -> None:
    bank = make_bank([3, 4])
    freq, reach = bank.freq.copy(), bank.reach.copy()
    if what == "sum":
        freq[1, 0] += 1
    elif what == "zero":
        freq[1, 0], freq[1, 1] = 0, freq[1, 0] + freq[1, 1]
    else:
        reach[1] = int(what.split()[1])
    with pytest.raises(ValueError, match="4096"):
        Bank(freq, reach)
