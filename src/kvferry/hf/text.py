"""English prose that every Python installation has: a text to prefill, calibrate and judge on, with no network."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput


@cache
def default_text() -> str:
    """CPython's own reference topics, some 450,000 characters of technical English, in alphabetical order of topic."""
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


JUDGED_FROM = 0.6
"""Share of `default_text` behind which lies what fits are judged on by default."""


def default_part(*, judged: bool) -> str:
    """The part of `default_text` to fit on, or the other one, to judge a fit on: nothing is judged on what it knows."""
    text = default_text()
    place = int(JUDGED_FROM * len(text))
    return text[place:] if judged else text[:place]


def tokens_of(tokenizer: Any, text: str, max_tokens: int | None = None) -> Int[Tensor, "1 seq_len"]:
    """The first ``max_tokens`` tokens of ``text`` (fewer when it is shorter), with the tokenizer's special tokens.

    Raises:
        InvalidInput: ``max_tokens`` is not positive, or the text has no tokens.
    """
    if max_tokens is not None and max_tokens < 1:
        raise InvalidInput(f"max_tokens is {max_tokens}; it must be positive")
    # A text of some hundred thousand tokens takes seconds; a prefix that is surely long enough gives the same start.
    enough = len(text) if max_tokens is None else 16 * max_tokens + 1024
    ids = tokenizer(text[:enough], verbose=False).input_ids
    if max_tokens is not None:
        if len(ids) < max_tokens and enough < len(text):
            ids = tokenizer(text, verbose=False).input_ids
        ids = ids[:max_tokens]
    if not ids:
        raise InvalidInput("the text has no tokens")
    return torch.tensor([ids], dtype=torch.int64)
