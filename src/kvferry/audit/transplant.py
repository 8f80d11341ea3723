"""Transplants: a donor's keys and values put into a recipient, then decoded. Is the cache the carrier, and which part?

Donor and recipient are caches of the same tokens that came about differently; both directions are run, with natural
controls: a recipient given its own cache again, and a donor built a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvferry.audit.arm import CACHE_ON, Arm
from kvferry.audit.drift import relative_l2
from kvferry.audit.finding import Finding, Json, Measure, place_of, rate
from kvferry.audit.generate import Generated, build_cache, first_split, generate
from kvferry.audit.pair import Record, number
from kvferry.audit.passages import Passage
from kvferry.audit.study import Study
from kvferry.audit.verdict import worst
from kvferry.snapshot import LayerState, Snapshot

DONOR = Arm("incremental")
RECIPIENT = CACHE_ON


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a cache is transplanted: of these layers and tokens, keys, values or both.

    Attributes:
        layers: ``(begin, end)`` as shares of the layers.
        tokens: ``(begin, end)``; negative: counted from the end; ``None``: to the end.
    """

    keys: bool = True
    values: bool = True
    layers: tuple[float, float] = (0.0, 1.0)
    tokens: tuple[int, int | None] = (0, None)


PARTS: dict[str, Part] = {
    "whole": Part(),
    "keys": Part(values=False),
    "values": Part(keys=False),
    "layers, first half": Part(layers=(0.0, 0.5)),
    "layers, second half": Part(layers=(0.5, 1.0)),
    "layers, first quarter": Part(layers=(0.0, 0.25)),
    "layers, last quarter": Part(layers=(0.75, 1.0)),
    "layers, first three quarters": Part(layers=(0.0, 0.75)),
    "layers, last three quarters": Part(layers=(0.25, 1.0)),
    "all but the first token": Part(tokens=(1, None)),
    "first 4 tokens": Part(tokens=(0, 4)),
    "last 16 tokens": Part(tokens=(-16, None)),
    "all but the last 16 tokens": Part(tokens=(0, -16)),
}
"""Name -> part. A new one is one line."""

FEW = ("whole", "keys", "values", "layers, first half", "layers, second half")


def transplant_cache(recipient: Snapshot, donor: Snapshot, part: Part) -> Snapshot:
    """``recipient`` with a part of ``donor``; shares no storage with either."""
    count = len(recipient.layers)
    chosen = range(round(part.layers[0] * count), round(part.layers[1] * count))
    layers = []
    for index, (mine, theirs) in enumerate(zip(recipient.layers, donor.layers, strict=True)):
        layers.append(_grafted(mine, theirs, part) if index in chosen else mine)
    return replace(recipient, layers=tuple(layers)).clone()


def _grafted(mine: LayerState, theirs: LayerState, part: Part) -> LayerState:
    if mine.keys is None or mine.values is None or theirs.keys is None or theirs.values is None:
        return mine
    begin, end, _ = slice(*part.tokens).indices(mine.seen)
    held = slice(max(0, begin - mine.first), max(0, end - mine.first))
    keys, values = mine.keys.clone(), mine.values.clone()
    if part.keys:
        keys[:, :, held] = theirs.keys[:, :, held]
    if part.values:
        values[:, :, held] = theirs.values[:, :, held]
    return mine.map_tensors(keys, values)


def transplant(study: Study) -> list[Finding]:
    """Both directions between a cache built token by token and one prefilled at once."""
    return between(study, RECIPIENT, DONOR)


def between(study: Study, recipient: Arm, donor: Arm) -> list[Finding]:
    """Both directions between two arms: a finding each."""
    records: list[Record] = []
    explained: list[Record] = []
    for passage in study.passages:
        records.append(_record(study, recipient, donor, passage))
        if len(explained) < study.settings.explain:
            explained.append(study.pair(recipient, donor, passage))
        study.step("transplant")
    return [
        _finding(records, explained, "donor_to_recipient", study.described(recipient, donor)),
        _finding(records, explained, "recipient_to_donor", study.described(donor, recipient)),
    ]


def _record(study: Study, recipient: Arm, donor: Arm, passage: Passage) -> Record:
    settings = study.settings
    parts = PARTS if settings.layer_step == 1 else {name: PARTS[name] for name in FEW}

    def make() -> Record:
        prompt = passage.prompt

        def decode(cache: Snapshot) -> Generated:
            return generate(study.models, recipient, prompt, settings.new_tokens, start=cache, keep_logits=True)

        caches = [build_cache(study.models, arm, prompt[:, :-1]) for arm in (recipient, donor)]
        runs = [decode(cache) for cache in caches]
        again = [decode(build_cache(study.models, arm, prompt[:, :-1])) for arm in (recipient, donor)]
        return {
            "split": first_split(runs[0].tokens, runs[1].tokens),
            "tokens": settings.new_tokens,
            "donor_to_recipient": _direction(caches[0], caches[1], runs[0], runs[1], again, parts, decode),
            "recipient_to_donor": _direction(caches[1], caches[0], runs[1], runs[0], again[::-1], parts, decode),
        }

    return study.record("transplant", (recipient, donor), passage, [settings.new_tokens, sorted(parts)], make)


def _direction(
    receiving: Snapshot,
    giving: Snapshot,
    own: Generated,
    target: Generated,
    again: list[Generated],
    parts: Mapping[str, Part],
    decode: Callable[[Snapshot], Generated],
) -> Record:
    """Every part from ``giving`` to ``receiving``, and the controls: outcomes against both trajectories."""
    found = {
        "control: own cache": _outcome(decode(transplant_cache(receiving, receiving.clone(), Part())), own, own),
        "control: built again": _outcome(again[0], own, own),
        "control: donor built again": _outcome(again[1], own, target),
    }
    for name, part in parts.items():
        found[name] = _outcome(decode(transplant_cache(receiving, giving, part)), own, target)
    return found


def _outcome(patched: Generated, own: Generated, target: Generated) -> Json:
    """What became of one transplant.

    ``restored`` is the share of the distance of the first logits, whose prefix is the same in all runs, that the
    transplant closes: 1 at the target, 0 at the recipient's own.
    """
    before = float(relative_l2(own.logits[0], target.logits[0]))
    after = float(relative_l2(patched.logits[0], target.logits[0]))
    return {
        "tokens_equal": patched.tokens == target.tokens,
        "logits_equal": patched.tokens == target.tokens
        and all(torch.equal(a, b) for a, b in zip(patched.logits, target.logits, strict=True)),
        "split_from_target": first_split(patched.tokens, target.tokens),
        "split_from_own": first_split(patched.tokens, own.tokens),
        "restored": number(1 - after / before) if 0 < before < math.inf else None,
    }


def _finding(records: list[Record], explained: list[Record], direction: str, arms: tuple[Json, ...]) -> Finding:
    apart = [record for record in records if record["split"] is not None]
    measures = {"trajectories_differing": rate(len(apart), len(records), "sequences")}
    matrix: Json = {}
    for name in records[0][direction]:
        every = [record[direction][name] for record in records]
        among = every if name.startswith("control") else [record[direction][name] for record in apart]
        recovered = sum(one["tokens_equal"] for one in among)
        exact = sum(one["logits_equal"] for one in every)
        restored = [one["restored"] for one in every if one["restored"] is not None]
        matrix[name] = {
            "recovered": recovered,
            "n": len(among),
            "exact": exact,
            "n_exact": len(every),
            "restored_median": float(np.median(restored)) if restored else None,
        }
        if among:
            measures[f"{name}: tokens recovered"] = rate(recovered, len(among), "sequences")
        measures[f"{name}: logits to the bit"] = rate(exact, len(every), "sequences")
        if restored:
            measures[f"{name}: first logits restored"] = Measure(matrix[name]["restored_median"], len(restored))
    verdict = worst([one["verdict"] for one in explained]) if explained else "identical"
    layer, tensor, reasons = None, None, ()
    if explained:
        layer, tensor, shown = place_of(explained, verdict)
        reasons = tuple(shown["reasons"])
    controls = all(
        record[direction][name]["logits_equal"] for record in records for name in record[direction] if "control" in name
    )
    whole = all(record[direction]["whole"]["logits_equal"] for record in records)
    carrier = (
        "the cache is the carrier: the whole of it gives the donor's logits to the bit"
        if controls and whole
        else "the whole cache does not give the donor's logits to the bit"
        if controls
        else "controls differ: the run is not deterministic, and nothing is claimed"
    )
    return Finding(
        protocol="transplant",
        arms=arms,
        verdict=verdict,
        layer=layer,
        tensor=tensor,
        n=len(records),
        measures=measures,
        reasons=(carrier, *reasons),
        verdicts=dict(Counter(one["verdict"] for one in explained)),
        replicas=sum(
            record[direction]["control: built again"]["logits_equal"]
            and record[direction]["control: donor built again"]["logits_equal"]
            for record in records
        ),
        detail={"direction": direction, "matrix": matrix},
    )
