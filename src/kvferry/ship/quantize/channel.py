"""Per-channel quantisation over blocks of tokens (KIVI's layout for keys): a minimum and a scale a channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.ship.quantize import scale as scales
from kvferry.ship.quantize.asymmetric import dequantize, quantize_groups
from kvferry.ship.quantize.base import get_values, put_bytes, select_rows, store_rows
from kvferry.ship.quantize.packing import pack_rows, row_bytes, unpack_rows


@dataclass(frozen=True, slots=True)
class PerChannel:
    """``chan{n}b{B}``: a group is one channel over B consecutive selected tokens; the last block may be partial.

    Codes stay token-major rows; minima and scales are written per (head, block, channel).
    """

    nbits: int
    block: int

    @property
    def spec(self) -> str:
        return f"chan{self.nbits}b{self.block}"

    def nbytes(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
        return heads * (self._blocks(tokens) * dim * (dtype.itemsize + 2) + tokens * row_bytes(self.nbits, dim))

    def encode(self, x: Tensor, index: Tensor | None, out: Tensor) -> None:
        rows = select_rows(x, index)
        heads, tokens, dim = rows.shape
        if rows.numel() == 0:
            out.zero_()
            return
        full = tokens // self.block * self.block
        parts = []
        if full:
            parts.append(quantize_groups(rows[:, :full].reshape(heads, -1, self.block, dim), 2, self.nbits))
        if full < tokens:
            parts.append(quantize_groups(rows[:, full:].unsqueeze(1), 2, self.nbits))
        lows = torch.cat([lo for lo, _, _ in parts], dim=1)
        codes = torch.cat([code for _, code, _ in parts], dim=1)
        u = torch.cat([u.flatten(1, 2) for _, _, u in parts], dim=1)
        stop = put_bytes(out, 0, lows.to(x.dtype))
        stop = put_bytes(out, stop, scales.code_bytes(codes))
        put_bytes(out, stop, pack_rows(u.flatten(0, 1), self.nbits))

    def decode(self, data: Tensor, index: Tensor | None, out: Tensor) -> None:
        heads, tokens, dim = out.shape
        tokens = tokens if index is None else index.numel()
        if heads * tokens * dim == 0:
            return
        count = heads * self._blocks(tokens) * dim
        lows, stop = get_values(data, 0, count, out.dtype)
        stored, stop = get_values(data, stop, count, torch.int16)
        packed = data[stop:].view(heads * tokens, row_bytes(self.nbits, dim))
        u = unpack_rows(packed, self.nbits, dim).view(heads, tokens, dim)
        lo = self._spread(lows.to(torch.float32), heads, tokens, dim)
        code = self._spread(scales.codes_from_bytes(stored), heads, tokens, dim)
        store_rows(out, index, dequantize(u, lo, code))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _spread(self, values: Tensor, heads: int, tokens: int, dim: int) -> Tensor:
        blocks = values.view(heads, self._blocks(tokens), 1, dim)
        return blocks.expand(-1, -1, self.block, -1).reshape(heads, -1, dim)[:, :tokens]
