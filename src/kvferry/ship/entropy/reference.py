"""The entropy coder in numpy: oracle of the compiled one, and what runs where there is none; see docs/entropy.md."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES = 32
SCALE_BITS = 12
LOW = 1 << 16
BINS_PER_OCTAVE = 4
HEAD = 8 + 4 * LANES

Codes = NDArray[np.int32]
Bins = NDArray[np.int16]


class Bank:
    """Tables of every bin, ready for use.

    Args:
        freq: uint16 ``(bins, 256)``; symbol ``v`` of bin ``b`` has index ``v + reach[b]``, and the escape the next one
            after the last; each row's first ``2 reach + 2`` sum to 4096.
        reach: uint8 ``(bins,)``: largest magnitude that has a symbol.
    """

    def __init__(self, freq: NDArray[np.uint16], reach: NDArray[np.uint8]):
        symbols = np.arange(256)[None, :] <= 2 * reach.astype(np.int64)[:, None] + 1
        own = np.where(symbols, freq, 0).astype(np.int64)
        if (
            not ((reach >= 1) & (reach <= 127)).all()
            or (own[symbols] < 1).any()
            or (own.sum(1) != 1 << SCALE_BITS).any()
        ):
            raise ValueError("a table's frequencies do not sum to 4096")
        self.freq = np.ascontiguousarray(own.astype(np.uint16))
        self.reach = np.ascontiguousarray(reach.astype(np.uint8))
        self.start = np.cumsum(own, axis=1) - own
        self.slots = np.stack([np.repeat(np.arange(256), row) for row in own]).astype(np.uint8)
        self.bits = np.where(own > 0, SCALE_BITS - np.log2(np.maximum(own, 1)), 0.0).astype(np.float32)

    @property
    def bins(self) -> int:
        return len(self.reach)


def places(bank: Bank, row_bin: Bins, column_bin: Bins) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Table of every cell (below 0: not coded), and how many of its low bits are written as they are."""
    bins = row_bin.astype(np.int64)[:, None] + column_bin[None, :]
    top = bank.bins - 1
    shift = np.where(bins > top, np.minimum(-((top - bins) // BINS_PER_OCTAVE), SCALE_BITS), 0)
    return np.where(bins > top, np.minimum(bins - BINS_PER_OCTAVE * shift, top), bins), shift


def encode(bank: Bank, codes: Codes, row_bin: Bins, column_bin: Bins) -> bytes:
    """Write ``codes`` ``(rows, columns)``; see docs/entropy.md."""
    rows, columns = codes.shape
    bins, shift = places(bank, row_bin, column_bin)
    reach = bank.reach.astype(np.int64)[np.maximum(bins, 0)]
    values = codes.astype(np.int64) >> shift
    low = codes.astype(np.int64) & ((1 << shift) - 1)
    far = np.abs(values) > reach
    index = np.where(far, 2 * reach + 1, values + reach)
    freq, start = bank.freq[np.maximum(bins, 0), index].astype(np.uint64), bank.start[np.maximum(bins, 0), index]
    state = np.full(LANES, LOW, np.uint64)
    words: list[NDArray[np.uint64]] = []

    def put(lanes: NDArray[np.int64], f: NDArray[np.uint64], begin: NDArray[np.uint64]) -> None:
        x = state[lanes]
        full = x >= (f << np.uint64(32 - SCALE_BITS))
        words.append((x[full] & np.uint64(0xFFFF))[::-1])
        x = np.where(full, x >> np.uint64(16), x)
        state[lanes] = (x // f << np.uint64(SCALE_BITS)) + x % f + begin

    for r in range(rows - 1, -1, -1):
        for first in range((columns - 1) // LANES * LANES, -1, -LANES):
            cells = slice(first, first + LANES)
            split = np.flatnonzero((bins[r, cells] >= 0) & (shift[r, cells] > 0))
            if split.size:
                width = (SCALE_BITS - shift[r, cells][split]).astype(np.uint64)
                put(split, np.uint64(1) << width, low[r, cells][split].astype(np.uint64) << width)
            lanes = np.flatnonzero(bins[r, cells] >= 0)
            if lanes.size:
                put(lanes, freq[r, cells][lanes], start[r, cells][lanes].astype(np.uint64))
    stream = np.concatenate([np.empty(0, np.uint64), *words])[::-1].astype("<u2")
    escapes = values[far & (bins >= 0)].astype("<i4")
    head = np.array([stream.size, escapes.size, *state], dtype="<u4")
    return bytes(head.tobytes() + stream.tobytes() + escapes.tobytes())


def decode(bank: Bank, data: bytes | memoryview, rows: int, columns: int, row_bin: Bins, column_bin: Bins) -> Codes:
    """Read what `encode` wrote; raises `ValueError` for anything else."""
    if len(data) < HEAD:
        raise ValueError("the stream is cut off")
    head = np.frombuffer(data, "<u4", 2 + LANES)
    n_words, n_escapes = int(head[0]), int(head[1])
    if len(data) - HEAD != 2 * n_words + 4 * n_escapes:
        raise ValueError(f"the stream has {len(data)} bytes, not what it announces")
    stream = np.frombuffer(data, "<u2", n_words, HEAD).astype(np.uint64)
    escapes = np.frombuffer(data, "<i4", n_escapes, HEAD + 2 * n_words)
    state = head[2:].astype(np.uint64)
    if (state < LOW).any():
        raise ValueError("a state is out of range")
    bins, shift = places(bank, row_bin, column_bin)
    codes = np.zeros((rows, columns), np.int64)
    far, low = np.zeros((rows, columns), bool), np.zeros((rows, columns), np.int64)
    at = 0

    def refill(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        nonlocal at
        empty = x < LOW
        count = int(empty.sum())
        if at + count > n_words:
            raise ValueError("the stream ends too early")
        x[empty] = x[empty] << np.uint64(16) | stream[at : at + count]
        at += count
        return x

    for r in range(rows):
        for first in range(0, columns, LANES):
            cells = slice(first, first + LANES)
            lanes = np.flatnonzero(bins[r, cells] >= 0)
            if lanes.size == 0:
                continue
            own = bins[r, cells][lanes]
            slot = (state[lanes] & np.uint64((1 << SCALE_BITS) - 1)).astype(np.int64)
            symbol = bank.slots[own, slot].astype(np.int64)
            x = bank.freq[own, symbol].astype(np.uint64) * (state[lanes] >> np.uint64(SCALE_BITS))
            state[lanes] = refill(x + (slot - bank.start[own, symbol]).astype(np.uint64))
            reach = bank.reach[own].astype(np.int64)
            codes[r, first + lanes] = symbol - reach
            far[r, first + lanes] = symbol > 2 * reach
            split = lanes[shift[r, cells][lanes] > 0]
            if split.size:
                width = (SCALE_BITS - shift[r, cells][split]).astype(np.uint64)
                x = state[split]
                low[r, first + split] = ((x & np.uint64((1 << SCALE_BITS) - 1)) >> width).astype(np.int64)
                below = x & ((np.uint64(1) << width) - np.uint64(1))
                state[split] = refill((x >> np.uint64(SCALE_BITS) << width) + below)
    if at != n_words or int(far.sum()) != n_escapes:
        raise ValueError("the stream is too long or lacks an escaped value")
    if (state != LOW).any():
        raise ValueError("the stream does not end where it began")
    codes[far] = escapes
    if (np.abs(escapes.astype(np.int64)) <= bank.reach.astype(np.int64)[bins[far]]).any():
        raise ValueError("an escaped value needs no escape")
    whole = (codes << shift) | low
    if ((whole < -(2**31)) | (whole >= 2**31)).any():
        raise ValueError("an escaped value is too large")
    return whole.astype(np.int32)
