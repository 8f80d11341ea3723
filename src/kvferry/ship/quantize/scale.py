"""The scale format ``ue8m8``: fp32 without its sign and without its 15 low mantissa bits, in two bytes.

It has the whole exponent range of fp32, so that no scale of a normal number underflows (an fp16 scale does, and then
the row decodes to NaN or to nothing), and 8 mantissa bits: a relative error of at most 2^-9.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.ship.quantize.base import LARGEST, MARK

_HALF = 0x4000
_TINY = 2.0**-126


def to_ue8m8(scale: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Nearest codes (int32) of non-negative fp32 scales; below 2^-126 the code is 0, above the range `LARGEST`."""
    code = (scale.contiguous().view(torch.int32) + _HALF) >> 15
    code = code.clamp(max=LARGEST)
    return torch.where(scale < _TINY, 0, code)


def from_ue8m8(code: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The fp32 scales of int32 codes; NaN for `MARK` and all that is no number's code."""
    return torch.where(code > LARGEST, torch.nan, (code << 15).view(torch.float32))


def mark(code: Tensor, bad: Tensor) -> Tensor:
    """``code`` with `MARK` where ``bad``."""
    return torch.where(bad, MARK, code)


def code_bytes(code: Tensor) -> Tensor:
    """int32 codes as the 16-bit integers that are written."""
    return code.to(torch.int16)  # wraps: the low sixteen bits are what is kept


def codes_from_bytes(values: Tensor) -> Tensor:
    """Inverse of `code_bytes`."""
    return values.to(torch.int32) & 0xFFFF


def inverse(scale: Tensor) -> Tensor:
    """``1 / scale`` in fp32, 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)
