# mypy: ignore-errors
# ruff: noqa: N803, RET505
"""The codec's arithmetic in Triton, to the bit of ``docs/quantizers.md``.

On a GPU that takes some care:

- minima, maxima and tests for NaN and infinity work on the bits of fp32, as integers, so that neither the sign of a
  zero nor a subnormal depends on how the hardware compares floats;
- division is `tl.div_rn` (a plain ``/`` is approximate), and every launch forbids the fusion of a product and a sum
  (``enable_fp_fusion=False``, set by the caller);
- rounding adds 1.5 * 2^23, which leaves the integer, rounded half to even, in the low bits of the sum;
- bf16 is converted by shifts; fp16 by the hardware, which is exact one way and rounds half to even the other.

Triton's language is not typed Python, hence no type check here. No ``from __future__ import annotations`` either: the
interpreter looks at the annotations themselves.
"""

import triton
import triton.language as tl

BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FP32 = tl.constexpr(2)

MARK = tl.constexpr(0xFFFF)
LARGEST = tl.constexpr(0xFEFF)
SPECIAL = tl.constexpr(0xFF00)  # scale codes from here on are an infinity or a NaN
ABS = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
TINY = tl.constexpr(0x00800000)  # 2^-126
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def widen(raw, KIND: tl.constexpr):
    """Bits of the source dtype (a signed integer of its size) -> bits of the same value in fp32."""
    if KIND == BF16:
        return raw.to(tl.int32) << 16
    elif KIND == FP16:
        return as_bits(raw.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
    else:
        return raw.to(tl.int32)


@triton.jit
def narrow(bits, KIND: tl.constexpr):
    """Inverse of `widen` for finite values within the dtype's range, rounding half to even."""
    if KIND == BF16:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif KIND == FP16:
        return as_float(bits).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return bits


@triton.jit
def order(bits):
    """fp32 bits <-> integers in the order of the values (-0 before +0); its own inverse."""
    return bits ^ ((bits >> 31) & ABS)


@triton.jit
def scale_code(scale):
    """Non-negative fp32 -> ue8m8."""
    code = tl.minimum((as_bits(scale) + 0x4000) >> 15, LARGEST)
    code = tl.where(as_bits(scale) >= INFINITY, LARGEST, code)
    return tl.where(as_bits(scale) < TINY, 0, code)


@triton.jit
def inverse_scale(code):
    """1 / scale, 0 for a scale of zero and for a mark."""
    none = (code == 0) | (code == MARK)
    scale = as_float(tl.where(none, 0x3F800000, code << 15))
    one = tl.full(code.shape, 1.0, tl.float32)
    return tl.where(none, 0.0, tl.div_rn(one, scale))


@triton.jit
def symmetric_scale(largest, NBITS: tl.constexpr):
    """Scale codes from the bits of the largest absolute values."""
    bad = largest >= INFINITY
    amax = as_float(tl.where(bad, 0, largest))
    limit = tl.full(amax.shape, 2 ** (NBITS - 1) - 1, tl.float32)
    return tl.where(bad, MARK, scale_code(tl.div_rn(amax, limit)))


@triton.jit
def asymmetric_scale(least, most, largest, NBITS: tl.constexpr):
    """Bits of the minima (fp32) and scale codes, from least and most (in `order`) and the largest absolute bits."""
    bad = largest >= INFINITY
    lo, hi = order(least), order(most)
    lo = tl.where(bad | ((lo & ABS) == 0), 0, lo)
    hi = tl.where(bad, 0, hi)
    spread = as_float(hi) - as_float(lo)
    levels = tl.full(spread.shape, 2**NBITS - 1, tl.float32)
    return lo, tl.where(bad, MARK, scale_code(tl.div_rn(spread, levels)))


@triton.jit
def rounded(value):
    """fp32 -> int32, half to even; what lies above 2^22 (an infinity included) becomes some large number."""
    return as_bits(value + ROUND) - ROUND_BITS


@triton.jit
def symmetric_codes(bits, code, NBITS: tl.constexpr):
    half: tl.constexpr = 2 ** (NBITS - 1)
    inverse = inverse_scale(code)
    q = rounded(as_float(bits) * inverse)
    q = tl.where(as_bits(inverse) == 0, 0, tl.minimum(tl.maximum(q, 1 - half), half - 1))
    return tl.where(code == MARK, 0, q + half)


@triton.jit
def asymmetric_codes(bits, lo, inverse, NBITS: tl.constexpr):
    u = rounded((as_float(bits) - as_float(lo)) * inverse)
    return tl.where(as_bits(inverse) == 0, 0, tl.minimum(tl.maximum(u, 0), 2**NBITS - 1))
