"""How far the attention's output moves when keys, values or both come from a shipped cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.snapshot import LayerState, Snapshot


@dataclass(frozen=True, slots=True)
class AttentionCosine:
    """Mean cosine between attention outputs of the 16-bit cache and of a shipped one, a layer; ``None`` for layers that
    share another's cache.

    Attributes:
        keys: shipped keys, 16-bit values.
        values: 16-bit keys, shipped values.
        both: shipped keys and values.
    """

    keys: tuple[float | None, ...]
    values: tuple[float | None, ...]
    both: tuple[float | None, ...]

    def to_json(self) -> dict[str, Any]:
        return {"keys": list(self.keys), "values": list(self.values), "both": list(self.both)}


def attention_cosine(reference: Snapshot, shipped: Snapshot) -> AttentionCosine:
    """Attention of the last observed queries of ``reference`` over both caches, layer by layer, before the output
    projection; the mean is over queries and heads.

    Each layer is judged apart from the errors of those before it: its queries are the 16-bit run's. Logit softcapping,
    where a model has it, is left out.

    Raises:
        InvalidInput: ``reference`` was captured without queries, or the two caches are not of the same tokens.
    """
    if not torch.equal(reference.token_ids, shipped.token_ids.to(reference.token_ids.device)):
        raise InvalidInput("the two caches are not of the same tokens")
    columns: tuple[list[float | None], ...] = ([], [], [])
    for index, (layer, other) in enumerate(zip(reference.layers, shipped.layers, strict=True)):
        if layer.keys is None or other.keys is None:
            for column in columns:
                column.append(None)
            continue
        if layer.queries is None:
            raise InvalidInput(f"layer {index} has no queries: capture with query_window=32 or so")
        base = _attend(layer, layer, reference.mask)
        arms = (
            _attend(other, layer, shipped.mask, layer.queries),
            _attend(layer, other, reference.mask, layer.queries),
            _attend(other, other, shipped.mask, layer.queries),
        )
        for column, output in zip(columns, arms, strict=True):
            column.append(float(torch.cosine_similarity(base, output, dim=-1).mean()))
    keys, values, both = (tuple(column) for column in columns)
    return AttentionCosine(keys, values, both)


def _attend(
    keyed: LayerState, valued: LayerState, mask: Tensor, queries: Tensor | None = None
) -> Float[Tensor, "batch kv_heads group window dim"]:
    """Softmax of the last queries over one cache's keys, times another's values, in float32."""
    keys, values = keyed.keys, valued.values
    asked = keyed.queries if queries is None else queries
    assert keys is not None
    assert values is not None
    assert asked is not None
    batch, heads, held, dim = keys.shape
    window = min(asked.shape[2], held)
    grouped = asked[:, :, asked.shape[2] - window :].reshape(batch, heads, -1, window, dim).float()
    logits = torch.einsum("bhgwd,bhnd->bhgwn", grouped, keys.float())
    tokens = torch.arange(keyed.first, keyed.seen, device=keys.device)
    asking = torch.arange(keyed.seen - window, keyed.seen, device=keys.device).unsqueeze(1)
    allowed = tokens <= asking
    if keyed.kind.name == "sliding" and keyed.kind.argument is not None:
        allowed &= tokens > asking - keyed.kind.argument
    allowed = allowed & mask[:, None, None, None, keyed.first :].to(keys.device)
    logits = torch.where(allowed, logits, -torch.inf)
    paid = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    return torch.einsum("bhgwn,bhnd->bhgwd", paid, values.float())
