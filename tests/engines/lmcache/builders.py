"""Chunks as LMCache has them, and what kvferry's own two verbs make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvferry as kv
from kvferry.engines.lmcache.config import SerdeConfig
from kvferry.snapshot import Identity, LayerGeometry, LayerState, Snapshot
from kvferry.snapshot.layer import FULL

HEADS, DIM = 3, 64
SETTINGS: dict[str, Any] = {"num_kv_heads": HEADS, "head_dim": DIM}

QUANTIZERS = ("raw", "sym8", "asym4g64", "chan4b128:asym4g64", "raw:sym4", "cen4g64:had3g64")


@dataclass(frozen=True)
class Key:
    """The fields of LMCache's ``ObjectKey``."""

    chunk_hash: bytes = bytes(range(32))
    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


def config(**more: Any) -> SerdeConfig:
    return SerdeConfig.parse({**SETTINGS, **more})


def random_chunk(
    seed: int,
    layers: int = 4,
    tokens: int = 48,
    heads: int = HEADS,
    dim: int = DIM,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``(2, layers, tokens, hidden)``, channels of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    chunk = torch.randn(2, layers, tokens, heads * dim, generator=generator)
    return (chunk * torch.linspace(0.1, 3, heads * dim)).to(dtype)


def by_own_verbs(chunk: Tensor, quantizer: str, heads: int = HEADS, dim: int = DIM) -> Tensor:
    """What `kv.encode` and `kv.decode` make of a chunk, put together here without the serde's code."""
    _, layers, tokens, _ = chunk.shape
    split = chunk.reshape(2, layers, tokens, heads, dim).permute(0, 1, 3, 2, 4)
    geometry = LayerGeometry(FULL, heads, dim, dim)
    snapshot = Snapshot(
        identity=Identity("m", "w", (geometry,) * layers, str(chunk.dtype).removeprefix("torch.")),
        token_ids=torch.arange(tokens).unsqueeze(0),
        positions=torch.arange(tokens).unsqueeze(0),
        mask=torch.ones(1, tokens, dtype=torch.bool),
        layers=tuple(LayerState(FULL, split[0, i : i + 1], split[1, i : i + 1], tokens) for i in range(layers)),
    )
    keys, _, values = quantizer.partition(":")
    tiers = {"keys": ("raw", keys), "values": ("raw", values or keys)}
    back = kv.decode(kv.encode(snapshot, policy="uniform_int8", quantizers=tiers))
    out = torch.empty_like(split)
    for index, layer in enumerate(back.layers):
        assert layer.keys is not None
        assert layer.values is not None
        out[0, index], out[1, index] = layer.keys[0], layer.values[0]
    return out.permute(0, 1, 3, 2, 4).reshape(chunk.shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, NaNs too."""
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )
