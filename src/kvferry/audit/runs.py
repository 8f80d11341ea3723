"""Runs of one sequence, shared by the pairs that ask for them: an arm and its replica run once each."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kvferry.audit.arm import Arm
from kvferry.audit.drift import drift
from kvferry.audit.models import ModelSet
from kvferry.audit.run import run_arm
from kvferry.audit.trace import TENSORS, Trace

KEPT_BYTES = 1 << 30
"""Traces kept at once; the oldest go first, and are run again where they are asked for again."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What the same path twice is off by.

    Attributes:
        max_abs: the largest difference of a logit.
        relative_l2: the largest of a layer and position, over keys, values, attention and residual stream.
    """

    max_abs: float
    relative_l2: float


def floor_between(first: Trace, second: Trace) -> Floor:
    """The distance of two runs as a floor; infinite where either is not finite."""
    apart = float((first.logits.double() - second.logits.double()).abs().max())
    between = drift(first, second)
    inside = max(float(between.by_layer(name).max()) for name in TENSORS)
    return Floor(apart if math.isfinite(apart) else math.inf, inside)


class Runs:
    """What arms show on one sequence.

    A pair of arms takes up to seven runs, and the protocols' pairs have many of them in common: the reference, its
    replica, and its float64 control above all.

    Args:
        models: what to run on.
        token_ids: the sequence.
        start: tokens of the prefix.
    """

    def __init__(self, models: ModelSet, token_ids: Int[Tensor, "1 length"], start: int):
        self.models, self.token_ids, self.start = models, token_ids, start
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._replicas: dict[str, Floor | None] = {}

    def trace(self, arm: Arm) -> Trace:
        """The run of ``arm``."""
        key = self._key(arm)
        if key in self._traces:
            self._traces.move_to_end(key)
            return self._traces[key]
        trace = run_arm(self.models, arm, self.token_ids, self.start)
        self._traces[key] = trace
        while len(self._traces) > 1 and sum(kept.nbytes for kept in self._traces.values()) > KEPT_BYTES:
            self._traces.popitem(last=False)
        return trace

    def floor(self, arm: Arm) -> Floor | None:
        """How far a second run of ``arm``, which shares no storage with the first, is off; ``None``: not by a bit."""
        key = self._key(arm)
        if key not in self._replicas:
            again = run_arm(self.models, arm, self.token_ids.clone(), self.start)
            first = self.trace(arm)
            self._replicas[key] = None if first.same_bits(again) else floor_between(first, again)
        return self._replicas[key]

    def _key(self, arm: Arm) -> str:
        return json.dumps({**arm.to_json(), "dtype": arm.dtype or self.models.dtype}, sort_keys=True)
