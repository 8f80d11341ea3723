"""Transplants: a donor's keys and values put into a recipient, then decoded. Is the cache the carrier, and which part?

Donor and recipient are caches of the same tokens that came about differently; both directions are run, with natural
controls: a recipient given its own cache again, and a donor built a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvferry.audit.arm import CACHE_ON, Arm
from kvferry.audit.drift import relative_l2
from kvferry.audit.finding import Finding, Json, Measure, place_of, rate
from kvferry.audit.generate import build_cache, first_split, generate
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

EVERYWHERE = ("whole", "keys", "values")
"""Parts for every transplanted sequence; the others are for as many as `Settings.ranges` says."""


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
    settings = study.settings
    records: list[Record] = []
    explained: list[Record] = []
    screened = parted = 0
    for passage in study.passages:
        if settings.parted and parted >= settings.parted:
            study.step("transplant: enough were found")
            continue
        wide = settings.ranges is None or (parted if settings.parted else screened) < settings.ranges
        record = _record(
            study, recipient, donor, passage, PARTS if wide else {name: PARTS[name] for name in EVERYWHERE}
        )
        screened += 1
        parted += record["split"] is not None
        if "donor_to_recipient" in record:
            records.append(record)
            if len(explained) < settings.explain:
                explained.append(study.pair(recipient, donor, passage))
        elif passage is study.passages[-1] and not explained and settings.explain:
            explained.append(study.pair(recipient, donor, passage))  # an overflow parts nothing, and is told
        study.step("transplant")
    counts = {"screened": screened, "parted": parted}
    return [
        _finding(records, explained, "donor_to_recipient", study.described(recipient, donor), counts),
        _finding(records, explained, "recipient_to_donor", study.described(donor, recipient), counts),
    ]


def _record(study: Study, recipient: Arm, donor: Arm, passage: Passage, parts: Mapping[str, Part]) -> Record:
    """Every part both ways on one passage; where only those that part are asked for, others end with their split."""
    new, only = study.settings.new_tokens, bool(study.settings.parted)

    def make() -> Record:
        prompt = passage.prompt
        caches = [build_cache(study.models, arm, prompt[:, :-1]) for arm in (recipient, donor)]

        def decode(cache: Snapshot, targets: Sequence[_Decoded] = ()) -> _Decoded:
            tokens = [target.tokens for target in targets]
            run = generate(
                study.models, recipient, prompt, new, start=cache, until_split_from=tokens or None, keep_logits=True
            )
            return _Decoded(run.tokens, run.logits[0], _digest(run.logits))

        runs = [decode(cache) for cache in caches]
        split = first_split(runs[0].tokens, runs[1].tokens)
        found: Record = {"split": split, "tokens": new}
        if only and split is None:
            return found
        again = [decode(build_cache(study.models, arm, prompt[:, :-1])) for arm in (recipient, donor)]
        # Keys of the one are values of the other, the other way: both directions often ask for the same cache.
        known: dict[str, _Decoded] = {}

        def patched(receiving: Snapshot, giving: Snapshot, part: Part) -> _Decoded:
            cache = transplant_cache(receiving, giving, part)
            key = _digest(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
            if key not in known:
                known[key] = decode(cache, runs)
            return known[key]

        for name, mine in (("donor_to_recipient", 0), ("recipient_to_donor", 1)):
            own, target = runs[mine], runs[1 - mine]
            found[name] = {
                "control: own cache": _outcome(patched(caches[mine], caches[mine].clone(), Part()), own, own),
                "control: built again": _outcome(again[mine], own, own),
                "control: donor built again": _outcome(again[1 - mine], own, target),
            } | {
                part: _outcome(patched(caches[mine], caches[1 - mine], what), own, target)
                for part, what in parts.items()
            }
        return found

    return study.record("transplant", (recipient, donor), passage, [new, sorted(parts), only], make)


@dataclass(frozen=True, slots=True, eq=False)
class _Decoded:
    """Tokens, the first logits, and the digest of all logits' bits."""

    tokens: list[int]
    first: Tensor
    bits: str


def _digest(tensors: Iterable[Tensor | None]) -> str:
    """Of every bit."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        if tensor is not None:
            state.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def _outcome(patched: _Decoded, own: _Decoded, target: _Decoded) -> Json:
    """What became of one transplant.

    ``restored`` is the share of the distance of the first logits, whose prefix is the same in all runs, that the
    transplant closes: 1 at the target, 0 at the recipient's own.
    """
    before = float(relative_l2(own.first, target.first))
    after = float(relative_l2(patched.first, target.first))
    return {
        "tokens_equal": patched.tokens == target.tokens,
        "logits_equal": patched.tokens == target.tokens and patched.bits == target.bits,
        "split_from_target": first_split(patched.tokens, target.tokens),
        "split_from_own": first_split(patched.tokens, own.tokens),
        "restored": number(1 - after / before) if 0 < before < math.inf else None,
    }


def _finding(
    records: list[Record], explained: list[Record], direction: str, arms: tuple[Json, ...], counts: dict[str, int]
) -> Finding:
    measures = {"trajectories_differing": rate(counts["parted"], counts["screened"], "sequences")}
    matrix: Json = {}
    for name in dict.fromkeys(name for record in records for name in record[direction]):
        tried = [record for record in records if name in record[direction]]
        every = [record[direction][name] for record in tried]
        apart = [record[direction][name] for record in tried if record["split"] is not None]
        among = every if name.startswith("control") else apart
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
        "no two trajectories part: there is nothing to carry"
        if not records
        else "the cache is the carrier: the whole of it gives the donor's logits to the bit"
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
        detail={"direction": direction, "matrix": matrix, **counts},
    )
