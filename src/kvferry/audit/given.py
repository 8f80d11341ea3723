"""Audits of a cache that was made elsewhere: shipped, mapped, or out of a file. Is it the receiver's own?

Its arm cannot be run again in float64, so the precision control is another: the receiver's own caches, built along
several paths, are off from a float64 prefill by rounding; the given cache may be off by as much. Behind a declared
codec it may be off by as much as the receiver's own cache is behind the same codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from kvferry.audit.arm import CACHE_ON, Arm, Change
from kvferry.audit.diagnose import Case, diagnose
from kvferry.audit.drift import Drift, cache_distance, drift, nonfinite, relative_l2
from kvferry.audit.finding import Finding, Json, Measure, rate
from kvferry.audit.generate import generate
from kvferry.audit.locate import Location, locate
from kvferry.audit.lossy import Lossy, fault_under_loss
from kvferry.audit.measures import logit_drift
from kvferry.audit.models import ModelSet
from kvferry.audit.run import run_arm
from kvferry.audit.runs import floor_between
from kvferry.audit.study import OnProgress
from kvferry.audit.trace import TENSORS, Trace
from kvferry.audit.transplant import Part, transplant_cache
from kvferry.audit.verdict import Evidence, decide
from kvferry.errors import InvalidInput
from kvferry.snapshot import Snapshot, dtype_from_name

PATHS = ("incremental", "chunked(32)", "decoded(16)")
"""Constructions whose own distances from float64, beside a prefill's, say what rounding is."""

SLACK = 4.0
"""A given cache may be off by so many times the worst of the receiver's own, of each layer and tensor."""

CODEC_SLACK = 1.5
"""And behind a declared codec, keys or values as a whole by so many times what the receiver's own are behind it: which
layers and tokens it spares hangs on choices that a few bits move."""

Codec = Callable[[Snapshot], Snapshot]


@dataclass(frozen=True, slots=True)
class _Runs:
    own: Trace
    again: Trace
    paths: dict[str, Trace]
    exact: Trace
    given: Trace
    coded: Trace | None


def audit_cache(
    models: ModelSet,
    snapshot: Snapshot,
    *,
    codec: Codec | None = None,
    declared: bool | None = None,
    new_tokens: int = 32,
    on_progress: OnProgress | None = None,
) -> Finding:
    """Hold a cache against the receiver's own of the same tokens.

    Args:
        models: the receiver.
        snapshot: the cache; one sequence without padding.
        codec: what a declared lossy stage does, to be done to the receiver's own cache as well.
        declared: whether the cache went through a lossy stage; by default where its construction names a packet or a
            mapper, or where ``codec`` is given.
        new_tokens: of the receiver's own continuation, on which both caches are compared.
        on_progress: called with runs done and runs in all.

    Raises:
        InvalidInput: more than one sequence, left padding, or too few tokens.
        IncompatibleIdentity: made for another model.
    """
    require_auditable(models, snapshot)
    lossy = codec is not None or _lossy(snapshot) if declared is None else declared
    prompt = snapshot.token_ids
    more = generate(models, CACHE_ON, prompt, new_tokens).tokens
    ids = torch.cat([prompt, torch.tensor([more])], dim=1)
    runs = _run(models, snapshot, codec, ids, on_progress)
    return _judge(models, snapshot, runs, lossy, codec is not None)


def require_auditable(models: ModelSet, snapshot: Snapshot) -> None:
    """Raise unless the cache is one sequence, without padding, and of this receiver: see `audit_cache`."""
    if snapshot.batch_size != 1 or snapshot.seq_len < 2 or int(snapshot.positions[0, 0]) != 0:
        raise InvalidInput("one sequence at a time is audited, of at least 2 tokens and without left padding")
    from kvferry.hf.identity import identity_of

    snapshot.identity.require_compatible(identity_of(models.own))


def _run(
    models: ModelSet, snapshot: Snapshot, codec: Codec | None, ids: torch.Tensor, on_progress: OnProgress | None
) -> _Runs:
    start = snapshot.seq_len
    total = len(PATHS) + 4 + (codec is not None)
    done = 0

    def run(arm: Arm) -> Trace:
        nonlocal done
        trace = run_arm(models, arm, ids, start)
        done += 1
        if on_progress is not None:
            on_progress(done, total, str(arm))
        return trace

    replaced = Change("given", cache=lambda _own, _model: snapshot)
    return _Runs(
        own=run(CACHE_ON),
        again=run(CACHE_ON),
        paths={path: run(Arm(path)) for path in PATHS},
        exact=run(Arm(dtype="float64", decode="block")),
        given=run(Arm(change=replaced)),
        coded=None if codec is None else run(Arm(change=Change("codec", cache=lambda own, _model: codec(own)))),
    )


def _judge(models: ModelSet, snapshot: Snapshot, runs: _Runs, lossy: bool, verified: bool) -> Finding:
    own, given = runs.own, runs.given
    dropped = ~snapshot.mask[0].numpy()
    distances = _masked(drift(runs.exact, given), dropped)
    noise = _largest([drift(runs.exact, trace) for trace in (own, *runs.paths.values())])
    eps = torch.finfo(dtype_from_name(models.dtype)).eps
    bounds = {name: SLACK * np.maximum(noise[name], eps) for name in TENSORS}
    where = locate(distances, bounds, runs.exact, given)
    notes: list[str] = []
    matches = [path for path, trace in {"prefill": own, **runs.paths}.items() if trace.same_outputs(given)]
    declared, under, diagnosis = False, None, None
    if where is not None and lossy:
        declared, where = _within_codec(runs, distances, bounds, dropped, where)
        # A lossy stage may take a cache far off, but it neither turns keys nor swaps heads.
        under = fault_under_loss(Lossy(models.own, runs.exact, given, torch.from_numpy(dropped)))
        notes.append(
            f"under what the lossy stage costs, {under.name} in layer {under.layer}: {under.why}"
            if under is not None
            else "the receiver's own cache through the same codec is as far off"
            if declared and runs.coded is not None
            else "a lossy stage is declared; no codec was given to check its size, and no fault shows under it"
            if declared
            else "farther off than the receiver's own cache is through the same codec"
        )
        declared = declared and under is None
    stands = where is not None
    if under is not None:
        diagnosis = {"name": under.name, "why": under.why}
    elif where is not None and not declared:
        known = diagnose(Case(models.own, runs.exact, given, where))
        diagnosis = None if known is None else {"name": known[0], "why": known[1]}
        notes += [] if known is None else [f"{known[0]}: {known[1]}"]
    broken = nonfinite(given)
    floor = None if own.same_bits(runs.again) else floor_between(own, runs.again)
    evidence = Evidence(
        replicas=floor is None,
        floor=None if floor is None else (floor.max_abs, floor.relative_l2),
        identical="prefill" in matches,
        nonfinite=None if broken is None else ("given cache", *broken),
        vanishes=not stands,
        shapes_match=bool(matches),
        declared=declared,
        notes=(*notes, *([f"the same bits as the receiver's own, built as {matches[0]}"] if matches else [])),
    )
    verdict = decide(evidence)
    reasons = verdict.reasons
    if verdict.name == "rounding":
        reasons = ("no farther from a float64 prefill than the receiver's own caches are", *verdict.reasons[1:])
    elif verdict.name == "codec" and runs.coded is None:
        reasons = ("stays at any precision, as a declared lossy stage does; its size was not checked", *notes)
    elif verdict.name == "codec":
        reasons = ("no larger than what the declared lossy stage does to the receiver's own cache", *notes)
    elif verdict.name == "semantic" and under is None:
        reasons = ("farther from a float64 prefill than rounding takes the receiver's own caches", *verdict.reasons[1:])
    layer, tensor = None, None
    if broken is not None:
        layer, tensor = broken[0], broken[1]
    elif under is not None:
        layer, tensor = under.layer, under.tensor
    elif where is not None:
        layer, tensor = where.layer, where.tensor
    return Finding(
        protocol="given_cache",
        arms=(
            {"dtype": models.dtype, **CACHE_ON.to_json()},
            {"dtype": snapshot.identity.dtype, "given": list(snapshot.identity.construction)},
        ),
        verdict=verdict.name,
        layer=layer,
        tensor=tensor,
        n=1,
        measures=_measures(own, given),
        reasons=reasons,
        diagnosis=diagnosis,
        verdicts={verdict.name: 1},
        replicas=int(evidence.replicas),
        detail={
            "stages": _stages(models, snapshot, runs),
            "layers": _carriers(own, given),
            "location": None if where is None else where.to_json(),
            "drift": {name: _plain(distances.by_layer(name)) for name in TENSORS},
            "bounds": {name: _plain(bounds[name]) for name in TENSORS},
            "dropped_tokens": int(dropped.sum()),
            "codec_checked": verified,
        },
    )


def _within_codec(
    runs: _Runs, distances: Drift, bounds: dict[str, Any], dropped: np.ndarray[Any, Any], where: Location
) -> tuple[bool, Location | None]:
    """Whether a declared codec explains all that is beyond rounding; else where it does not.

    What was given is the cache alone: the rest of the difference has followed from it.
    """
    if runs.coded is None:
        return True, where
    own, given, through = runs.own.built, runs.given.built, runs.coded.built
    sides = (("keys",), ("values",))
    if all(cache_distance(own, given, side) <= CODEC_SLACK * cache_distance(own, through, side) for side in sides):
        return True, where
    coded = _masked(drift(runs.exact, runs.coded), dropped)
    wider = {name: np.maximum(bounds[name], CODEC_SLACK * coded.by_layer(name)) for name in TENSORS}
    return False, locate(distances, wider, runs.exact, runs.given) or where


def _measures(own: Trace, given: Trace) -> dict[str, Measure]:
    logits = logit_drift(own.logits, given.logits)
    n = len(logits.flip)
    found = {
        "flip_rate": rate(int(logits.flip.sum()), n, "positions"),
        "expected_flips": Measure(expected_flips(own.logits, given.logits), n, None, "positions"),
        "cache_l2": Measure(_number(cache_distance(own.built, given.built)), 1),
        "cache_l2_keys": Measure(_number(cache_distance(own.built, given.built, ("keys",))), 1),
        "cache_l2_values": Measure(_number(cache_distance(own.built, given.built, ("values",))), 1),
    }
    for name, values in (("kl", logits.kl), ("max_abs", logits.max_abs)):
        found[f"{name}_mean"] = Measure(_number(float(values.mean())), n, None, "positions")
        for label, q in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
            found[f"{name}_{label}"] = Measure(_number(float(np.percentile(values, q))), n, None, "positions")
    return found


def expected_flips(
    own: Float[torch.Tensor, "positions vocabulary"], given: Float[torch.Tensor, "positions vocabulary"]
) -> float | None:
    """Flips that margins predict, were the differences of logits normal and independent: ``Σ Φ(−m / (σ√2))``.

    ``m``: margin between the first and second choice; ``σ``: root mean square of the position's differences, its mean
    taken off, which moves no choice.
    """
    expected = 0.0
    for a, b in zip(own.double(), given.double(), strict=True):
        difference = b - a
        sigma = float(difference.std(correction=0))
        top = a.topk(2).values
        if not math.isfinite(sigma):
            return None
        if sigma > 0:
            expected += 0.5 * math.erfc(float(top[0] - top[1]) / (2 * sigma))
    return expected


def _stages(models: ModelSet, snapshot: Snapshot, runs: _Runs) -> list[Json]:
    """The distance to the receiver's own prefill, stage by stage, each by its cache in the same decode."""

    def line(name: str, trace: Trace) -> Json:
        logits = logit_drift(runs.own.logits, trace.logits)
        return {
            "stage": name,
            "cache_l2": _number(cache_distance(runs.own.built, trace.built)),
            "kl_mean": _number(float(logits.kl.mean())),
            "max_abs": _number(float(logits.max_abs.max())),
            "flips": int(logits.flip.sum()),
            "n": len(logits.flip),
        }

    lines = [line("replica", runs.again)]
    lines += [line(f"construction: {path}", trace) for path, trace in runs.paths.items()]
    if runs.coded is not None:
        lines.append(line("codec: own cache through it", runs.coded))
    lines.append(line("given", runs.given))
    ids = torch.cat([snapshot.token_ids, _suffix(models, snapshot, runs)], dim=1)
    for name, part in (("given, keys alone", Part(values=False)), ("given, values alone", Part(keys=False))):
        change = Change(name, cache=lambda own, _model, part=part: transplant_cache(own, snapshot, part))  # type: ignore[misc]
        lines.append(line(name, run_arm(models, Arm(change=change), ids, snapshot.seq_len)))
    return lines


def _suffix(models: ModelSet, snapshot: Snapshot, runs: _Runs) -> torch.Tensor:
    """The tokens that all runs were fed after the cache: the receiver's own continuation."""
    count = runs.own.length - runs.own.start
    return torch.tensor([generate(models, CACHE_ON, snapshot.token_ids, count).tokens])


def _carriers(own: Trace, given: Trace, most: int = 8) -> list[Json]:
    """Layers and tensors by their share of the squared difference of the whole cache."""
    found: list[tuple[float, int, str, float]] = []
    for layer, (mine, theirs) in enumerate(zip(own.built, given.built, strict=True)):
        if mine is None or theirs is None:
            continue
        for tensor in ("keys", "values"):
            a, b = getattr(mine, tensor).double(), getattr(theirs, tensor).double()
            square = float((a - b).square().sum())
            if math.isfinite(square):
                found.append((square, layer, tensor, float(relative_l2(a.flatten(), b.flatten()))))
    total = sum(square for square, *_ in found)
    found.sort(reverse=True)
    return [
        {"layer": layer, "tensor": tensor, "share": square / total, "relative_l2": apart}
        for square, layer, tensor, apart in found[:most]
        if total > 0
    ]


def _lossy(snapshot: Snapshot) -> bool:
    return any(stage.startswith(("packet(", "mapped(")) for stage in snapshot.identity.construction)


def _masked(found: Drift, dropped: np.ndarray[Any, Any]) -> Drift:
    """Without the keys and values of tokens that the cache declares dropped."""
    maps = {name: values.copy() for name, values in found.maps.items()}
    for name in ("keys", "values"):
        maps[name][:, : len(dropped)][:, dropped] = np.nan
    return Drift(maps)


def _largest(drifts: list[Drift]) -> dict[str, Float[np.ndarray, " layers"]]:
    return {name: np.max([one.by_layer(name) for one in drifts], axis=0) for name in TENSORS}


def _plain(values: Any) -> list[float | None]:
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
