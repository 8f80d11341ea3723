"""A model's transform, from its own caches of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.hf.capture import capture
from kvferry.hf.gradients import CacheGradients, cache_gradients
from kvferry.hf.identity import identity_of
from kvferry.hf.rotary import rotaries_of
from kvferry.ship.policy.tiers import N_SINK
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.basis import Basis, Moments, build_basis
from kvferry.ship.transform.block import Components, step_bins
from kvferry.ship.transform.body import group_rows
from kvferry.ship.transform.groups import layer_groups
from kvferry.ship.transform.tables import Counts, Tables
from kvferry.ship.transform.weights import Importance, attention_scores, features, fit_importance, token_octaves
from kvferry.snapshot import LayerState, Snapshot
from kvferry.snapshot.rope import Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP_WIDTH = 2048
"""Widest group of several layers: bases of this width take 64 MB of memory each way and a second to build."""

_KEPT = 10
"""Windows that importance and tables are fitted on."""

_STEPS = range(-32 * 15, -32 * 7, 12)
"""Step codes that the tables are counted at: all that a budget is likely to want."""

_TYPICAL = -352
"""Step code of a budget of about 0.1: which components matter to a token's importance."""


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    windows: int = 44,
    gradient_windows: int = 28,
    prefix: int = 1024,
    suffix: int = 384,
    seed: int = 0,
    on_window: Callable[[int, int], None] | None = None,
) -> Transform:
    """Build the transform of ``model`` for policy ``klt``.

    Args:
        model: from `load_model`, in the dtype that its caches will have.
        tokenizer: its tokenizer.
        text: what its caches are taken of; the more like what will be shipped the better.
        windows: windows of the text, fewer where it is short.
        gradient_windows: those, of them, that gradients are taken of.
        prefix, suffix: tokens cached, and tokens whose loss tells what the cache is worth.
        seed: of the labels drawn for the gradients.
        on_window: told ``(windows done, windows in all)``.

    Raises:
        InvalidInput: a text of less than four windows.
        UnsupportedCache: a model whose rotation or cache is of a kind that no transform takes.
    """
    chosen = _windows(tokenizer, text, prefix + suffix, windows)
    generator = torch.Generator().manual_seed(seed)
    identity = identity_of(model, tokenizer)
    rotaries = rotaries_of(model, len(identity.layers))
    moments = [Moments.of(group) for group in layer_groups(identity, GROUP_WIDTH)]
    kept: list[CacheGradients] = []
    with_gradients = max(4, min(gradient_windows, len(chosen) * 2 // 3))
    for place, window in enumerate(chosen):
        if on_window is not None:
            on_window(place, len(chosen))
        ids = window.to(model.device)
        felt = cache_gradients(model, ids, prefix, generator) if place < with_gradients else None
        snapshot = capture(model, ids[:, :prefix]) if felt is None else felt.snapshot
        for own in moments:
            own.add(_rows(snapshot, rotaries, own))
            if felt is not None:
                own.add_felt(_rows(_gradient_cache(felt), rotaries, own))
        if felt is not None and len(kept) < _KEPT:
            kept.append(felt)
    if on_window is not None:
        on_window(len(chosen), len(chosen))
    bases = tuple(build_basis(own) for own in moments)
    importance = tuple(_importance(basis, rotaries, kept) for basis in bases)
    tables = _tables(bases, importance, rotaries, kept)
    made = {
        "windows": len(chosen),
        "gradient_windows": with_gradients,
        "prefix": prefix,
        "suffix": suffix,
        "seed": seed,
        "tokens": len(chosen) * prefix,
    }
    return Transform(identity, bases, importance, rotaries, tables, made)


def _windows(tokenizer: Any, text: str, tokens: int, count: int) -> list[Tensor]:
    """Disjoint windows spread over a text, each led by what the tokenizer puts before one."""
    ids = torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False).input_ids], dtype=torch.int64)
    lead = torch.tensor([tokenizer("", verbose=False).input_ids], dtype=torch.int64).view(1, -1)
    own = tokens - lead.shape[1]
    count = min(count, ids.shape[1] // own)
    if count < 4:
        raise InvalidInput(
            f"calibration needs a text of at least {4 * own} tokens; this one has {ids.shape[1]}: give a longer one"
        )
    starts = [place * (ids.shape[1] - own) // (count - 1) for place in range(count)]
    return [torch.cat([lead, ids[:, start : start + own]], dim=1) for start in starts]


def _rows(snapshot: Snapshot, rotaries: tuple[Rotary, ...], moments: Moments) -> Tensor:
    tokens = _coded(snapshot, moments.group.layers[0])
    return group_rows(snapshot, rotaries, moments.group, 0, tokens)


def _coded(snapshot: Snapshot, layer: int) -> Tensor:
    return torch.arange(max(snapshot.layers[layer].first, N_SINK), snapshot.seq_len)


def _gradient_cache(felt: CacheGradients) -> Snapshot:
    """Gradients in the shape of a cache: a rotation is orthogonal, so they turn as the keys do."""
    from dataclasses import replace

    layers = tuple(
        LayerState(layer.kind, keys, values, layer.seen)
        for layer, keys, values in zip(felt.snapshot.layers, felt.keys, felt.values, strict=True)
    )
    return replace(felt.snapshot, layers=layers)


def _importance(basis: Basis, rotaries: tuple[Rotary, ...], kept: list[CacheGradients]) -> Importance:
    told, plain, energy = [], [], []
    wide = basis.level >= _TYPICAL - 48
    back = basis.back[:, wide if bool(wide.any()) else slice(0, 1)]
    for felt in kept:
        snapshot = felt.snapshot
        tokens = _coded(snapshot, basis.group.layers[0])
        rows = group_rows(_gradient_cache(felt), rotaries, basis.group, 0, tokens)
        energy.append((rows @ back).square().mean(dim=1))
        scores = attention_scores(snapshot)
        plain.append(features(basis.group, tokens, snapshot.seq_len, None))
        if scores is not None:
            told.append(features(basis.group, tokens, snapshot.seq_len, scores[:, 0]))
    return fit_importance(told, plain, energy)


def _tables(
    bases: tuple[Basis, ...],
    importance: tuple[Importance, ...],
    rotaries: tuple[Rotary, ...],
    kept: list[CacheGradients],
) -> Tables:
    counts = Counts()
    for felt in kept:
        snapshot, scores = felt.snapshot, attention_scores(felt.snapshot)
        for basis, own in zip(bases, importance, strict=True):
            tokens = _coded(snapshot, basis.group.layers[0])
            told = None if scores is None else scores[:, 0]
            octaves = token_octaves(own, basis.group, tokens, snapshot.seq_len, told)
            components = Components.of(basis, group_rows(snapshot, rotaries, basis.group, 0, tokens), octaves)
            centred = components.values - components.mean[:, None]
            for code in _STEPS:
                bins, steps = step_bins(basis, octaves, code)
                counts.add(centred / steps, bins)
    return counts.tables()
