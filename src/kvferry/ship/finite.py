"""Tokens that hold a NaN or an infinity: no quantiser carries them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvferry.ship import native

_FP32_MAX = torch.finfo(torch.float32).max


def nonfinite_tokens(tensor: Float[Tensor, "batch heads tokens dim"]) -> Bool[Tensor, "batch tokens"] | None:
    """Tokens that hold a NaN or an infinity (also in fp32, which the quantisers use), on the CPU; ``None`` for none.

    One fast pass says whether there are any; only where there are, a slow one finds them.
    """
    if tensor.numel() == 0 or _all_finite(tensor):
        return None
    bad = torch.zeros(tensor.shape[0], tensor.shape[2], dtype=torch.bool, device=tensor.device)
    for head in tensor.unbind(dim=1):  # one at a time: the fp32 copy is all the extra memory
        bad |= ~head.to(torch.float32).isfinite().all(dim=2)
    return bad.cpu()


def _all_finite(tensor: Tensor) -> bool:
    found = native.all_finite(tensor)
    if found is not None:
        return found
    low, high = torch.aminmax(tensor)  # both are NaN where anything is
    return -_FP32_MAX <= low.item() <= high.item() <= _FP32_MAX
