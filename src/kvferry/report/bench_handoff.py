"""Results of ``kvferry bench handoff`` as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]

_PARTS = ("prefill", "encode", "wire", "decode", "install", "first_token")
_EXPLAINED = (
    "Medians of n hand-offs (quartiles in brackets, where there are several), in milliseconds. Two processes in "
    "two network namespaces, joined by a real link shaped with `tc`; encrypted; both models loaded and warm; "
    "combinations in random order. Parts of a pipelined hand-off overlap. *wire* is the time during which at "
    "least one frame was under way. *computed* is the packet's bytes over the link's rate. A *progressive* packet "
    "is refined after the first token, until the cache is exact. *unshipped* is the prompt's TTFT in the producer "
    "alone. *bound* is 1.1 · (max(prefill, wire) + min(prefill, wire) / layers) + install + first token, each as "
    "measured in the plain hand-offs beside it, which send the same packet after the prefill; *met by* is the "
    "share of hand-offs that meet it with their own prefill instead."
)


def render_bench(result: Row, environment: Row) -> str:
    """The tables of one run, a section a prompt length.

    Args:
        result: `HandoffBenchResult.to_json`.
        environment: what it was made with, as every command's ``--json`` has it.
    """
    settings, rows = result["settings"], result["rows"]
    lines = [
        f"## Time to the first token over shaped links: {settings['model']}",
        "",
        f"{environment.get('cpu')}, {environment.get('cpus')} CPUs for both processes; {settings['dtype']}, "
        f"attention {settings['attn']}; torch {environment.get('torch')}, transformers "
        f"{environment.get('transformers')}; revision {environment.get('git_revision')}; seed {settings['seed']}.",
        "",
        _EXPLAINED,
        "",
        *_verdict(rows),
    ]
    for tokens in sorted({row["tokens"] for row in rows}):
        lines += [f"### {tokens:,} tokens", "", *_table([row for row in rows if row["tokens"] == tokens]), ""]
    if result["skipped"]:
        lines += ["### Not measured", ""]
        lines += [f"- {each['combination']}: {each['reason']}" for each in result["skipped"]] + [""]
    return "\n".join(lines)


def _verdict(rows: Sequence[Row]) -> list[str]:
    said = [*_bound(rows), *_progressive(rows), *_wire(rows)]
    return [*(f"- {sentence}" for sentence in said), *([""] if said else [])]


def _bound(rows: Sequence[Row]) -> list[str]:
    judged = [row for row in rows if row["bound"] is not None]
    if not judged:
        return []
    met = sum(row["bound"]["met"] for row in judged)
    least, n = min(row["n"] for row in judged), sum(row["n"] for row in judged)
    own = round(sum(row["bound"]["met_by"] * row["n"] for row in judged))
    return [
        f"The bound is met in {met} of {len(judged)} combinations, by the medians of n = {least} or more; with a "
        f"hand-off's own prefill in its place, by {own} of {n} hand-offs."
    ]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("tokens", "link", "policy", "pipelined"))


def _progressive(rows: Sequence[Row]) -> list[str]:
    """The first token of progressive packets beside that of plain ones of the same budget."""
    plain = {(*_key(row), row["budget_asked"]): row for row in rows if not row["progressive"]}
    ratios = [
        row["seconds"]["ttft"]["median"] / beside["seconds"]["ttft"]["median"]
        for row in rows
        if row["progressive"] and (beside := plain.get((*_key(row), row["budget_asked"]))) is not None
    ]
    if not ratios:
        return []
    return [
        f"The first token out of a progressive packet comes after {median(ratios):.2f} of the time that it takes out "
        f"of a plain one (median of {len(ratios)} pairs of combinations; {min(ratios):.2f} to {max(ratios):.2f})."
    ]


SLOW = ("100mbit", "500mbit", "1gbit")
"""Links on which the wire counts."""


def _wire(rows: Sequence[Row]) -> list[str]:
    """Time on the wire and its share of the time to the first token, over those of a packet of 16 bit."""
    own = [row for row in rows if row["link"] in SLOW and not row["pipelined"] and not row["progressive"]]
    whole = {(row["tokens"], row["link"]): row for row in own if row["budget_asked"] == 1}
    told = []
    for budget in sorted({row["budget_asked"] for row in own} - {1}, reverse=True):
        pairs = [
            (row, whole[row["tokens"], row["link"]])
            for row in own
            if row["budget_asked"] == budget and (row["tokens"], row["link"]) in whole
        ]
        if pairs:
            wire = median(a["seconds"]["wire"]["median"] / b["seconds"]["wire"]["median"] for a, b in pairs)
            share = median(a["transfer_share"] / b["transfer_share"] for a, b in pairs)
            told.append(f"{budget:g}: {wire:.2f} and {share:.2f}")
    if not told:
        return []
    return [
        "Time on the wire, and its share of the time to the first token, of plain packets over those of 16 bit, by "
        f"budget, medians over lengths and links of 1 Gbit/s and less: {'; '.join(told)}."
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    head = (
        "link", "budget", "actual", "packet, MB", "mode", "n", *(part.replace("_", " ") for part in _PARTS), "computed",
        "TTFT", "unshipped", "wire / TTFT", "bound", "met", "met by",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(_cells(row))} |" for row in rows]


def _cells(row: Row) -> list[str]:
    seconds, bound, computed = row["seconds"], row["bound"], row["wire_computed"]
    policy = "" if row["policy"] == "auto" else f" {row['policy']}"
    refined = f" progressive, exact at {_ms(row['refined']['exact']['median'])}" if row["refined"] else ""
    return [
        row["link"],
        f"{row['budget_asked']:g}{policy}{refined}",
        f"{row['budget']:.3f}",
        f"{row['packet_bytes'] / 1e6:.2f}",
        "pipelined" if row["pipelined"] else "plain",
        str(row["n"]),
        *(_ms(seconds[part]["median"]) for part in _PARTS),
        "" if computed is None else _ms(computed),
        _spread(seconds["ttft"], row["n"]),
        _ms(row["ttft_unshipped"]["median"]),
        f"{row['transfer_share']:.2f}",
        "" if bound is None else _ms(bound["seconds"]),
        "" if bound is None else ("yes" if bound["met"] else "no"),
        "" if bound is None else f"{bound['met_by']:.0%}",
    ]


def _ms(value: float) -> str:
    return f"{1e3 * value:,.0f}" if value >= 0.01 else f"{1e3 * value:.1f}"


def _spread(spread: Row, n: int) -> str:
    if n == 1:
        return f"**{_ms(spread['median'])}**"
    low, high = spread["quartiles"]
    return f"**{_ms(spread['median'])}** [{_ms(low)} to {_ms(high)}]"
