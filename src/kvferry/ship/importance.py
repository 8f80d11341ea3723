"""How much each token of a cache matters: scorers, the decay, and what is made of layers. Higher means keep.

SpectrumKV (arXiv 2606.08635): the importance of token j of n is ``I_j = A_j * exp(-decay * (n - j))`` with A an
attention statistic, or the norm of keys and values where no attention is to be had. A scorer gives A for every layer; a
new one is a function and one line in `SCORERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.snapshot import LayerState, Snapshot

HOW_TO_CAPTURE = (
    "capture the cache with its last queries (`kvferry.capture(..., query_window=32)`), or use the scorer 'kv_norm'"
)


def positional(layer: LayerState, mask: Tensor) -> Tensor:
    """1 for every token: with a decay this is recency, and sinks lead every ranking anyway."""
    return torch.ones(mask.shape[0], layer.held, dtype=torch.float32, device=mask.device)


def kv_norm(layer: LayerState, mask: Tensor) -> Tensor:
    """Mean over heads of the norms of key and value, each as a share of its sum over the layer's tokens."""
    assert layer.keys is not None
    assert layer.values is not None
    seen = mask[:, layer.first :]
    total = torch.zeros(seen.shape, dtype=torch.float32, device=layer.keys.device)
    for tensor in (layer.keys, layer.values):
        norms = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).mean(dim=1)
        norms = torch.where(seen.to(norms.device) & norms.isfinite(), norms, 0.0)
        total += 0.5 * norms / norms.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return total


def observation_window(layer: LayerState, mask: Tensor) -> Tensor:
    """Attention that the last queries pay to each token, averaged over heads and over the queries that can see it.

    The softmax is the model's own: causal, within a sliding window, without padding. Query heads that share a
    key-value head are averaged. Memory is heads × window × tokens; nothing is quadratic in the sequence.
    """
    keys, queries = layer.keys, layer.queries
    assert keys is not None
    if queries is None:
        raise InvalidInput(
            f"the scorer 'observation_window' needs queries, and this snapshot has none: {HOW_TO_CAPTURE}"
        )
    batch, kv_heads, held, dim = keys.shape
    window = min(queries.shape[2], held)
    if queries.shape[0] != batch or queries.shape[1] % kv_heads or queries.shape[3] != dim:
        raise InvalidInput(f"queries {tuple(queries.shape)} do not fit keys {tuple(keys.shape)}")
    grouped = queries[:, :, queries.shape[2] - window :].reshape(batch, kv_heads, -1, window, dim).to(torch.float32)
    visible = _visible(layer, window, mask)
    total = torch.zeros(batch, held, dtype=torch.float32, device=keys.device)
    for head in range(kv_heads):  # one head at a time: the fp32 copy of its keys is all the extra memory
        logits = torch.einsum("bgwd,bnd->bgwn", grouped[:, head], keys[:, head].to(torch.float32))
        logits = torch.where(visible.unsqueeze(1), logits, -torch.inf)
        paid = torch.softmax(logits, dim=-1).nan_to_num(0.0)  # a row of padding sees nothing: 0, not NaN
        total += paid.mean(dim=1).sum(dim=1)
    return total / (kv_heads * visible.sum(dim=1).clamp_min(1))


def _visible(layer: LayerState, window: int, mask: Tensor) -> Bool[Tensor, "batch window held"]:
    """Which held token each of the last ``window`` queries may attend to."""
    assert layer.keys is not None
    device = layer.keys.device
    tokens = torch.arange(layer.first, layer.seen, device=device)
    asking = torch.arange(layer.seen - window, layer.seen, device=device).unsqueeze(1)
    allowed = tokens <= asking
    if layer.kind.name == "sliding" and layer.kind.argument is not None:
        allowed &= tokens > asking - layer.kind.argument
    return allowed.unsqueeze(0) & mask[:, layer.first :].to(device).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Scorer:
    """One way to score.

    Attributes:
        score: ``(layer, mask of the whole sequence) -> (batch, held)`` scores of the tokens that the layer holds.
        decay: λ used where the caller names none.
    """

    score: Callable[[LayerState, Tensor], Tensor]
    decay: float = 0.0


SCORERS: dict[str, Scorer] = {
    "positional": Scorer(positional, decay=0.005),
    "kv_norm": Scorer(kv_norm),
    "observation_window": Scorer(observation_window),
}


def scorer_named(name: str) -> Scorer:
    """A scorer; raises `InvalidInput` for a name that there is not, and says which there are."""
    found = SCORERS.get(name)
    if found is None:
        raise InvalidInput(f"unknown scorer {name!r}; there are {', '.join(SCORERS)}")
    return found


def default_scorer(snapshot: Snapshot) -> str:
    """``observation_window`` where the snapshot has queries, else ``kv_norm``, as in the paper."""
    return "observation_window" if has_queries(snapshot) else "kv_norm"


def has_queries(snapshot: Snapshot) -> bool:
    """Whether every layer that holds tokens came with its last queries."""
    own = [layer for layer in snapshot.layers if layer.keys is not None]
    return bool(own) and all(layer.queries is not None for layer in own)


def layer_scores(
    snapshot: Snapshot, scorer: str | None = None, *, decay: float | None = None
) -> Float[Tensor, "layers batch seq"]:
    """Importance of each token in each layer, NaN where the layer does not hold the token (on the CPU).

    Args:
        snapshot: the cache; `observation_window` needs its ``queries``.
        scorer: a name in `SCORERS`; ``None``: `default_scorer`.
        decay: λ a token of distance; ``None``: the scorer's own.

    Raises:
        InvalidInput: unknown scorer, a negative decay, or no queries where they are needed.
    """
    found = scorer_named(scorer or default_scorer(snapshot))
    rate = found.decay if decay is None else decay
    if not 0 <= rate < float("inf"):
        raise InvalidInput(f"a decay of {rate} is not a number of at least 0")
    shape = (len(snapshot.layers), snapshot.batch_size, snapshot.seq_len)
    scores = torch.full(shape, torch.nan, dtype=torch.float32)
    for index, layer in enumerate(snapshot.layers):
        if layer.keys is not None:
            scores[index, :, layer.first :] = found.score(layer, snapshot.mask).cpu()
    distance = torch.arange(snapshot.seq_len - 1, -1, -1, dtype=torch.float32)
    return scores * torch.exp(-rate * distance)


def token_scores(
    snapshot: Snapshot, scorer: str | None = None, *, decay: float | None = None
) -> Float[Tensor, "batch seq"]:
    """`layer_scores`, averaged over the layers that hold each token (0 where none does)."""
    scores = layer_scores(snapshot, scorer, decay=decay)
    return scores.nanmean(dim=0).nan_to_num(0.0) if len(scores) else torch.zeros(scores.shape[1:])


def given_scores(
    snapshot: Snapshot, given: Tensor | Sequence[float] | Sequence[Sequence[float]]
) -> Float[Tensor, "batch seq"]:
    """Scores from the caller, ``(batch, seq)`` or ``(seq,)``, as fp32 on the CPU.

    Raises:
        InvalidInput: another shape, NaN, or what is no real numbers at all.
    """
    want = (snapshot.batch_size, snapshot.seq_len)
    try:
        scores = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"scores must be numbers, (batch, seq_len) {want}: {error}") from error
    if scores.is_complex():
        raise InvalidInput("scores are complex: a token cannot be ranked by them")
    if scores.dim() == 1:
        scores = scores.unsqueeze(0).expand(want[0], -1)
    if tuple(scores.shape) != want:
        raise InvalidInput(f"scores {tuple(scores.shape)} for a cache of (batch, seq_len) {want}")
    if scores.isnan().any():
        raise InvalidInput("scores hold NaN: a token cannot be ranked by it")
    return scores.detach().to(torch.float32).cpu()
