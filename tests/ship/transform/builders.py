"""Transforms and caches for tests, with no model: random channels that hang together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.basis import Basis, Moments, build_basis
from kvferry.ship.transform.block import step_bins
from kvferry.ship.transform.groups import Group, layer_groups
from kvferry.ship.transform.tables import Counts
from kvferry.ship.transform.weights import Importance
from kvferry.snapshot import Identity, LayerState, Snapshot
from kvferry.snapshot.rope import Rotary
from tests.snapshot.builders import make_snapshot

WIDTH = 64
"""Widest group of several layers."""


def rotary(dim: int, theta: float = 10_000.0) -> Rotary:
    return Rotary(theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def channels(group: Group, tokens: int, seed: int) -> torch.Tensor:
    """Correlated rows, float32 ``(tokens, width)``, with an offset: few directions hold nearly all there is."""
    mixing = torch.Generator().manual_seed(hash((group.keys, group.layers)) % 2**31)
    mix = torch.randn(group.width, group.width, generator=mixing) * 0.6 ** torch.arange(group.width)
    offset = 2 * torch.randn(group.width, generator=mixing)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, group.width, generator=generator) @ mix.T + offset


def make_basis(group: Group, seed: int = 0) -> Basis:
    moments = Moments.of(group)
    for window in range(4):
        moments.add(channels(group, 256, seed * 100 + window))
        moments.add_felt(channels(group, 256, seed * 100 + 50 + window) * 1e-2)
    return build_basis(moments)


def make_transform(identity: Identity, seed: int = 0, *, width: int = WIDTH) -> Transform:
    """A transform that fits `make_cache`'s caches of ``identity``."""
    bases = tuple(make_basis(group, seed) for group in layer_groups(identity, width))
    importance = tuple(
        Importance(torch.tensor([-1.0, 0.5, -0.1, -0.1]), torch.tensor([0.9, -0.3, -0.2])) for _ in bases
    )
    counts = Counts()
    for basis in bases:
        values = (channels(basis.group, 256, seed + 7) @ basis.forward.T - basis.mean).T
        for code in range(-320, 65, 32):
            bins, steps = step_bins(basis, torch.zeros(values.shape[1]), code)
            counts.add(values / steps, bins)
    rotaries = tuple(rotary(layer.head_dim) for layer in identity.layers)
    return Transform(identity, bases, importance, rotaries, counts.tables(), {"windows": 4, "seed": seed})


def make_cache(*given: Any, seed: int = 0, **settings: Any) -> Snapshot:
    """As `make_snapshot`, of the channels that `make_transform` was made for."""
    snapshot = make_snapshot(*given, seed=seed, **settings)
    tensors: dict[tuple[bool, int], torch.Tensor] = {}
    for group in layer_groups(snapshot.identity, WIDTH):
        rows = channels(group, snapshot.batch_size * snapshot.seq_len, seed + 1)
        for layer, own in zip(group.layers, rows.split(list(group.sizes), dim=1), strict=True):
            state, geometry = snapshot.layers[layer], snapshot.identity.layers[layer]
            dim = geometry.head_dim if group.keys else geometry.value_head_dim
            tensor = own.view(snapshot.batch_size, snapshot.seq_len, geometry.kv_heads, dim).transpose(1, 2)
            if group.keys:
                tensor = rotary(dim).apply(tensor, snapshot.positions)
            tensors[group.keys, layer] = tensor[:, :, state.first :].to(state.keys.dtype).contiguous()
    layers = [
        replace(state, keys=tensors[True, index], values=tensors[False, index]) if state.keys is not None else state
        for index, state in enumerate(snapshot.layers)
    ]
    return replace(snapshot, layers=tuple(layers))


def with_token(snapshot: Snapshot, row: int, token: int, value: float) -> Snapshot:
    """The same with one element of one key of the first layer set."""
    keys = snapshot.layers[0].keys.clone()
    keys[row, 0, token, 1] = value
    first = LayerState(snapshot.layers[0].kind, keys, snapshot.layers[0].values, snapshot.seq_len)
    return replace(snapshot, layers=(first, *snapshot.layers[1:]))


def error(one: Snapshot, other: Snapshot) -> float:
    """Relative L2 of keys and values of the tokens that are shown."""
    wrong = whole = 0.0
    for a, b in zip(one.layers, other.layers, strict=True):
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            if x is None or y is None:
                continue
            shown = other.mask[:, other.seq_len - y.shape[2] :, None].unsqueeze(1)
            wrong += float(torch.where(shown, x.double() - y.double(), 0.0).square().sum())
            whole += float(torch.where(shown, y.double(), 0.0).square().sum())
    return (wrong / whole) ** 0.5
