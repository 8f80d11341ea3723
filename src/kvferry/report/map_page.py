"""What mappers of a pair are worth, as one page of Markdown; every number comes out of the studies' JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.report.files import writable_folder
from kvferry.report.page import read
from kvferry.report.tables import made_with, markdown
from kvferry.snapshot.files import write_text

Row = Mapping[str, Any]

DIRECTIONS = {"up": "child to parent", "down": "parent to child"}
"""By the second word of a file's name: ``map-up-ridge-eval.json``."""


def write_map_page(folder: Path, files: Iterable[Path]) -> str:
    """Write ``map.md`` into ``folder``; returns its path.

    Args:
        folder: made where it is missing.
        files: ``map-….json``, as the commands' ``--json`` and the studies write them.

    Raises `InvalidInput` where a file is none of these.
    """
    found = {path.stem.removeprefix("map-"): read(path) for path in files}
    lines = [
        "# Mapping: another model's cache from this one's",
        "",
        "Made from the JSON files beside it by `make results-map`; not edited by hand. Brackets hold 95% intervals:",
        "of a context gain and a difference by bootstrap over windows or questions, of a rate Wilson's. *computed*:",
        "share of the prefix's tokens that the target ran on, the native first ones included.",
        "",
    ]
    if "pair" in found:
        lines += ["## The pair", "", *_pair(found["pair"]["result"]), ""]
    for direction, title in DIRECTIONS.items():
        mine = {
            name.removeprefix(f"{direction}-"): content
            for name, content in found.items()
            if name.startswith(f"{direction}-")
        }
        if mine:
            lines += [f"## {title.capitalize()}", "", *_direction(mine), ""]
    if "turns" in found:
        lines += ["## Turns", "", *_turns(found["turns"]["result"]), ""]
    if "gate" in found:
        lines += ["## The gate", "", *_gate(found["gate"]["result"]), ""]
    lines += [
        "## Made with",
        "",
        *(f"- {name}: {made_with(content['environment'])}" for name, content in found.items()),
        "",
    ]
    page = writable_folder(folder) / "map.md"
    write_text(page, "\n".join(lines))
    return str(page)


def _pair(result: Row) -> list[str]:
    rows = [("layers kept", ", ".join(map(str, result["kept"])))]
    for key, value in result["made"].items():
        within = value if isinstance(value, Mapping) else {"": value}
        for name, own in within.items():
            if isinstance(own, str | int | float):
                rows.append((f"{key} {name}".strip(), f"{own:.4g}" if isinstance(own, float) else str(own)))
    return markdown(("", ""), rows)


def _direction(mine: Mapping[str, Row]) -> list[str]:
    fits = {name.removesuffix("-fit"): content["result"] for name, content in mine.items() if name.endswith("-fit")}
    evals = {name.removesuffix("-eval"): content["result"] for name, content in mine.items() if name.endswith("-eval")}
    lines: list[str] = []
    if fits:
        lines += ["### Fits", "", *markdown(_FIT_HEAD, [_fit_row(name, fit) for name, fit in fits.items()]), ""]
        for name, fit in fits.items():
            if fit["tries"]:
                lines += [f"Held-out R² of the tries of `{name}`:", "", *_tries(fit["tries"]), ""]
    for name, result in evals.items():
        size = result["settings"]
        exact = "exact" if result["identity_exact"] else "**NOT exact: no row below counts**"
        lines += [
            f"### {name}",
            "",
            f"{size['windows']} windows of {size['prefix']} + {size['suffix']} tokens; the target's own cache through "
            f"the whole path: {exact}. *computed*: of the prefix, what the target ran on; *time*: of mapping and "
            "of that, over the target's own prefill.",
            "",
            *markdown(_ROW_HEAD, [_eval_row(row, result["seconds"]["prefill"]) for row in result["rows"]]),
            "",
        ]
        if result["tasks"]:
            lines += [*markdown(_TASK_HEAD, [_task_row(task) for task in result["tasks"]]), ""]
    if "bench" in mine:
        bench = mine["bench"]["result"]
        lines += ["### Latency", "", f"Medians of {bench['repeats']}, in one run.", ""]
        lines += markdown(_BENCH_HEAD, [_bench_row(row) for row in bench["rows"]])
    return lines


_FIT_HEAD = ("mapper", "layers", "λ", "R² keys", "R² values", "parameters", "bytes", "fit", "fit / models", "moments")


def _fit_row(name: str, fit: Row) -> tuple[str, ...]:
    seconds = fit["seconds"]
    return (
        name,
        str(fit["top_k"] or "all"),
        f"{fit['ridge']:g}",
        f"{fit['r2_mean']['keys']:.3f}",
        f"{fit['r2_mean']['values']:.3f}",
        f"{fit['parameters']:,}",
        f"{fit['bytes']:,}",
        f"{seconds['fit']:.0f} s",
        f"{seconds['ratio']:.2f}",
        f"{fit['moments_bytes']:,}",
    )


def _tries(tries: Sequence[Row]) -> list[str]:
    rows = [
        (str(row["top_k"] or "all"), f"{row['ridge']:g}", _number(row["keys"]), _number(row["values"])) for row in tries
    ]
    return markdown(("layers", "λ", "R² keys", "R² values"), rows)


_ROW_HEAD = (
    "target goes on from",
    "ppl",
    "KL mean",
    "p95",
    "max",
    "top-1",
    "context gain",
    "cosine",
    "computed",
    "time",
)


def _eval_row(row: Row, prefill: float) -> tuple[str, ...]:
    """``prefill``: seconds of the target's own, of which *time* is the share."""
    took = sum(row["seconds"].values())
    gain = row["context_gain"]
    interval = "" if gain["ci"] is None else f" [{gain['ci'][0]:.3f}, {gain['ci'][1]:.3f}]"
    return (
        row["name"],
        _number(row["ppl"], 2),
        _number(row["kl_mean"], 4),
        _number(row["kl_p95"], 3),
        _number(row["kl_max"], 2),
        _number(row["top1_agreement"]),
        "" if gain["recovered"] is None else f"{gain['recovered']:.3f}{interval}",
        _number(row["attention_cosine"]),
        "" if row["share"] is None else f"{100 * row['share']:.1f}%",
        f"{100 * took / prefill:.1f}%" if took else "",
    )


_TASK_HEAD = ("task", "cache", "n", "source", "target", "mapped", "retention", "over chance", "difference", "McNemar p")


def _task_row(task: Row) -> tuple[str, ...]:
    def rate(name: str) -> str:
        low, high = task[f"{name}_ci"]
        return f"{task[name]:.3f} [{low:.3f}, {high:.3f}]"

    ci = task["difference_ci"]
    return (
        *(task["name"], task["arm"], str(task["n"]), rate("source"), rate("target"), rate("mapped")),
        *(_number(task["retention"]), _number(task["retention_floor"])),
        "" if ci is None else f"[{ci[0]:.3f}, {ci[1]:.3f}]",
        f"{task['p']:.3g}",
    )


_BENCH_HEAD = (
    *("tokens", "own prefill", "map", "native and recompute", "in all"),
    *("own / map", "own / all", "own / all, cold"),
)


def _bench_row(row: Row) -> tuple[str, ...]:
    return (
        f"{row['tokens']:,}",
        f"{row['prefill']:.3f} s",
        f"{row['map']:.4f} s",
        f"{row['transfer'] - row['map']:.4f} s",
        f"{row['transfer']:.4f} s",
        f"{row['speedup_map_only']:.1f}",
        f"{row['speedup']:.1f}",
        _number(row["speedup_cold"], 1),
    )


def _turns(result: Row) -> list[str]:
    by_turn: dict[tuple[str, int], list[Row]] = {}
    for row in result["rows"]:
        by_turn.setdefault((row["begins"], row["turn"]), []).append(row)
    rows = [
        (
            begins,
            str(turn),
            f"{sum(row['n'] for row in group):,}",
            f"{_mean(group, 'kl_mean'):.4f}",
            f"{max(row['kl_max'] for row in group):.3f}",
            f"{_mean(group, 'top1_agreement'):.3f}",
            f"{group[0]['native'] / group[0]['context']:.2f}",
        )
        for (begins, turn), group in by_turn.items()
    ]
    head = ("begins with", "turn", "tokens", "KL mean", "KL max", "top-1", "of the context its own")
    return [
        f"A prefills {result['first']} tokens, then both take turns of {result['turn']}; each keeps what it computed.",
        "",
        *markdown(head, rows),
    ]


def _mean(rows: Sequence[Row], name: str) -> float:
    weights = [row["n"] for row in rows]
    return float(sum(row[name] * weight for row, weight in zip(rows, weights, strict=True)) / sum(weights))


def _gate(result: Row) -> list[str]:
    rows = []
    for row in result["rows"]:
        low, high = row["ci"]
        opened = f"{row['opened']} [{low:.3f}, {high:.3f}]"
        rows.append((row["mapper"], str(row["n"]), opened, _brief(row["reasons"])))
    return markdown(("mapper", "texts", "opened, and the rate's interval", "a reason"), rows)


def _brief(reasons: Sequence[str]) -> str:
    said = [reason for reason in reasons if reason]
    return said[0][:160] if said else ""


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
