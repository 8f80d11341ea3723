"""Caches for tests of packets."""

from dataclasses import replace

import torch

from kvferry.snapshot import FULL, LayerKind, Snapshot
from tests.snapshot.builders import SLIDING, make_snapshot

SHARED = LayerKind("shared", 0)
MIXED = (FULL, SLIDING, FULL, SHARED)


def unmasked(snapshot: Snapshot) -> Snapshot:
    """The same without padding."""
    return replace(snapshot, mask=torch.ones_like(snapshot.mask))


def left_padded(snapshot: Snapshot, *lengths: int) -> Snapshot:
    """The same with row i masked but for its last ``lengths[i]`` tokens."""
    place = torch.arange(snapshot.seq_len)
    mask = torch.stack([place >= snapshot.seq_len - length for length in lengths])
    return replace(snapshot, mask=mask, positions=(mask.cumsum(1) - 1).clamp_min(0))


def realistic(seq_len: int, *, layers: int = 30, heads: int = 3, dim: int = 64, seed: int = 0) -> Snapshot:
    """SmolLM2-135M's shape in bf16, filled with noise."""
    return unmasked(
        make_snapshot([FULL] * layers, seq_len=seq_len, kv_heads=heads, head_dim=dim, dtype="bfloat16", seed=seed)
    )


def with_value(snapshot: Snapshot, layer: int, row: int, token: int, value: float) -> Snapshot:
    """The same with one key element of one token of one layer set."""
    keys = snapshot.layers[layer].keys.clone()
    keys[row, 0, token, 1] = value
    layers = list(snapshot.layers)
    layers[layer] = replace(layers[layer], keys=keys)
    return replace(snapshot, layers=tuple(layers))
