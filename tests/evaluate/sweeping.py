"""A sweep small enough for tests."""

from __future__ import annotations

from kvferry.evaluate.method import Method
from kvferry.evaluate.needle import NeedleGrid
from kvferry.evaluate.sweep import SweepSettings

METHODS = (
    Method("full"),
    Method("zero_cache"),
    Method("auto", budget=0.3),
    Method("greedy", budget=0.05),
    Method("adaptive", nominal_budget=0.5, int4_allowed=False),
)


def settings() -> SweepSettings:
    return SweepSettings(METHODS, windows=2, prefix=96, suffix=32, needle=NeedleGrid((128,), (0.5,), 1))
