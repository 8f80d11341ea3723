"""A page about hand-offs: what was sent, what it took, what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvferry.report.svg import timeline
from kvferry.report.tables import brief_quantizers
from kvferry.snapshot.files import write_text

Row = Mapping[str, Any]

PARTS = {
    "prefill": "#4477aa",
    "encode": "#66ccee",
    "wire": "#228833",
    "decode": "#ccbb44",
    "install": "#ee6677",
    "first_token": "#aa3377",
}
"""Parts of the time to the first token, in their order, and their colours."""

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child{text-align:left}pre{white-space:pre-wrap;background:#f6f6f6;padding:.8em}"
    "svg{max-width:100%;height:auto}small{color:#555}"
)


def write_report(folder: Path, rows: Sequence[Row], environment: Row) -> list[str]:
    """Write ``report.html`` and ``results.json`` about hand-offs into ``folder``; returns their paths.

    Args:
        folder: an existing folder.
        rows: `HandoffResult.to_json` of each.
        environment: what they were made with.
    """
    page, data = folder / "report.html", folder / "results.json"
    write_text(data, json.dumps({"environment": environment, "rows": rows}, indent=1, allow_nan=False) + "\n")
    write_text(page, render(rows, environment))
    return [str(page), str(data)]


def render(rows: Sequence[Row], environment: Row) -> str:
    """The page, in one piece: nothing is fetched when it is looked at."""
    first = rows[0]
    title = f"Hand-off of {first['producer']['model']}, {first['prompt_tokens']:,} tokens"
    drawing = timeline([(f"budget {_asked(row)}", row["timeline"]) for row in rows], PARTS)
    texts = "".join(
        f"<h3>budget {_asked(row)}: "
        f"{'the same tokens' if row['tokens_equal'] else 'other tokens from number ' + str(row['first_difference'])}"
        f"</h3><pre>{escape(row['text']['shipped'])}</pre>"
        for row in rows
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        "<p>One process prefilled the prompt and sent the cache; another, which shares nothing with it but a socket, "
        "installed the cache and went on greedily. Both were then fed the tokens of the run that was not shipped, and "
        "their logits compared.</p>"
        f"{_table(rows)}"
        "<h2>To the first token</h2>"
        f"{drawing}<p><small>Measured, on one machine, over the loopback interface. Encode, wire and decode overlap: "
        "a bar reaches from the first beginning to the last end; the table has the time spent inside.</small></p>"
        f"<h2>What was written</h2><h3>the prompt ends</h3><pre>{escape(first['text']['prompt_end'])}</pre>"
        f"<h3>unshipped</h3><pre>{escape(first['text']['local'])}</pre>{texts}"
        f"<h2>Made with</h2><pre>{escape(json.dumps(environment, indent=1))}</pre></body></html>\n"
    )


def _table(rows: Sequence[Row]) -> str:
    lines: list[tuple[str, Callable[[Row], str]]] = [
        ("budget, asked for", _asked),
        ("budget, actual bytes", lambda row: f"{row['budget']:.4f}"),
        ("budget, nominal", lambda row: f"{row['nominal_budget']:.4f}"),
        ("packet bytes", lambda row: f"{row['packet_bytes']:,}"),
        ("16-bit packet", lambda row: f"{row['full_bytes']:,}"),
        ("policy", lambda row: str(row["policy"])),
        ("quantiser, keys / values", lambda row: brief_quantizers(str(row["quantizer"]))),
        *((part.replace("_", " ") + ", ms", _milliseconds(part)) for part in PARTS),
        ("TTFT, ms", _milliseconds("ttft")),
        ("TTFT unshipped, ms", lambda row: f"{1e3 * row['local_seconds']['ttft']:.1f}"),
        ("KL, mean (nats)", lambda row: _number(row["kl_mean"])),
        ("KL, 95th percentile", lambda row: _number(row["fidelity"]["kl_p95"])),
        ("top-1 agreement", lambda row: _number(row["top1_agreement"])),
        ("positions compared", lambda row: str(row["fidelity"]["n"])),
        ("tokens equal", lambda row: "yes" if row["tokens_equal"] else "no"),
    ]
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(value(row))}</td>' for row in rows)}</tr>"
        for name, value in lines
    )
    return f"<table>{body}</table>"


def _asked(row: Row) -> str:
    return f"{row['budget_asked']:g}" if row["budget_asked"] is not None else f"nominal {row['nominal_budget']:g}"


def _milliseconds(part: str) -> Callable[[Row], str]:
    return lambda row: f"{1e3 * row['seconds'][part]:.1f}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
