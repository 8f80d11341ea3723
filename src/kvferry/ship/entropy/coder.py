"""The door to the entropy coder: compiled where it can be, else numpy; the bytes are the same."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from kvferry.errors import CorruptPacket
from kvferry.ship import native
from kvferry.ship.entropy import reference
from kvferry.ship.entropy.reference import Bank, Bins


def encode(bank: Bank, codes: Int[Tensor, "rows columns"], row_bin: Bins, column_bin: Bins) -> bytes:
    """Write int32 ``codes``; the bin of a cell is ``row_bin + column_bin``, and below 0 nothing is written.

    Codes that are not written read as 0.
    """
    dense = np.ascontiguousarray(codes.numpy(), dtype=np.int32)
    kernels = native.kernels()
    if kernels is None:
        return reference.encode(bank, dense, row_bin, column_bin)
    return bytes(kernels.entropy_encode(bank.freq, bank.reach, dense, row_bin, column_bin))


def decode(
    bank: Bank, data: bytes | memoryview, rows: int, columns: int, row_bin: Bins, column_bin: Bins
) -> NDArray[np.int32]:
    """Read ``(rows, columns)`` codes.

    Raises:
        CorruptPacket: bytes that no encoder wrote for this shape and these bins.
    """
    kernels = native.kernels()
    try:
        if kernels is None:
            return reference.decode(bank, data, rows, columns, row_bin, column_bin)
        out = np.empty((rows, columns), np.int32)
        kernels.entropy_decode(bank.freq, bank.reach, np.frombuffer(data, np.uint8), row_bin, column_bin, out)
    except ValueError as error:
        raise CorruptPacket(f"an entropy-coded stream is not what its header says: {error}") from error
    return out


def quantize(
    bank: Bank,
    values: Float[Tensor, "rows columns"],
    row_bin: Bins,
    column_bin: Bins,
    steps: Float[Tensor, " columns"],
    threshold: float,
    *,
    codes: bool = True,
) -> tuple[Int[Tensor, "rows columns"] | None, float]:
    """Codes of float32 ``values``, and the bits that they will cost by the tables, escapes included.

    A value within ``threshold`` steps of 0 becomes 0, the others the nearest code with that dead zone.

    Args:
        codes: ``False``: only the bits are wanted.
    """
    kernels = native.kernels()
    dense = np.ascontiguousarray(values.numpy())
    if kernels is not None:
        out = np.empty(dense.shape if codes else (0, 0), np.int32)
        bits = kernels.entropy_quantize(
            bank.freq, bank.reach, dense, row_bin, column_bin, steps.numpy(), threshold, out
        )
        return (torch.from_numpy(out) if codes else None), float(bits)
    bins, shift = reference.places(bank, row_bin, column_bin)
    inverse = np.float32(1) / steps.numpy()
    with np.errstate(over="ignore"):  # infinity is cut to the largest code too
        exact = np.abs(dense) * inverse + (np.float32(1) - np.float32(threshold))
    size = np.minimum(exact, np.float32(2**30)).astype(np.int64)
    found = np.where(bins >= 0, np.where(dense < 0, -size, size), 0)
    coded = bins >= 0
    table, high = bins[coded], (found >> shift)[coded]
    reach = bank.reach.astype(np.int64)[table]
    far = np.abs(high) > reach
    index = np.where(far, 2 * reach + 1, high + reach)
    bits = bank.bits[table, index].sum(dtype=np.float64) + shift[coded].sum() + 32 * far.sum()
    return (torch.from_numpy(found.astype(np.int32)) if codes else None), float(bits)
