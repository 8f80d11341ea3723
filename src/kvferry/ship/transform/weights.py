"""How much an error in a token will cost, as far as can be told when it is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.ship.importance import has_queries, layer_scores
from kvferry.ship.transform.groups import Group
from kvferry.snapshot import Snapshot

MOST = 8
"""Weights are within ``2^-MOST`` and ``2^MOST``."""

_LEAST_SCORE = 1e-6
_TRIM = 0.995


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """Log-linear prediction of the energy of a token's gradients in one group.

    Attributes:
        attention: ``(4,)`` coefficients of 1, log attention of the last queries, log distance from the end, log
            distance from the first token that is coded; used where the snapshot has queries.
        position: ``(3,)`` the same without the attention.
    """

    attention: Float[Tensor, " told"]
    position: Float[Tensor, " plain"]


def features(
    group: Group, tokens: Int[Tensor, " tokens"], seq_len: int, scores: Float[Tensor, "layers seq"] | None
) -> Float[Tensor, "tokens features"]:
    """What the prediction is made from, float64; ``tokens`` ascending, within those that the group's layers hold."""
    one = torch.ones(len(tokens), dtype=torch.float64)
    places = [(seq_len - tokens).double().log(), (tokens - tokens[0] + 1).double().log()]
    if scores is None:
        return torch.stack([one, *places], dim=1)
    paid = scores[list(group.layers)][:, tokens].double().mean(dim=0)
    return torch.stack([one, (paid + _LEAST_SCORE).log(), *places], dim=1)


def attention_scores(snapshot: Snapshot) -> Float[Tensor, "layers batch seq"] | None:
    """Attention of the last queries to each token, where the snapshot has them."""
    return layer_scores(snapshot, "observation_window", decay=0.0) if has_queries(snapshot) else None


def token_octaves(
    importance: Importance,
    group: Group,
    tokens: Int[Tensor, " tokens"],
    seq_len: int,
    scores: Float[Tensor, "layers seq"] | None,
) -> Int[Tensor, " tokens"]:
    """log2 of each token's weight, as int16 within ``MOST``: its step is ``2^(-octaves / 2)`` of the common one."""
    told = features(group, tokens, seq_len, scores)
    weights = importance.position if scores is None else importance.attention
    octaves: Tensor = (told @ weights.double() / math.log(2)).round()
    return octaves.clamp(-MOST, MOST).to(torch.int16)


def fit_importance(told: list[Tensor], plain: list[Tensor], energy: list[Tensor]) -> Importance:
    """The weights that make what a given number of bits costs least, over windows of calibration.

    With a step of ``w^(-1/2)`` a token of energy ``e`` adds ``e / w`` to the loss and ``log(w) / 2`` to the rate, so
    ``log(mean(e / w)) + mean(log(w))`` is minimised, which is convex in the coefficients. The constant is set so that
    ``mean(e / w) = 1``: then bits are worth the same in every group.

    Args:
        told: `features` with scores, a window each; empty where no queries were to be had.
        plain: `features` without.
        energy: mean square of a token's gradient by the components.
    """
    felt = torch.cat(energy).double()
    felt = felt + 1e-6 * felt.mean()
    position = _fit(torch.cat(plain), felt)
    attention = _fit(torch.cat(told), felt) if told else torch.cat([position[:1], torch.zeros(1), position[1:]])
    return Importance(attention, position)


def _fit(columns: Float[Tensor, "tokens features"], felt: Float[Tensor, " tokens"]) -> Float[Tensor, " features"]:
    goal = felt.log()
    start = torch.linalg.lstsq(columns, goal.unsqueeze(1)).solution.squeeze(1)
    found = (0.7 * start).requires_grad_()
    search = torch.optim.LBFGS([found], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss() -> Tensor:
        search.zero_grad()
        weights = columns @ found
        value: Tensor = torch.logsumexp(goal - weights, dim=0) + weights.mean() + 1e-4 * (found - start).square().sum()
        torch.autograd.backward(value)
        return value

    with torch.enable_grad():
        search.step(loss)  # type: ignore[no-untyped-call]
    solved = found.detach()
    left = (goal - columns @ solved).exp()
    solved[0] += left.clamp_max(float(left.quantile(_TRIM))).mean().log()
    weights: Tensor = solved.float()
    return weights
