"""Floats as the integers that order them, so that near values have near numbers whatever their signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}
_TENSORS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIELDS = {torch.bfloat16: (7, 8), torch.float16: (10, 5), torch.float32: (23, 8), torch.float64: (52, 11)}
"""Bits of mantissa and of exponent."""

CONTEXTS = 12
"""How far below the largest of its row a value may lie, in powers of two, before it counts as one with the rest."""


def bits_of(x: Float[Tensor, "*shape"]) -> NDArray[Any]:
    """The bit patterns as signed integers of the same width, flat; a CPU tensor, copied only where it is strided."""
    dense = x.contiguous()
    raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    bits: NDArray[Any] = raw.view(_INTEGERS[x.element_size()])
    return bits


def from_bits(bits: NDArray[Any], like: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Inverse of `bits_of`: a new tensor of the dtype and shape of ``like``."""
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(like.dtype).view(like.shape)


def ordinals(bits: NDArray[Any]) -> NDArray[Any]:
    """Bit patterns ↔ ordinals, its own inverse: -0 is -1, 0 is 0, and order is kept (NaN beyond infinity)."""
    width = 8 * bits.itemsize
    sign = bits >> (width - 1)
    turned: NDArray[Any] = bits ^ (sign & np.array((1 << (width - 1)) - 1, bits.dtype))
    return turned


def differences(exact: Float[Tensor, "*shape"], near: Float[Tensor, "*shape"]) -> NDArray[Any]:
    """``ordinal(exact) - ordinal(near)``, modulo the width, folded: 0, -1, 1, -2… become 0, 1, 2, 3…; unsigned."""
    delta = ordinals(bits_of(exact)) - ordinals(bits_of(near))
    folded: NDArray[Any] = (delta << 1) ^ (delta >> (8 * delta.itemsize - 1))
    return folded.view(f"u{delta.itemsize}")


def add_differences(near: Float[Tensor, "*shape"], folded: NDArray[Any]) -> Float[Tensor, "*shape"]:
    """Inverse of `differences`: the exact values, bit for bit."""
    signed = folded.view(_INTEGERS[folded.itemsize])
    # A shift of the unsigned number brings a zero in; the sign is in its lowest bit.
    delta = (folded >> 1).view(signed.dtype) ^ -(signed & 1)
    return from_bits(ordinals(ordinals(bits_of(near)) + delta), near)


def contexts(near: Float[Tensor, "batch heads tokens dim"]) -> NDArray[np.uint8]:
    """How large a difference to expect: by how many powers of two a value lies below the largest of its row, flat.

    A row's error is about the same for all of its values, so it is many steps of a small value's last bit, and few of
    a large one's.
    """
    mantissa, width = _FIELDS[near.dtype]
    exponents = (near.contiguous().view(_TENSORS[near.element_size()]) >> mantissa) & ((1 << width) - 1)
    below = exponents.amax(dim=3, keepdim=True) - exponents
    found: NDArray[np.uint8] = below.clamp_(max=CONTEXTS - 1).to(torch.uint8).reshape(-1).numpy()
    return found
