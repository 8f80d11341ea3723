"""Asymmetric quantisation of groups of channels within a (head, token) row: a minimum and a scale a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.ship.quantize import scale as scales
from kvferry.ship.quantize.base import get_values, put_bytes, select_rows, store_rows
from kvferry.ship.quantize.packing import pack_rows, row_bytes, unpack_rows


@dataclass(frozen=True, slots=True)
class Asymmetric:
    """``asym{n}g{G}`` or ``asym{n}row``: groups of G consecutive channels (the last may be short), or the whole row.

    ``u = round((x - lo) / scale)``, ``y = lo + u * scale``; ``lo`` is the group's minimum, exact, in the source's
    dtype. A group with NaN or infinity is marked.
    """

    nbits: int
    group: int | None

    @property
    def spec(self) -> str:
        return f"asym{self.nbits}row" if self.group is None else f"asym{self.nbits}g{self.group}"

    def nbytes(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
        return heads * tokens * (self._groups(dim) * (dtype.itemsize + 2) + row_bytes(self.nbits, dim))

    def encode(self, x: Tensor, index: Tensor | None, out: Tensor) -> None:
        rows = select_rows(x, index).flatten(0, 1)
        if rows.numel() == 0:
            out.zero_()
            return
        parts = [quantize_groups(part, 1, self.nbits) for part in torch.split(rows, self._size(rows.shape[1]), dim=1)]
        lows, codes = torch.cat([lo for lo, _, _ in parts], 1), torch.cat([code for _, code, _ in parts], 1)
        stop = put_bytes(out, 0, lows.to(x.dtype))
        stop = put_bytes(out, stop, scales.code_bytes(codes))
        put_bytes(out, stop, pack_rows(torch.cat([u for _, _, u in parts], 1), self.nbits))

    def decode(self, data: Tensor, index: Tensor | None, out: Tensor) -> None:
        heads, tokens, dim = out.shape
        rows = heads * (tokens if index is None else index.numel())
        if rows * dim == 0:
            return
        count = rows * self._groups(dim)
        lows, stop = get_values(data, 0, count, out.dtype)
        stored, stop = get_values(data, stop, count, torch.int16)
        u = unpack_rows(data[stop:].view(rows, row_bytes(self.nbits, dim)), self.nbits, dim)
        group = torch.arange(dim, device=data.device) // self._size(dim)
        lo = lows.to(torch.float32).view(rows, self._groups(dim))[:, group]
        code = scales.codes_from_bytes(stored).view(rows, self._groups(dim))[:, group]
        store_rows(out, index, dequantize(u, lo, code).view(heads, rows // heads, dim))

    def _size(self, dim: int) -> int:
        return max(1, dim) if self.group is None else self.group

    def _groups(self, dim: int) -> int:
        return -(-dim // self._size(dim))


def quantize_groups(x: Tensor, dim: int, nbits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise fp32 ``x`` with one minimum and scale for all that lies along ``dim``.

    Returns the minima and the int32 scale codes (``dim`` kept, of size 1), and the uint8 codes of ``x``'s shape.
    """
    bad = ~x.isfinite().all(dim=dim, keepdim=True)
    x = torch.where(bad, 0.0, x)
    lo, hi = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    lo = torch.where(lo == 0, torch.zeros_like(lo), lo)  # -0.0 and 0.0 are one minimum: written as 0.0
    levels = (1 << nbits) - 1
    code = scales.to_ue8m8((hi - lo) / levels)
    inverse = scales.inverse(scales.from_ue8m8(code))
    u = ((x - lo) * inverse).round_().clamp_(0, levels)
    return lo, scales.mark(code, bad), u.to(torch.uint8)


def dequantize(u: Tensor, lo: Tensor, code: Tensor) -> Tensor:
    """``lo + u * scale`` in fp32, NaN where marked (or where ``lo`` is no number); all three of one shape."""
    return torch.where(lo.isfinite(), lo + u.to(torch.float32) * scales.from_ue8m8(code), torch.nan)
