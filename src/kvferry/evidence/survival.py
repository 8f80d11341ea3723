"""First divergence is censored data: a run that ended before it split says only "later than this"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from kvferry.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Survival:
    """Kaplan and Meier's estimate (1958) of the share that has not split yet, with Greenwood's variance.

    Attributes:
        times: positions at which at least one run split, ascending.
        surviving: share still together just behind each.
        low, high: interval of each, by the log-log transform (Kalbfleisch & Prentice, 1980); ``None`` where the share
            is 0 or 1, at which the transform says nothing.
        n: runs.
        events: runs that split.
    """

    times: tuple[int, ...]
    surviving: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    n: int
    events: int

    def median(self) -> int | None:
        """First position behind which no more than half are together; ``None`` where more than half never split."""
        return next((time for time, share in zip(self.times, self.surviving, strict=True) if share <= 0.5), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "events": self.events,
            "median": self.median(),
            "times": list(self.times),
            "surviving": list(self.surviving),
            "low": list(self.low),
            "high": list(self.high),
        }


def kaplan_meier(times: Sequence[int], split: Sequence[bool], confidence: float = 0.95) -> Survival:
    """The survival curve of runs of which some were still together when they ended.

    Args:
        times: of each run the position at which it split, or ended together.
        split: whether it split then.
        confidence: of the intervals, each for its own position.

    Raises:
        InvalidInput: no runs, unequal numbers, or a negative time.
    """
    if not times or len(times) != len(split) or min(times) < 0:
        raise InvalidInput(f"{len(times)} times and {len(split)} marks: a curve needs as many of both, none negative")
    if not 0 < confidence < 1:
        raise InvalidInput(f"a confidence of {confidence}: it lies between 0 and 1")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, greenwood = 1.0, 0.0
    moments, shares = [], []
    low: list[float | None] = []
    high: list[float | None] = []
    for time in sorted({time for time, event in zip(times, split, strict=True) if event}):
        at_risk = sum(1 for other in times if other >= time)
        events = sum(1 for other, event in zip(times, split, strict=True) if event and other == time)
        share *= 1 - events / at_risk
        moments.append(time)
        shares.append(share)
        if events == at_risk:
            low.append(None)
            high.append(None)
            continue
        greenwood += events / (at_risk * (at_risk - events))
        spread = z * math.sqrt(greenwood) / math.log(share)
        low.append(share ** math.exp(-spread))
        high.append(share ** math.exp(spread))
    return Survival(tuple(moments), tuple(shares), tuple(low), tuple(high), len(times), sum(map(bool, split)))
