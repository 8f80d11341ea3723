"""A chunk of LMCache's as a snapshot: keys and values ``(2, layers, tokens, hidden)`` of one object key.

A chunk knows neither its tokens nor where they stand: the snapshot's token ids are 0, and its positions count from the
chunk's first token on. What the object key says stands in the identity: the model's name, and in the construction path
a stage ``lmcache.FIELD=VALUE`` for each of its other fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.engines.lmcache.config import SerdeConfig
from kvferry.errors import IncompatibleIdentity, UnsupportedCache
from kvferry.ship.header import PacketHeader
from kvferry.snapshot import Identity, LayerGeometry, LayerState, Snapshot
from kvferry.snapshot.layer import FULL
from kvferry.snapshot.snapshot import dtype_name

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_STAGE = "lmcache."


class ChunkKey(Protocol):
    """The fields of LMCache's ``ObjectKey``."""

    @property
    def chunk_hash(self) -> bytes: ...

    @property
    def model_name(self) -> str: ...

    @property
    def kv_rank(self) -> int: ...

    @property
    def object_group_id(self) -> int: ...

    @property
    def cache_salt(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Layers, tokens and dtype of a chunk whose heads are the config's."""

    layers: int
    tokens: int
    dtype: torch.dtype

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], config: SerdeConfig) -> ChunkShape:
        """Check the layout of a memory object.

        Raises:
            UnsupportedCache: several tensors an object, latent caches (MLA), or a dtype that is none of `DTYPES`.
            IncompatibleIdentity: as many channels as the config's heads do not have.
        """
        if len(shapes) != 1 or len(dtypes) != 1:
            raise UnsupportedCache(
                f"the serde kvferry carries objects of one tensor, not of {len(shapes)}: this model's layers have "
                "keys and values of several shapes"
            )
        shape, dtype = tuple(int(size) for size in shapes[0]), dtypes[0]
        if len(shape) != 4 or shape[0] != 2 or min(shape) < 1:
            raise UnsupportedCache(
                f"the serde kvferry carries keys and values (2, layers, tokens, hidden), not {shape}: latent caches "
                "(MLA) and other states need another serde"
            )
        if dtype not in DTYPES:
            raise UnsupportedCache(
                f"the serde kvferry carries bfloat16, float16 and float32, not {dtype_name(dtype)}: a cache that is "
                "quantised already needs no codec"
            )
        if shape[3] != config.hidden:
            raise IncompatibleIdentity(
                f"a token has {shape[3]} channels of keys, but num_kv_heads = {config.num_kv_heads} heads of head_dim "
                f"= {config.head_dim} have {config.hidden}: set what one worker of the model has",
                {"hidden": (shape[3], config.hidden)},
            )
        return cls(shape[1], shape[2], dtype)


def make_identity(shape: ChunkShape, config: SerdeConfig, key: ChunkKey) -> Identity:
    """What a chunk under this key is."""
    geometry = LayerGeometry(FULL, config.num_kv_heads, config.head_dim, config.head_dim)
    fields = {
        "chunk_hash": key.chunk_hash.hex(),
        "kv_rank": f"{key.kv_rank:#010x}",
        "object_group_id": str(key.object_group_id),
        "cache_salt": key.cache_salt,
    }
    return Identity(
        model=key.model_name,
        weights=config.weights,
        layers=(geometry,) * shape.layers,
        dtype=dtype_name(shape.dtype),
        construction=tuple(f"{_STAGE}{name}={value}" for name, value in fields.items()),
    )


def make_snapshot(chunk: Float[Tensor, "2 layers tokens hidden"], identity: Identity) -> Snapshot:
    """The chunk as a snapshot that shares its memory."""
    tokens = chunk.shape[2]
    layers = []
    for pair, geometry in zip(chunk.unbind(1), identity.layers, strict=True):
        keys, values = pair.view(2, tokens, geometry.kv_heads, geometry.head_dim).transpose(1, 2)
        layers.append(LayerState(FULL, keys.unsqueeze(0), values.unsqueeze(0), tokens))
    return Snapshot(
        identity=identity,
        token_ids=torch.zeros(1, tokens, dtype=torch.int64),
        positions=torch.arange(tokens).unsqueeze(0),
        mask=torch.ones(1, tokens, dtype=torch.bool),
        layers=tuple(layers),
    )


def put_snapshot(snapshot: Snapshot, chunk: Float[Tensor, "2 layers tokens hidden"]) -> None:
    """Write a snapshot's keys and values into a chunk's memory."""
    for layer, pair in zip(snapshot.layers, chunk.unbind(1), strict=True):
        assert layer.keys is not None
        assert layer.values is not None
        _, heads, tokens, dim = layer.keys.shape
        places = pair.view(2, tokens, heads, dim).transpose(1, 2)
        places[0].copy_(layer.keys[0])
        places[1].copy_(layer.values[0])


def require_chunk(header: PacketHeader, want: Identity, tokens: int) -> None:
    """Raise `IncompatibleIdentity`, naming what differs, unless a packet is the chunk that was asked for."""
    have = header.identity
    found: dict[str, tuple[Any, Any]] = {}
    if have.model != want.model:
        found["model"] = (have.model, want.model)
    fields = [_key_fields(identity) for identity in (have, want)]
    for name in fields[0] | fields[1]:
        sides = (fields[0].get(name), fields[1].get(name))
        if sides[0] != sides[1]:
            found[name] = sides
    found.update(have.differences(want))
    sent = int(header.mask.sum())
    if (header.batch, header.seq_len, sent) != (1, tokens, tokens):
        found["tokens"] = (sent, tokens)
    if found:
        raise IncompatibleIdentity("this packet is not the chunk that LMCache asked for", found)


def _key_fields(identity: Identity) -> dict[str, str]:
    stages = (stage.removeprefix(_STAGE) for stage in identity.construction if stage.startswith(_STAGE))
    return {name: value for name, _, value in (stage.partition("=") for stage in stages)}
