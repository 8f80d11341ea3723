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
    def of(kind: str) -> dict[str, Row]:
        return {
            name.removesuffix(f"-{kind}"): content["result"]
            for name, content in mine.items()
            if name.endswith(f"-{kind}")
        }

    fits, evals = of("fit"), of("eval")
    lines: list[str] = []
    if fits:
        lines += ["### Fits", "", *markdown(_FIT_HEAD, [_fit_row(name, fit) for name, fit in fits.items()]), ""]
        lines += ["*peak*: most resident memory of the process of a fit that nothing had been kept for.", ""]
        for name, fit in fits.items():
            if fit["tries"]:
                lines += [f"Held-out R² of the tries of `{name}`:", "", *_tries(fit["tries"]), ""]
            lines += _training(name, fit["made"])
    if "explain" in mine:
        plot = Path(mine["explain"]["result"]["plot"]).name
        lines += [f"![Held-out R² of each target layer from each source layer alone]({plot})", ""]
    if evals:
        rows = [_r2_row(name, result) for name, result in evals.items()]
        lines += ["### R² on text that nothing was chosen on", "", *markdown(("mapper", "keys", "values"), rows), ""]
    for name, result in evals.items():
        size = result["settings"]
        exact = "exact" if result["identity_exact"] else "**NOT exact: no row below counts**"
        lines += [
            f"### {name}",
            "",
            f"{size['windows']} windows of {size['prefix']} + {size['suffix']} tokens; the target's own cache through "
            f"the whole path: {exact}. *computed*: of the prefix, what the target ran on; *time*: of mapping, choosing "
            "and of that, over the target's own prefill; *over source*: perplexity beside the source model alone.",
            "",
            *markdown(_ROW_HEAD, [_eval_row(row, result["seconds"]["prefill"]) for row in result["rows"]]),
            "",
        ]
        lines += _asked(result)
    for name, result in of("tasks").items():
        lines += [f"### {name}: questions and needles", "", *_asked(result)]
    if "bench" in mine:
        bench = mine["bench"]["result"]
        lines += ["### Latency", "", f"Medians of {bench['repeats']}, in one run.", ""]
        lines += markdown(_BENCH_HEAD, [_bench_row(row) for row in bench["rows"]])
    return lines


def _asked(result: Row) -> list[str]:
    """The tasks of an evaluation."""
    if not result["tasks"]:
        return []
    return [*markdown(_TASK_HEAD, [_task_row(task) for task in result["tasks"]]), ""]


def _training(name: str, made: Row) -> list[str]:
    """How a trained variant's error on held-out sequences went."""
    if "held_errors" not in made:
        return []
    judged = made["judged_by"]
    course = ", ".join(f"{look[judged]:.4g} ({look['step']})" for look in made["held_errors"])
    ended = "stopped early" if made["stopped_early"] else "to its end"
    kept = f"{made['epochs_done']:g} of {made['epochs']} epochs, {ended}; kept: that of epoch {made['epoch_kept']:g}"
    return [f"Held-out error ({judged}) of `{name}` by step: {course}. {kept}.", ""]


def _r2_row(name: str, result: Row) -> tuple[str, ...]:
    found = []
    for side in ("keys", "values"):
        known = [value for value in result["r2_judged"][side] if value is not None]
        found.append(_number(sum(known) / len(known) if known else None))
    return (name, *found)


_FIT_HEAD = (
    *("mapper", "layers", "λ", "R² keys", "R² values", "parameters", "bytes", "tokens", "fit", "fit / models"),
    *("moments", "peak"),
)


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
        f"{fit['made']['tokens_fit']:,}",
        f"{seconds['fit']:.0f} s",
        f"{seconds['ratio']:.2f}",
        f"{fit['moments_bytes']:,}",
        "" if fit["taken_up"] or fit["peak_bytes"] is None else f"{fit['peak_bytes']:,}",
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
    "over source",
)


def _eval_row(row: Row, prefill: float) -> tuple[str, ...]:
    """``prefill``: seconds of the target's own, of which *time* is the share."""
    took = sum(row["seconds"].values())
    gain = row["context_gain"]
    interval = "" if gain["ci"] is None else f" [{gain['ci'][0]:.3f}, {gain['ci'][1]:.3f}]"
    over = row["over_source"]
    return (
        f"{row['name']} (oracle: it looks at the target's own cache)" if row["oracle"] else row["name"],
        _number(row["ppl"], 2),
        _number(row["kl_mean"], 4),
        _number(row["kl_p95"], 3),
        _number(row["kl_max"], 2),
        _number(row["top1_agreement"]),
        "" if gain["recovered"] is None else f"{gain['recovered']:.3f}{interval}",
        _number(row["attention_cosine"]),
        "" if row["share"] is None else f"{100 * row['share']:.1f}%",
        f"{100 * took / prefill:.1f}%" if took and not row["oracle"] else "",
        "" if over is None else f"{over['ppl_delta_pct']:+.1f}%{_interval(over['ci'])}",
    )


def _interval(ci: Sequence[float] | None) -> str:
    return "" if ci is None else f" [{ci[0]:.3g}, {ci[1]:.3g}]"


_TASK_HEAD = (
    *("task", "cache", "computed", "n", "source", "target", "mapped", "retention", "over chance"),
    *("less target", "McNemar p", "less source", "McNemar p"),
)


def _task_row(task: Row) -> tuple[str, ...]:
    def rate(name: str) -> str:
        low, high = task[f"{name}_ci"]
        return f"{task[name]:.3f} [{low:.3f}, {high:.3f}]"

    return (
        *(task["name"], f"{task['arm']} (oracle)" if task["oracle"] else task["arm"]),
        *("" if task["share"] is None else f"{100 * task['share']:.1f}%", str(task["n"])),
        *(rate("source"), rate("target"), rate("mapped"), _number(task["retention"])),
        _number(task["retention_floor"]) + _interval(task["retention_floor_ci"]),
        *(_interval(task["difference_ci"]).strip(), f"{task['p']:.3g}"),
        *(_interval(task["over_source_ci"]).strip(), f"{task['source_p']:.3g}"),
    )


_BENCH_HEAD = (
    *("tokens", "own prefill", "map", "native and recompute", "install", "in all", "cold start", "source's prefill"),
    *("own / map", "own / all", "own / all, cold"),
)


def _bench_row(row: Row) -> tuple[str, ...]:
    cold = row["cold"]
    return (
        f"{row['tokens']:,}",
        f"{row['prefill']:.3f} s",
        f"{row['map']:.4f} s",
        f"{row['transfer'] - row['map']:.4f} s",
        f"{row['install']:.4f} s",
        f"{row['transfer'] + row['install']:.4f} s",
        "" if cold is None else f"{cold:.3f} s ({row['cold_repeats']})",
        f"{row['source_prefill']:.3f} s",
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
        "",
        *_extended(result["extended"]),
    ]


def _extended(rows: Sequence[Row]) -> list[str]:
    """One line: whether extending gives what mapping at once does."""
    most = max(row["max_abs"] for row in rows)
    splits = ", ".join(str(split) for split in sorted({row["split"] for row in rows}))
    same = "the same to the last bit" if most == 0 else f"at most {most:.3g} apart"
    return [
        f"A cache that is extended from {splits} tokens and one that is mapped at once: {same} ({len(rows)} tries)."
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
    windows, prefix, suffix = result["windows"]
    return [
        f"Judged: a record on a text of its own, {windows} windows of {prefix} + {suffix} tokens, by the default "
        f"floors. At a hand-off: a context of {result['context']} tokens, under a record. The same texts and contexts "
        "for each.",
        "",
        *markdown(("mapper", "times", "opened, and the rate's interval", "a reason"), rows),
    ]


def _brief(reasons: Sequence[str]) -> str:
    said = [reason for reason in reasons if reason]
    return said[0][:160] if said else ""


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
