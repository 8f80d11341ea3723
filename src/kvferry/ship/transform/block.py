"""One group's tokens of one sequence: components, quantised and entropy-coded.

A block is three streams of the entropy coder, each led by its length (u32): the octaves of the tokens' weights (one
row), the means of the components in eighths of a step (one row), the codes (a row for each component that is in use).
Which rows and cells are in use follows from the basis, the step and the octaves, by integers alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from kvferry.errors import CorruptPacket
from kvferry.ship.entropy import coder
from kvferry.ship.entropy.reference import BINS_PER_OCTAVE
from kvferry.ship.transform.basis import LEVELS, Basis
from kvferry.ship.transform.tables import LOWEST, THRESHOLD, Tables
from kvferry.ship.transform.weights import MOST

STEP_CODES = (-LEVELS * 40, LEVELS * 24)
"""Least and largest step code: the step is ``2^(code / LEVELS)``."""

_LENGTH = struct.Struct("<I")
_PER_BIN = LEVELS // BINS_PER_OCTAVE
_OCTAVES_BIN = LOWEST + 4
"""Octaves of weights spread by about 2."""

_MEAN_EIGHTHS = 3
_LARGEST = 2.0**30


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """What a block is made of.

    Attributes:
        values: float32 ``(components, tokens)``, less the transform's own mean.
        mean: their mean, weighted.
        octaves: log2 of the tokens' weights.
    """

    values: Float[Tensor, "components tokens"]
    mean: Float[Tensor, " components"]
    octaves: Int[Tensor, " tokens"]

    @classmethod
    def of(cls, basis: Basis, rows: Float[Tensor, "tokens width"], octaves: Int[Tensor, " tokens"]) -> Components:
        """Transform tokens of `Group.rows`."""
        values = basis.forward @ rows.T - basis.mean[:, None]
        weights = octaves.float().exp2()
        return cls(values, (values @ weights) / weights.sum(), octaves)

    def every(self, stride: int) -> Components:
        """One token in ``stride``."""
        return Components(self.values[:, ::stride].contiguous(), self.mean, self.octaves[::stride])


def step_size(code: int) -> float:
    """The step of that code."""
    return float(2.0 ** (code / LEVELS))


def cost(own: Components, basis: Basis, tables: Tables, code: int) -> float:
    """Bytes of the block's codes, by the tables' frequencies."""
    used, row_bin, column_bin = _bins(basis, own.octaves, code)
    values = own.values[used] - _means(own.mean, basis, code)[1][used, None]
    _, bits = coder.quantize(
        tables.bank, values, row_bin, column_bin, _steps(own.octaves, code), THRESHOLD, codes=False
    )
    return bits / 8


def encode_block(own: Components, basis: Basis, tables: Tables, code: int) -> bytes:
    """The block at that step."""
    bank = tables.bank
    used, row_bin, column_bin = _bins(basis, own.octaves, code)
    whole, means = _means(own.mean, basis, code)
    values = own.values[used] - means[used, None]
    codes, _ = coder.quantize(bank, values, row_bin, column_bin, _steps(own.octaves, code), THRESHOLD)
    assert codes is not None
    streams = (
        coder.encode(bank, own.octaves.to(torch.int32)[None], *_octave_bins(len(own.octaves))),
        coder.encode(bank, whole[None], *_mean_bins(basis, code)),
        coder.encode(bank, codes, row_bin, column_bin),
    )
    return b"".join(_LENGTH.pack(len(stream)) + stream for stream in streams)


def decode_block(
    data: memoryview, at: int, tokens: int, basis: Basis, tables: Tables, code: int
) -> tuple[Float[Tensor, "tokens width"], int]:
    """Read a block of so many tokens from ``data`` at ``at``; returns their channels and where the block ends.

    Raises:
        CorruptPacket: it is no such block.
    """
    bank = tables.bank
    stream, at = _take(data, at)
    octaves = torch.from_numpy(coder.decode(bank, stream, 1, tokens, *_octave_bins(tokens))[0])
    if not -MOST <= int(octaves.min()) <= int(octaves.max()) <= MOST:
        raise CorruptPacket("a token's weight is out of range")
    stream, at = _take(data, at)
    whole = coder.decode(bank, stream, 1, len(basis.mean), *_mean_bins(basis, code))[0]
    means = basis.mean + torch.from_numpy(whole).float() * (step_size(code) / 2**_MEAN_EIGHTHS)
    stream, at = _take(data, at)
    used, row_bin, column_bin = _bins(basis, octaves, code)
    codes = coder.decode(bank, stream, len(row_bin), tokens, row_bin, column_bin)
    values = _reconstruct(torch.from_numpy(codes), row_bin, column_bin, tables) * _steps(octaves, code)
    return torch.addmm(basis.back @ means, values.T, basis.back[:, used].T), at


def _reconstruct(codes: Tensor, row_bin: NDArray[np.int16], column_bin: NDArray[np.int16], tables: Tables) -> Tensor:
    """Codes where their values lie on average, in steps."""
    top = tables.bank.bins - 1
    shift = torch.zeros(top + 2, 3)  # of codes 0, 1 and larger ones; nothing beyond the last bin
    shift[: top + 1, 1:] = tables.shift
    signed = torch.cat([-shift[:, [2, 1]], shift], dim=1)
    rows, columns = (torch.from_numpy(bins.astype(np.int32)) for bins in (row_bin, column_bin))
    cells = (rows[:, None] + columns).clamp_(0, top + 1).mul_(5).add_(codes.clamp(-2, 2)).add_(2)
    return codes.float().add_(signed.take(cells.long()))


def _bins(
    basis: Basis, octaves: Int[Tensor, " tokens"], code: int
) -> tuple[Tensor, NDArray[np.int16], NDArray[np.int16]]:
    """Components in use, and the bins of their rows and of the tokens' columns."""
    rows = (basis.level.to(torch.int64) - code + _PER_BIN // 2) // _PER_BIN + LOWEST
    columns = octaves.to(torch.int64) * (BINS_PER_OCTAVE // 2)
    used = (rows + int(columns.max()) >= 0).nonzero().flatten()
    return used, rows[used].numpy().astype(np.int16), columns.numpy().astype(np.int16)


def step_bins(
    basis: Basis, octaves: Int[Tensor, " tokens"], code: int
) -> tuple[Int[Tensor, "components tokens"], Float[Tensor, " tokens"]]:
    """Bin of every cell, and the step of every token."""
    rows = (basis.level.to(torch.int64) - code + _PER_BIN // 2) // _PER_BIN + LOWEST
    return rows[:, None] + octaves.to(torch.int64) * (BINS_PER_OCTAVE // 2), _steps(octaves, code)


def _steps(octaves: Int[Tensor, " tokens"], code: int) -> Float[Tensor, " tokens"]:
    return step_size(code) * (-0.5 * octaves.float()).exp2()


def _octave_bins(tokens: int) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    return np.array([_OCTAVES_BIN], np.int16), np.zeros(tokens, np.int16)


def _mean_bins(basis: Basis, code: int) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    fine = code - _MEAN_EIGHTHS * LEVELS
    columns = (basis.spread.to(torch.int64) - fine + _PER_BIN // 2) // _PER_BIN + LOWEST
    return np.zeros(1, np.int16), columns.numpy().astype(np.int16)


def _means(mean: Tensor, basis: Basis, code: int) -> tuple[Int[Tensor, " components"], Float[Tensor, " components"]]:
    """Codes of the means, 0 where none is written, and what the receiver makes of them."""
    fine = step_size(code) / 2**_MEAN_EIGHTHS
    whole = (mean / fine).clamp(-_LARGEST, _LARGEST).round().to(torch.int32)
    whole = torch.where(torch.from_numpy(_mean_bins(basis, code)[1] >= 0), whole, 0)
    return whole, whole.float() * fine


def _take(data: memoryview, at: int) -> tuple[memoryview, int]:
    if at + _LENGTH.size > len(data):
        raise CorruptPacket("a block ends within the length of a stream")
    (size,) = _LENGTH.unpack_from(data, at)
    start = at + _LENGTH.size
    if start + size > len(data):
        raise CorruptPacket("a block ends within a stream")
    return data[start : start + size], start + size
