"""What audits found, in sentences: each is computed from the findings, and says what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvferry.evidence.statistics import mcnemar, wilson

Row = Mapping[str, Any]

Found = Sequence[tuple[str, Row]]
"""Model and finding."""

LIVE = ("incremental", "decoded(16)")
"""Constructions that stand for a cache as it is decoded."""

FACTOR = 65_536
"""Ratio of the epsilons of bfloat16 and float32."""


def sentences(own: Sequence[Row]) -> list[str]:
    """What holds of one model and what does not, as far as it was run."""
    return [sentence for tell in TOLD for sentence in tell(own)]


def live(finding: Row) -> bool:
    """Whether the second arm's cache came about as decoding makes it."""
    return finding["arms"][-1]["construction"] in LIVE


def once(finding: Row) -> bool:
    """`precision_2x2` has the pair of `fixed_prefix` among its own: that one counts once."""
    return bool(finding["protocol"] != "precision_2x2" or finding["arms"][-1]["dtype"] == "float32")


def counted(measure: Row) -> str:
    """A rate as hits of n, with its interval; none is given as an upper bound."""
    return share(round(measure["value"] * measure["n"]), measure["n"])


def share(hits: int, n: int) -> str:
    """Hits of n with Wilson's interval, as an upper bound where there are none."""
    if not n:
        return "0 of 0"
    low, high = wilson(hits, n)
    return f"{hits} of {n} (at most {high:.1%})" if not hits else f"{hits} of {n} [{low:.1%}, {high:.1%}]"


def dtype_of(finding: Row) -> str:
    """Of the second arm."""
    return str(finding["arms"][-1]["dtype"])


def _of(own: Iterable[Row], protocol: str, measure: str) -> list[Row]:
    return [one for one in own if one["protocol"] == protocol and measure in one["measures"]]


def _free(own: Sequence[Row]) -> list[str]:
    said = []
    for one in _of(own, "free_run", "prompts_diverging"):
        measures, sampler, dtype = one["measures"], one["detail"]["sampler"]["name"], dtype_of(one)
        rate = measures["prompts_diverging"]
        words = f"{sampler} runs in {dtype} part on {counted(rate)} prompts within {_longest(one)} tokens"
        hits = round(rate["value"] * rate["n"])
        if sampler == "greedy" and dtype == "float32":
            words += ", none, as in 'The Illusion of Equivalence'" if not hits else ", where that paper has none"
        elif sampler == "greedy":
            holds = "holds" if hits == rate["n"] else "does not hold at this length"
            words += f": that all of them do, as that paper has it of float16, {holds}"
        ended = measures.get("prompts_ended_together")
        if ended is not None and ended["value"]:
            words += f"; {counted(ended)} ended together before that"
        said.append(words + _screened(measures) + _edges(one) + ".")
    return said


def _screened(measures: Row) -> str:
    if "steps_recomputed" not in measures:
        return ""
    words = (
        f"; OFF was screened: {measures['steps_recomputed']['value']:.1%} of its steps were near enough to a tie to be "
        "recomputed"
    )
    whole = measures.get("screening_agrees")
    if whole is not None:
        agreed = round(whole["value"] * whole["n"])
        words += f", and recomputed at every step it was the same on {agreed} of the {whole['n']} prompts tried"
    return words


def _edges(finding: Row) -> str:
    """Of drawn runs: at how many splits a token had crossed the edge of what is drawn from, and how near the rest."""
    splits = [one for one in finding["detail"].get("splits", []) if one.get("crossed") is not None]
    if finding["detail"]["sampler"]["name"] == "greedy" or not splits:
        return ""
    near = [min(one["margins"]) for one in splits if not one["crossed"] and None not in one["margins"]]
    words = (
        f"; at {sum(one['crossed'] for one in splits)} of {len(splits)} splits a token had crossed the edge of what "
    )
    words += "is drawn from"
    return words + (f", and at the others one run's choice led by {max(near):.2g} at most" if near else "")


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
        words = f"answers in {dtype_of(one)}: OFF right {counted(off)}, ON {counted(on)}"
        if "right_in_reference_alone" in measures:
            alone = [round(measures[f"right_in_{arm}_alone"]["value"] * off["n"]) for arm in ("reference", "other")]
            words += f"; in OFF alone {alone[0]}, in ON alone {alone[1]}"
        words += (
            f" (McNemar's exact p {measures['accuracy_mcnemar_p']['value']:.3g}): {side}; "
            f"{counted(measures['answers_differing'])} differ"
        )
        if max(off["value"], on["value"]) < 0.1:
            words += "; so few are right that their number says nothing of ON against OFF"
        said.append(words + ".")
    return said


def _constructions(own: Sequence[Row]) -> list[str]:
    said = []
    distances: dict[str, float] = {}
    for one in _of(own, "stage_replay", "cache_l2_median"):
        if live(one):
            distances[dtype_of(one)] = max(
                distances.get(dtype_of(one), 0.0), one["measures"]["cache_l2_median"]["value"]
            )
    for one in _of(own, "stage_replay", "suffix_differs"):
        if one["arms"][-1]["construction"] != "incremental":
            continue
        words = (
            f"suffixes from a cache built token by token and from a prefill differ in {dtype_of(one)} in "
            f"{counted(one['measures']['suffix_differs'])} within {one['detail']['suffix_tokens']} tokens"
        )
        if dtype_of(one) == "bfloat16":
            words += " ('Stage-Replay Divergence': 83 %, over suffixes of its own length, with a median of 88 tokens)"
        said.append(words + ".")
    if distances.get("bfloat16") and distances.get("float32"):
        factor = distances["bfloat16"] / distances["float32"]
        said.append(
            f"from bfloat16 to float32 the distance between constructions falls {factor:,.0f} times; the ratio "
            f"of the two epsilons is {FACTOR:,}."
        )
    return said


def _orders(own: Sequence[Row]) -> list[str]:
    """How much smaller the KL of ON from OFF is in float32 than in bfloat16."""
    kl = {
        dtype_of(one): one["measures"]["kl_mean"]["value"]
        for protocol in ("precision_2x2", "fixed_prefix")
        for one in _of(own, protocol, "kl_mean")
    }
    if not (kl.get("bfloat16") and kl.get("float32")):
        return []
    return [
        f"the mean KL of ON from OFF falls from {kl['bfloat16']:.3g} in bfloat16 to {kl['float32']:.3g} in float32, "
        f"{kl['bfloat16'] / kl['float32']:.2g} times: it is quadratic in the difference of the logits, which would "
        "explain the eight orders of 'The Illusion of Equivalence'."
    ]


def _transplants(own: Sequence[Row]) -> list[str]:
    tables = [one for one in own if one["protocol"] == "transplant" and "whole" in one["detail"]["matrix"]]
    if not tables:
        return []
    said = []
    whole = [one["detail"]["matrix"]["whole"] for one in tables]
    exact, n = sum(row["exact"] for row in whole), sum(row["n_exact"] for row in whole)
    holds = "holds" if exact == n else "does not hold"
    each = "; ".join(
        f"{one['detail']['direction'].replace('_', ' ')} {share(row['recovered'], row['n'])}"
        for one, row in zip(tables, whole, strict=True)
    )
    first = tables[0]["detail"]
    said.append(
        f"that the cache is the carrier {holds}: a whole transplant gives the donor's logits to the bit in {exact} of "
        f"{n}, and its tokens: {each}; donor and recipient part in {first['parted']} of {first['screened']} passages."
    )
    followed = hybrids(tables)
    if followed is not None:
        keys, values, neither = followed
        said.append(
            f"of {keys + values + neither} caches with one run's keys and the other's values, {keys} give the text of "
            f"the keys' run, {values} of the values' run and {neither} another one (sign test of the first two, p = "
            f"{mcnemar(keys, values):.2f})."
        )
    parts = [part for part in first["matrix"] if part != "whole" and not part.startswith("control")]
    enough = [part for part in parts if all(_all_exact(one["detail"]["matrix"].get(part)) for one in tables)]
    if parts:
        told = ", ".join(enough) if enough else "none"
        said.append(f"parts of a cache that always give the donor's logits to the bit, of {len(parts)} tried: {told}.")
    controls = [part for part in first["matrix"] if part.startswith("control")]
    same = all(_all_exact(one["detail"]["matrix"].get(part)) for one in tables for part in controls)
    said.append(
        f"the controls of transplants (own cache, built again) {'are' if same else 'are not'} the same to the bit."
    )
    return said


def _all_exact(row: Row | None) -> bool:
    return row is not None and bool(row["n_exact"]) and row["exact"] == row["n_exact"]


def hybrids(tables: Sequence[Row]) -> tuple[int, int, int] | None:
    """Caches of the keys of one run and the values of the other: how many gave the keys' run's tokens, the values'
    run's, and neither's.

    The donor's keys in the recipient are the recipient's values in the donor: either direction tells of the same
    caches what the other does not.
    """
    by = {one["detail"]["direction"]: one["detail"]["matrix"] for one in tables}
    if len(by) != 2 or not all("keys" in matrix and "values" in matrix for matrix in by.values()):
        return None
    keys = sum(matrix["keys"]["recovered"] for matrix in by.values())
    values = sum(matrix["values"]["recovered"] for matrix in by.values())
    n = sum(matrix["keys"]["n"] for matrix in by.values())
    return keys, values, n - keys - values


def _patches(own: Sequence[Row]) -> list[str]:
    said = []
    for one in _of(own, "residual_patch", "restored_same_step_all_layers_mean_clipped"):
        if one["detail"]["direction"] != "off_into_on":
            continue
        at, later = (
            one["measures"].get(f"restored_{step}_all_layers_mean_clipped") for step in ("same_step", "later_steps")
        )
        if at is None or later is None:
            continue
        low, high = later["ci"] or (later["value"], later["value"])
        restores = "does not restore" if low <= 0 <= high else "restores a part of" if low > 0 else "makes worse"
        said.append(
            f"OFF's residual stream put into ON at one position closes, as a mean over layers, {_mean(at)} of "
            f"the distance at its own step and {_mean(later)} at the {one['detail']['horizon']} that follow "
            f"(n = {one['n']} passages): it {restores} later steps, which read keys and values that are still ON's. "
            "Behind the last layer, which no key or value comes after, that is so by construction."
        )
    return said


def _mean(measure: Row) -> str:
    interval = "" if measure["ci"] is None else f" [{measure['ci'][0]:.2f}, {measure['ci'][1]:.2f}]"
    return f"{measure['value']:.2f}{interval}"


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
            f"nearer to float64 in {dtype_of(one)} is {side}: relative L2 {errors[0]:.3g} of OFF, {errors[1]:.3g} of "
            f"ON, n = {measure['n']} sequences that differ."
        )
    return said


def _padded(own: Sequence[Row]) -> list[str]:
    """What left padding alone does, beside ON against OFF."""
    padded = [
        one
        for one in _of(own, "batch", "kl_mean")
        if one["arms"][-1].get("left_padding") and not one["arms"][-1].get("batch")
    ]
    beside = {dtype_of(one): one["measures"]["kl_mean"] for one in _of(own, "fixed_prefix", "kl_mean")}
    return [
        f"left padding alone moves the predictions in {dtype_of(one)} by a mean KL of "
        f"{one['measures']['kl_mean']['value']:.2g} (n = {one['n']}); ON against OFF "
        f"{beside[dtype_of(one)]['value']:.2g} (n = {beside[dtype_of(one)]['n']})."
        for one in padded
        if dtype_of(one) in beside
    ]


def _overflows(own: Sequence[Row]) -> list[str]:
    return [
        f"{dtype_of(one)} overflows in {one['verdicts']['overflow']} of {one['n']} sequences, first in layer "
        f"{one['layer']}, {one['tensor']} ({one['reasons'][0].partition(':')[0]}): free runs in it are not run."
        for one in own
        if one["protocol"] == "fixed_prefix" and one["verdict"] == "overflow"
    ]


def _shipped(own: Sequence[Row]) -> list[str]:
    """What carries most of a shipped cache's distance, and the flips that margins predict."""
    said = []
    for one in _of(own, "given_cache", "expected_flips"):
        layers, flips = one["detail"]["layers"][:4], one["measures"]["flip_rate"]
        most = ", ".join(f"{row['tensor']} of layer {row['layer']} {row['share']:.0%}" for row in layers)
        said.append(
            f"a shipped cache is `{one['verdict']}`: {one['reasons'][0]}; most of its squared distance lies in {most}; "
            f"margins predict {one['measures']['expected_flips']['value']:.1f} flips in {flips['n']}, there are "
            f"{round(flips['value'] * flips['n'])} (n = 1 cache)."
        )
    return said


TOLD: tuple[Callable[[Sequence[Row]], list[str]], ...] = (
    _free,
    _answers,
    _constructions,
    _orders,
    _transplants,
    _patches,
    _nearer,
    _padded,
    _overflows,
    _shipped,
)
"""What is said of each model, in this order."""
