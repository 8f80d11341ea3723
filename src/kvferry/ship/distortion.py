"""What quantisers do to the tokens of a cache: the measured errors that the policy ``optimal`` chooses by."""

from __future__ import annotations

import re

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvferry.ship import native
from kvferry.ship.quantize import Section, decode_sections, encode_sections, quantizer

_CHUNK_BYTES = 1 << 20
"""Of fp32 at a time, where torch measures: beyond the decoded rows that is all the extra memory."""

_LANES = 16

_ROTATED = re.compile("(had|cen)([0-9])g([0-9]+)")


def measure_errors(
    tensor: Float[Tensor, "batch heads tokens dim"],
    ladder: tuple[str, ...],
    channels: Float[Tensor, "heads dim"],
    usable: Bool[Tensor, "batch tokens"],
) -> Float[Tensor, "tiers batch tokens"]:
    """Squared error of every token by every quantiser of a ladder, channels weighted; 0 for tokens not ``usable``."""
    batch, heads, tokens, dim = tensor.shape
    found = torch.zeros(len(ladder), batch, tokens)
    root = channels.sqrt()
    for row in range(batch):
        index = None if bool(usable[row].all()) else usable[row].nonzero().flatten()
        if not (tokens if index is None else index.numel()) * heads * dim:
            continue
        scaled: dict[str, Tensor] = {}
        for place, spec in enumerate(ladder):
            if spec == "raw":
                continue
            rotated = _ROTATED.fullmatch(spec)
            if rotated is None:
                error = token_errors(spec, tensor[row], index, root)
            else:
                # These have no overload: the error of n bits is that of 4 bits times 4^(4 - n).
                family, bits, group = rotated.groups()
                if group not in scaled:
                    scaled[group] = token_errors(f"{family}4g{group}", tensor[row], index, root)
                error = scaled[group] * 4.0 ** (4 - int(bits))
            if index is None:
                found[place, row] = error
            else:
                found[place, row, index] = error
    return found


def token_errors(
    spec: str,
    x: Float[Tensor, "heads tokens dim"],
    index: Int[Tensor, " selected"] | None,
    root: Float[Tensor, "heads dim"],
) -> Float[Tensor, " selected"]:
    """Squared error of each selected token by one quantiser, channels multiplied by ``root`` before, on the CPU."""
    out = torch.empty(x.shape[1] if index is None else index.numel())
    if native.measure_rows(spec, x, index, root, out):
        return out
    return _token_errors(spec, x if index is None else x.index_select(1, index.to(x.device)), root.to(x.device))


def token_sums(squares: Float[Tensor, "heads tokens dim"]) -> Float[Tensor, " tokens"]:
    """Sums over heads and channels in fp32, in the one order that the compiled kernel has too.

    Channels 16 apart are added up one after the other; of the 16 sums the first half takes the second, until one is
    left; heads are added up one after the other.
    """
    width = squares.shape[2]
    lanes = torch.nn.functional.pad(squares, (0, -width % _LANES))
    sums = lanes[..., :_LANES]
    for start in range(_LANES, lanes.shape[2], _LANES):
        sums = sums + lanes[..., start : start + _LANES]
    half = _LANES // 2
    while half:
        sums = sums[..., :half] + sums[..., half:]
        half //= 2
    total = sums[0, :, 0].clone()
    for head in range(1, len(sums)):
        total += sums[head, :, 0]
    return total


def _token_errors(
    spec: str, x: Float[Tensor, "heads tokens dim"], root: Float[Tensor, "heads dim"]
) -> Float[Tensor, " tokens"]:
    method = quantizer(spec)
    heads, tokens, dim = x.shape
    back = torch.empty_like(x, memory_format=torch.contiguous_format)
    data = torch.empty(method.nbytes(heads, tokens, dim, x.dtype), dtype=torch.uint8, device=x.device)
    sections = [Section(method, None, data)]
    encode_sections(x, sections)
    decode_sections(sections, back)
    chunk = max(1, _CHUNK_BYTES // (4 * heads * dim))
    found = []
    for start in range(0, tokens, chunk):
        here = slice(start, start + chunk)
        lost = x[:, here].to(torch.float32, copy=True).sub_(back[:, here].to(torch.float32))
        found.append(token_sums(lost.mul_(root.unsqueeze(1)).square_()))
    return torch.cat(found).cpu()
