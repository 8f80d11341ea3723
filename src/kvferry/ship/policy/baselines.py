"""What the policies must beat: one precision for all, no ranking, and dropping tokens. Same signature as `spectrum`."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvferry.ship.policy.spectrum import greedy_fractions
from kvferry.ship.policy.tiers import INT4, INT8, RAW, PolicyContext, assign, counts, ranking


def full(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:  # noqa: ARG001
    """Every token at 16 bit."""
    return torch.full((n,), RAW, dtype=torch.uint8)


def uniform_int8(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:  # noqa: ARG001
    """Every token, sinks too, at INT8."""
    return torch.full((n,), INT8, dtype=torch.uint8)


def uniform_int4(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:  # noqa: ARG001
    """Every token, sinks too, at INT4."""
    return torch.full((n,), INT4, dtype=torch.uint8)


def random_tier(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:  # noqa: ARG001
    """`greedy`'s fractions without a ranking: a permutation from the seed and the row; sinks take their chance."""
    generator = torch.Generator().manual_seed(context.seed * 1_000_003 + context.row)
    return assign(torch.randperm(n, generator=generator), *counts(n, *greedy_fractions(b)))


def pdtrim(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:  # noqa: ARG001
    """The first n_sink and the last tokens at 16 bit, the middle dropped (the paper's PDTrim baseline)."""
    order = torch.cat([torch.arange(min(context.n_sink, n)), torch.arange(n - 1, min(context.n_sink, n) - 1, -1)])
    return assign(order, _kept(b, n, context), 0, 0)


def sws(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:
    """Semantic working set: sinks and the most important tokens at 16 bit, the others dropped."""
    return assign(ranking(scores, context.n_sink), _kept(b, n, context), 0, 0)


def _kept(b: float, n: int, context: PolicyContext) -> int:
    """Tokens that a dropping policy keeps: floor(b n), and the sinks with one more at the least."""
    return min(n, max(math.floor(b * n + 1e-9), context.n_sink + 1))
