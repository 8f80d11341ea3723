"""Logits in single precision from a 16-bit model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvferry.errors import UnsupportedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def fp32_logits(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's output head multiplies in float32, and what follows it (softcapping, scaling) stays there.

    A bfloat16 logit of 20 has steps of 0.125: rounding the logits alone would hide differences of a tenth of a percent
    in perplexity. The hidden states keep the model's own dtype. The head has its `forward` back on the way out.

    Raises:
        UnsupportedCache: the model's head is no linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedCache(f"the output head of {type(model).__name__} is a {type(head).__name__}, not linear")
    if head.weight.dtype == torch.float32:
        yield
        return
    weight = head.weight.detach().float()
    bias = None if head.bias is None else head.bias.detach().float()

    def multiply(hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), weight, bias)

    # Not a hook: it would run beside the 16-bit product, whose cost at a vocabulary of 262,144 is that of the model.
    attributes = vars(head)
    own = attributes.get("forward")  # where another library has put its own in place
    attributes["forward"] = multiply
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own
