"""Residual patching: one run's residual stream put into the other at a layer and position. Is it the carrier?

After 'The Illusion of Equivalence' (arXiv 2604.15409). It can restore the logits of the step that is patched, the more
the later the layer; it is expected not to restore the steps that follow, since past keys and values stay as they were.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from kvferry.audit.arm import CACHE_OFF, CACHE_ON
from kvferry.audit.drift import relative_l2
from kvferry.audit.finding import Finding, Json, Measure, place_of
from kvferry.audit.pair import Record, number
from kvferry.audit.passages import Passage
from kvferry.audit.run import Run, run_arm
from kvferry.audit.study import Study
from kvferry.audit.verdict import worst
from kvferry.audit.watch import Watched, decoder_layers
from kvferry.errors import UnsupportedCache
from kvferry.evidence.statistics import bootstrap_mean
from kvferry.hf.restore import empty_cache, to_cache
from kvferry.snapshot import Snapshot

DIRECTIONS = ("off_into_on", "on_into_off")


@contextlib.contextmanager
def patched(layer: nn.Module, column: int, value: Float[Tensor, " hidden"]) -> Iterator[None]:
    """Inside, the residual stream behind ``layer`` has ``value`` in one column of every row.

    Raises:
        UnsupportedCache: the layer gives several streams side by side.
    """

    def put(_module: nn.Module, _args: Any, output: Any) -> Any:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if hidden.dim() != 3:
            raise UnsupportedCache("the residual stream of this model is several streams: it cannot be patched")
        changed = hidden.clone()
        changed[:, column] = value
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = layer.register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()


def residual_patch(study: Study) -> list[Finding]:
    """A sweep over layers and positions, in both directions: a finding each."""
    records: list[Record] = []
    explained: list[Record] = []
    for passage in study.passages:
        records.append(_record(study, passage))
        if len(explained) < study.settings.explain:
            explained.append(study.pair(CACHE_OFF, CACHE_ON, passage))
        study.step("residual_patch")
    return [_finding(study, records, explained, direction) for direction in DIRECTIONS]


def _record(study: Study, passage: Passage) -> Record:
    settings = study.settings

    def make() -> Record:
        off = run_arm(study.models, CACHE_OFF, passage.token_ids, passage.start)
        on = run_arm(study.models, CACHE_ON, passage.token_ids, passage.start)
        layers = list(range(0, off.layers, settings.layer_step))
        if layers[-1] != off.layers - 1:
            layers.append(off.layers - 1)
        last = off.length - 1 - settings.horizon
        places = sorted(
            {int(place) for place in np.linspace(off.start, max(off.start, last), settings.patch_positions)}
        )
        found: Record = {"layers": layers, "positions": places, "length": off.length, "start": off.start}
        with study.models.use(CACHE_ON) as model:
            modules = decoder_layers(model)
            run = Run(model, CACHE_ON, passage.token_ids, Watched(), study.models.identity(model))
            caches = _caches(run, off.start, places)
            for direction, giver, target, own in (
                ("off_into_on", off.residual, off.logits, on.logits),
                ("on_into_off", on.residual, on.logits, off.logits),
            ):
                found[direction] = [
                    [
                        _restored(
                            run,
                            modules[layer],
                            giver[layer, place],
                            place,
                            settings.horizon,
                            caches[place] if direction == "off_into_on" else None,
                            target,
                            own,
                            off.start,
                        )
                        for place in places
                    ]
                    for layer in layers
                ]
        return found

    more = [settings.layer_step, settings.patch_positions, settings.horizon]
    return study.record("residual", (CACHE_OFF, CACHE_ON), passage, more, make)


def _caches(run: Run, start: int, places: list[int]) -> dict[int, Snapshot]:
    """The cache ON as it is before each of these positions."""
    cache = run.build(start)
    found = {}
    for place in range(start, places[-1] + 1):
        if place in places:
            found[place] = run.snapshot_of(cache, place).clone()
        run.forward(cache, place, place + 1, keep=0)
    return found


def _restored(
    run: Run,
    layer: nn.Module,
    value: Tensor,
    place: int,
    horizon: int,
    before: Snapshot | None,
    target: Tensor,
    own: Tensor,
    start: int,
) -> list[float | None]:
    """Share of the distance to the target's logits that the patch closes, at its own step and those that follow.

    With a cache (``before``) the patch happens once, at its step. Without one it is there again in every later
    recomputation: that is what the patched run would have computed at this position.
    """
    found: list[float | None] = []
    end = min(place + 1 + horizon, target.shape[0] + start)
    cache = None if before is None else to_cache(before, run.model, check=False)
    for step in range(place, end):
        if cache is None:
            with patched(layer, place, value):
                logits = run.forward(empty_cache(run.model), 0, step + 1, keep=1)[0, -1]
        else:
            with patched(layer, 0, value) if step == place else contextlib.nullcontext():
                logits = run.forward(cache, step, step + 1, keep=1)[0, -1]
        apart = float(relative_l2(own[step - start], target[step - start]))
        left = float(relative_l2(logits, target[step - start]))
        found.append(number(1 - left / apart) if 0 < apart < math.inf else None)
    return found


def _at_own_step(records: list[Record], direction: str, index: int, position: int) -> float | None:
    """Median share that is restored at its own step by a patch behind one layer at the so-many-th position."""
    rows = [record[direction][index] for record in records]
    values = [row[position][0] for row in rows if position < len(row) and row[position][0] is not None]
    return float(np.median(values)) if values else None


def _finding(study: Study, records: list[Record], explained: list[Record], direction: str) -> Finding:
    settings = study.settings
    matrix: list[Json] = []
    for index, layer in enumerate(records[0]["layers"]):
        by_offset = [
            [
                (number, cell[offset])
                for number, record in enumerate(records)
                for cell in record[direction][index]
                if offset < len(cell) and cell[offset] is not None
            ]
            for offset in range(settings.horizon + 1)
        ]
        matrix.append(
            {
                "layer": layer,
                "restored": [float(np.median([v for _, v in cells])) if cells else None for cells in by_offset],
                "n": [len(cells) for cells in by_offset],
                "by_position": [_at_own_step(records, direction, index, k) for k in range(settings.patch_positions)],
            }
        )
    measures = {}
    for label, offsets in (("same_step", [0]), ("later_steps", list(range(1, settings.horizon + 1)))):
        for where, chosen in (("last_layer", [-1]), ("all_layers", list(range(len(matrix))))):
            cells = [
                (number, cell[offset])
                for number, record in enumerate(records)
                for index in chosen
                for cell in record[direction][index]
                for offset in offsets
                if offset < len(cell) and cell[offset] is not None
            ]
            if cells:
                values = [value for _, value in cells]
                # Medians resist the steps at which the runs were nearly equal anyway, where the share is wild.
                measures[f"restored_{label}_{where}_median"] = Measure(
                    float(np.median(values)), len(cells), None, "patches"
                )
                clipped = [min(1.0, max(-1.0, value)) for value in values]
                interval = bootstrap_mean(
                    clipped, [number for number, _ in cells], resamples=settings.resamples, seed=settings.seed
                )
                measures[f"restored_{label}_{where}_mean_clipped"] = Measure(
                    float(np.mean(clipped)), len(records), interval
                )
    verdict = worst([one["verdict"] for one in explained]) if explained else "identical"
    layer, tensor, shown = place_of(explained, verdict) if explained else (None, None, {"reasons": []})
    why = (
        "past keys and values stay as they were, so later steps are not restored by a patch of one position"
        if direction == "off_into_on"
        else "the patch is repeated in each recomputation; keys and values of all other positions stay the run's own"
    )
    return Finding(
        protocol="residual_patch",
        arms=study.described(CACHE_ON, CACHE_OFF)
        if direction == "off_into_on"
        else study.described(CACHE_OFF, CACHE_ON),
        verdict=verdict,
        layer=layer,
        tensor=tensor,
        n=len(records),
        measures=measures,
        reasons=(why, *shown["reasons"]),
        verdicts=dict(Counter(one["verdict"] for one in explained)),
        replicas=sum(one["replicas"] for one in explained),
        detail={"direction": direction, "matrix": matrix, "horizon": settings.horizon},
    )
