"""Which source layers a target layer is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.map.layout import Layout


def rank_sources(
    layout: Layout, single: Float[Tensor, "targets sources heads"], target: int, head: int | None = None
) -> list[int]:
    """Candidates of a target, best first, by the R² that each reaches alone, held out: averaged over heads, or of one
    head. Equal ones stand in their own order."""
    count = layout.target_heads[target]
    scores = single[target, :, :count]
    score = scores.mean(dim=1) if head is None else scores[:, head]
    return sorted(layout.candidates[target], key=lambda index: (-float(torch.nan_to_num(score[index], -1e9)), index))


def choose(layout: Layout, ranked: Sequence[int], top_k: int | None) -> tuple[int, ...]:
    """The first ``top_k`` source *layers* of a ranking, rising; ``None``: all of them.

    Where keys and values of a source layer both serve, both come with it: the ranking is by the better of the two.

    Raises:
        InvalidInput: ``top_k`` is not positive.
    """
    if top_k is None:
        return tuple(sorted(ranked))
    if top_k < 1:
        raise InvalidInput(f"top_k is {top_k}: at least one source layer is needed, or 'all'")
    layers = list(dict.fromkeys(layout.sources[index].layer for index in ranked))[:top_k]
    return tuple(sorted(index for index in ranked if layout.sources[index].layer in layers))
