"""Refinements for tests, and the sentence that every refusal must keep: nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash

import kvferry as kv
from kvferry.ship.refine.message import digest_tensors
from kvferry.snapshot import FULL, Snapshot
from tests.ship.builders import unmasked
from tests.snapshot.builders import make_snapshot

REFUSALS = (kv.CorruptPacket, kv.UnsupportedVersion, kv.TooLarge)


def small(dtype: str = "bfloat16", *, tokens: int = 9, layers: int = 2, seed: int = 0) -> Snapshot:
    return unmasked(make_snapshot([FULL] * layers, seq_len=tokens, kv_heads=2, head_dim=8, dtype=dtype, seed=seed))


def refiner_of(packet: kv.Packet, refinement: kv.Refinement) -> tuple[kv.Refiner, Snapshot]:
    """A refiner, and the snapshot that it writes to."""
    near = kv.decode(packet)
    return kv.Refiner(packet.header_bytes, near, refinement.header_bytes), near


def level_frames(refinement: kv.Refinement, level: int) -> tuple[memoryview, ...]:
    count = refinement.header.frames
    return refinement.frames[(level - 1) * count : level * count]


def contents(snapshot: Snapshot) -> bytes:
    return digest_tensors(
        tensor for layer in snapshot.layers for tensor in (layer.keys, layer.values) if tensor is not None
    )


@contextmanager
def refused(near: Snapshot, match: str | None = None, errors: tuple[type[Exception], ...] = REFUSALS) -> Iterator[None]:
    """The block raises a typed error and leaves the cache as it was."""
    before = contents(near)
    with pytest.raises(errors, match=match):
        yield
    assert contents(near) == before


def resigned(frame: bytes | bytearray) -> bytes:
    """The frame with the checksum that belongs to what is in it."""
    return bytes(frame[:-8]) + xxhash.xxh3_64_digest(frame[:-8])


def with_bits(snapshot: Snapshot, patterns: list[int], seed: int) -> Snapshot:
    """The same with bit patterns put here and there in every layer's keys and values."""
    random = np.random.default_rng(seed)
    layers = []
    for layer in snapshot.layers:
        if layer.keys is None or layer.values is None:
            layers.append(layer)
            continue
        sides = []
        for tensor in (layer.keys, layer.values):
            width = {2: np.int16, 4: np.int32, 8: np.int64}[tensor.element_size()]
            bits = tensor.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
            flat = bits.view(-1)
            for pattern in patterns:
                value = np.array(pattern & ((1 << 8 * tensor.element_size()) - 1), f"u{tensor.element_size()}")
                flat[random.integers(flat.numel())] = int(value.view(width))
            sides.append(bits.view(tensor.dtype))
        layers.append(replace(layer, keys=sides[0], values=sides[1]))
    return replace(snapshot, layers=tuple(layers))
