"""Snapshots made of random numbers, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvferry.snapshot import (
    FULL,
    Identity,
    LayerGeometry,
    LayerKind,
    LayerState,
    RopeSpec,
    Snapshot,
    dtype_from_name,
)

SLIDING = LayerKind("sliding", 8)
ROPE = RopeSpec("default", 10_000.0)


def make_identity(
    kinds: Sequence[LayerKind] = (FULL, FULL),
    *,
    kv_heads: int = 2,
    head_dim: int = 4,
    value_head_dim: int | None = None,
    dtype: str = "float32",
    rope: RopeSpec | None = ROPE,
    **fields: object,
) -> Identity:
    """An identity with equal geometry in all layers."""
    layers = tuple(
        LayerGeometry(kind, kv_heads, head_dim, head_dim if value_head_dim is None else value_head_dim, rope)
        for kind in kinds
    )
    known = {"model": "toy", "weights": "w" * 16, "construction": ("prefill",), **fields}
    return Identity(layers=layers, dtype=dtype, **known)  # type: ignore[arg-type]


def make_snapshot(
    kinds: Sequence[LayerKind] = (FULL, FULL),
    *,
    batch: int = 1,
    seq_len: int = 5,
    heads: int = 0,
    window: int = 3,
    seed: int = 0,
    **identity: object,
) -> Snapshot:
    """Random keys and values for `make_identity`'s geometry; ``heads`` > 0 adds queries of ``window`` tokens."""
    who = make_identity(kinds, **identity)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype_from_name(who.dtype)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layers = []
    for geometry in who.layers:
        held = geometry.kind.held(seq_len)
        own = geometry.kind.name != "shared"
        state = LayerState(
            kind=geometry.kind,
            keys=random(batch, geometry.kv_heads, held, geometry.head_dim) if own else None,
            values=random(batch, geometry.kv_heads, held, geometry.value_head_dim) if own else None,
            seen=seq_len,
        )
        if heads and own:
            state = replace(state, queries=random(batch, heads, window, geometry.head_dim))
        layers.append(state)
    mask = torch.rand((batch, seq_len), generator=generator) > 0.2
    return Snapshot(
        identity=who,
        token_ids=torch.randint(0, 50_000, (batch, seq_len), generator=generator),
        positions=torch.arange(seq_len).expand(batch, seq_len).contiguous(),
        mask=mask,
        layers=tuple(layers),
    )


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit, NaN payloads included."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = (torch.empty(one.numel(), dtype=one.dtype).copy_(tensor.reshape(-1)) for tensor in (one, other))
    return bool(torch.equal(left.view(torch.uint8), right.view(torch.uint8)))


def assert_same_snapshot(one: Snapshot, other: Snapshot) -> None:
    """Fail, naming the part, unless two snapshots agree in everything, bit for bit."""
    assert one.identity == other.identity
    for name in ("token_ids", "positions", "mask"):
        assert same_bits(getattr(one, name), getattr(other, name)), name
    assert len(one.layers) == len(other.layers)
    for index, (left, right) in enumerate(zip(one.layers, other.layers, strict=True)):
        assert (left.kind, left.seen) == (right.kind, right.seen), index
        for name in ("keys", "values", "queries"):
            assert same_bits(getattr(left, name), getattr(right, name)), (index, name)
