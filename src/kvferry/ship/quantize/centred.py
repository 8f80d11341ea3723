"""Centred rows: one mean vector a head and section is taken off before, and put back after, another quantiser.

An offset that all keys of a head share shifts every logit of a query by the same amount and means nothing to the
softmax, but a symmetric range of a token is eaten up by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.ship.quantize.base import Quantizer, get_values, put_bytes, select_rows, store_rows

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Centred:
    """``cen{n}``, ``cen{n}g{G}``: means of the selected tokens, in the source's dtype, then the inner section.

    Args:
        inner: a quantiser that takes each row by itself, and whose sections are the same for every dtype.
        spec: canonical text.
    """

    inner: Quantizer
    spec: str

    @property
    def nbits(self) -> float:
        return self.inner.nbits

    def nbytes(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
        if heads * tokens * dim == 0:
            return 0
        return heads * dim * dtype.itemsize + self.inner.nbytes(heads, tokens, dim, dtype)

    def encode(self, x: Tensor, index: Tensor | None, out: Tensor) -> None:
        rows = select_rows(x, index)
        if rows.numel() == 0:
            return
        limit = min(torch.finfo(x.dtype).max, _LARGEST)
        mean = mean_of(rows).clamp_(-limit, limit).to(x.dtype)
        stop = put_bytes(out, 0, mean)
        centred = rows - mean.to(torch.float32).unsqueeze(1)
        # Two finite numbers may be further apart than fp32 goes; what is not finite stays so, and is marked.
        centred = torch.where(rows.isfinite(), centred.clamp(-_LARGEST, _LARGEST), rows)
        self.inner.encode(centred, None, out[stop:])

    def decode(self, data: Tensor, index: Tensor | None, out: Tensor) -> None:
        heads, tokens, dim = out.shape
        tokens = tokens if index is None else index.numel()
        if heads * tokens * dim == 0:
            return
        stored, stop = get_values(data, 0, heads * dim, out.dtype)
        mean = stored.to(torch.float32).view(heads, 1, dim)
        mean = torch.where(mean.isfinite(), mean, torch.nan)
        rows = torch.empty(heads, tokens, dim, device=data.device)
        self.inner.decode(data[stop:], None, rows)
        store_rows(out, index, rows + mean)


def mean_of(rows: Float[Tensor, "heads tokens dim"]) -> Float[Tensor, "heads dim"]:
    """Mean over the tokens whose rows are finite in that head, 0 where there is none; the order of sums is fixed.

    Neighbours are added to each other, then neighbouring sums (a last one without a neighbour stays alone), until one
    is left; it is multiplied by one over the count. Sums beyond fp32 of both signs have no mean: 0.
    """
    good = rows.isfinite().all(dim=2, keepdim=True)
    count = good.sum(dim=1).clamp_min(1).to(torch.float32)
    sums = torch.where(good, rows, 0.0)
    while sums.shape[1] > 1:
        paired = sums.shape[1] // 2 * 2
        added = sums[:, 0:paired:2] + sums[:, 1:paired:2]
        sums = torch.cat((added, sums[:, paired:]), dim=1)
    mean = sums[:, 0] * (1.0 / count)
    return torch.where(mean.isnan(), 0.0, mean)
