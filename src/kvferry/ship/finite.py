"""Tokens that hold a NaN or an infinity: no quantiser carries them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvferry.ship import native
from kvferry.snapshot import LayerState

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


def nonfinite_in_layer(layer: LayerState) -> Bool[Tensor, "batch held"] | None:
    """Tokens whose keys or values of this layer hold a NaN or an infinity, as `nonfinite_tokens`."""
    found: Tensor | None = None
    for tensor in (layer.keys, layer.values):
        bad = None if tensor is None else nonfinite_tokens(tensor)
        if bad is not None:
            found = bad if found is None else found | bad
    return found


def _all_finite(tensor: Tensor) -> bool:
    found = native.all_finite(tensor)
    if found is not None:
        return found
    low, high = torch.aminmax(tensor)  # both are NaN where anything is
    return -_FP32_MAX <= low.item() <= high.item() <= _FP32_MAX
