"""The audit's own positive control: faults planted in this very model must be caught, named and located."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.audit import faults
from kvferry.audit.arm import CACHE_ON, Arm, Change
from kvferry.audit.finding import Finding, Json, pair_finding, rate
from kvferry.audit.pair import Record
from kvferry.audit.study import Study
from kvferry.hf.geometry import layer_kinds, text_config


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, and what an audit must say of it."""

    arm: Arm
    name: str
    layer: int
    tensor: str

    def caught(self, record: Record) -> bool:
        """Semantic, at the right place, by the right name."""
        place, known = record.get("location"), record.get("diagnosis")
        return (
            record["verdict"] == "semantic"
            and place is not None
            and (place["layer"], place["tensor"]) == (self.layer, self.tensor)
            and known is not None
            and known["name"] == self.name
        )


def planted(study: Study) -> list[Planted]:
    """The faults that this model and these passages can show."""
    config = text_config(study.models.own)
    kinds = layer_kinds(config)
    owners = [index for index, kind in enumerate(kinds) if kind.name != "shared"]
    middle = owners[len(owners) // 2]

    def arm(change: Change, padding: int = 0) -> Arm:
        return replace(CACHE_ON, change=change, left_padding=padding)

    found = [
        Planted(arm(faults.shifted_positions()), "positions", 0, "keys"),
        Planted(arm(faults.swapped_head(middle)), "keys and values swapped", middle, "keys+values"),
        Planted(arm(faults.stale_layer(middle)), "stale layer", middle, "keys+values"),
        Planted(arm(faults.perturbed_model(middle)), "other weights", middle, "values"),
        Planted(arm(faults.unmasked_padding(), 7), "padding attended", 0, "attention"),
        Planted(arm(faults.quantised_layer(middle)), "quantised", middle, "keys+values"),
    ]
    sliding = [index for index, kind in enumerate(kinds) if kind.name == "sliding"]
    window = kinds[sliding[0]].argument if sliding else None
    shortest = min(passage.token_ids.shape[1] for passage in study.passages)
    if window is not None and shortest > window:
        found.append(Planted(arm(faults.short_window()), "sliding window", sliding[0], "attention"))
    return found


def steps(study: Study) -> int:
    """Steps that `self_check` takes."""
    return len(planted(study)) * len(study.passages)


def self_check(study: Study) -> list[Finding]:
    """Plant each fault in every passage: a finding each, with the rate at which it was caught."""
    faulty, settings = planted(study), study.settings
    found: list[list[Record]] = [[] for _ in faulty]
    for passage in study.passages:
        for fault, own in zip(faulty, found, strict=True):
            own.append(study.pair(CACHE_ON, fault.arm, passage))
            study.step(f"self_check: {fault.arm.change.name if fault.arm.change else ''}")
    findings = []
    for fault, records in zip(faulty, found, strict=True):
        finding = pair_finding(
            "self_check",
            study.described(CACHE_ON, fault.arm),
            records,
            resamples=settings.resamples,
            seed=settings.seed,
        )
        caught = sum(fault.caught(record) for record in records)
        expected: Json = {"name": fault.name, "layer": fault.layer, "tensor": fault.tensor}
        findings.append(
            replace(
                finding,
                measures={"caught": rate(caught, len(records), "sequences"), **finding.measures},
                detail={"expected": expected, "caught": caught == len(records)},
            )
        )
    return findings
