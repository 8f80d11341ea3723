"""Policies by name. A new one is a function and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.ship.policy import baselines, optimal, spectrum
from kvferry.ship.policy.tiers import PolicyContext

Assign = Callable[[Tensor, float, int, PolicyContext], Tensor]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to give each token its tier.

    Attributes:
        assign: ``(scores of n tokens, nominal budget, n, context) -> uint8 tier of n tokens``.
        least: smallest nominal budget that it has an answer for.
        most: largest one that makes a difference.
        ranked: whether scores matter.
    """

    assign: Assign
    least: float
    most: float = 1.0
    ranked: bool = True


POLICIES: dict[str, Policy] = {
    "greedy": Policy(spectrum.greedy, 0.25),
    "balanced": Policy(spectrum.balanced, 0.25),
    "sink_protect": Policy(spectrum.sink_protect, 0.25),
    "two_tier": Policy(spectrum.two_tier, 0.0),
    "adaptive": Policy(spectrum.adaptive, 0.25),
    "optimal": Policy(optimal.nominal, 0.25),
    "random_tier": Policy(baselines.random_tier, 0.25, ranked=False),
    "uniform_int8": Policy(baselines.uniform_int8, 0.5, 0.5, ranked=False),
    "uniform_int4": Policy(baselines.uniform_int4, 0.25, 0.25, ranked=False),
    "pdtrim": Policy(baselines.pdtrim, 0.0, ranked=False),
    "sws": Policy(baselines.sws, 0.0),
    "full": Policy(baselines.full, 1.0, ranked=False),
}


def policy(name: str) -> Policy:
    """The policy of that name; raises `InvalidInput` for an unknown one."""
    found = POLICIES.get(name)
    if found is None:
        raise InvalidInput(f"unknown policy {name!r}; there are auto, fast, {', '.join(POLICIES)}, klt")
    return found
