"""Windows of a text: a prefix whose cache is shipped, and the tokens scored after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """``prefix`` tokens are cached and shipped; the next one is fed; the ``suffix`` tokens after that are scored.

    A receiver always runs the model on at least one token, so the first logits that depend on a shipped cache are those
    after token ``prefix + 1``: the tokens scored are ``prefix + 2 … prefix + 1 + suffix``, counted from 1, and they are
    the same for every method.

    Attributes:
        index: which window of the text.
        token_ids: int64 ``(1, prefix + 1 + suffix)``.
        prefix: tokens in the cache.
    """

    index: int
    token_ids: Int[Tensor, "1 seq_len"]
    prefix: int

    @property
    def prefix_ids(self) -> Int[Tensor, "1 prefix"]:
        """What is cached and shipped."""
        return self.token_ids[:, : self.prefix]

    @property
    def fed_ids(self) -> Int[Tensor, "1 seq_len_less_one"]:
        """All but the last token, which is only a target."""
        return self.token_ids[:, :-1]

    @property
    def targets(self) -> Int[Tensor, " suffix"]:
        """The tokens scored."""
        return self.token_ids[0, self.prefix + 1 :]

    @property
    def digest(self) -> str:
        """Of the tokens and of where the prefix ends."""
        state = xxhash.xxh3_128(f"{self.prefix} ".encode())
        state.update(self.token_ids.numpy().tobytes())
        return state.hexdigest()


def cut_windows(tokenizer: Any, text: str, *, windows: int, prefix: int, suffix: int) -> list[Window]:
    """Disjoint windows spread over a text; asking for more keeps the first ones and adds to them.

    Each begins with the special tokens that the tokenizer puts before a text (Gemma's BOS), counted within the prefix.
    Window i lies at the i-th point of van der Corput's sequence over the places that there are, so that a few of them
    already come from all over the text.

    Raises:
        InvalidInput: numbers that are not positive, or a text too short for so many windows.
    """
    if min(windows, prefix, suffix) < 1:
        raise InvalidInput(f"{windows} windows of {prefix} + {suffix} tokens: all three must be at least 1")
    lead = list(tokenizer("").input_ids)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    length = prefix + 1 + suffix
    own = length - len(lead)
    if own < 2 or prefix <= len(lead):
        raise InvalidInput(f"a prefix of {prefix} tokens leaves no room beside {len(lead)} special tokens")
    places = len(ids) // own
    if places < windows:
        raise InvalidInput(
            f"the text has {len(ids)} tokens: enough for {places} windows of {prefix} + 1 + {suffix}, not for {windows}"
        )
    start = torch.tensor(lead, dtype=torch.int64)
    body = torch.tensor(ids, dtype=torch.int64)
    return [
        Window(index, torch.cat([start, body[place * own : (place + 1) * own]]).unsqueeze(0), prefix)
        for index, place in enumerate(_spread(places, windows))
    ]


def _spread(places: int, count: int) -> list[int]:
    """The first ``count`` of ``places`` numbers, in the order of their bits reversed."""
    bits = max(1, (places - 1).bit_length())
    order = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    found = [place for place in order if place < places]
    return found[:count]
