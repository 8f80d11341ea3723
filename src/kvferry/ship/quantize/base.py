"""What a quantiser is, and the few steps that all of them share."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

MARK = 0xFFFF
"""Scale code of a row or group that holds a NaN or an infinity: it decodes to NaN throughout."""

LARGEST = 0xFEFF
"""Largest scale code of a number. Codes between it and `MARK` are never written; they read as `MARK`."""


class Quantizer(Protocol):
    """One way to write rows of keys or values in fewer bytes; the definition is in ``docs/quantizers.md``.

    Attributes:
        spec: canonical text that travels in the frame: ``raw``, ``sym8``, ``asym4g64``, ``chan4b128``…
        nbits: nominal bits an element, codes only.
    """

    @property
    def spec(self) -> str: ...

    @property
    def nbits(self) -> float: ...

    def nbytes(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
        """Exact bytes of a section that holds ``tokens`` selected tokens."""

    def encode(
        self,
        x: Float[Tensor, "heads tokens dim"],
        index: Int[Tensor, " selected"] | None,
        out: UInt8[Tensor, " nbytes"],
    ) -> None:
        """Write the selected tokens of ``x`` (any strides) into ``out``, of exactly ``nbytes`` bytes."""

    def decode(
        self,
        data: UInt8[Tensor, " nbytes"],
        index: Int[Tensor, " selected"] | None,
        out: Float[Tensor, "heads tokens dim"],
    ) -> None:
        """Write the selected tokens into ``out`` (any strides), in place; the others are left alone."""


def select_rows(x: Tensor, index: Tensor | None) -> Tensor:
    """The selected tokens as contiguous fp32, ``(heads, selected, dim)``."""
    picked = x if index is None else x.index_select(1, index)
    return picked.to(torch.float32).contiguous()


def store_rows(out: Tensor, index: Tensor | None, rows: Tensor) -> None:
    """Put fp32 ``rows`` into the selected tokens of ``out``, clamped to the finite range of its dtype."""
    limit = min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max)
    none = rows.isnan()
    rows = rows.clamp(-limit, limit).to(out.dtype)
    # torch's own conversion has several bit patterns for NaN; the format has one.
    store_exact(out, index, rows.masked_fill_(none, torch.nan))


def store_exact(out: Tensor, index: Tensor | None, rows: Tensor) -> None:
    """Put ``rows``, already of the right dtype, into the selected tokens of ``out``."""
    if index is None:
        out.copy_(rows)
    else:
        out.index_copy_(1, index.long(), rows)


def put_bytes(out: Tensor, start: int, values: Tensor) -> int:
    """Write the bytes of ``values`` into ``out`` from ``start`` on; returns where they end."""
    dense = values.detach().contiguous()
    # Not view(-1): a dimension of one element may keep any stride, and view(uint8) needs 1.
    raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    stop = start + raw.numel()
    out[start:stop].copy_(raw)
    return stop


def get_values(data: Tensor, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Read ``count`` values of ``dtype`` from ``data`` at any byte offset; returns them and where they end."""
    stop = start + count * dtype.itemsize
    return data[start:stop].clone().view(dtype), stop
