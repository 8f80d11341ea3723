"""Wald's sequential probability ratio test of a rate, with its operating characteristic worked out exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvferry.errors import InvalidInput

Decision = Literal["accept", "reject", "undecided"]


@dataclass(frozen=True, slots=True)
class Sprt:
    """Test of "the rate is at most ``tolerable``" against "it is at least ``intolerable``" (Wald 1945).

    Events are looked at one by one until the likelihood ratio leaves ``(beta / (1 - alpha), (1 - beta) / alpha)``.

    Attributes:
        tolerable: a rate that should be accepted.
        intolerable: a rate that should be rejected.
        alpha: chance to reject at ``tolerable``, to first order.
        beta: chance to accept at ``intolerable``, to first order.
        most: looks after which the test ends undecided.
    """

    tolerable: float = 0.01
    intolerable: float = 0.05
    alpha: float = 0.05
    beta: float = 0.05
    most: int = 400

    def __post_init__(self) -> None:
        if not 0 < self.tolerable < self.intolerable < 1:
            raise InvalidInput(f"rates {self.tolerable} and {self.intolerable}: 0 < tolerable < intolerable < 1")
        if not (0 < self.alpha < 0.5 and 0 < self.beta < 0.5):
            raise InvalidInput(f"error rates {self.alpha} and {self.beta} must lie between 0 and 0.5")
        if self.most < 1:
            raise InvalidInput(f"a test of at most {self.most} looks")

    @property
    def bounds(self) -> tuple[float, float]:
        """Log likelihood ratios at and below which the rate is accepted, at and above which it is rejected."""
        return math.log(self.beta / (1 - self.alpha)), math.log((1 - self.beta) / self.alpha)

    def ratio(self, events: int, looks: int) -> float:
        """Log likelihood ratio, intolerable over tolerable, after ``events`` in ``looks``."""
        return events * math.log(self.intolerable / self.tolerable) + (looks - events) * math.log(
            (1 - self.intolerable) / (1 - self.tolerable)
        )

    def verdict(self, events: int, looks: int) -> Decision:
        """What is decided when the test stands there."""
        low, high = self.bounds
        ratio = self.ratio(events, looks)
        return "accept" if ratio <= low else "reject" if ratio >= high else "undecided"

    def decide(self, events: Iterable[bool]) -> tuple[Decision, int, int]:
        """Run the test: the decision, events seen, looks taken. It stops by itself and reads no further."""
        seen = looks = 0
        for event in events:
            seen, looks = seen + bool(event), looks + 1
            found = self.verdict(seen, looks)
            if found != "undecided" or looks == self.most:
                return found, seen, looks
        return "undecided", seen, looks

    def operating_characteristic(self, rate: float) -> tuple[float, float, float]:
        """Chance to accept, chance to end undecided, and mean looks, where events come independently at ``rate``.

        Exact, by going through every state that the test can be in; Wald's own formulas neglect that the ratio
        overshoots its bounds and that the test is cut off.
        """
        standing = np.zeros(self.most + 1)  # chance to have seen so many events and still be testing
        standing[0] = 1.0
        seen = np.arange(self.most + 1)
        low, high = self.bounds
        accepted = looks = 0.0
        for look in range(1, self.most + 1):
            looks += standing.sum()
            standing = standing * (1 - rate) + np.concatenate(([0.0], standing[:-1])) * rate
            step = math.log((1 - self.intolerable) / (1 - self.tolerable))
            ratio = seen * (math.log(self.intolerable / self.tolerable) - step) + look * step
            accepted += standing[ratio <= low].sum()
            standing[(ratio <= low) | (ratio >= high)] = 0.0
        return float(accepted), float(standing.sum()), float(looks)
