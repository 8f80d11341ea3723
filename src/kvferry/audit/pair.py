"""One experiment on one sequence: two arms, their replicas, the controls, and all that is measured. JSON goes out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from kvferry.audit.arm import Arm
from kvferry.audit.diagnose import Case, diagnose
from kvferry.audit.drift import Drift, cache_distance, drift, nonfinite
from kvferry.audit.locate import Location, locate
from kvferry.audit.measures import logit_drift
from kvferry.audit.runs import Floor, Runs, floor_between
from kvferry.audit.trace import TENSORS, Trace
from kvferry.audit.verdict import Evidence, decide, finer, finest_bounds, precision_bounds

BINS = 48
"""Position bins that a heat map is kept in."""

Record = dict[str, Any]
"""What one sequence gave, as JSON."""


@dataclass(frozen=True, slots=True)
class Controls:
    """What is run beside the two arms.

    Attributes:
        replicas: every arm twice.
        precision: both arms in float64.
        shapes: the reference in the other arm's shapes.
    """

    replicas: bool = True
    precision: bool = True
    shapes: bool = True


def compare(runs: Runs, reference: Arm, other: Arm, controls: Controls | None = None) -> Record:
    """Run two arms over one sequence, with their controls, and say what is between them."""
    controls = controls or Controls()
    first, second = runs.trace(reference), runs.trace(other)
    floors = [floor for arm in (reference, other) if controls.replicas and (floor := runs.floor(arm)) is not None]
    replicas = not floors
    between = drift(first, second)
    logits = logit_drift(first.logits, second.logits)
    identical = first.same_outputs(second)
    record: Record = {
        "tokens": first.length,
        "start": first.start,
        "replicas": replicas,
        "identical": identical,
        "logits": {name: numbers(row) for name, row in logits.to_json().items()},
        "drift": {name: numbers(between.by_layer(name)) for name in TENSORS},
        "cache_l2": {
            "both": number(cache_distance(first.built, second.built)),
            "keys": number(cache_distance(first.built, second.built, ("keys",))),
            "values": number(cache_distance(first.built, second.built, ("values",))),
        },
        "drift_median": {name: numbers(_medians(between, name)) for name in TENSORS},
        # A step of the suffix is where two caches show; a long prefix, or one that both share, would drown it.
        "drift_median_prefix": {name: numbers(_medians(between, name, 0, first.start)) for name in TENSORS},
        "drift_median_suffix": {name: numbers(_medians(between, name, first.start)) for name in TENSORS},
        "heat": {name: _binned(between.maps[name]) for name in TENSORS},
    }
    floor = None
    if floors:
        floor = Floor(max(one.max_abs for one in floors), max(one.relative_l2 for one in floors))
        record["floor"] = {"max_abs": number(floor.max_abs), "relative_l2": number(floor.relative_l2)}
    broken = _nonfinite(first, second)
    evidence = Evidence(
        replicas=replicas,
        identical=identical,
        nonfinite=broken,
        floor=None if floor is None else (floor.max_abs, floor.relative_l2),
        within_floor=floor is not None and _within(floor, first, second),
    )
    if not identical and broken is None:
        evidence = _explained(runs, record, evidence, first, second, between, controls)
    verdict = decide(evidence)
    if broken is not None:
        record["location"] = {"layer": broken[1], "tensor": broken[2], "first": broken[3]}
    return record | {"verdict": verdict.name, "reasons": list(verdict.reasons)}


def fine_arm(arm: Arm, dtype: str) -> Arm:
    """``arm`` in a longer dtype; without a cache the whole sequence runs once, which is the same there."""
    return replace(arm, dtype=dtype, decode="one_shot" if arm.decode == "recompute" else arm.decode)


def matched_arm(reference: Arm, other: Arm) -> Arm:
    """``reference`` in the shapes of ``other``: what would shape kernels alike, and nothing else of it."""
    return replace(
        reference,
        construction=other.construction,
        decode=other.decode,
        batch=other.batch,
        neighbours="copies",
        left_padding=other.left_padding,
        threads=other.threads,
        accumulation=other.accumulation,
    )


def _explained(
    runs: Runs,
    record: Record,
    evidence: Evidence,
    first: Trace,
    second: Trace,
    between: Drift,
    controls: Controls,
) -> Evidence:
    """Add what the controls say to ``record`` and to the evidence."""
    reference, other = first.arm, second.arm
    if controls.shapes:
        matched = matched_arm(reference, other)
        alone = not _differ(matched, other)
        told = evidence.replicas if controls.replicas else None
        same = told if alone else runs.trace(matched).same_outputs(second)
        record["shapes_match"] = same
        evidence = replace(evidence, shapes_match=same, shapes_alone=alone)
    dtype = reference.dtype or runs.models.dtype
    fine = finer(dtype) if controls.precision else None
    if dtype == "float64":
        where = locate(between, finest_bounds(first.layers), first, second)
        notes = _located(runs, record, first, second, where)
        if where is None:
            notes.append(f"largest relative L2 of the residual stream: {_largest(between):.3g} in {dtype}")
        return replace(evidence, vanishes=where is None, finest=True, declared=_declares(other), notes=tuple(notes))
    if fine is None:
        return evidence
    exact, changed = runs.trace(fine_arm(reference, fine)), runs.trace(fine_arm(other, fine))
    left = drift(exact, changed)
    bounds = precision_bounds({name: between.by_layer(name) for name in TENSORS}, dtype, fine)
    where = locate(left, bounds, exact, changed)
    record["fine"] = {"dtype": fine, "drift": {name: numbers(left.by_layer(name)) for name in TENSORS}}
    record["oracle"] = _oracle(exact, first, second)
    notes = _located(runs, record, exact, changed, where)
    if where is None:
        notes.append(
            f"largest relative L2 of the residual stream: {_largest(between):.3g} in {dtype}, "
            f"{_largest(left):.3g} in {fine}"
        )
    unexplained = _unexplained(record)
    record["unexplained_flips"] = unexplained
    return replace(
        evidence,
        vanishes=where is None,
        declared=_declares(other),
        unexplained_flips=unexplained,
        notes=tuple(notes),
    )


def _located(runs: Runs, record: Record, first: Trace, second: Trace, where: Location | None) -> list[str]:
    """Put where two runs part, and what that is, into ``record``; returns it in words."""
    if where is None:
        return []
    record["location"] = where.to_json()
    known = diagnose(Case(runs.models.own, first, second, where))
    record["diagnosis"] = None if known is None else {"name": known[0], "why": known[1]}
    return [_words(where), *([] if known is None else [f"{known[0]}: {known[1]}"])]


def _declares(arm: Arm) -> bool:
    return arm.change is not None and arm.change.lossy


def _oracle(exact: Trace, first: Trace, second: Trace) -> Record:
    """Errors of both arms against the exact reference, by position (logits) and by layer (medians over positions)."""
    found: Record = {}
    for name, trace in (("reference", first), ("other", second)):
        logits = logit_drift(exact.logits, trace.logits)
        inside = drift(exact, trace)
        found[name] = {
            "max_abs": numbers(logits.max_abs),
            "relative_l2": numbers(logits.relative_l2),
            "kl": numbers(logits.kl),
            "flip": numbers(logits.flip),
            "layers": {tensor: numbers(_medians(inside, tensor)) for tensor in TENSORS},
        }
    return found


def _unexplained(record: Mapping[str, Any]) -> int:
    """Flips that rounding does not reach: the reference's margin is beyond twice what its own logits are off by.

    The noise of a position is the reference's own error there plus the 99th percentile of its errors, both against the
    oracle: a flip needs the two logits to move by half of the margin each.
    """
    logits, errors = record["logits"], record["oracle"]["reference"]["max_abs"]
    own = np.array([math.inf if value is None else value for value in errors])
    noise = own + np.percentile(own, 99)
    margins = np.array([0.0 if value is None else value for value in logits["margin"]])
    return int(((np.array(logits["flip"], dtype=float) > 0) & (margins > 2 * noise)).sum())


def _within(floor: Floor, first: Trace, second: Trace) -> bool:
    """Whether two runs are no farther apart than either is from itself; one draw of a floor is taken twice."""
    between = floor_between(first, second)
    return between.max_abs <= 2 * floor.max_abs and between.relative_l2 <= 2 * floor.relative_l2


def _differ(a: Arm, b: Arm) -> bool:
    return a.to_json() != b.to_json()


def _nonfinite(first: Trace, second: Trace) -> tuple[str, int, str, int] | None:
    for name, trace in (("reference", first), ("other", second)):
        where = nonfinite(trace)
        if where is not None:
            return (f"{name} ({trace.arm})", *where)
    return None


def _words(where: Location) -> str:
    heads = f", head {', '.join(map(str, where.heads))}" if where.heads else ""
    many = f" (and in {len(where.layers) - 1} more layers)" if len(where.layers) > 1 else ""
    return (
        f"begins in layer {where.layer}, {where.tensor}{heads}, positions {where.first} to {where.last} "
        f"({where.tokens} tokens), relative L2 up to {where.size:.3g}{many}"
    )


def _largest(found: Drift) -> float:
    return float(found.by_layer("residual").max())


def _medians(found: Drift, tensor: str, begin: int = 0, end: int | None = None) -> Float[np.ndarray, " layers"]:
    values = found.maps[tensor][:, begin:end]
    medians = [float(np.median(row[~np.isnan(row)])) if (~np.isnan(row)).any() else 0.0 for row in values]
    return np.array(medians)


def _binned(values: Float[np.ndarray, "layers length"]) -> list[list[float | None]]:
    """The largest of each bin of neighbouring positions; ``None`` where nothing is held."""
    edges = np.linspace(0, values.shape[1], min(BINS, values.shape[1]) + 1).astype(int)
    rows = []
    for row in values:
        bins = [row[begin:end] for begin, end in itertools.pairwise(edges)]
        rows.append([None if np.isnan(part).all() else number(float(np.nanmax(part))) for part in bins])
    return rows


def numbers(values: Any) -> list[float | None]:
    return [number(float(value)) for value in values]


def number(value: float) -> float | None:
    """``value`` in six digits, which is more than any of these mean; ``None`` for what JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
