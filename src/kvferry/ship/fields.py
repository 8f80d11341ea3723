"""Token ids, positions and masks in few bytes: what a packet's header says of the sequence.

Ids take the fewest whole bytes that hold the largest of them; positions are runs ``(start, length)`` that step by 1 or
by 0; masks are the lengths of alternating runs, or bits where those are fewer. Every encoding has one spelling only,
and a decoder knows how many values to expect before it makes any. What it makes takes `TOKEN_BYTES` a token, whatever
the bytes say; spelling is checked on the bytes and the runs, so that a decoder needs no second copy of its values.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput

TOKEN_BYTES = 17
"""Memory of a token's id (int64), position (int64) and mask (bool), once decoded: as a snapshot holds them."""

_WIDTHS = (1, 2, 3, 4, 8)
_FAR = 2**62
_CHUNK = 1 << 16
_VARINT_STEPS = 1 << (7 * np.arange(1, 9, dtype=np.int64))


def encode_ids(ids: Int[Tensor, "batch seq"]) -> bytes:
    """A byte that says how many bytes an id takes (1, 2, 3, 4 or 8), then the ids, little endian."""
    values = ids.reshape(-1).cpu().numpy().astype("<i8")
    width = _id_width(values)
    columns = values.view(np.uint8).reshape(-1, 8)[:, :width]
    return bytes([width]) + columns.tobytes()


def decode_ids(data: memoryview, batch: int, seq_len: int) -> Int[Tensor, "batch seq"]:
    """Inverse of `encode_ids`."""
    if len(data) < 1 or data[0] not in _WIDTHS:
        raise CorruptPacket("the header's token ids have no known width")
    width = data[0]
    if len(data) - 1 != batch * seq_len * width:
        raise CorruptPacket(
            f"the header holds {len(data) - 1} bytes of token ids, not {batch} x {seq_len} ids of {width} bytes"
        )
    values = np.zeros((batch, seq_len), "<i8")
    columns = values.view(np.uint8).reshape(-1, 8)
    columns[:, :width] = np.frombuffer(data, np.uint8, offset=1).reshape(-1, width)
    if _id_width(values) != width:
        raise CorruptPacket(f"the header's token ids take {width} bytes each, but need another width")
    return torch.from_numpy(values.astype(np.int64, copy=False))


def encode_positions(positions: Int[Tensor, "batch seq"]) -> bytes:
    """Runs over the flattened positions: zigzag start, ``2 * (length - 1) + step``, as variable-length integers."""
    values = positions.reshape(-1).cpu().numpy().astype(np.int64)
    if len(values) and not -_FAR < int(values.min()) <= int(values.max()) < _FAR:
        raise InvalidInput("positions must lie within ±2^62")
    out = bytearray()
    steps = np.diff(values)
    changes = np.flatnonzero(np.diff(steps) != 0) + 1  # step index at which another step begins
    at, count = 0, len(values)
    while at < count:
        step = int(steps[at]) if at < count - 1 else 1
        if step not in (0, 1):
            stop, step = at + 1, 1
        else:
            after = np.searchsorted(changes, at, side="right")
            stop = int(changes[after]) + 1 if after < len(changes) else count
        _put(out, _zigzag(int(values[at])))
        _put(out, 2 * (stop - at - 1) + step)
        at = stop
    return bytes(out)


def decode_positions(data: memoryview, batch: int, seq_len: int) -> Int[Tensor, "batch seq"]:
    """Inverse of `encode_positions`."""
    values = np.empty(batch * seq_len, np.int64)
    at, place = 0, 0
    last, joined = 0, (-1, -1)  # of the run before: its last value, and what would have made the next one part of it
    while at < len(values):
        start, place = _get(data, place)
        rest, place = _get(data, place)
        length, step = (rest >> 1) + 1, rest & 1
        first = _unzigzag(start)
        if length > len(values) - at or not -_FAR < first <= first + step * (length - 1) < _FAR:
            raise CorruptPacket("the header's positions overrun the sequence, or lie beyond ±2^62")
        if (at and first - last in joined) or (length == 1 and step == 0):
            raise CorruptPacket("the header's positions are not in their one spelling")
        _fill(values[at : at + length], first, step)
        at, last = at + length, first + step * (length - 1)
        joined = (0, 1) if length == 1 else (step, step)
    if place != len(data):
        raise CorruptPacket("the header's positions are not in their one spelling")
    return torch.from_numpy(values).view(batch, seq_len)


def encode_mask(mask: Bool[Tensor, "batch seq"]) -> bytes:
    """``0`` and the lengths of runs, the first of them of True; or ``1`` and bits, where that is shorter."""
    values = mask.reshape(-1).cpu().numpy()
    edges = np.flatnonzero(np.diff(values)) + 1
    bits = b"\x01" + np.packbits(values, bitorder="little").tobytes()
    if len(edges) + 2 > len(bits):
        return bits
    ends = [0, *edges.tolist(), len(values)]
    runs = [stop - start for start, stop in itertools.pairwise(ends) if len(values)]
    out = bytearray(b"\x00")
    for run in runs if len(values) and values[0] else [0, *runs]:
        _put(out, run)
    return bytes(out) if len(out) <= len(bits) else bits


def decode_mask(data: memoryview, batch: int, seq_len: int) -> Bool[Tensor, "batch seq"]:
    """Inverse of `encode_mask`."""
    count = batch * seq_len
    most = 1 + (count + 7) // 8
    if len(data) < 1 or data[0] > 1:
        raise CorruptPacket("the header's mask is of no known kind")
    if data[0] == 1:
        if len(data) != most:
            raise CorruptPacket(f"the header's mask has {len(data) - 1} bytes for {count} tokens")
        packed: NDArray[np.uint8] = np.frombuffer(data, np.uint8, offset=1)
        values = np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
        canonical = _runs_nbytes(values, most) > most and not (count % 8 and packed[-1] >> count % 8)
    else:
        values = np.zeros(count, np.bool_)
        at, place, flag, canonical = 0, 1, True, len(data) <= most
        while at < count:
            run, place = _get(data, place)
            if run > count - at or (run == 0 and place > 2):  # only the first run, of True, may have no token
                raise CorruptPacket("the header's mask overruns the sequence, or has a run of no tokens")
            values[at : at + run] = flag
            at, flag = at + run, not flag
        canonical &= place == len(data)
    if not canonical:
        raise CorruptPacket("the header's mask is not in its one spelling")
    return torch.from_numpy(values).view(batch, seq_len)


def _fill(out: NDArray[np.int64], first: int, step: int) -> None:
    """Write ``first``, ``first + step``… into ``out``, a chunk at a time."""
    if step == 0 or len(out) == 1:
        out[:] = first
        return
    for start in range(0, len(out), _CHUNK):
        part = out[start : start + _CHUNK]
        part[:] = np.arange(first + start, first + start + len(part))


def _runs_nbytes(values: NDArray[np.bool_], limit: int) -> int:
    """Bytes of a mask written as runs; some number above ``limit`` when it has more than that."""
    total = 1 if values[0] else 2  # the kind, and a first run of no tokens
    begin = 0
    for start in range(0, len(values) - 1, _CHUNK):
        part = values[start : start + _CHUNK + 1]
        edges = np.flatnonzero(part[1:] != part[:-1]) + start + 1
        if len(edges):
            total += _varints_nbytes(np.diff(edges, prepend=begin))
            begin = int(edges[-1])
        if total > limit:
            return total
    return total + _varints_nbytes(np.array([len(values) - begin]))


def _varints_nbytes(values: NDArray[np.int64]) -> int:
    return len(values) + int(np.searchsorted(_VARINT_STEPS, values, side="right").sum())


def _id_width(values: NDArray[np.int64]) -> int:
    if values.size == 0:
        return 1
    low, high = int(values.min()), int(values.max())
    if low < 0:
        return 8
    return next(width for width in _WIDTHS if high < 1 << (8 * width - (width == 8)))


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _unzigzag(code: int) -> int:
    return code >> 1 if code & 1 == 0 else -((code + 1) >> 1)


def _put(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _get(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise CorruptPacket("the header ends within a number")
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if byte == 0 and shift:
                raise CorruptPacket("the header holds a number that is written with more bytes than it needs")
            return value, place
    raise CorruptPacket("the header holds a number of more than ten bytes")
