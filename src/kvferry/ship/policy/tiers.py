"""Tiers, their nominal costs, and how counts of tokens become a tier for each token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

RAW, INT8, INT4, DROP = 0, 1, 2, 3
"""Tier codes, dearest first. What ``INT8`` and ``INT4`` stand for is `kvferry.ship.allocate.TierSpecs`'s to say."""

TIER_COST = (1.0, 0.5, 0.25, 0.0)
"""Nominal cost of a token of each tier: 16 bit is 1; scales, maps and headers are not counted."""

N_SINK = 4
"""Tokens at the start of a sequence that are ranked before all others (the paper's s)."""

_FUZZ = 1e-9


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at besides the scores.

    Attributes:
        n_sink: first tokens of the sequence that are ranked ahead of all others.
        seed: of `random_tier`.
        row: index of the sequence in its batch.
        int4_allowed: what the probe says of this model (`adaptive`).
    """

    n_sink: int = N_SINK
    seed: int = 0
    row: int = 0
    int4_allowed: bool = True


def counts(n: int, raw: float, int8: float, int4: float) -> tuple[int, int, int]:
    """Fractions of n tokens as whole tokens, the rest being dropped.

    Rounding: the *cumulative* fractions (raw, raw + int8, raw + int8 + int4) times n are rounded down, so every
    tier's count is within one token of its formula and the mean cost never exceeds the nominal budget.
    """
    ends, total = [], 0.0
    for fraction in (raw, int8, int4):
        total += fraction
        ends.append(min(n, max(0, math.floor(total * n + _FUZZ))))
    return ends[0], max(0, ends[1] - ends[0]), max(0, ends[2] - max(ends[0], ends[1]))


def ranking(scores: Float[Tensor, " n"], n_sink: int) -> Int[Tensor, " n"]:
    """Token indices, most important first: sinks in their order, then by score; of equal scores the later token."""
    n = scores.numel()
    sinks = min(n, n_sink)
    tail = scores[sinks:].flip(0)
    order = n - 1 - torch.argsort(tail, descending=True, stable=True)
    return torch.cat([torch.arange(sinks, device=scores.device), order])


def assign(order: Int[Tensor, " n"], raw: int, int8: int, int4: int) -> UInt8[Tensor, " n"]:
    """The first ``raw`` tokens of ``order`` get `RAW`, the next `INT8`, the next `INT4`, the rest `DROP`."""
    tiers = torch.full((order.numel(),), DROP, dtype=torch.uint8, device=order.device)
    tiers[order[: raw + int8 + int4]] = INT4
    tiers[order[: raw + int8]] = INT8
    tiers[order[:raw]] = RAW
    return tiers
