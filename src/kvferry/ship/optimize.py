"""The policy ``optimal`` on a real cache: measured errors of a ladder of quantisers, and the choice made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvferry.ship import importance
from kvferry.ship.allocate import Allocation, TierSpecs
from kvferry.ship.distortion import measure_errors
from kvferry.ship.layout import FrameSlot, Layout
from kvferry.ship.policy.optimal import Choice, Ladder, Problem
from kvferry.ship.quantize import quantizer
from kvferry.ship.sensitivity import (
    KEY_TEMPER,
    POSITION_PROFILE,
    VALUE_TEMPER,
    Sensitivity,
    flat,
    tempered,
    token_weights,
)
from kvferry.snapshot import Identity, LayerState, Snapshot

CHANNEL_TOKENS = 96
"""Tokens of a frame from which on keys get a scale a channel: below, those scales cost more than they save."""

ROTATED_BELOW = 0.4
"""Budget below which the ladders are of rotated rows: they lose least at 2 to 4 bits, and take longer."""

KEYS = ("raw", "chan8b128", "asym8g64", "chan6b128", "chan5b128", "chan4b128", "chan3b128", "chan2b128")
SHORT_KEYS = ("raw", "asym8g64", "asym6g64", "asym5g64", "asym4g64", "asym3g64", "asym2g64")
VALUES = ("raw", "asym8g64", "asym6g64", "asym5g64", "asym4g64", "asym3g64", "asym2g64")


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A cache with all that the choice depends on but the budget.

    Attributes:
        problem: parts are keys, then values, of each frame in order.
        specs: the ladders.
        layout: the frames.
        sent: which tokens are sent.
        layers: of the model.
    """

    problem: Problem
    specs: TierSpecs
    layout: Layout
    sent: Bool[Tensor, "batch seq"]
    layers: int

    def allocation(self, choice: Choice) -> Allocation:
        """A choice as tiers of the whole cache."""
        shape = (self.layers, *self.sent.shape)
        tiers = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
        for slot in self.layout:
            for side in range(2):
                chosen = choice.tiers[2 * slot.index + side, :, : slot.tokens]
                tiers[side][slot.first_layer, :, slot.start : slot.stop] = chosen
        return Allocation(self.specs, tiers[0], tiers[1], self.sent)


def rotated_specs(dim: int, value_dim: int) -> TierSpecs:
    """Ladders of Hadamard-rotated rows, keys centred."""
    bits = (8, 6, 5, 4, 3, 2)
    return TierSpecs(
        ("raw", *(f"cen{n}g{_group(dim)}" for n in bits)), ("raw", *(f"had{n}g{_group(value_dim)}" for n in bits))
    )


def _group(dim: int) -> int:
    """Channels that share a scale: as many as a power of two divides, from 64 to 256."""
    return max(64, min(256, dim & -dim))


def default_specs(layout: Layout) -> TierSpecs:
    """Ladders without rotation, for frames of this length."""
    tokens = [slot.tokens for slot in layout]
    long = sum(tokens) >= CHANNEL_TOKENS * max(1, len(tokens))
    return TierSpecs(KEYS if long else SHORT_KEYS, VALUES)


def ladders(identity: Identity, layout: Layout, budget: float) -> tuple[TierSpecs, TierSpecs]:
    """What there is to choose from at a budget, and what else where that has nothing so small.

    Rotated rows where bits are few, else what is fastest. Which of them gets smaller hangs on the length of the cache.
    """
    own = [layer for layer in identity.layers if layer.kind.name != "shared"]
    rotated = rotated_specs(min(layer.head_dim for layer in own), min(layer.value_head_dim for layer in own))
    plain = default_specs(layout)
    return (plain, rotated) if budget >= ROTATED_BELOW else (rotated, plain)


def nominal_cost(allocation: Allocation) -> float:
    """Mean bits of a sent token's codes, keys and values of all layers alike, as a share of 16."""
    total = 0.0
    for tiers, specs in (
        (allocation.key_tiers, allocation.specs.keys),
        (allocation.value_tiers, allocation.specs.values),
    ):
        counts = torch.bincount(tiers[:, allocation.sent].flatten(), minlength=len(specs)).tolist()
        bits = sum(count * min(16.0, quantizer(spec).nbits) for count, spec in zip(counts, specs, strict=True))
        total += bits / (16 * max(1, sum(counts)))
    return total / 2


@torch.no_grad()
def measure(
    snapshot: Snapshot,
    layout: Layout,
    sent: Bool[Tensor, "batch seq"],
    pinned: Bool[Tensor, "batch seq"],
    specs: TierSpecs,
    *,
    sensitivity: Sensitivity | None,
    scores: Tensor | str | None,
    decay: float | None,
    n_sink: int,
) -> Measured:
    """Quantise a cache by every quantiser of the ladders and weigh the errors.

    Args:
        snapshot: the cache.
        layout: its frames.
        sent: tokens that are sent, on the CPU.
        pinned: tokens that must go raw.
        specs: the ladders; every first tier is ``raw``.
        sensitivity: of the model; ``None``: `kvferry.ship.sensitivity.flat`.
        scores: ``(batch, seq)``, or a scorer's name; ``None``: the default one.
        decay: of the scorer.
        n_sink: first tokens of each sequence, which go raw: what follows hangs on them more than on all others.
    """
    known = flat(snapshot) if sensitivity is None else sensitivity
    name = scores if isinstance(scores, str) else None
    if scores is None:
        name = "observation_window" if importance.has_queries(snapshot) else "positional"
    ranked = None if isinstance(scores, Tensor) else importance.layer_scores(snapshot, name, decay=decay)
    sinks = (sent.cumsum(dim=1) <= n_sink) & sent
    slots: dict[int, list[FrameSlot]] = {}
    for slot in layout:
        slots.setdefault(slot.first_layer, []).append(slot)
    ladders: list[Ladder] = []
    masks: list[Tensor] = []
    for index, frames in slots.items():
        layer = snapshot.layers[index]
        for slot in frames:
            for tensor, ladder in ((layer.keys, specs.keys), (layer.values, specs.values)):
                assert tensor is not None
                ladders.append(_ladder(ladder, tensor.shape[1], slot.tokens, tensor.shape[3], tensor.dtype))
                masks.append(sent[:, slot.start : slot.stop])

    def errors() -> Iterator[Tensor]:
        """Of one part after the other, so that no more than a layer's lie beside the problem's."""
        for index, frames in slots.items():
            layer = snapshot.layers[index]
            held = slice(layer.first, layer.seen)
            own = scores[:, held].float() if isinstance(scores, Tensor) else _held(ranked, index, held)
            sides = []
            for keys in (True, False):
                profile = known.key_profile if keys else known.value_profile
                if name == "positional":
                    profile = POSITION_PROFILE
                profile = tempered(profile, KEY_TEMPER if keys else VALUE_TEMPER)
                weights = token_weights(own, sent[:, held], profile, sinks[:, held])
                error = _layer_errors(layer, known, index, specs, sent[:, held], pinned[:, held], keys=keys)
                error.mul_(weights)[1:].masked_fill_((sinks | pinned)[:, held], torch.inf)
                sides.append(error)
            for slot in frames:
                here = slice(slot.start - layer.first, slot.stop - layer.first)
                yield from (error[:, :, here] for error in sides)

    return Measured(Problem(ladders, errors(), masks), specs, layout, sent, len(snapshot.layers))


def _held(ranked: Tensor | None, index: int, held: slice) -> Tensor:
    assert ranked is not None
    return ranked[index, :, held].nan_to_num(0.0)


@lru_cache(maxsize=256)
def _ladder(specs: tuple[str, ...], heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Ladder:
    table = [[quantizer(spec).nbytes(heads, count, dim, dtype) for count in range(tokens + 1)] for spec in specs]
    return Ladder(specs, torch.tensor(table, dtype=torch.int64))


def _layer_errors(
    layer: LayerState,
    known: Sensitivity,
    index: int,
    specs: TierSpecs,
    sent: Bool[Tensor, "batch held"],
    pinned: Bool[Tensor, "batch held"],
    *,
    keys: bool,
) -> Float[Tensor, "tiers batch held"]:
    tensor = layer.keys if keys else layer.values
    channels = (known.keys if keys else known.values)[index]
    ladder = specs.keys if keys else specs.values
    assert tensor is not None
    assert channels is not None
    if tensor.numel() and not any(tensor.stride()):
        level = (known.key_energy if keys else known.value_energy)[index]
        expected = torch.tensor([0.0 if spec == "raw" else level * 4.0 ** -quantizer(spec).nbits for spec in ladder])
        return expected[:, None, None].expand(-1, *sent.shape).clone()
    return measure_errors(tensor, ladder, channels, sent & ~pinned)
