"""No quantisation: the bytes of the source, as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.ship.quantize.base import get_values, put_bytes, store_exact


@dataclass(frozen=True, slots=True)
class Raw:
    """The source's own bytes, head-major; NaN payloads and signed zeros included."""

    nbits: float = 16.0
    spec: str = "raw"

    def nbytes(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
        return heads * tokens * dim * dtype.itemsize

    def encode(self, x: Tensor, index: Tensor | None, out: Tensor) -> None:
        put_bytes(out, 0, x if index is None else x.index_select(1, index))

    def decode(self, data: Tensor, index: Tensor | None, out: Tensor) -> None:
        heads, tokens, dim = out.shape
        tokens = tokens if index is None else index.numel()
        values, _ = get_values(data, 0, heads * tokens * dim, out.dtype)
        store_exact(out, index, values.view(heads, tokens, dim))
