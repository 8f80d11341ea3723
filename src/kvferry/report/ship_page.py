"""Sweeps, parts studies and progressive packets as one page of Markdown; every number comes out of their JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import InvalidInput
from kvferry.report.files import writable_folder
from kvferry.report.tables import brief_quantizers, made_with, markdown
from kvferry.snapshot.files import write_text

Row = Mapping[str, Any]

TITLES = {
    "paper": "The paper's policies at its nominal budgets",
    "default": "The default policy, fixed rates and transform coding at equal actual bytes",
    "ladder": "The ladder of quantisers at one budget",
    "small": "Transform coding",
    "needle": "Needles",
    "parts": "What each part of the transform codec buys",
    "progressive": "Progressive packets",
}
"""Sections in order, by the last part of a file's name: ``ship-MODEL-paper.json``."""

_LEAST = re.compile("least budget is ([0-9.]*[0-9])")

GOALS = {0.52: 0.1, 0.28: 0.15, 0.25: 0.3, 0.2: 1.0, 0.15: 0.3, 0.1: 0.5, 0.07: 1.0, 0.05: 3.0}
"""Actual budget → the rise of perplexity, in percent, that is aimed at."""

EQUAL_BYTES = 1.01
"""Packets that differ by less are of equal bytes."""

_SWEEPS = ("default", "paper", "ladder", "small")
"""Parts that sweep policies on the same windows."""


def write_ship_page(folder: Path, files: Iterable[Path]) -> list[str]:
    """Write ``ship.md`` into ``folder``; returns its path.

    Args:
        folder: made where it is missing.
        files: ``ship-….json``, as ``kvferry ship sweep --json`` and the studies write them.

    Raises `InvalidInput` where a file is none of these.
    """
    found: dict[str, list[tuple[str, Row]]] = {}
    for path in files:
        found.setdefault(_section(path), []).append((path.name, _read(path)))
    lines = [
        "# Shipping: quality at equal bytes",
        "",
        "Made from the JSON files beside it by `make results`; not edited by hand. What the figures say is in",
        "[ship-notes.md](ship-notes.md).",
        "",
        "*budget* is actual: bytes of the packet, header, maps, scales and checksums in, over those of the packet with",
        "every token at 16 bit. *Δ%*: change of the perplexity of the suffix, scored through the cached decode path,",
        "against the 16-bit cache; in brackets its 95% interval (bootstrap over windows). *KL*: mean to the 16-bit",
        "cache's predictions, nats a token; *largest*: of one token. *top-1*: same most likely token.",
        "",
    ]
    for name, title in TITLES.items():
        for file, result in sorted(found.get(name, ()), key=lambda pair: pair[0]):
            lines += [f"## {title}: {_model(result)}", "", *_provenance(file, result), ""]
            lines += [*SECTIONS[name](result["result"]), ""]
            if name == "default":
                rows = [
                    row
                    for part in _SWEEPS
                    for _, other in found.get(part, ())
                    if _model(other) == _model(result)
                    for row in other["result"]["rows"]
                ]
                lines += [*standing(result["result"]["rows"], rows), ""]
    page = writable_folder(folder) / "ship.md"
    write_text(page, "\n".join(lines))
    return [str(page)]


def _section(path: Path) -> str:
    name = path.stem.rsplit("-", 1)[-1]
    if not path.name.startswith("ship-") or name not in TITLES:
        raise InvalidInput(f"{path} is no result of a study of ship: its name ends in none of {', '.join(TITLES)}")
    return name


def _read(path: Path) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is no result of a study: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("result"), dict) or "environment" not in found:
        raise InvalidInput(f"{path} is no result of a study: it has no result, or no environment")
    return found


def _model(result: Row) -> str:
    found = result["result"]
    if "model" not in found:  # a study of several
        return ", ".join(dict.fromkeys(str(row["model"]) for row in found["rows"]))
    return str(found["model"]["model"] if isinstance(found["model"], Mapping) else found["model"])


def _provenance(file: str, result: Row) -> list[str]:
    made = result["environment"]
    settings = result["result"].get("settings", {})
    sizes = ""
    if settings.get("windows"):
        sizes = f"; {settings['windows']} windows, prefix {settings['prefix']:,}, suffix {settings['suffix']:,}"
    dtype = "" if made["dtype"] is None else f", {made['dtype']}"
    return [f"Made with {made_with(made)}{dtype}{sizes} (`{file}`)."]


def sweep_section(result: Row) -> list[str]:
    """A line a method, dearest first."""
    lines = []
    for row in sorted(result["rows"], key=lambda row: -(row["budget"] if row["budget"] is not None else -1.0)):
        asked = row["asked"]
        wanted = f"{asked['budget']:g}" if asked["budget"] is not None else ""
        if asked["nominal_budget"] is not None:
            wanted = f"b = {asked['nominal_budget']:g}"
        if row["reason"] is not None:
            least = _LEAST.search(row["reason"])
            why = f"not possible below {least[1]}" if least else "not possible"
            lines.append((row["policy"], f"{asked['quantizers'] or 'its own'}: {why}", wanted, *[""] * 7))
            continue
        lines.append(
            (
                row["policy"],
                brief_quantizers(row["quantizer"]),
                wanted,
                f"{row['budget']:.4f}",
                _number(row["ppl"], ".3f"),
                _number(row["ppl_delta_pct"], "+.3f"),
                _interval(row["ppl_delta_ci"]),
                _number(row["kl_mean"], ".5f"),
                _number(row["kl_max"], ".3f"),
                _number(row["top1_agreement"], ".4f"),
            )
        )
    head = ("policy", "quantiser (keys / values)", "asked", "budget", "ppl", "Δ%", "95%", "KL", "largest", "top-1")
    return [*markdown(head, lines), *goal_lines(result["rows"])]


def standing(default: Sequence[Row], others: Sequence[Row]) -> list[str]:
    """Each packet of the default policy beside the best that any other method did with at most as many bytes.

    Another is better beyond noise where the interval of its Δ% lies below the default's. The policies that the default
    itself takes are among the others.
    """
    lines = []
    measured = [row for row in others if row["ppl_delta_ci"] is not None and row["policy"] not in ("full", "auto")]
    for row in default:
        if row["ppl_delta_ci"] is None or row["policy"] != "auto":
            continue
        near = [other for other in measured if other["budget"] <= row["budget"] * EQUAL_BYTES]
        if not near:
            continue
        best = min(near, key=lambda other: float(other["kl_mean"]))
        better = [other for other in near if other["ppl_delta_ci"][1] < row["ppl_delta_ci"][0]]
        lines.append(
            (
                f"{row['budget']:.4f}",
                f"{row['ppl_delta_pct']:+.3f} {_interval(row['ppl_delta_ci'])}",
                _number(row["kl_mean"], ".5f"),
                f"{best['policy']} at {best['budget']:.4f}",
                f"{best['ppl_delta_pct']:+.3f} {_interval(best['ppl_delta_ci'])}",
                _number(best["kl_mean"], ".5f"),
                str(len(near)),
                ", ".join(f"**{other['policy']} at {other['budget']:.4f}**" for other in better) or "none",
            )
        )
    head = (
        *("budget", "Δ% of the default", "KL", "least KL of another", "its Δ%", "its KL"),
        *("others of as many bytes or fewer", "better beyond noise"),
    )
    return markdown(head, lines) if lines else []


def goal_lines(rows: Sequence[Row]) -> list[str]:
    """For each budget that is aimed at and was asked for: what came of it."""
    lines = []
    for row in rows:
        budget = row["asked"]["budget"]
        if row["asked"]["policy"] not in ("auto", "fast", "klt"):
            continue
        goal = GOALS.get(budget) if budget is not None else None
        if goal is None or row["ppl_delta_pct"] is None:
            continue
        low, high = row["ppl_delta_ci"]
        verdict = "met" if row["ppl_delta_pct"] <= goal else "**not met**"
        if verdict == "met" and high > goal:
            verdict = "met by the mean; the interval reaches beyond"
        elif verdict != "met" and low <= goal:
            verdict = "**not met** by the mean; the interval reaches it"
        lines.append(
            (
                f"{row['asked']['policy']} at {budget:g}",
                f"≤ {goal:+g}%",
                f"{row['ppl_delta_pct']:+.3f}% [{low:+.2f}, {high:+.2f}]",
                verdict,
            )
        )
    return ["", *markdown(("goal", "aimed at", "reached", ""), lines)] if lines else []


def needle_section(result: Row) -> list[str]:
    """A line a method: how many needles were found."""
    lines = []
    for row in sorted(result["rows"], key=lambda row: -(row["budget"] if row["budget"] is not None else -1.0)):
        needle = row["needle"]
        if row["reason"] is not None or needle is None:
            continue
        low, high = needle["ci"]
        lines.append(
            (
                row["policy"],
                f"{row['budget']:.4f}",
                f"{needle['hits']} / {needle['n']}",
                f"[{low:.3f}, {high:.3f}]",
            )
        )
    return markdown(("policy", "budget", "found", "95%"), lines)


def parts_section(result: Row) -> list[str]:
    """A line a variant, and what a general-purpose compressor makes of the packets."""
    lines = [
        (
            row["variant"],
            f"{row['budget']:.4f}",
            _number(row["kl_mean"], ".5f"),
            _number(row["ppl_delta_pct"], "+.3f"),
            _interval(row["ppl_delta_ci"]),
            _number(row["encode_seconds"], ".2f"),
            _number(row["decode_seconds"], ".2f"),
        )
        for row in result["rows"]
    ]
    head = ("variant", "budget", "KL", "Δ%", "95%", "encode s", "decode s")
    packed = result["zstd_of_packet"]
    return [*markdown(head, lines), "", f"zstd makes {packed:.4f} of the whole codec's packets."]


_LEVELS = (
    ("packet", "the packet, and the refinement's header", "first_share"),
    ("level_1", "level 1", "level_1_share"),
    ("exact", "level 2, all bits", "total_share"),
    ("uniform_int8", "beside it: uniform INT8", None),
)


def progressive_section(result: Row) -> list[str]:
    """A table a model and dtype: how good the cache is when so many bytes have come."""
    lines: list[str] = []
    for row in result["rows"]:
        proof = "bit-exact" if row["bit_exact"] else "**NOT bit-exact**"
        speed = row["gb_per_s"]
        lines += [
            f"{row['model']}, {row['dtype']}: {row['windows']} windows of {row['prefix']:,} + {row['suffix']} tokens; "
            f"the last level is {proof}. GB/s of the cache, one thread: refine {speed['refine']:.3f}, level 1 "
            f"{speed['level_1']:.3f}, level 2 {speed['level_2']:.3f}, memcpy {speed['memcpy']:.1f}.",
            "",
        ]
        rows = []
        for key, title, share in _LEVELS:
            found = row["fidelity"][key]
            rows.append(
                (
                    title,
                    "" if share is None else f"{row[share]:.4f}",
                    str(found["n"]),
                    *(f"{found[name]:.5f}" for name in ("kl_mean", "kl_p50", "kl_p95", "kl_max")),
                    f"{found['top1_agreement']:.4f}",
                )
            )
        head = ("after", "share of the 16-bit packet", "tokens", "KL", "median", "p95", "largest", "top-1")
        lines += [*markdown(head, rows), ""]
    return lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"[{pair[0]:+.2f}, {pair[1]:+.2f}]"


SECTIONS: dict[str, Callable[[Row], list[str]]] = {
    "paper": sweep_section,
    "default": sweep_section,
    "ladder": sweep_section,
    "small": sweep_section,
    "needle": needle_section,
    "parts": parts_section,
    "progressive": progressive_section,
}
