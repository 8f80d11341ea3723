"""What a model's next tokens feel of every number of a cache: its Fisher information, by one backward pass a window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvferry.errors import InvalidInput
from kvferry.hf.capture import capture
from kvferry.hf.compat import cache_argument
from kvferry.hf.observe import OBSERVABLE, QUERY_WINDOW
from kvferry.hf.restore import to_cache
from kvferry.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class CacheFisher:
    """One window.

    Attributes:
        snapshot: the cache of its prefix, with the last queries where the attention backend shows them.
        keys, values: of each layer, an estimate of the diagonal of the Fisher information of the distribution of a
            token of the suffix, of the shape of the layer's keys and values; ``None`` for a layer that has none.
    """

    snapshot: Snapshot
    keys: tuple[Float[Tensor, "batch kv_heads held head_dim"] | None, ...]
    values: tuple[Float[Tensor, "batch kv_heads held value_head_dim"] | None, ...]


def cache_fisher(
    model: PreTrainedModel, token_ids: Int[Tensor, "1 seq_len"], prefix: int, generator: torch.Generator
) -> CacheFisher:
    """Prefill ``prefix`` tokens, then differentiate the log likelihood of tokens drawn from the model itself.

    With targets drawn from the model's own distribution at every position of the suffix, gradients of different
    positions have no correlation, so the square of their sum is an unbiased estimate of the sum of the Fisher
    information of all positions.

    Args:
        model: the model; its weights take no gradients and stay as they are.
        token_ids: the window, longer than ``prefix``.
        prefix: tokens in the cache.
        generator: draws the targets.

    Raises:
        InvalidInput: no token follows the prefix, or several sequences are given.
    """
    if token_ids.dim() != 2 or token_ids.shape[0] != 1 or not 0 < prefix < token_ids.shape[1]:
        raise InvalidInput(f"a window of shape {tuple(token_ids.shape)} with a prefix of {prefix} tokens has no suffix")
    observable = model.config._attn_implementation in OBSERVABLE
    snapshot = capture(model, token_ids[:, :prefix], query_window=QUERY_WINDOW if observable else 0)
    cache = to_cache(snapshot, model)
    assert isinstance(cache, DynamicCache)
    own = [index for index, layer in enumerate(snapshot.layers) if layer.keys is not None]
    leaves: list[Tensor] = []
    for index in own:
        layer = cache.layers[index]
        layer.keys = layer.keys.detach().requires_grad_()
        layer.values = layer.values.detach().requires_grad_()
        leaves += [layer.keys, layer.values]
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            arguments = {cache_argument(model): cache, "use_cache": True}
            positions = torch.arange(prefix, token_ids.shape[1], device=model.device).unsqueeze(0)
            outputs = model(input_ids=token_ids[:, prefix:].to(model.device), position_ids=positions, **arguments)
            log_p = torch.log_softmax(outputs.logits[0].float(), dim=-1)
            drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
            found = torch.autograd.grad(log_p.gather(1, drawn).sum(), leaves)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    squares = [(gradient.float().pow(2) / log_p.shape[0]).cpu() for gradient in found]
    keys: list[Tensor | None] = [None] * len(snapshot.layers)
    values: list[Tensor | None] = [None] * len(snapshot.layers)
    for place, index in enumerate(own):
        keys[index], values[index] = squares[2 * place], squares[2 * place + 1]
    return CacheFisher(snapshot, tuple(keys), tuple(values))
