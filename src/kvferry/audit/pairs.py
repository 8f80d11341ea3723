"""Protocols that hold pairs of arms against each other on fixed prefixes, and `stage_replay`, which decodes on."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from statistics import median

from kvferry.audit.arm import CACHE_OFF, CACHE_ON, Arm
from kvferry.audit.finding import Finding, Json, Measure, pair_finding, rate
from kvferry.audit.generate import Generated, build_cache, first_split, generate
from kvferry.audit.pair import Record, number
from kvferry.audit.passages import Passage
from kvferry.audit.study import Study
from kvferry.audit.trace import held_by, same_bits
from kvferry.evidence.survival import kaplan_meier
from kvferry.hf.geometry import layer_kinds, text_config
from kvferry.snapshot import Snapshot

Pairs = list[tuple[Arm, Arm]]

STAGES = ("chunked(32)", "decoded(16)", "incremental")
"""Constructions that `stage_replay` holds against a prefill at once."""


def fixed_prefix_pairs(study: Study) -> Pairs:  # noqa: ARG001
    """Cache OFF, and cache ON."""
    return [(CACHE_OFF, CACHE_ON)]


def precision_pairs(study: Study) -> Pairs:
    """Cache OFF and ON, in the model's dtype and in float32 with the same weights."""
    shorter = [] if study.models.dtype == "float32" else [(CACHE_OFF, CACHE_ON)]
    return [*shorter, (replace(CACHE_OFF, dtype="float32"), replace(CACHE_ON, dtype="float32"))]


def batch_pairs(study: Study) -> Pairs:  # noqa: ARG001
    """Alone, and with neighbours, with padding, with both."""
    return [
        (CACHE_ON, Arm(batch=3)),
        (CACHE_ON, Arm(batch=3, neighbours="others")),
        (CACHE_ON, Arm(left_padding=7)),
        (CACHE_ON, Arm(batch=3, neighbours="others", left_padding=7)),
    ]


def stage_pairs(study: Study) -> Pairs:  # noqa: ARG001
    """A prefill at once, and the other ways in which a cache comes about."""
    return [(CACHE_ON, Arm(construction)) for construction in STAGES]


def run_together(study: Study, pairs: Pairs) -> None:
    """Make the records of the pairs of several protocols, passage by passage: they share many of their runs."""
    for passage in study.passages:
        for reference, other in pairs:
            study.pair(reference, other, passage)
            study.step(f"{reference} beside {other}")


def run_pairs(study: Study, protocol: str, pairs: Pairs) -> list[Finding]:
    """One finding a pair."""
    settings = study.settings
    records: list[list[Record]] = [[] for _ in pairs]
    for passage in study.passages:
        for (reference, other), own in zip(pairs, records, strict=True):
            own.append(study.pair(reference, other, passage))
    findings = []
    for (reference, other), own in zip(pairs, records, strict=True):
        described = study.described(reference, other)
        finding = pair_finding(protocol, described, own, resamples=settings.resamples, seed=settings.seed)
        findings.append(replace(finding, detail=finding.detail | {"kinds": by_kind(study, finding)}))
    return findings


def by_kind(study: Study, finding: Finding) -> Json:
    """Median drift of the layers of each kind, sliding and full apart: kind -> tensor -> median over its layers.

    Of the suffix: a prefix that two arms build alike would drown it.
    """
    kinds = [kind.name for kind in layer_kinds(text_config(study.models.own))]
    found: Json = {}
    for name in dict.fromkeys(kinds):
        found[name] = {"layers": kinds.count(name)}
        for tensor, values in finding.detail["drift_median_suffix"].items():
            among = [value for kind, value in zip(kinds, values, strict=True) if kind == name]
            found[name][tensor] = float(median(among)) if all(map(math.isfinite, among)) else None
    return found


def fixed_prefix(study: Study) -> list[Finding]:
    return run_pairs(study, "fixed_prefix", fixed_prefix_pairs(study))


def precision_2x2(study: Study) -> list[Finding]:
    return run_pairs(study, "precision_2x2", precision_pairs(study))


def batch(study: Study) -> list[Finding]:
    return run_pairs(study, "batch", batch_pairs(study))


def stage_replay(study: Study) -> list[Finding]:
    """Caches and boundary logits of each construction, and the suffixes decoded from each cache."""
    pairs = stage_pairs(study)
    findings = run_pairs(study, "stage_replay", pairs)
    suffixes: list[list[Record]] = [[] for _ in pairs]
    for passage in study.passages:
        own = _Reference(study, pairs[0][0], passage)
        for (_, other), among in zip(pairs, suffixes, strict=True):
            among.append(_suffix(study, own, other, passage))
            study.step(f"stage_replay: suffixes of {other}")
    found = []
    for finding, records in zip(findings, suffixes, strict=True):
        splits = [one["split"] for one in records]
        apart = [split is not None for split in splits]
        times = [one["tokens"] if one["split"] is None else one["split"] for one in records]
        curve = kaplan_meier(times, apart)
        more = {
            "suffix_differs": rate(sum(apart), len(apart), "sequences"),
            "suffix_first_divergence_median": Measure(curve.median(), len(apart)),
        }
        detail = finding.detail | {
            "survival": curve.to_json(),
            "suffix_tokens": study.settings.new_tokens,
            "suffixes_of_equal_caches": sum(one["same_cache"] for one in records),
        }
        found.append(replace(finding, measures=finding.measures | more, detail=detail))
    return found


class _Reference:
    """The reference's cache and suffix after one prefix, made when first asked for and shared by all constructions."""

    def __init__(self, study: Study, arm: Arm, passage: Passage):
        self.study, self.arm, self.passage = study, arm, passage

    @cached_property
    def cache(self) -> Snapshot:
        return build_cache(self.study.models, self.arm, self.passage.prompt[:, :-1])

    @cached_property
    def run(self) -> Generated:
        new = self.study.settings.new_tokens
        return generate(self.study.models, self.arm, self.passage.prompt, new, start=self.cache)


def _suffix(study: Study, own: _Reference, other: Arm, passage: Passage) -> Record:
    """Greedy suffixes after the prefix from both caches: where they part, and the margins there.

    From a cache of the same bits the same suffix follows, and it is not decoded again: ``same_cache`` says so. Behind
    its first token that is another the second suffix is not decoded, either: it says nothing there.
    """
    new = study.settings.new_tokens

    def make() -> Record:
        cache = build_cache(study.models, other, passage.prompt[:, :-1])
        if same_bits(held_by(own.cache), held_by(cache)):
            return {"split": None, "tokens": len(own.run.tokens), "margins": None, "same_cache": True}
        second = generate(study.models, other, passage.prompt, new, start=cache, until_split_from=[own.run.tokens])
        split = first_split(own.run.tokens, second.tokens)
        margins = None if split is None else [number(run.margins[split]) for run in (own.run, second)]
        return {"split": split, "tokens": len(own.run.tokens), "margins": margins, "same_cache": False}

    return study.record("suffixes", (own.arm, other), passage, new, make)
