"""Which tokens of a mapped cache the target had better compute itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.map.mapper import Mapper
from kvferry.snapshot import LayerState, Snapshot

Chooser = Callable[[Mapper, Snapshot, Snapshot | None], Float[Tensor, " tokens"]]
"""Scores of the tokens, higher: compute anew."""


def choose_tokens(
    name: str, share: float, mapper: Mapper, source: Snapshot, own: Snapshot | None = None
) -> Int[Tensor, " chosen"]:
    """The ``share`` of a single sequence's tokens that chooser ``name`` scores highest, rising.

    Args:
        name: one of `CHOOSERS`.
        share: of all tokens, between 0 and 1.
        mapper: whose map is to be mended.
        source: the cache that is mapped; ``attention`` needs its queries (``query_window`` at capture).
        own: the target's own cache, which ``error`` compares with: for studies alone.

    Raises:
        InvalidInput: an unknown chooser or share, a batch, or no queries.
    """
    if name not in CHOOSERS:
        raise InvalidInput(f"unknown chooser {name!r}: {', '.join(CHOOSERS)} are")
    if not 0 <= share <= 1 or source.batch_size != 1:
        raise InvalidInput(f"a share of {share} of a batch of {source.batch_size}: tokens are chosen for one sequence")
    count = round(share * source.seq_len)
    scores = CHOOSERS[name](mapper, source, own)
    return scores.topk(count).indices.sort().values


def _last(_mapper: Mapper, source: Snapshot, _own: Snapshot | None) -> Tensor:
    return torch.arange(source.seq_len, dtype=torch.float32)


def _spread(_mapper: Mapper, source: Snapshot, _own: Snapshot | None) -> Tensor:
    """Evenly: an order in which any first part lies spread over the whole."""
    places = torch.arange(source.seq_len, dtype=torch.float64)
    return -torch.frac(places * 0.6180339887498949).float()


def _attention(_mapper: Mapper, source: Snapshot, _own: Snapshot | None) -> Tensor:
    """What the source's last queries attend to, mean over layers and heads."""
    total = torch.zeros(source.seq_len)
    for index, layer in enumerate(source.layers):
        if layer.queries is None or layer.keys is None:
            raise InvalidInput(f"layer {index} has no queries: capture with query_window=32 or so")
        total[layer.first :] += _paid(layer, source.mask[:, layer.first :])
    return total


def _paid(layer: LayerState, mask: Tensor) -> Float[Tensor, " held"]:
    assert layer.keys is not None
    assert layer.queries is not None
    _, heads, held, dim = layer.keys.shape
    window = min(layer.queries.shape[2], held)
    queries = layer.queries[:, :, -window:].reshape(1, heads, -1, window, dim).float()
    logits = torch.einsum("bhgwd,bhnd->bhgwn", queries, layer.keys.float())
    tokens, asking = torch.arange(held), torch.arange(held - window, held).unsqueeze(1)
    allowed = (tokens <= asking) & mask[0].cpu()
    weights = torch.softmax(logits.cpu().masked_fill(~allowed, -torch.inf), dim=-1).nan_to_num(0.0)
    return weights.mean(dim=(0, 1, 2, 3))


def _error(mapper: Mapper, source: Snapshot, own: Snapshot | None) -> Tensor:
    """How far the map is from the target's own cache, each layer's keys and values in units of their spread."""
    if own is None:
        raise InvalidInput("chooser 'error' compares with the target's own cache: give it")
    made = mapper.map(source)
    total = torch.zeros(source.seq_len)
    for a, b in zip(made.layers, own.layers, strict=True):
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            assert x is not None
            assert y is not None
            spread = (y.float() - y.float().mean(dim=2, keepdim=True)).square().sum(dim=(1, 3)).mean()
            total[a.first :] += ((x.float() - y.float()).square().sum(dim=(1, 3)) / spread)[0].cpu()
    return total


CHOOSERS: dict[str, Chooser] = {"last": _last, "spread": _spread, "attention": _attention, "error": _error}
"""Name -> its scores; ``error`` knows the answer and is for studies alone."""

ORACLES = ("error",)
"""Choosers that look at what they are to spare: how far a perfect choice would go, and no way to transfer."""
