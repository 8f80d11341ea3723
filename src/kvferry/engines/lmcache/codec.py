"""From a chunk to the bytes that LMCache stores, and back: a whole packet, header, frames and all checksums.

LMCache's file adapter takes a chunk for missing whose file has not exactly the bytes of the buffer that was made to
read it, and what that buffer is made by knows only the chunk's shape. So all chunks of a shape take the same bytes,
`room`, and what a packet leaves of them is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.engines.lmcache.chunk import (
    ChunkKey,
    ChunkShape,
    make_identity,
    make_snapshot,
    put_snapshot,
    require_chunk,
)
from kvferry.engines.lmcache.config import RAW, SerdeConfig
from kvferry.errors import CorruptPacket, TooLarge
from kvferry.ship.allocate import TierSpecs
from kvferry.ship.frame import announced_frame_length
from kvferry.ship.header import announced_length
from kvferry.ship.plan import MEASURED, EncodePlan, plan
from kvferry.ship.quantize import quantizer
from kvferry.ship.reader import PacketReader
from kvferry.snapshot import Snapshot

NAMES_BYTES = 1024
"""Room in every packet for what its object key holds: the model's name, the chunk's hash, the salt…"""


def encode(
    chunk: Float[Tensor, "2 layers tokens hidden"], shape: ChunkShape, config: SerdeConfig, key: ChunkKey
) -> EncodePlan:
    """Plan the packet of a chunk; its frames are built when they are asked for.

    Raises:
        BudgetTooSmall: the config's budget cannot be met for this chunk; says what can.
        TooLarge: it does not fit into `room`.
    """
    planned = _plan(make_snapshot(chunk, make_identity(shape, config, key)), config)
    most = room(shape, config)
    if planned.nbytes > most:
        raise TooLarge(
            f"the chunk takes {planned.nbytes:,} bytes, more than the {most:,} that chunks of its shape get: "
            f"{planned.header.report['nonfinite']} of its tokens hold NaN or infinity and must go raw, and the texts "
            f"of its key may take {NAMES_BYTES} bytes"
        )
    return planned


def write(planned: EncodePlan, out: memoryview) -> None:
    """Write a packet to the beginning of a buffer, and zeros behind it: the buffer may hold others' old bytes."""
    at = 0
    pieces: Iterable[bytes | memoryview] = chain((planned.header_bytes,), planned.frames())
    for piece in pieces:
        out[at : at + len(piece)] = piece
        at += len(piece)
    out[at:] = bytes(len(out) - at)


def decode(
    data: memoryview,
    chunk: Float[Tensor, "2 layers tokens hidden"],
    shape: ChunkShape,
    config: SerdeConfig,
    key: ChunkKey,
) -> None:
    """Read the packet at the beginning of ``data`` into a chunk's memory, which is left alone if anything is wrong.

    Raises:
        CorruptPacket, UnsupportedVersion, TooLarge: damaged, or not from this version's serde.
        IncompatibleIdentity: of another model, key or shape; names what differs.
    """
    at = announced_length(data)
    if at > len(data):
        raise CorruptPacket(f"the packet ends within its header: {len(data)} of {at} bytes")
    reader = PacketReader(bytes(data[:at]), device=chunk.device)
    require_chunk(reader.header, make_identity(shape, config, key), shape.tokens)
    end = at + reader.header.payload_bytes
    while at < end:
        length = announced_frame_length(data[at : min(end, len(data))])
        if not 0 < length <= min(end, len(data)) - at:
            raise CorruptPacket("the packet ends within a frame")
        reader.add(data[at : at + length])
        at += length
    put_snapshot(reader.snapshot(), chunk)


@lru_cache(maxsize=256)
def room(shape: ChunkShape, config: SerdeConfig) -> int:
    """Bytes that every chunk of this shape takes: those of its packet with the longest key, exactly."""
    longest = _LongestKey("m" * NAMES_BYTES)
    geometry = (2, shape.layers, shape.tokens, config.hidden)
    probe = torch.zeros(1, dtype=shape.dtype).expand(geometry)  # one element of memory
    snapshot = make_snapshot(probe, make_identity(shape, config, longest))
    if config.budget is not None:
        return math.floor(config.budget * plan(snapshot, None, "full").full_bytes)
    return _plan(snapshot, config).nbytes


@dataclass(frozen=True, slots=True)
class _LongestKey:
    model_name: str
    chunk_hash: bytes = b""
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


def _plan(snapshot: Snapshot, config: SerdeConfig) -> EncodePlan:
    if config.budget is not None:
        # A chunk does not know where in its prompt it stands: none of its tokens is a sink, or recent.
        flat = torch.ones(1, snapshot.seq_len)
        return plan(snapshot, config.budget, MEASURED, flat, n_sink=0)
    keys, values = config.quantizers
    if (keys, values) == (RAW, RAW):
        return plan(snapshot, None, "full")
    bits = max(quantizer(keys).nbits, quantizer(values).nbits)
    tiers = TierSpecs((RAW, keys, keys), (RAW, values, values))
    return plan(snapshot, None, "uniform_int4" if bits <= 4 else "uniform_int8", quantizers=tiers)
