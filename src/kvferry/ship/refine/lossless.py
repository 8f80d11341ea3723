"""Differences of ordinals without loss: sorted by context, split into byte planes, each coded by zstd.

A frame's body holds how many bytes the keys take, as u64, then the keys, then the values. Of either: for each plane,
lowest byte first, and for each context that occurs, in order, the coded length as u32, and so many bytes. A length that
is that of the plain bytes means plain bytes, else it is one zstd frame. How many values a context has follows from what
the receiver holds already, so a decoder knows every size before it reads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CorruptPacket
from kvferry.ship.refine.ordinals import CONTEXTS

_LENGTH = struct.Struct("<I")
_KEYS = struct.Struct("<Q")
_LEVEL = 1
_LEAST_CODED = 32
"""Values below which zstd's own head costs more than it saves."""


def most_bytes(counts: Sequence[int], itemsize: int) -> int:
    """Upper bound of a frame's body, from how many values its keys and its values are."""
    return _KEYS.size + sum(count * itemsize + _LENGTH.size * itemsize * min(CONTEXTS, count) for count in counts)


def joined(keys: list[bytes], values: list[bytes]) -> list[bytes | memoryview]:
    """The pieces of a frame's body, from what `compress` gives for each."""
    return [_KEYS.pack(sum(map(len, keys))), *keys, *values]


def parts(data: memoryview, where: object) -> tuple[memoryview, memoryview]:
    """Those of the keys and those of the values; raises `CorruptPacket` where there are none."""
    if len(data) < _KEYS.size:
        raise CorruptPacket(f"{where} ends within its head")
    (keys,) = _KEYS.unpack_from(data)
    stop = _KEYS.size + keys
    if stop > len(data):
        raise CorruptPacket(f"{where} says that its keys take {keys} bytes, which it does not hold")
    return data[_KEYS.size : stop], data[stop:]


def compress(folded: NDArray[Any], context: NDArray[np.uint8]) -> list[bytes]:
    """The pieces that, joined, `decompress` reads."""
    import zstandard

    coder = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=False)
    order, bounds = _sorted(context)
    planes = np.take(folded, order).view(np.uint8).reshape(-1, folded.itemsize)
    pieces: list[bytes] = []
    for place in range(folded.itemsize):
        plane = np.ascontiguousarray(planes[:, place])
        for start, stop in bounds:
            plain = plane[start:stop]
            coded = coder.compress(plain.data) if stop - start >= _LEAST_CODED else b""
            if not coded or len(coded) >= stop - start:
                coded = plain.tobytes()
            pieces += [_LENGTH.pack(len(coded)), coded]
    return pieces


def decompress(data: memoryview, dtype: np.dtype[Any], context: NDArray[np.uint8], where: object) -> NDArray[Any]:
    """The differences; they must take all of ``data``.

    Raises:
        CorruptPacket: the bytes are not what `compress` gives for this context. ``where`` names the frame.
    """
    import zstandard

    coder = zstandard.ZstdDecompressor()
    order, bounds = _sorted(context)
    planes = np.empty((len(context), dtype.itemsize), np.uint8)
    at = 0
    for place in range(dtype.itemsize):
        for start, stop in bounds:
            if at + _LENGTH.size > len(data):
                raise CorruptPacket(f"{where} ends within its planes")
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            coded = data[at : at + length]
            if len(coded) != length or length > stop - start:
                raise CorruptPacket(f"{where} has a plane of {length} bytes, which it does not hold")
            plain = coded if length == stop - start else _decoded(coder, coded, stop - start, where, zstandard)
            planes[start:stop, place] = np.frombuffer(plain, np.uint8)
            at += length
    if at != len(data):
        raise CorruptPacket(f"{where} holds {len(data) - at} bytes too many")
    folded = np.empty(len(context), dtype)
    folded[order] = planes.view(dtype).reshape(-1)
    return folded


def _decoded(coder: Any, coded: memoryview, count: int, where: object, zstandard: Any) -> bytes:
    try:
        # A frame that declares a size has that much allocated, whatever the limit is.
        if zstandard.frame_content_size(coded) not in (-1, count):
            raise CorruptPacket(f"{where} has a plane of another size than its {count} values")
        plain: bytes = coder.decompress(coded, max_output_size=count, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise CorruptPacket(f"{where} has a plane that zstd cannot read: {error}") from error
    if len(plain) != count:
        raise CorruptPacket(f"{where} has a plane of {len(plain)} bytes, not of {count}")
    return plain


def _sorted(context: NDArray[np.uint8]) -> tuple[NDArray[np.intp], list[tuple[int, int]]]:
    """The order that puts equal contexts together, and where each of those that occur begins and ends."""
    order = np.argsort(context, kind="stable")
    ends = np.cumsum(np.bincount(context, minlength=CONTEXTS)).tolist()
    return order, [(start, stop) for start, stop in zip([0, *ends], ends, strict=False) if stop > start]
