"""Hadamard-rotated rows: an outlier is spread over its group, then one scale serves all of it.

Rotation before quantisation is QuaRot's idea (arXiv 2404.00456, section 4). Groups are quantised mid-rise, with as many
levels below zero as above, so that all 2^n codes are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.ship.quantize import scale as scales
from kvferry.ship.quantize.base import get_values, put_bytes, select_rows, store_rows
from kvferry.ship.quantize.packing import pack_rows, row_bytes, unpack_rows


@dataclass(frozen=True, slots=True)
class Hadamard:
    """``had{n}g{G}``: groups of G channels (a power of two), each multiplied by the Hadamard matrix of its size.

    The last group of a row may be shorter; it is padded with zeros to a power of two, as a whole row is whose width
    lies below G. A group with NaN or infinity is marked.
    """

    nbits: int
    group: int

    @property
    def spec(self) -> str:
        return f"had{self.nbits}g{self.group}"

    def nbytes(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        sizes = group_sizes(dim, self.group)
        return heads * tokens * (2 * len(sizes) + row_bytes(self.nbits, sum(sizes)))

    def encode(self, x: Tensor, index: Tensor | None, out: Tensor) -> None:
        self.encode_rows(select_rows(x, index).flatten(0, 1), out)

    def encode_rows(self, rows: Float[Tensor, "rows dim"], out: Tensor) -> None:
        """Write contiguous fp32 rows."""
        if rows.numel() == 0:
            out.zero_()
            return
        all_codes, all_scales, at = [], [], 0
        for size in group_sizes(rows.shape[1], self.group):
            part = rows[:, at : at + size]
            at += size
            bad = ~part.abs().amax(dim=1, keepdim=True).isfinite()
            if bool(bad.any()):
                part = torch.where(bad, 0.0, part)
            if part.shape[1] < size:
                part = torch.nn.functional.pad(part, (0, size - part.shape[1]))
            part = rotate(part * (1.0 / size))
            half = 1 << (self.nbits - 1)
            code = scales.to_ue8m8(part.abs().amax(dim=1, keepdim=True) * (1.0 / half))
            inverse = scales.inverse(scales.from_ue8m8(code))
            q = part.mul_(inverse).floor_().clamp_(-half, half - 1).add_(half)
            all_codes.append(q.masked_fill_(bad, 0.0).to(torch.uint8))
            all_scales.append(scales.mark(code, bad))
        stop = put_bytes(out, 0, scales.code_bytes(torch.cat(all_scales, 1)))
        put_bytes(out, stop, pack_rows(torch.cat(all_codes, 1), self.nbits))

    def decode(self, data: Tensor, index: Tensor | None, out: Tensor) -> None:
        heads, tokens, dim = out.shape
        tokens = tokens if index is None else index.numel()
        if heads * tokens * dim == 0:
            return
        rows = self.decode_rows(data, heads * tokens, dim)
        store_rows(out, index, rows.view(heads, tokens, dim))

    def decode_rows(self, data: Tensor, rows: int, dim: int) -> Float[Tensor, "rows dim"]:
        """The rows of a section in fp32."""
        sizes = group_sizes(dim, self.group)
        stored, stop = get_values(data, 0, rows * len(sizes), torch.int16)
        code = scales.codes_from_bytes(stored).view(rows, len(sizes))
        width = sum(sizes)
        u = unpack_rows(data[stop:].view(rows, row_bytes(self.nbits, width)), self.nbits, width)
        q = u.to(torch.float32) - ((1 << (self.nbits - 1)) - 0.5)
        parts, at = [], 0
        for place, size in enumerate(sizes):
            scale = scales.from_ue8m8(code[:, place : place + 1])
            # Divided and multiplied by the size around the rotation, so that no sum of finite numbers overflows in it.
            y = q[:, at : at + size] * (scale * (1.0 / size))
            parts.append(rotate(y) * float(size))
            at += size
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1))[:, :dim]


def group_sizes(dim: int, group: int) -> list[int]:
    """Widths of a row's groups: powers of two, none above ``group``, the last one just wide enough."""
    whole, rest = divmod(dim, group)
    return [group] * whole + ([1 << math.ceil(math.log2(rest))] if rest else [])


def rotate(x: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """Every row times the Hadamard matrix of its size (Sylvester's, not normalised), by butterflies.

    At distance 1, 2, 4, … each pair (a, b) becomes (a + b, a - b), every sum rounded to fp32 on its own.
    """
    rows, size = x.shape
    if size == 1 or not rows:
        return x
    # Rows are the inner dimension: then every butterfly is a sum of long stretches of memory.
    have, free = x.t().contiguous(), torch.empty(size, rows, device=x.device)
    distance = 1
    while distance < size:
        shape = (size // (2 * distance), 2, distance, rows)
        pairs, out = have.view(shape), free.view(shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        have, free = free, have
        distance *= 2
    return have.t().contiguous()
