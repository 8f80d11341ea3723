# mypy: ignore-errors
# ruff: noqa: N803, N806, PLR1714, RET505
"""Triton kernels of the codec: one program encodes or decodes a few rows, scales and packing included.

Parts of a section start at any byte, and a GPU faults on a misaligned access: minima and scales come as 16- or 32-bit
pointers where they are aligned, as byte pointers where they are not, and are then moved byte by byte.

As in ``arithmetic.py``: no type check, and no ``from __future__ import annotations``.
"""

import triton
import triton.language as tl

from kvferry.ship.gpu.arithmetic import (
    ABS,
    BF16,
    FP16,
    FP32,
    INFINITY,
    NAN,
    SPECIAL,
    as_bits,
    as_float,
    asymmetric_codes,
    asymmetric_scale,
    inverse_scale,
    narrow,
    order,
    symmetric_codes,
    symmetric_scale,
    widen,
)

SYM = tl.constexpr(0)
ASYM = tl.constexpr(1)
CHAN = tl.constexpr(2)


@triton.jit
def _put(pointer, at, value, mask):
    """Store integers of the pointer's size, or the low bytes of 16- or 32-bit integers through a byte pointer."""
    if pointer.dtype.element_ty == tl.uint8:
        for byte in tl.static_range(value.dtype.primitive_bitwidth // 8):
            part = (value.to(tl.int32) >> (8 * byte)) & 0xFF
            tl.store(pointer + at * (value.dtype.primitive_bitwidth // 8) + byte, part.to(tl.uint8), mask=mask)
    else:
        tl.store(pointer + at, value, mask=mask)


@triton.jit
def _get(pointer, at, mask, SIZE: tl.constexpr):
    """Load integers of SIZE bytes that `_put` stored, as int32; 16-bit ones come without a sign."""
    if pointer.dtype.element_ty == tl.uint8:
        value = tl.load(pointer + at * SIZE, mask=mask, other=0).to(tl.int32)
        for byte in tl.static_range(1, SIZE):
            value |= tl.load(pointer + at * SIZE + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
        return value
    else:
        value = tl.load(pointer + at, mask=mask, other=0).to(tl.int32)
        if SIZE == 2:
            value &= 0xFFFF
        return value


@triton.jit
def _places(row, tokens, index, stride_head, stride_token, row_ok, INDEXED: tl.constexpr):
    """Where the rows of selected tokens start in the source, in elements; rows count heads, then selected tokens."""
    head, token = row // tokens, row % tokens
    if INDEXED:
        token = tl.load(index + token, mask=row_ok, other=0).to(tl.int64)
    return head * stride_head + token * stride_token


@triton.jit
def _spread_groups(values, channel, GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(R, groups) -> (R, C): each channel's group."""
    group = tl.minimum(channel // GROUP, values.shape[1] - 1)
    return tl.gather(values, tl.broadcast_to(group[None, :], (R, C)), axis=1)


@triton.jit
def _put_plane(
    codes, start, u, row_ok, EIGHTH: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr
):
    """Pack WIDTH bits of codes in the order of eighths (`encode`) into bytes and store them from ``start`` on."""
    parts: tl.constexpr = 8 // WIDTH
    field = (u >> SHIFT) & (2**WIDTH - 1)
    field = tl.reshape(field, (u.shape[0], parts, P * WIDTH))
    packed = tl.sum(field << (tl.arange(0, parts) * WIDTH)[None, :, None], axis=1)
    i = tl.arange(0, P * WIDTH)
    byte = (i // P) * EIGHTH + i % P
    mask = row_ok[:, None] & (i % P < EIGHTH)[None, :]
    tl.store(codes + start[:, None] + byte[None, :], packed.to(tl.uint8), mask=mask)


@triton.jit
def _put_bits(codes, start, top, row_ok, EIGHTH: tl.constexpr, P: tl.constexpr):
    """Pack single bits in the order of channels, eight a byte."""
    field = tl.reshape(top, (top.shape[0], P, 8))
    packed = tl.sum(field << tl.arange(0, 8)[None, None, :], axis=2)
    byte = tl.arange(0, P)
    mask = row_ok[:, None] & (byte < EIGHTH)[None, :]
    tl.store(codes + start[:, None] + byte[None, :], packed.to(tl.uint8), mask=mask)


@triton.jit
def _take_plane(codes, start, channel, mask, EIGHTH: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH bits of each channel's code, from a plane that begins at ``start``."""
    if WIDTH == 1:
        byte, shift = channel // 8, channel % 8
    else:
        byte, shift = channel % (EIGHTH * WIDTH), channel // (EIGHTH * WIDTH) * WIDTH
    packed = tl.load(codes + start[:, None] + byte[None, :], mask=mask, other=0).to(tl.int32)
    return (packed >> shift[None, :]) & (2**WIDTH - 1)


@triton.jit
def _load(x, place, channel, stride_dim, row_ok, DIM: tl.constexpr, KIND: tl.constexpr):
    """fp32 bits (rows, channels); 0 past the last channel."""
    ok = row_ok[:, None] & (channel < DIM)[None, :]
    raw = tl.load(x + place[:, None] + channel.to(tl.int64)[None, :] * stride_dim, mask=ok, other=0)
    return widen(raw, KIND)


@triton.jit
def _extremes(bits, ok, AXIS: tl.constexpr):
    """Least and most (in `order`) and the largest absolute bits along an axis, which stays, of size 1."""
    least = tl.min(tl.where(ok, order(bits), ABS), axis=AXIS, keep_dims=True)
    most = tl.max(tl.where(ok, order(bits), -ABS), axis=AXIS, keep_dims=True)
    return least, most, tl.max(tl.where(ok, bits & ABS, 0), axis=AXIS, keep_dims=True)


@triton.jit
def encode(
    x, index, lo, scale, codes, rows, tokens, blocks, stride_head, stride_token, stride_dim,
    DIM: tl.constexpr, NBITS: tl.constexpr, GROUP: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr,
    INDEXED: tl.constexpr, R: tl.constexpr, P: tl.constexpr, NG: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """R rows of a section. Per-channel sections have their minima and scales already (`channel_scales`).

    P is a power of two that holds an eighth of a padded row; NG and GP powers of two that hold the groups of a row and
    the channels of a group. GROUP is the channels of a group, or the tokens of a per-channel block.
    """
    EIGHTH: tl.constexpr = (DIM + 7) // 8
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row_ok = row < rows
    place = _places(row, tokens, index, stride_head, stride_token, row_ok, INDEXED)
    i = tl.arange(0, 8 * P)
    channel = i if P == EIGHTH else tl.where(i % P < EIGHTH, (i // P) * EIGHTH + i % P, DIM)  # eighths lie P apart
    bits = _load(x, place, channel, stride_dim, row_ok, DIM, KIND)
    ok = row_ok[:, None] & (channel < DIM)[None, :]
    if FAMILY == CHAN:
        at = ((row // tokens) * blocks + (row % tokens) // GROUP)[:, None] * DIM + channel[None, :]
        low = widen(_get(lo, at, ok, 4 if KIND == FP32 else 2), KIND)
        u = asymmetric_codes(bits, low, inverse_scale(_get(scale, at, ok, 2)), NBITS)
    elif FAMILY == SYM:
        code = symmetric_scale(tl.max(bits & ABS, axis=1, keep_dims=True), NBITS)
        u = symmetric_codes(bits, code, NBITS)
        _put(scale, row[:, None], code.to(tl.int16), row_ok[:, None])
    elif GROUP >= DIM:
        least, most, largest = _extremes(bits, ok, 1)
        low, code = asymmetric_scale(least, most, largest, NBITS)
        u = asymmetric_codes(bits, low, inverse_scale(code), NBITS)
        _put(lo, row[:, None], narrow(low, KIND), row_ok[:, None])
        _put(scale, row[:, None], code.to(tl.int16), row_ok[:, None])
    else:
        group, member = tl.arange(0, NG), tl.arange(0, GP)
        if NG * GP == DIM and P == EIGHTH:
            grouped = tl.reshape(bits, (R, NG, GP))
            least, most, largest = _extremes(grouped, row_ok[:, None, None], 2)
        else:
            inside = (member < GROUP)[None, :] & (group[:, None] * GROUP + member[None, :] < DIM)
            inside = row_ok[:, None, None] & inside[None, :, :]
            column = (group[:, None] * GROUP + member[None, :]).to(tl.int64) * stride_dim
            grouped = widen(tl.load(x + place[:, None, None] + column[None, :, :], mask=inside, other=0), KIND)
            least, most, largest = _extremes(grouped, inside, 2)
        low, code = asymmetric_scale(least, most, largest, NBITS)
        inverse = inverse_scale(code)
        at = (row[:, None] * GROUPS + group[None, :])[:, :, None]
        keep = (row_ok[:, None] & (group < GROUPS)[None, :])[:, :, None]
        _put(lo, at, narrow(low, KIND), keep)
        _put(scale, at, code.to(tl.int16), keep)
        if NG * GP == DIM and P == EIGHTH:
            u = tl.reshape(asymmetric_codes(grouped, low, inverse, NBITS), (R, 8 * P))
        else:
            low = _spread_groups(tl.reshape(low, (R, NG)), channel, GROUP, R, 8 * P)
            inverse = _spread_groups(tl.reshape(inverse, (R, NG)), channel, GROUP, R, 8 * P)
            u = asymmetric_codes(bits, low, inverse, NBITS)
    u = tl.where(ok, u, 0)

    start = row * (NBITS * EIGHTH)
    if NBITS == 8:
        _put_plane(codes, start, u, row_ok, EIGHTH, P, 8, 0)
    elif NBITS >= 4:
        _put_plane(codes, start, u, row_ok, EIGHTH, P, 4, 0)
        if NBITS == 6:
            _put_plane(codes, start + 4 * EIGHTH, u, row_ok, EIGHTH, P, 2, 4)
    else:
        _put_plane(codes, start, u, row_ok, EIGHTH, P, 2, 0)
    if NBITS == 5 or NBITS == 3:
        top = u >> (NBITS - 1)
        if P != EIGHTH:
            top = tl.gather(top, tl.broadcast_to(((i // EIGHTH) % 8 * P + i % EIGHTH)[None, :], (R, 8 * P)), axis=1)
        _put_bits(codes, start + (NBITS - 1) * EIGHTH, top, row_ok, EIGHTH, P)


@triton.jit
def channel_scales(
    x, index, lo, scale, tokens, blocks, stride_head, stride_token, stride_dim,
    DIM: tl.constexpr, NBITS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    INDEXED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Minima and scales of C channels of one (head, block), R tokens at a time."""
    unit = tl.program_id(0).to(tl.int64)
    head, first = unit // blocks, (unit % blocks) * GROUP
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < DIM
    least = tl.full((C,), ABS, tl.int32)
    most = tl.full((C,), -ABS, tl.int32)
    largest = tl.zeros((C,), tl.int32)
    length = tl.minimum(GROUP, tokens - first)
    for begin in range(0, length, R):
        step = begin + tl.arange(0, R)
        row_ok = step < length
        place = _places(head * tokens + first + step, tokens, index, stride_head, stride_token, row_ok, INDEXED)
        place = tl.where(row_ok, place, 0)
        ok = row_ok[:, None] & inside[None, :]
        raw = tl.load(x + place[:, None] + channel.to(tl.int64)[None, :] * stride_dim, mask=ok, other=0)
        bits = widen(raw, KIND)
        largest = tl.maximum(largest, tl.max(bits & ABS, axis=0))
        least = tl.minimum(least, tl.min(tl.where(ok, order(bits), ABS), axis=0))
        most = tl.maximum(most, tl.max(tl.where(ok, order(bits), -ABS), axis=0))
    low, code = asymmetric_scale(least, most, largest, NBITS)
    _put(lo, unit * DIM + channel, narrow(low, KIND), inside)
    _put(scale, unit * DIM + channel, code.to(tl.int16), inside)


@triton.jit
def decode(
    out, index, lo, scale, codes, rows, tokens, blocks, stride_head, stride_token, stride_dim,
    DIM: tl.constexpr, NBITS: tl.constexpr, GROUP: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr,
    LIMIT: tl.constexpr, INDEXED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """R rows of a section; C is a power of two that holds a row, LIMIT the largest finite value of the output."""
    EIGHTH: tl.constexpr = (DIM + 7) // 8
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row_ok = row < rows
    channel = tl.arange(0, C)
    ok = row_ok[:, None] & (channel < DIM)[None, :]
    start = row * (NBITS * EIGHTH)
    if NBITS == 8:
        u = _take_plane(codes, start, channel, ok, EIGHTH, 8)
    elif NBITS >= 4:
        u = _take_plane(codes, start, channel, ok, EIGHTH, 4)
        if NBITS == 6:
            u |= _take_plane(codes, start + 4 * EIGHTH, channel, ok, EIGHTH, 2) << 4
    else:
        u = _take_plane(codes, start, channel, ok, EIGHTH, 2)
    if NBITS == 5 or NBITS == 3:
        u |= _take_plane(codes, start + (NBITS - 1) * EIGHTH, channel, ok, EIGHTH, 1) << (NBITS - 1)

    WHOLE: tl.constexpr = C == DIM and (GROUP & (GROUP - 1)) == 0  # groups fill the tile: each is read once
    if FAMILY == CHAN:
        at = ((row // tokens) * blocks + (row % tokens) // GROUP)[:, None] * DIM + channel[None, :]
        there = ok
    elif GROUP >= DIM:
        at = row[:, None]
        there = row_ok[:, None]
    elif WHOLE:
        at = row[:, None] * GROUPS + tl.arange(0, C // GROUP)[None, :]
        there = tl.broadcast_to(row_ok[:, None], (R, C // GROUP))
    else:
        at = row[:, None] * GROUPS + (channel // GROUP)[None, :]
        there = ok
    code = _get(scale, at, there, 2)
    if FAMILY != SYM:
        low = widen(_get(lo, at, there, 4 if KIND == FP32 else 2), KIND)
        if FAMILY == ASYM and GROUP < DIM and WHOLE:
            code = tl.reshape(tl.broadcast_to(code[:, :, None], (R, C // GROUP, GROUP)), (R, C))
            low = tl.reshape(tl.broadcast_to(low[:, :, None], (R, C // GROUP, GROUP)), (R, C))
    bad = code >= SPECIAL
    factor = as_float(tl.where(bad, 0, code << 15))
    if FAMILY == SYM:
        value = (u - 2 ** (NBITS - 1)).to(tl.float32) * factor
    else:
        bad = bad | ((low & ABS) >= INFINITY)
        value = as_float(tl.where(bad, 0, low)) + u.to(tl.float32) * factor
    value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    if KIND == BF16:
        nan: tl.constexpr = 0x7FC0
    elif KIND == FP16:
        nan: tl.constexpr = 0x7E00
    else:
        nan: tl.constexpr = NAN
    result = tl.where(bad, nan, narrow(as_bits(value), KIND)).to(out.dtype.element_ty)
    place = _places(row, tokens, index, stride_head, stride_token, row_ok, INDEXED)
    tl.store(out + place[:, None] + channel.to(tl.int64)[None, :] * stride_dim, result, mask=ok)


@triton.jit
def encode_raw(
    x, index, data, rows, tokens, stride_head, stride_token, stride_dim,
    DIM: tl.constexpr, INDEXED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The bytes of R rows as they are."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row_ok = row < rows
    channel = tl.arange(0, C).to(tl.int64)
    ok = row_ok[:, None] & (channel < DIM)[None, :]
    place = _places(row, tokens, index, stride_head, stride_token, row_ok, INDEXED)
    value = tl.load(x + place[:, None] + channel[None, :] * stride_dim, mask=ok, other=0)
    _put(data, row[:, None] * DIM + channel[None, :], value, ok)


@triton.jit
def decode_raw(
    out, index, data, rows, tokens, stride_head, stride_token, stride_dim,
    DIM: tl.constexpr, INDEXED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Inverse of `encode_raw`."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row_ok = row < rows
    channel = tl.arange(0, C).to(tl.int64)
    ok = row_ok[:, None] & (channel < DIM)[None, :]
    size: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    value = _get(data, row[:, None] * DIM + channel[None, :], ok, size)
    place = _places(row, tokens, index, stride_head, stride_token, row_ok, INDEXED)
    tl.store(out + place[:, None] + channel[None, :] * stride_dim, value.to(out.dtype.element_ty), mask=ok)
