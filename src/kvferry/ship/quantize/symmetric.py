"""Symmetric absmax quantisation, one scale a (head, token) row: the paper's quantiser.

SpectrumKV (arXiv 2606.08635), quantiser: ``scale = max|x| / qmax``, ``q = round(x / scale)`` clamped to ±qmax, with
qmax 127 and 7 for INT8 and INT4. The scale is stored as ``ue8m8`` and the codes are computed against the stored one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.ship.quantize import scale as scales
from kvferry.ship.quantize.base import get_values, put_bytes, select_rows, store_rows
from kvferry.ship.quantize.packing import pack_rows, row_bytes, unpack_rows


@dataclass(frozen=True, slots=True)
class Symmetric:
    """``sym{n}``: codes ``q + 2^(n-1)`` of n bits, one ``ue8m8`` scale a row. A row with NaN or infinity is marked."""

    nbits: int

    @property
    def spec(self) -> str:
        return f"sym{self.nbits}"

    def nbytes(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        return heads * tokens * (2 + row_bytes(self.nbits, dim))

    def encode(self, x: Tensor, index: Tensor | None, out: Tensor) -> None:
        rows = select_rows(x, index).flatten(0, 1)
        if rows.numel() == 0:
            out.zero_()
            return
        bad = ~rows.isfinite().all(dim=1)
        rows = torch.where(bad.unsqueeze(1), 0.0, rows)
        qmax, offset = self._range()
        code = scales.to_ue8m8(rows.abs().amax(dim=1) / qmax)
        inverse = scales.inverse(scales.from_ue8m8(code)).unsqueeze(1)
        q = (rows * inverse).round_().clamp_(-qmax, qmax)
        codes = torch.where(bad.unsqueeze(1), 0.0, q + offset).to(torch.uint8)
        stop = put_bytes(out, 0, scales.code_bytes(scales.mark(code, bad)))
        put_bytes(out, stop, pack_rows(codes, self.nbits))

    def decode(self, data: Tensor, index: Tensor | None, out: Tensor) -> None:
        heads, tokens, dim = out.shape
        tokens = tokens if index is None else index.numel()
        stored, stop = get_values(data, 0, heads * tokens, torch.int16)
        code = scales.codes_from_bytes(stored)
        packed = data[stop:].view(heads * tokens, row_bytes(self.nbits, dim))
        _, offset = self._range()
        q = unpack_rows(packed, self.nbits, dim).to(torch.float32) - offset
        rows = q * scales.from_ue8m8(code).unsqueeze(1)
        store_rows(out, index, rows.view(heads, tokens, dim))

    def _range(self) -> tuple[int, int]:
        half = 1 << (self.nbits - 1)
        return half - 1, half
