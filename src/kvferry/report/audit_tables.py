"""Tables of the page of audits, each out of the findings of all runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.report.audit_said import Found, Row, dtype_of, live, once, share
from kvferry.report.tables import markdown

DTYPES = ("bfloat16", "float16", "float32", "float64")

NOT_RUN = "Not run."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, or that there is nothing."""
    return "\n".join(markdown(head, rows)) if rows else NOT_RUN


def told(measure: Row, digits: int = 3) -> str:
    """A value with its interval and n; none of n as an upper bound."""
    value, ci, n = measure["value"], measure["ci"], measure["n"]
    if value is None:
        return f"none (n {n})"
    if value == 0 and ci is not None and ci[0] == 0:
        return f"0 (≤ {ci[1]:.2g}; n {n})"
    interval = "" if ci is None else f"[{ci[0]:.{digits}g}, {ci[1]:.{digits}g}]; "
    return f"{value:.{digits}g} ({interval}n {n})"


def models_of(found: Found) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(model for model, _ in found))


def _pairs(found: Found, model: str) -> dict[str, Row]:
    """ON against OFF on fixed prefixes, by dtype."""
    own = [one for name, one in found if name == model and one["protocol"] in ("fixed_prefix", "precision_2x2")]
    return {dtype_of(one): one for one in own if once(one)}


def cell(finding: Row, measure: str) -> str:
    """A measure of a finding; of a median that was not reached, how far one looked."""
    found = finding["measures"][measure]
    if found["value"] is None:
        horizon = finding["detail"].get("suffix_tokens") or finding["detail"].get("new_tokens")
        return f"not reached in {horizon} (n {found['n']})" if horizon else f"none (n {found['n']})"
    return told(found)


FIXED: tuple[tuple[str, str], ...] = (
    ("sequences that differ", "sequences_differing"),
    ("flips of OFF's first choice", "flip_rate_clustered"),
    ("flips beyond rounding", "unexplained_flips"),
    ("largest margin at a flip", "margin_at_flips_max"),
    ("margin, median", "margin_median"),
    ("flips of OFF against float64", "oracle_flip_rate_reference"),
    ("flips of ON against float64", "oracle_flip_rate_other"),
    ("KL of ON from OFF, mean", "kl_mean"),
    ("KL, the other way", "kl_reverse_mean"),
    ("KL, p50", "kl_p50"),
    ("KL, p95", "kl_p95"),
    ("KL, p99", "kl_p99"),
    ("KL, largest", "kl_max"),
    ("largest difference of a logit, p50", "max_abs_p50"),
    ("largest difference of a logit, p99", "max_abs_p99"),
    ("largest difference of a logit", "max_abs_max"),
)
"""What measures of fixed prefixes are called."""


def fixed(found: Found) -> str:
    """ON against OFF on fixed prefixes, a column a model and dtype."""
    columns = [
        (f"{model}, {dtype}", pairs[dtype])
        for model in models_of(found)
        if (pairs := _pairs(found, model))
        for dtype in DTYPES
        if dtype in pairs and "kl_mean" in pairs[dtype]["measures"]
    ]
    rows = [
        (title, *(told(one["measures"][key]) if key in one["measures"] else "" for _, one in columns))
        for title, key in FIXED
    ]
    rows += [
        ("KL, p99 by quarter of the suffix", *(_depth(one["detail"]["by_depth"]) for _, one in columns)),
        ("layer of the first difference", *(_text(one["detail"].get("onset_layer")) for _, one in columns)),
        ("growth a layer of the residual's", *(_text(one["detail"].get("growth_per_layer")) for _, one in columns)),
    ]
    return table(("", *(name for name, _ in columns)), rows if columns else [])


def _depth(parts: Sequence[Row]) -> str:
    return ", ".join(f"{part['kl'][2]:.2g}" if "kl" in part else "none" for part in parts)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


FREE = (
    ("prompts_diverging", "prompts that part"),
    ("prompts_ended_together", "ended together"),
    ("divergence_per_token_at_risk", "a token at risk"),
    ("first_divergence_median", "median of all"),
    ("splits_at_the_edge", "splits at the sampler's edge"),
    ("steps_recomputed", "OFF steps recomputed"),
    ("accuracy_reference", "right, OFF"),
    ("accuracy_other", "right, ON"),
    ("answers_differing", "answers that differ"),
)
"""Measures of free runs, and what they are called."""


def free(found: Found) -> str:
    """Free runs, a row a model, dtype and sampler."""
    rows = [
        (
            model,
            dtype_of(one),
            one["detail"]["sampler"]["name"],
            *(cell(one, key) if key in one["measures"] else "" for key, _ in FREE),
            f"{sum(one['verdicts'].values())} of {one['n']}",
        )
        for model, one in found
        if one["protocol"] == "free_run"
    ]
    return table(("model", "dtype", "sampler", *(title for _, title in FREE), "ran twice, and in float64"), rows)


def constructions(found: Found) -> str:
    """Caches by construction, against a prefill at once."""
    rows = [
        (
            model,
            dtype_of(one),
            one["arms"][-1]["construction"],
            *(
                cell(one, key)
                for key in (
                    "suffix_differs",
                    "suffix_first_divergence_median",
                    "cache_l2_keys_median",
                    "cache_l2_values_median",
                    "max_abs_median_of_sequences",
                )
            ),
            _kinds(one["detail"].get("kinds", {})),
        )
        for model, one in found
        if one["protocol"] == "stage_replay" and live(one) and "cache_l2_keys_median" in one["measures"]
    ]
    head = ("model", "dtype", "construction", "suffixes that differ", "first divergence, median", "keys, relative L2")
    return table((*head, "values", "largest logit difference, median", "keys of sliding / full layers"), rows)


def _kinds(kinds: Mapping[str, Row]) -> str:
    if len(kinds) < 2:
        return ""
    return " / ".join(f"{name} {kinds[name]['keys']:.2g}" for name in sorted(kinds, reverse=True))


def faults(found: Found) -> str:
    """What was planted, and as what it was found."""
    rows = []
    for model, one in found:
        if one["protocol"] != "self_check":
            continue
        expected, caught, known = one["detail"]["expected"], one["measures"]["caught"], one["diagnosis"]
        rows.append(
            (
                model,
                one["arms"][-1]["change"],
                f"layer {expected['layer']}, {expected['tensor']}: {expected['name']}",
                f"{one['verdict']}, layer {one['layer']}, {one['tensor']}: {known['name'] if known else 'no name'}",
                share(round(caught["value"] * caught["n"]), caught["n"]),
                one["reasons"][1].removeprefix("begins in ") if len(one["reasons"]) > 1 else "",
            )
        )
    return table(("model", "fault", "expected", "found in most", "caught", "where it begins"), rows)


def oracle(found: Found) -> str:
    """Which arm is nearer to float64."""
    keys = ("oracle_error_reference", "oracle_error_other", "oracle_error_difference", "oracle_other_nearer")
    rows = [
        (
            model,
            dtype_of(one),
            one["protocol"],
            f"{arm(one['arms'][0])}, {arm(one['arms'][1])}",
            *(told(one["measures"][key]) for key in keys),
        )
        for model, one in found
        if keys[-1] in one["measures"] and one["protocol"] != "self_check" and once(one)
    ]
    head = ("model", "dtype", "protocol", "first and second arm", "error of the first", "of the second", "difference")
    return table((*head, "second is nearer"), rows)


def transplants(found: Found) -> str:
    """What part of one run's cache in the other's gives what, a row a part, a column a direction."""
    rows = []
    for model in models_of(found):
        own = [one for name, one in found if name == model and one["protocol"] == "transplant"]
        by = {one["detail"]["direction"]: one["detail"]["matrix"] for one in own}
        for part in dict.fromkeys(part for matrix in by.values() for part in matrix):
            cells = []
            for direction in ("donor_to_recipient", "recipient_to_donor"):
                row = by.get(direction, {}).get(part)
                cells += ["", ""] if row is None else [_of(row, "recovered", "n"), _of(row, "exact", "n_exact")]
            rows.append((model, part, *cells))
    head = ("model", "part", "donor into recipient: tokens", "logits to the bit", "recipient into donor: tokens")
    return table((*head, "logits to the bit"), rows)


def _of(row: Row, hits: str, n: str) -> str:
    return share(row[hits], row[n])


def patches(found: Found) -> str:
    """What a patch of the residual stream restores: by layer, steps after it, and position."""
    rows = []
    for model, one in found:
        if one["protocol"] != "residual_patch":
            continue
        for row in one["detail"]["matrix"]:
            rows.append(
                (
                    model,
                    one["detail"]["direction"].replace("_", " "),
                    str(row["layer"]),
                    _shares(row["restored"][:1]),
                    _shares(row["restored"][1:]),
                    _shares(row.get("by_position", [])),
                    str(row["n"][0]),
                )
            )
    head = ("model", "direction", "behind layer", "own step, median", "steps after it", "own step by position")
    return table((*head, "patches"), rows)


def _shares(values: Iterable[float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.2f}" for value in values)


def stages(found: Found) -> str:
    """Where the distance of a given cache to the receiver's own comes from: a row a stage."""
    rows = [
        (
            model,
            row["stage"],
            _text(row["cache_l2"]),
            _text(row["kl_mean"]),
            _text(row["max_abs"]),
            f"{row['flips']} of {row['n']}",
        )
        for model, one in found
        if one["protocol"] == "given_cache"
        for row in one["detail"]["stages"]
    ]
    head = ("model", "cache", "relative L2 to the own", "KL, mean", "largest logit difference", "flips")
    return table(head, rows)


def verdicts(found: Found) -> str:
    """The verdict on every pair of arms but planted faults."""
    rows = [
        (
            model,
            one["protocol"],
            arm(one["arms"][-1], dtype=True),
            ", ".join(f"{verdict} {count}" for verdict, count in one["verdicts"].items()),
            "" if one["layer"] is None else f"{one['layer']}, {one['tensor']}",
            "" if one["replicas"] is None else str(one["replicas"]),
            one["reasons"][0] if one["reasons"] else "",
        )
        for model, one in found
        if one["protocol"] not in ("self_check", "given_cache") and once(one)
    ]
    head = ("model", "protocol", "second arm", "verdicts of sequences", "begins in layer", "same bits twice")
    return table((*head, "decided by, first sequence"), rows)


def arm(described: Row, *, dtype: bool = False) -> str:
    """An arm in words: what builds the cache, what decodes, and all that is not the model's own."""
    said = [] if not dtype else [str(described["dtype"])]
    said.append(f"{described['construction']}/{described['decode']}")
    more = {k: v for k, v in described.items() if k not in ("dtype", "attn", "threads", "construction", "decode")}
    said += [f"{name.replace('_', ' ')} {value}" for name, value in more.items()]
    return ", ".join(said)
