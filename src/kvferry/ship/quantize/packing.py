"""Codes of 2 to 8 bits, packed row by row as planes: nothing but shifts and masks, for wide registers.

A row of ``dim`` codes is padded with zeros to a multiple of 8 (``padded``) and written as planes, lowest bits first:
a byte plane (8 bits), or a plane of 4, 2 or 1 bits. Byte j of the 4-bit plane holds codes j and j + padded/2; byte j
of the 2-bit plane codes j, j + padded/4, j + padded/2 and j + 3 padded/4; bit k of byte j of the 1-bit plane
code 8j + k.
"""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor

PLANES: dict[int, tuple[int, ...]] = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits a code -> widths of its planes, lowest bits first."""


def padded_dim(dim: int) -> int:
    """``dim`` rounded up to a multiple of 8."""
    return (dim + 7) // 8 * 8


def row_bytes(nbits: int, dim: int) -> int:
    """Bytes of one packed row."""
    return nbits * padded_dim(dim) // 8


def pack_rows(codes: UInt8[Tensor, "rows dim"], nbits: int) -> UInt8[Tensor, "rows row_bytes"]:
    """Pack rows of codes below ``2**nbits``."""
    rows, dim = codes.shape
    width = padded_dim(dim)
    if width != dim:
        codes = torch.nn.functional.pad(codes, (0, width - dim))
    planes, shift = [], 0
    for bits in PLANES[nbits]:
        plane = (codes >> shift) & ((1 << bits) - 1)
        planes.append(_pack_plane(plane, bits, rows, width))
        shift += bits
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=1)


def unpack_rows(packed: UInt8[Tensor, "rows row_bytes"], nbits: int, dim: int) -> UInt8[Tensor, "rows dim"]:
    """Inverse of `pack_rows`."""
    width = padded_dim(dim)
    codes, start, shift = None, 0, 0
    for bits in PLANES[nbits]:
        stop = start + bits * width // 8
        plane = _unpack_plane(packed[:, start:stop], bits)
        codes = plane if codes is None else codes | (plane << shift)
        start, shift = stop, shift + bits
    assert codes is not None
    return codes[:, :dim]


def _pack_plane(plane: Tensor, bits: int, rows: int, width: int) -> Tensor:
    if bits == 8:
        return plane
    if bits == 1:
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=plane.device)
        return (plane.view(rows, width // 8, 8) * weights).sum(dim=2, dtype=torch.uint8)
    parts = plane.view(rows, 8 // bits, width * bits // 8)
    packed = parts[:, 0].clone()
    for position in range(1, 8 // bits):
        packed |= parts[:, position] << (bits * position)
    return packed


def _unpack_plane(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    if bits == 1:
        return ((packed.unsqueeze(2) >> shifts) & mask).flatten(1)
    return ((packed.unsqueeze(1) >> shifts.unsqueeze(1)) & mask).flatten(1)
