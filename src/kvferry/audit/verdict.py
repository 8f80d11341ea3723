"""From evidence to a name. Every verdict says what decided it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float

from kvferry.audit.trace import TENSORS
from kvferry.snapshot import dtype_from_name

VERDICTS = ("identical", "kernel-shape", "rounding", "codec", "semantic", "overflow")
"""From harmless to not.

``identical``: the same bits. ``kernel-shape``: other bits, which vanish when the matrix shapes are matched, and with
precision. ``rounding``: vanishes with precision. ``codec``: a loss that the arm declares, of the size that it declares.
``semantic``: stays at any precision: a fault in masks, positions or state. ``overflow``: NaN or infinity.
"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict on one pair of runs rests on.

    Attributes:
        replicas: both arms gave the same bits twice.
        identical: logits and caches of the pair are the same to the bit.
        nonfinite: ``(arm, layer, tensor, position)`` of the first NaN or infinity.
        vanishes: the difference shrinks with precision as rounding does; ``None``: not tried.
        finest: ``vanishes`` is not of a finer run, as none is finer: the difference is within float64's rounding.
        shapes_match: the reference, run in the other arm's shapes, gives the other arm's bits; ``None``: not tried.
        shapes_alone: in these shapes the reference is the other arm itself: its replica is that run.
        declared: the difference is what a declared lossy stage costs.
        unexplained_flips: flips whose margin is beyond what rounding reaches.
        floor: where replicas differ, by how much: of a logit, and in relative L2 of a layer.
        within_floor: the pair is no farther apart than its replicas are.
        notes: words for each of these that a reader needs.
    """

    replicas: bool
    identical: bool
    nonfinite: tuple[str, int, str, int] | None = None
    vanishes: bool | None = None
    finest: bool = False
    shapes_match: bool | None = None
    shapes_alone: bool = False
    declared: bool = False
    unexplained_flips: int = 0
    floor: tuple[float, float] | None = None
    within_floor: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A name of `VERDICTS`, and the evidence that decided, most important first."""

    name: str
    reasons: tuple[str, ...] = field(default=())


def decide(evidence: Evidence) -> Verdict:
    """The verdict on one pair of runs."""
    notes = evidence.notes
    if not evidence.replicas:
        notes = (f"the same path twice gave other bits{_sizes(evidence.floor)}: nothing finer is claimed", *notes)
    if evidence.nonfinite is not None:
        arm, layer, tensor, position = evidence.nonfinite
        where = (
            f"layer {layer}, {tensor}, position {position}" if tensor != "logits" else f"logits, position {position}"
        )
        return Verdict("overflow", (f"{arm}: NaN or infinity first in {where}", *notes))
    if evidence.within_floor:
        return Verdict("rounding", ("no farther apart than the same path is from itself", *notes))
    if evidence.identical and evidence.replicas:
        return Verdict("identical", ("logits and caches are the same to the bit", *notes))
    if evidence.vanishes is False:
        if evidence.declared:
            return Verdict("codec", ("stays at any precision, as declared by a lossy stage, and is no larger", *notes))
        reason = "larger than rounding of float64 can be" if evidence.finest else "does not shrink with precision"
        return Verdict("semantic", (reason, *notes))
    if evidence.vanishes is None and evidence.unexplained_flips:
        reason = f"{evidence.unexplained_flips} flips with margins beyond rounding; precision was not tried"
        return Verdict("semantic", (reason, *notes))
    if evidence.shapes_match and evidence.replicas:
        reason = (
            "the arms differ in the shapes of their matrices alone, and either gives the same bits twice"
            if evidence.shapes_alone
            else "vanishes to the bit when shapes are matched"
        )
        return Verdict("kernel-shape", (reason, *notes))
    if evidence.vanishes is None:
        return Verdict("rounding", ("nothing finer was run: that it is no more than rounding is not shown", *notes))
    if evidence.finest:
        return Verdict("rounding", ("no larger than rounding of float64", *notes))
    return Verdict("rounding", ("shrinks with precision as rounding does", *notes))


def _sizes(floor: tuple[float, float] | None) -> str:
    if floor is None:
        return ""
    return f", up to {floor[0]:.3g} in a logit and {floor[1]:.3g} in relative L2 of a layer"


def worst(names: Sequence[str]) -> str:
    """The least harmless of some verdicts."""
    return max(names, key=VERDICTS.index)


def finer(dtype: str) -> str | None:
    """The dtype that shows whether a difference is rounding of ``dtype``; none is finer than float64."""
    return None if dtype == "float64" else "float64"


FINEST = 1e-8
"""Relative L2 that a difference between runs in float64 may have: as far above its rounding, some 1e-14 behind tens of
layers, as it is below any fault worth the name."""


def finest_bounds(layers: int) -> dict[str, Float[np.ndarray, " layers"]]:
    """How far two runs in float64 may be apart, by tensor and layer; nothing finer is there to hold them against."""
    return {name: np.full(layers, FINEST) for name in TENSORS}


def precision_bounds(
    own: Mapping[str, Float[np.ndarray, " layers"]], dtype: str, fine: str
) -> dict[str, Float[np.ndarray, " layers"]]:
    """How much of a drift in ``dtype`` may be left in ``fine`` for it to be rounding, by tensor and layer.

    Rounding shrinks by the ratio of the two epsilons r; a fault does not shrink. The bound lies at their geometric
    middle, ``√r`` of the drift, so it is as far from either: for bfloat16 and float64 a factor of 5 million.

    Args:
        own: the largest drift of each layer in ``dtype``.
        dtype: of the runs.
        fine: of the control runs.
    """
    coarse, small = (torch.finfo(dtype_from_name(name)).eps for name in (dtype, fine))
    shrink = math.sqrt(small / coarse)
    # Where nothing drifted (or everything overflowed) one rounding of the dtype is what may have been.
    return {name: np.maximum(np.where(np.isfinite(own[name]), own[name], 0.0), coarse) * shrink for name in TENSORS}
