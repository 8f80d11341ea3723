"""How much a model's predictions feel an error in its cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.capture import capture
from kvferry.hf.compat import cache_argument
from kvferry.hf.observe import OBSERVABLE, QUERY_WINDOW
from kvferry.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class CacheGradients:
    """Of one window.

    Attributes:
        snapshot: the cache of the prefix, with its last queries where the attention backend shows them.
        keys, values: gradient of the loss of what follows, shaped and typed as the snapshot's keys (after RoPE) and
            values, layer by layer.
    """

    snapshot: Snapshot
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def cache_gradients(
    model: PreTrainedModel, token_ids: Tensor, prefix: int, generator: torch.Generator
) -> CacheGradients:
    """Gradient of the negative log-likelihood of the tokens after ``prefix``, summed, by the cache of the prefix.

    The labels are drawn from the model's own predictions: the mean outer product of such gradients is the Fisher
    information, the second-order term of the KL that an error in the cache costs.

    Args:
        model: any causal model whose layers all have keys and values of their own.
        token_ids: int64 ``(1, tokens)``, more than ``prefix``.
        prefix: tokens in the cache.
        generator: draws the labels, on the CPU.

    Raises:
        UnsupportedCache: a layer shares another's cache.
        InvalidInput: the model's predictions are not finite in its dtype.
    """
    observable = model.config._attn_implementation in OBSERVABLE
    snapshot = capture(model, token_ids[:, :prefix], query_window=QUERY_WINDOW if observable else 0)
    leaves: list[Tensor] = []
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(snapshot.layers):
        if layer.keys is None or layer.values is None:
            raise UnsupportedCache(f"layer {index} has no keys and values of its own: no gradient can be taken by them")
        keys, values = layer.keys.clone().requires_grad_(), layer.values.clone().requires_grad_()
        leaves += [keys, values]
        cache.update(keys, values, index)
        if hasattr(cache.layers[index], "cumulative_length"):
            cache.layers[index].cumulative_length = layer.seen
    places = torch.arange(prefix, token_ids.shape[1], device=token_ids.device).unsqueeze(0)
    with torch.enable_grad():
        logits = model(
            input_ids=token_ids[:, prefix:], position_ids=places, use_cache=True, **{cache_argument(model): cache}
        ).logits
        scores = torch.log_softmax(logits[0].float(), dim=-1)
        if not bool(scores.isfinite().all()):
            raise InvalidInput(
                f"the model predicts NaN or infinity in {str(model.dtype).removeprefix('torch.')}: it cannot be "
                "calibrated in it, try another dtype"
            )
        drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator).to(scores.device)
        found = torch.autograd.grad(-scores.gather(1, drawn).sum(), leaves)
    return CacheGradients(snapshot, found[0::2], found[1::2])
