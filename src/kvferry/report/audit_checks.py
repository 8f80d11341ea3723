"""What all audits together say of the audit itself: false alarms, faults caught, replicas."""

from __future__ import annotations

from collections import Counter

from kvferry.evidence.statistics import wilson
from kvferry.report.audit_said import Found, Row, once

HARMLESS = ("identical", "kernel-shape", "rounding")
"""Verdicts that a clean pair of runs may have."""

CLEAN = ("fixed_prefix", "precision_2x2", "stage_replay", "batch")
"""Protocols whose arms have nothing wrong with them."""


def overall(found: Found) -> list[str]:
    """In sentences."""
    return _alarms(found) + _caught(found) + _replicas(found)


def _clean(finding: Row) -> bool:
    return finding["protocol"] in CLEAN and once(finding)


def _alarms(found: Found) -> list[str]:
    clean: Counter[str] = Counter()
    passages: dict[str, int] = {}
    for model, one in found:
        if _clean(one):
            clean.update(one["verdicts"])
            passages[model] = max(passages.get(model, 0), one["n"])
    judged = sum(clean[verdict] for verdict in HARMLESS) + clean["semantic"]
    if not judged:
        return []
    least = sum(passages.values())
    words = f"Of {judged} clean pairs of runs that did not overflow, {clean['semantic']} were called semantic"
    if clean["semantic"]:
        low, high = wilson(clean["semantic"], judged)
        words += f" [{low:.2%}, {high:.2%}]"
    else:
        words += f" (at most {wilson(0, judged)[1]:.2%}; a passage serves several pairs: of {least} passages, at most "
        words += f"{wilson(0, least)[1]:.2%})"
    key = "oracle_error_reference"
    tried = sum(one["measures"][key]["n"] for _, one in found if _clean(one) and key in one["measures"])
    words += f". In {tried} both arms ran in float64 as well; {clean['identical']} were the same to the bit, which "
    words += "needs none"
    exact = judged - tried - clean["identical"]
    return [words + (f"; {exact} were in float64 themselves." if exact > 0 else ".")]


def _caught(found: Found) -> list[str]:
    caught = [one["measures"]["caught"] for _, one in found if one["protocol"] == "self_check"]
    if not caught:
        return []
    hits, n = sum(round(one["value"] * one["n"]) for one in caught), sum(one["n"] for one in caught)
    words = f"Of {n} planted faults, of the kinds below and each in one layer, {hits} were caught, named and located"
    low, high = wilson(hits, n)
    return [f"{words} [{low:.1%}, {high:.1%}]."]


def _replicas(found: Found) -> list[str]:
    told = [
        one
        for _, one in found
        if one["replicas"] is not None
        and one["verdicts"]
        and once(one)
        and one["detail"].get("direction") not in ("recipient_to_donor", "on_into_off")  # the same runs, the other way
    ]
    if not told:
        return []
    n = sum(one["n"] if one["protocol"] == "transplant" else sum(one["verdicts"].values()) for one in told)
    equal = sum(one["replicas"] for one in told)
    words = f"The same path twice gave the same bits in {equal} of the {n} pairs of arms that ran twice"
    words += f" (other bits in at most {wilson(n - equal, n)[1]:.2%})"
    sizes = [one["measures"]["replica_max_abs"]["value"] for one in told if "replica_max_abs" in one["measures"]]
    known = [size for size in sizes if size is not None]
    return [words + (f"; otherwise up to {max(known):.3g} in a logit: nothing finer is claimed." if known else ".")]
