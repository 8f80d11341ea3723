"""How likely a model finds each of several ends of one context, from a cache of that context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.evaluate.head import fp32_logits
from kvferry.hf.decode import teacher_forced_logits
from kvferry.hf.restore import empty_cache
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class EndScore:
    """One end of a context.

    Attributes:
        logprob: natural logarithm of its probability, summed over its tokens.
        greedy: each of its tokens is the likeliest after those before it.
    """

    logprob: float
    greedy: bool


def score_ends(
    model: PreTrainedModel,
    cache: Snapshot | None,
    context: Int[Tensor, "1 tokens"],
    ends: Sequence[Sequence[int]],
) -> list[EndScore]:
    """Score ``ends``, all in one batch and with logits in single precision.

    Args:
        model: the model that goes on.
        cache: of the first tokens of ``context``, all but the last at most; ``None`` for none of them.
        context: the tokens before every end.
        ends: at least one, each of at least one token.
    """
    rows, longest = len(ends), max(map(len, ends))
    padded = torch.tensor([[*end, *[end[-1]] * (longest - len(end))] for end in ends])
    ids = torch.cat([context.expand(rows, -1), padded], dim=1)
    start = empty_cache(model) if cache is None else cache.select([0] * rows)
    with fp32_logits(model):
        logits = teacher_forced_logits(model, start, ids)[:, -longest - 1 : -1].float()
    told = torch.log_softmax(logits, dim=-1).gather(2, padded.to(logits.device).unsqueeze(-1)).squeeze(-1).cpu()
    likeliest = logits.argmax(dim=-1).cpu() == padded
    return [
        EndScore(float(told[row, : len(end)].sum()), bool(likeliest[row, : len(end)].all()))
        for row, end in enumerate(ends)
    ]
