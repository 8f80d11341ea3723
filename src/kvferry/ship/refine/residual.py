"""Level 1: what a token lacks to INT8's quality, as a symmetric residual of just enough bits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kvferry.errors import CorruptPacket
from kvferry.ship.fields import decode_mask, encode_mask
from kvferry.ship.frame import bytes_tensor
from kvferry.ship.parts import BodyReader, Part, make_part
from kvferry.ship.quantize import quantizer

SPECS = ("sym2", "sym3", "sym4", "sym5", "sym6", "sym8")
_QMAX = (1, 3, 7, 15, 31, 127)

TARGET = 0.012
"""Relative error (L2 of the error over that of a token's deviation from the frame's mean) which counts as INT8's.

Rows of a normal distribution have 0.007 at INT8 and 0.12 at INT4; a residual of n bits divides an error that is spread
evenly over its range by 2 qmax(n), so that 4 bits bring INT4 to 0.009.
"""

_LEAST_FOR_MEAN = 16
_LENGTH = struct.Struct("<I")


def choose(
    exact: Float[Tensor, "batch heads tokens dim"],
    lacking: Float[Tensor, "batch heads tokens dim"],
    shown: Bool[Tensor, "batch tokens"],
) -> tuple[UInt8[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
    """Which of `SPECS` each token's residual gets, and which tokens get one at all; both tensors are fp32.

    None get those that are good enough, those that are not shown, and those whose values are not finite, or so large
    that their squares are not: the second level brings them whole.
    """
    error, energy = (x.square().sum(dim=(1, 3)) for x in (lacking, exact))
    counted = shown & error.isfinite() & energy.isfinite()
    tokens = counted.sum(dim=1)
    if int(tokens.min()) >= _LEAST_FOR_MEAN:  # of fewer tokens the mean is too much like each of them
        own = exact if bool(counted.all()) else torch.where(counted[:, None, :, None], exact, 0.0)
        mean = own.sum(dim=2, keepdim=True) / tokens.view(-1, 1, 1, 1)
        energy = (own - mean).square_().sum(dim=(1, 3))
    relative = (error / energy).sqrt()  # NaN of 0 / 0 lacks nothing, infinity of x / 0 gets the most bits
    tiers = torch.full(relative.shape, len(SPECS) - 1, dtype=torch.uint8)
    for tier in reversed(range(len(SPECS) - 1)):
        tiers[relative <= TARGET * 2 * _QMAX[tier]] = tier
    return tiers, counted & (relative > TARGET)


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """Residuals of keys or of values of one frame.

    Attributes:
        sent: tokens that have one.
        part: their tiers and where the sections of each lie.
        data: the sections.
    """

    sent: Bool[Tensor, "batch tokens"]
    part: Part
    data: UInt8[Tensor, " nbytes"]

    @classmethod
    def of(cls, exact: Tensor, near: Tensor, shown: Tensor) -> Residual:
        """Quantise what ``near`` lacks to ``exact``."""
        wide = exact.to(_sum_dtype(exact.dtype))
        lacking = (wide - near).float()
        tiers, sent = choose(wide.float(), lacking, shown)
        part = make_part(tiers, sent, SPECS)
        data = torch.empty(part.nbytes(exact.shape[1], exact.shape[3], torch.float32), dtype=torch.uint8)
        part.encode(lacking, data)
        return cls(sent, part, data)

    def description(self) -> bytes:
        """What a reader must know before the sections."""
        mask = encode_mask(self.sent)
        return _LENGTH.pack(len(mask)) + mask + self.part.description

    def added_to(self, near: Float[Tensor, "batch heads tokens dim"]) -> Float[Tensor, "batch heads tokens dim"]:
        """``near`` with the residual in: one addition, rounded once, in the cache's dtype."""
        lacking = torch.zeros(near.shape, dtype=torch.float32)
        self.part.decode(self.data, lacking)
        limit = torch.finfo(near.dtype).max
        upgraded = (lacking.to(_sum_dtype(near.dtype)) + near).clamp_(-limit, limit).to(near.dtype)
        return upgraded if bool(self.sent.all()) else torch.where(self.sent[:, None, :, None], upgraded, near)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what a value and its residual are added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def body(sides: Sequence[Residual]) -> list[bytes | memoryview]:
    """The pieces of a frame's body: descriptions of keys and values, then sections of both."""
    pieces: list[bytes | memoryview] = [side.description() for side in sides]
    pieces += [memoryview(side.data.numpy()).cast("B") for side in sides]  # type: ignore[arg-type]
    return pieces


def read_body(
    data: memoryview, where: object, shape: tuple[int, int], dims: Sequence[tuple[int, int]]
) -> list[Residual]:
    """Inverse of `body`.

    Args:
        data: the body.
        where: names the frame in messages.
        shape: ``(batch, tokens)`` of the frame.
        dims: ``(heads, dim)`` of keys and of values.

    Raises:
        CorruptPacket, UnsupportedVersion: the body is inconsistent, or names a quantiser that has no place in it.
    """
    nothing = torch.zeros(shape, dtype=torch.bool)
    reader = BodyReader(where, data, nothing)
    described = []
    for _ in dims:
        (length,) = _LENGTH.unpack(reader.take(_LENGTH.size, "mask"))
        reader.sent = decode_mask(reader.take(length, "mask"), *shape)
        part = reader.part(None)
        if not all(method.spec in SPECS for method in part.quantizers):
            raise CorruptPacket(f"{where} has residuals of other quantisers than {', '.join(SPECS)}")
        described.append((reader.sent, part))
    sides = []
    for (sent, part), (heads, dim) in zip(described, dims, strict=True):
        section = reader.take(part.nbytes(heads, dim, torch.float32), "sections")
        sides.append(Residual(sent, part, bytes_tensor(section)))
    reader.end()
    return sides


def most_bytes(batch: int, tokens: int, dims: Sequence[tuple[int, int]]) -> int:
    """Upper bound of a body's bytes."""
    count = batch * tokens
    largest = quantizer(SPECS[-1])
    described = _LENGTH.size + 1 + (count + 7) // 8 + 1 + sum(1 + len(spec) for spec in SPECS) + (3 * count + 7) // 8
    return sum(described + batch * largest.nbytes(heads, tokens, dim, torch.float32) for heads, dim in dims)
