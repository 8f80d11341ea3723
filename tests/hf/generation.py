"""What the tests about restoring share: prompts, native prefixes, 64 greedy tokens and the logits they came from."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache

from kvferry.hf.compat import cache_argument
from kvferry.hf.text import default_text, tokens_of


def real_prompt(tokenizer: Any, length: int) -> torch.Tensor:
    """The first tokens of the default text."""
    return tokens_of(tokenizer, default_text(), length)


def native(model: Any, ids: torch.Tensor, cache: Cache | None = None, mask: torch.Tensor | None = None) -> Cache:
    """The cache that transformers itself fills with ``ids``; a `DynamicCache` unless another is given."""
    if cache is None:
        cache = DynamicCache(config=model.config)
    positions = None if mask is None else (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    with torch.no_grad():
        model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): cache},
        )
    return cache


def generate(model: Any, cache: Cache, ids: torch.Tensor, new: int = 64, **options: Any) -> Any:
    """``model.generate`` from ``cache``: exactly ``new`` tokens, with the raw logits of each."""
    settings = {"do_sample": False, "min_new_tokens": None, "eos_token_id": None, **options}
    return model.generate(
        ids,
        max_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
        **{cache_argument(model): cache},
    )


def bits(logits: tuple[torch.Tensor, ...] | torch.Tensor) -> torch.Tensor:
    """Logits as integers: equal where the bits are, so that NaN equals itself."""
    stacked = logits if isinstance(logits, torch.Tensor) else torch.stack(logits, dim=1)
    return stacked.float().contiguous().view(torch.int32)


def same(one: Any, other: Any) -> bool:
    """Whether two results of `generate` agree in every token and every bit of every logit."""
    return torch.equal(one.sequences, other.sequences) and torch.equal(bits(one.logits), bits(other.logits))
