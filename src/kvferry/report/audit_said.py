"""What audits found, in sentences: each is computed from the findings, and says what it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvferry.evidence.statistics import wilson

Row = Mapping[str, Any]

Found = Sequence[tuple[str, Row]]
"""Model and finding."""

HARMLESS = ("identical", "kernel-shape", "rounding")
"""Verdicts that a clean pair of runs may have."""

LIVE = ("incremental", "decoded(16)")
"""Constructions that stand for a cache as it is decoded."""

CLEAN = ("fixed_prefix", "precision_2x2", "stage_replay", "batch")
"""Protocols whose arms have nothing wrong with them."""

FACTOR = 65_536
"""Ratio of the epsilons of bfloat16 and float32."""

RESTORED = 0.5
"""A patch that closes less of the distance is said not to restore."""

LORUP = (0.772, 0.876)
"""Interval of the share of suffixes that differ in bfloat16, of 'Stage-Replay Divergence'."""


def sentences(found: Found) -> list[str]:
    """What holds here and what does not, as far as it was run."""
    said = []
    for model in dict.fromkeys(model for model, _ in found):
        own = [one for name, one in found if name == model]
        for tell in TOLD:
            said += [f"{model}: {sentence}" for sentence in tell(own)]
    return said + _alarms(found) + _caught(found) + _replicas(found)


def live(finding: Row) -> bool:
    """Whether the second arm's cache came about as decoding makes it."""
    return finding["arms"][-1]["construction"] in LIVE


def once(finding: Row) -> bool:
    """`precision_2x2` has the pair of `fixed_prefix` among its own: that one counts once."""
    return bool(finding["protocol"] != "precision_2x2" or finding["arms"][-1]["dtype"] == "float32")


def _clean(finding: Row) -> bool:
    return finding["protocol"] in CLEAN and once(finding)


def counted(measure: Row) -> str:
    """A rate as hits of n, with its interval; none is given as an upper bound."""
    hits, n = round(measure["value"] * measure["n"]), measure["n"]
    low, high = measure["ci"] or wilson(hits, n)
    return f"{hits} of {n} (at most {high:.1%})" if not hits else f"{hits} of {n} [{low:.1%}, {high:.1%}]"


def _dtype(finding: Row) -> str:
    return str(finding["arms"][-1]["dtype"])


def _of(own: Iterable[Row], protocol: str, measure: str) -> list[Row]:
    return [one for one in own if one["protocol"] == protocol and measure in one["measures"]]


def _free(own: Sequence[Row]) -> list[str]:
    said = []
    for one in _of(own, "free_run", "prompts_diverging"):
        rate, sampler, dtype = one["measures"]["prompts_diverging"], one["detail"]["sampler"]["name"], _dtype(one)
        words = f"{sampler} runs in {dtype} part on {counted(rate)} prompts within {_longest(one)} tokens"
        if sampler == "greedy":
            hits = round(rate["value"] * rate["n"])
            if dtype == "float32":
                words += ", none, as in 'The Illusion of Equivalence'" if not hits else ", where that paper has none"
            else:
                holds = "holds" if hits == rate["n"] else "does not hold at this length"
                words += f": that all of them do, as that paper has it of float16, {holds}"
        if "steps_recomputed" in one["measures"]:
            done = one["measures"]["steps_recomputed"]
            words += f"; {done['value']:.1%} of the OFF steps were near enough to a tie to be recomputed"
            if "screening_agrees" in one["measures"]:
                words += f", and full recomputation agreed on {counted(one['measures']['screening_agrees'])} prompts"
        said.append(words + ".")
    return said


def _longest(finding: Row) -> int:
    curve = finding["detail"]["survival"]
    return int(finding["detail"].get("new_tokens") or max([0, *curve["times"]]))


def _answers(own: Sequence[Row]) -> list[str]:
    said = []
    for one in _of(own, "free_run", "accuracy_difference"):
        measures = one["measures"]
        off, on, apart = (measures[f"accuracy_{name}"] for name in ("reference", "other", "difference"))
        ci = apart["ci"]
        side = "neither is better" if ci is None or ci[0] <= 0 <= ci[1] else "ON is better" if ci[0] > 0 else "OFF is"
        words = (
            f"answers in {_dtype(one)}: OFF right {counted(off)}, ON {counted(on)}, McNemar's p "
            f"{measures['accuracy_mcnemar_p']['value']:.3g}: {side}; {counted(measures['answers_differing'])} differ"
        )
        if max(off["value"], on["value"]) < 0.1:
            words += " (so few are right that their number says nothing of ON against OFF)"
        said.append(words + ".")
    return said


def _constructions(own: Sequence[Row]) -> list[str]:
    said = []
    distances: dict[str, float] = {}
    for one in _of(own, "stage_replay", "cache_l2_median"):
        if live(one):
            distances[_dtype(one)] = max(distances.get(_dtype(one), 0.0), one["measures"]["cache_l2_median"]["value"])
    for one in _of(own, "stage_replay", "suffix_differs"):
        if one["arms"][-1]["construction"] != "incremental":
            continue
        rate, dtype = one["measures"]["suffix_differs"], _dtype(one)
        words = (
            f"suffixes of {one['detail']['suffix_tokens']} tokens from a cache built token by token differ in {dtype} "
            f"in {counted(rate)}"
        )
        if dtype == "bfloat16":
            low, high = rate["ci"]
            beside = "below" if high < LORUP[0] else "above" if low > LORUP[1] else "not told apart from"
            words += f", {beside} the 83 % of 'Stage-Replay Divergence', whose median first divergence is 88"
        said.append(words + ".")
    if distances.get("bfloat16") and distances.get("float32"):
        factor = distances["bfloat16"] / distances["float32"]
        said.append(
            f"from bfloat16 to float32 the distance between constructions falls {factor:,.0f} times; the ratio "
            f"of the two epsilons is {FACTOR:,}."
        )
    return said


def _transplants(own: Sequence[Row]) -> list[str]:
    tables = [one for one in own if one["protocol"] == "transplant" and "whole" in one["detail"]["matrix"]]
    if not tables:
        return []
    said = []
    whole = [one["detail"]["matrix"]["whole"] for one in tables]
    exact, n = sum(row["exact"] for row in whole), sum(row["n_exact"] for row in whole)
    holds = "holds" if exact == n else "does not hold"
    each = "; ".join(f"{one['detail']['direction'].replace('_', ' ')} {_hits(one, 'whole')}" for one in tables)
    first = tables[0]["detail"]
    said.append(
        f"that the cache is the carrier {holds}: a whole transplant gives the donor's logits to the bit in {exact} of "
        f"{n}, and its tokens: {each}; donor and recipient part in {first['parted']} of {first['screened']} passages."
    )
    parts = {
        part: (
            sum(t["detail"]["matrix"][part]["recovered"] for t in have),
            sum(t["detail"]["matrix"][part]["n"] for t in have),
        )
        for part in dict.fromkeys(part for t in tables for part in t["detail"]["matrix"])
        if (have := [t for t in tables if part in t["detail"]["matrix"]])
    }
    alone = [f"{part} alone {_share(*parts[part])}" for part in ("keys", "values") if parts.get(part, (0, 0))[1]]
    if alone:
        said.append(
            f"of the donor's trajectories, both directions taken together, {' and '.join(alone)} are recovered."
        )
    ranges = {part: parts[part] for part in parts if part.startswith("layers") and parts[part][1]}
    if ranges:
        enough = [part for part, (hits, of) in ranges.items() if hits == of]
        told = "; ".join(f"{part.removeprefix('layers, ')} {_share(hits, of)}" for part, (hits, of) in ranges.items())
        suffices = f"{', '.join(enough)} always suffice" if enough else "no range that was tried always suffices"
        said.append(f"of layers, {suffices}: {told}.")
    controls = [part for part in parts if part.startswith("control")]
    same = all(
        table["detail"]["matrix"][part]["exact"] == table["detail"]["matrix"][part]["n_exact"]
        for table in tables
        for part in controls
    )
    said.append(
        f"the controls of transplants (own cache, built again) {'are' if same else 'are not'} the same to the bit."
    )
    return said


def _hits(finding: Row, part: str) -> str:
    row = finding["detail"]["matrix"][part]
    return _share(row["recovered"], row["n"])


def _share(hits: int, n: int) -> str:
    if not n:
        return "0 of 0"
    low, high = wilson(hits, n)
    return f"{hits} of {n} [{low:.0%}, {high:.0%}]"


def _patches(own: Sequence[Row]) -> list[str]:
    said = []
    for one in _of(own, "residual_patch", "restored_same_step_last_layer_median"):
        if one["detail"]["direction"] != "off_into_on":
            continue
        at, later = (
            one["measures"].get(f"restored_{step}_last_layer_median", {}).get("value")
            for step in ("same_step", "later_steps")
        )
        if later is None:
            continue
        words = (
            f"OFF's residual stream behind the last layer, put into ON, closes {at:.0%} of the distance at its own "
            f"step and {later:.0%} at later ones (medians of n = {one['n']} passages)"
        )
        if at > RESTORED > later:
            words += ": it carries the step, and later ones read keys and values that are still ON's"
        said.append(words + ".")
    return said


def _nearer(own: Sequence[Row]) -> list[str]:
    said = []
    for one in [
        *_of(own, "fixed_prefix", "oracle_error_difference"),
        *_of(own, "precision_2x2", "oracle_error_difference"),
    ]:
        if not once(one):
            continue
        measure = one["measures"]["oracle_error_difference"]
        ci = measure["ci"]
        side = "neither" if ci is None or ci[0] <= 0 <= ci[1] else "cache ON" if measure["value"] < 0 else "cache OFF"
        errors = [one["measures"][f"oracle_error_{arm}"]["value"] for arm in ("reference", "other")]
        said.append(
            f"nearer to float64 in {_dtype(one)} is {side}: relative L2 {errors[0]:.3g} of OFF, {errors[1]:.3g} of ON, "
            f"n = {measure['n']} sequences that differ."
        )
    return said


def _overflows(own: Sequence[Row]) -> list[str]:
    return [
        f"{_dtype(one)} overflows in {one['verdicts']['overflow']} of {one['n']} sequences, first in layer "
        f"{one['layer']}, {one['tensor']}: what is decoded there is no text, and no free runs are compared."
        for one in own
        if one["protocol"] == "fixed_prefix" and one["verdict"] == "overflow"
    ]


TOLD: tuple[Callable[[Sequence[Row]], list[str]], ...] = (
    _free,
    _answers,
    _constructions,
    _transplants,
    _patches,
    _nearer,
    _overflows,
)
"""What is said of each model, in this order."""


def _alarms(found: Found) -> list[str]:
    clean: Counter[str] = Counter()
    for _, one in found:
        if _clean(one):
            clean.update(one["verdicts"])
    judged = sum(clean[verdict] for verdict in HARMLESS) + clean["semantic"]
    if not judged:
        return []
    low, high = wilson(clean["semantic"], judged)
    words = f"Of {judged} clean pairs of runs that did not overflow, {clean['semantic']} were called semantic"
    key = "oracle_error_reference"
    tried = sum(one["measures"][key]["n"] for _, one in found if _clean(one) and key in one["measures"])
    return [
        f"{words} [{low:.2%}, {high:.2%}]. In {tried} both arms ran in float64 as well; {clean['identical']} were the "
        "same to the bit, which needs none."
    ]


def _caught(found: Found) -> list[str]:
    caught = [one["measures"]["caught"] for _, one in found if one["protocol"] == "self_check"]
    if not caught:
        return []
    hits, n = sum(round(one["value"] * one["n"]) for one in caught), sum(one["n"] for one in caught)
    low, high = wilson(hits, n)
    return [f"Of {n} planted faults, {hits} were caught, named and located [{low:.1%}, {high:.1%}]."]


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
    low, high = wilson(n - equal, n)
    words = f"The same path twice gave the same bits in {equal} of {n} (other bits in {low:.2%} to {high:.2%})"
    sizes = [one["measures"]["replica_max_abs"]["value"] for one in told if "replica_max_abs" in one["measures"]]
    known = [size for size in sizes if size is not None]
    return [words + (f"; otherwise up to {max(known):.3g} in a logit: nothing finer is claimed." if known else ".")]
