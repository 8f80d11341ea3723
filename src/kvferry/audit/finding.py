"""What an audit says: findings with measures, intervals, numbers of observations, and what decided their verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.audit.pair import Record
from kvferry.audit.trace import TENSORS
from kvferry.audit.verdict import worst
from kvferry.evidence.statistics import Interval, bootstrap_mean, wilson

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """A value, its 95 % interval where it has one, and how many observations it rests on.

    ``unit`` says what was counted: positions, sequences, prompts, tokens.
    """

    value: float | None
    n: int
    ci: Interval | None = None
    unit: str = "sequences"

    def to_json(self) -> Json:
        return {"value": self.value, "ci": None if self.ci is None else list(self.ci), "n": self.n, "unit": self.unit}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one protocol found about one pair of arms.

    Attributes:
        protocol: name of the protocol.
        arms: descriptions: the reference, then what is held against it.
        verdict: the least harmless of the sequences' verdicts.
        layer: where the difference begins, in most of the sequences that have this verdict.
        tensor: in which tensor.
        n: sequences.
        measures: name -> `Measure`.
        reasons: the evidence, for the first sequence with this verdict.
        diagnosis: name and explanation of a semantic difference that is recognised.
        verdicts: verdict -> sequences that have it.
        replicas: sequences in which every arm gave the same bits twice.
        detail: what figures are drawn from.
    """

    protocol: str
    arms: tuple[Json, ...]
    verdict: str
    layer: int | None
    tensor: str | None
    n: int
    measures: dict[str, Measure]
    reasons: tuple[str, ...] = ()
    diagnosis: Json | None = None
    verdicts: dict[str, int] = field(default_factory=dict)
    replicas: int | None = None
    detail: Json = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether something is wrong: a fault or an overflow, or a planted fault that was not caught."""
        if self.protocol == "self_check":
            return not self.detail["caught"]
        return self.verdict in ("semantic", "overflow")

    def to_json(self) -> Json:
        return {
            "protocol": self.protocol,
            "arms": list(self.arms),
            "verdict": self.verdict,
            "layer": self.layer,
            "tensor": self.tensor,
            "n": self.n,
            "measures": {name: measure.to_json() for name, measure in self.measures.items()},
            "reasons": list(self.reasons),
            "diagnosis": self.diagnosis,
            "verdicts": self.verdicts,
            "replicas": self.replicas,
            "detail": _plain(self.detail),
        }


def _plain(value: Any) -> Any:
    """``value`` with ``None`` for the numbers that JSON cannot hold: an overflow leaves them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def place_of(records: Sequence[Record], verdict: str) -> tuple[int | None, str | None, Record]:
    """Layer and tensor that most records of ``verdict`` name, and the first record that names them."""
    with_verdict = [record for record in records if record["verdict"] == verdict]
    places = Counter(
        (record["location"]["layer"], record["location"]["tensor"]) for record in with_verdict if "location" in record
    )
    if not places:
        return None, None, with_verdict[0]
    (layer, tensor), _ = places.most_common(1)[0]
    shown = next(
        record
        for record in with_verdict
        if "location" in record and (record["location"]["layer"], record["location"]["tensor"]) == (layer, tensor)
    )
    return layer, tensor, shown


def pair_finding(
    protocol: str, arms: Sequence[Json], records: Sequence[Record], *, resamples: int, seed: int
) -> Finding:
    """Gather the records of one pair of arms."""
    names = [record["verdict"] for record in records]
    verdict = worst(names)
    layer, tensor, shown = place_of(records, verdict)
    return Finding(
        protocol=protocol,
        arms=tuple(arms),
        verdict=verdict,
        layer=layer,
        tensor=tensor,
        n=len(records),
        measures=pair_measures(records, resamples=resamples, seed=seed),
        reasons=tuple(shown["reasons"]),
        diagnosis=shown.get("diagnosis"),
        verdicts=dict(Counter(names)),
        replicas=sum(record["replicas"] for record in records),
        detail=pair_detail(records),
    )


def rate(hits: int, n: int, unit: str) -> Measure:
    """A share with Wilson's interval."""
    return Measure(hits / n if n else None, n, wilson(hits, n) if n else None, unit)


def pair_measures(records: Sequence[Record], *, resamples: int, seed: int) -> dict[str, Measure]:
    """Every measure of fixed prefixes that these records allow."""
    finite = [record for record in records if record["verdict"] != "overflow"]
    found = {
        "sequences_differing": rate(sum(not record["identical"] for record in records), len(records), "sequences"),
    }
    floors = [record["floor"] for record in records if "floor" in record]
    for name in ("max_abs", "relative_l2"):
        if floors:
            worst_of = max(math.inf if one[name] is None else one[name] for one in floors)
            found[f"replica_{name}"] = Measure(worst_of if math.isfinite(worst_of) else None, len(floors))
    if not finite:
        return found
    rows = [record["logits"] for record in finite]
    clusters = [index for index, row in enumerate(rows) for _ in row["flip"]]

    def pooled(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([value for row in rows for value in row[name]], dtype=np.float64)

    def mean(values: Any, among: Sequence[int]) -> Interval | None:
        if np.ptp(values) == 0:
            return None  # resampling what is all the same says nothing of what was not seen
        return bootstrap_mean(list(values), among, resamples=resamples, seed=seed)

    flips = pooled("flip")
    found["flip_rate"] = rate(int(flips.sum()), len(flips), "positions")
    flipped = sum(any(row["flip"]) for row in rows)
    # Of none at all, or all, the interval is that of sequences with a flip in them: a bootstrap would claim none.
    clustered = mean(flips, clusters) if 0 < flips.sum() < len(flips) else wilson(flipped, len(rows))
    found["flip_rate_clustered"] = Measure(float(flips.mean()), len(rows), clustered)
    for name in ("kl", "kl_reverse"):
        values = pooled(name)
        found[f"{name}_mean"] = Measure(float(values.mean()), len(rows), mean(values, clusters))
    for name in ("kl", "max_abs", "mean_abs", "relative_l2"):
        values = pooled(name)
        for label, quantile in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
            found[f"{name}_{label}"] = Measure(float(np.percentile(values, quantile)), len(values), None, "positions")
    greatest = [max(row["max_abs"]) for row in rows]
    found["max_abs_median_of_sequences"] = Measure(float(np.median(greatest)), len(rows), _median_interval(greatest))
    for tensor in ("both", "keys", "values"):
        distances = [record["cache_l2"][tensor] for record in finite]
        name = "cache_l2_median" if tensor == "both" else f"cache_l2_{tensor}_median"
        found[name] = Measure(float(np.median(distances)), len(distances), _median_interval(distances))
    margins = pooled("margin")
    at_flips = margins[flips > 0]
    found["margin_median"] = Measure(float(np.median(margins)), len(margins), None, "positions")
    if at_flips.size:
        found["margin_at_flips_median"] = Measure(float(np.median(at_flips)), at_flips.size, None, "flips")
        found["margin_at_flips_max"] = Measure(float(at_flips.max()), at_flips.size, None, "flips")
    tried = [record["unexplained_flips"] for record in finite if "unexplained_flips" in record]
    if tried:
        found["unexplained_flips"] = Measure(float(sum(tried)), int(flips.sum()), None, "flips")
    return found | _oracle_measures(finite, mean)


def _oracle_measures(records: Sequence[Record], mean: Callable[[Any, Sequence[int]], Interval | None]) -> Json:
    """Errors of both arms against the exact run, and which is nearer."""
    pairs = [record["oracle"] for record in records if "oracle" in record]
    found: Json = {}
    if not pairs:
        return found
    clusters = [index for index, pair in enumerate(pairs) for _ in pair["reference"]["relative_l2"]]
    errors = {
        arm: np.array([value for pair in pairs for value in pair[arm]["relative_l2"]], dtype=np.float64)
        for arm in ("reference", "other")
    }
    for arm, values in errors.items():
        found[f"oracle_error_{arm}"] = Measure(float(values.mean()), len(pairs), mean(values, clusters))
        flips = sum(sum(pair[arm]["flip"]) for pair in pairs)
        found[f"oracle_flip_rate_{arm}"] = rate(int(flips), len(values), "positions")
    difference = errors["other"] - errors["reference"]
    found["oracle_error_difference"] = Measure(float(difference.mean()), len(pairs), mean(difference, clusters))
    nearer = difference < 0
    decided = int((difference != 0).sum())
    found["oracle_other_nearer"] = rate(int(nearer.sum()), decided, "positions")
    return found


def pair_detail(records: Sequence[Record]) -> Json:
    """Layer profiles (medians over sequences), the first heat map, margins at flips, tails by depth."""
    detail: Json = {"heat": records[0]["heat"], "heat_tokens": records[0]["tokens"], "start": records[0]["start"]}
    for name in ("drift", "drift_median", "drift_median_prefix", "drift_median_suffix"):
        detail[name] = {
            tensor: np.median(
                np.array([[np.nan if v is None else v for v in record[name][tensor]] for record in records]), axis=0
            ).tolist()
            for tensor in TENSORS
        }
    residual = np.array(detail["drift_median_suffix"]["residual"])
    onset = np.flatnonzero(np.array(detail["drift"]["residual"]) > 0)
    detail["onset_layer"] = int(onset[0]) if onset.size else None
    grown = np.flatnonzero(residual > 0)  # in a short dtype the median of the first layers is no difference
    if grown.size > 1:
        slope = np.polyfit(grown, np.log(residual[grown]), 1)[0]
        detail["growth_per_layer"] = float(np.exp(slope))
    flips = [
        [margin, distance]
        for record in records
        for flip, margin, distance in zip(*(record["logits"][k] for k in ("flip", "margin", "max_abs")), strict=True)
        if flip and None not in (margin, distance)
    ]
    detail["flips"] = flips[:2000]
    detail["by_depth"] = _by_depth(records)
    oracle = [record["oracle"] for record in records if "oracle" in record]
    if oracle:
        detail["oracle_layers"] = {
            arm: {
                tensor: np.median(
                    np.array([one[arm]["layers"][tensor] for one in oracle], dtype=float), axis=0
                ).tolist()
                for tensor in TENSORS
            }
            for arm in ("reference", "other")
        }
        detail["oracle_points"] = [
            [a, b]
            for one in oracle
            for a, b in zip(one["reference"]["relative_l2"], one["other"]["relative_l2"], strict=True)
        ][:2000]
    fine = [record["fine"]["drift"]["residual"] for record in records if "fine" in record]
    if fine:
        detail["fine_residual"] = np.median(np.array(fine, dtype=float), axis=0).tolist()
    return detail


def _by_depth(records: Sequence[Record], parts: int = 4) -> list[Json]:
    """Tails of KL and of the largest logit difference in each quarter of the suffix."""
    found = []
    for part in range(parts):
        line: Json = {"part": part}
        for name in ("kl", "max_abs"):
            values = [
                value
                for record in records
                for place, value in enumerate(record["logits"][name])
                if place * parts // len(record["logits"][name]) == part and value is not None
            ]
            line["n"] = len(values)
            if values:
                line[name] = [float(np.percentile(values, q)) for q in (50, 95, 99, 100)]
        found.append(line)
    return found


def _median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Order statistics that hold the median with this confidence (binomial); ``None`` for too few values."""
    ordered, n = sorted(values), len(values)
    chance = [1.0]
    for _ in range(n):
        chance = [(a + b) / 2 for a, b in zip([*chance, 0.0], [0.0, *chance], strict=True)]
    below, rank = 0.0, 0
    while rank < n // 2 and below + chance[rank] <= (1 - confidence) / 2:
        below += chance[rank]
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None
