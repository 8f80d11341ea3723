"""Results of the benchmarks as one page of Markdown and one plot; every number comes out of their JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvferry.errors import InvalidInput
from kvferry.report.files import writable_folder
from kvferry.report.tables import markdown
from kvferry.snapshot.files import write_text

Row = Mapping[str, Any]

OURS = "kvferry"
GOALS = ((8, 0.8), (0, 0.6))
"""Bits from which on, and the ratio to memcpy that is asked for."""

PLOT = "speed.svg"
_COLORS = {"encode": "#4477aa", "decode": "#ee6677", "pack": "#88aacc", "unpack": "#ffaabb"}
_MANY_BYTES = 0.4
_LEFT, _WIDTH, _BAR, _FOOT = 300, 900, 9, 34


def write_page(folder: Path, files: Iterable[Path]) -> list[str]:
    """Write ``speed.md`` and the plot into ``folder``; returns their paths.

    Args:
        folder: made where it is missing.
        files: JSON objects of benchmarks, as their ``--json`` writes them; sections come in the order of `SECTIONS`.

    Raises `InvalidInput` where a file is none of these.
    """
    results = [_read(path) for path in files]
    folder = writable_folder(folder)
    page = folder / "speed.md"
    written = [str(page)]
    codec = next((each for each in results if each["command"] == "bench codec"), None)
    if codec is not None:
        write_text(folder / PLOT, plot(codec["result"]["rows"]))
        written.append(str(folder / PLOT))
    write_text(page, render(results))
    return written


def _read(path: Path) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is no result of a benchmark: {error}") from error
    if not isinstance(found, dict) or found.get("command") not in SECTIONS or not isinstance(found.get("result"), dict):
        raise InvalidInput(f"{path} is no result of a benchmark; those of {', '.join(SECTIONS)} are")
    return found


def render(results: Sequence[Row]) -> str:
    """The page."""
    order = list(SECTIONS)
    parts = ["# Speed", "", "Made from the JSON files beside it by `make bench`; not edited by hand.", ""]
    for each in sorted(results, key=lambda found: order.index(found["command"])):
        parts += [SECTIONS[each["command"]](each["result"], each["environment"]).rstrip("\n"), ""]
    return "\n".join(parts)


def codec_section(result: Row, environment: Row) -> str:
    """Goals, then a table a size and number of threads."""
    rows = result["rows"]
    lines = [
        "## Codec",
        "",
        _made_with(environment),
        f"Kernels at level {result['isa']}; heads of {result['settings']['head_dim']}.",
        "",
        "GB/s count bytes of the source. In brackets the ratio to memcpy of the same bytes by one thread, the median "
        "of pairs taken one right after the other, and its quartiles. *size*: encoded bytes over source bytes; "
        "*error*: relative L2 distance of what comes out, for noise. Ours writes into buffers that are there; peers "
        "allocate as they do. *pack* and *unpack* are the whole verbs `encode` and `decode`: plan, header, checksums, "
        "fresh memory.",
        "",
        f"![ratio to memcpy]({PLOT})",
        "",
        *goals(rows),
        *fastest_peers(rows),
    ]
    for megabytes, threads in sorted({(row["megabytes"], row["threads"]) for row in rows}):
        mine = [row for row in rows if (row["megabytes"], row["threads"]) == (megabytes, threads)]
        copied = {row["dtype"]: row["memcpy_gb_per_s"] for row in mine}
        copies = ", ".join(f"{speed:.1f} GB/s beside {dtype}" for dtype, speed in copied.items())
        lines += [f"### {megabytes:g} MiB, {threads} thread{'s' * (threads > 1)}", "", f"memcpy: {copies}.", ""]
        lines += [*_codec_table(mine), ""]
    if result["skipped"]:
        lines += ["### Not measured", ""]
        lines += [f"- {each['peer']}, {each['dtype']}: {each['reason']}" for each in result["skipped"]] + [""]
    return "\n".join(lines)


def goals(rows: Sequence[Row]) -> list[str]:
    """For each of our quantisers with one thread: the least ratio to memcpy, beside what is asked for."""
    table = []
    kinds = {(row["quantizer"], row["megabytes"], row["dtype"]): 0 for row in _kernels(rows) if row["threads"] == 1}
    for quantizer, megabytes, dtype in kinds:
        mine = [
            row
            for row in _kernels(rows)
            if (row["quantizer"], row["megabytes"], row["dtype"], row["threads"]) == (quantizer, megabytes, dtype, 1)
        ]
        asked = next(ratio for bits, ratio in GOALS if _bits(quantizer) >= bits)
        by_op = {row["op"]: row["ratio"] for row in mine}
        met = "yes" if min(by_op.values()) >= asked else "**no**"
        table.append(
            (quantizer, dtype, f"{megabytes:g}", f"{by_op['encode']:.2f}", f"{by_op['decode']:.2f}", f"{asked:g}", met)
        )
    head = ("quantizer", "dtype", "MiB", "encode / memcpy", "decode / memcpy", "asked", "met")
    return ["### Against memcpy, one thread", "", *markdown(head, table), ""] if table else []


def fastest_peers(rows: Sequence[Row]) -> list[str]:
    """INT8 and INT4 beside the fastest peer whose encoded form is about as large."""
    table = []
    places = {(row["dtype"], row["megabytes"], row["threads"]): 0 for row in rows}
    for dtype, megabytes, threads in places:
        here = [row for row in rows if (row["dtype"], row["megabytes"], row["threads"]) == (dtype, megabytes, threads)]
        for quantizer, large in (("sym8", True), ("sym4", False)):
            for op in ("encode", "decode"):
                own = [row for row in _kernels(here) if (row["quantizer"], row["op"]) == (quantizer, op)]
                peers = [
                    row
                    for row in here
                    if row["op"] == op and row["peer"] != OURS and (row["size"] > _MANY_BYTES) == large
                ]
                if not own or not peers:
                    continue
                best = max(peers, key=lambda row: float(row["gb_per_s"]))
                table.append(
                    (
                        f"{quantizer} {op}", dtype, f"{megabytes:g}", str(threads), f"{own[0]['gb_per_s']:.2f}",
                        f"{best['peer']}, {best['quantizer']}", f"{best['gb_per_s']:.2f}",
                        f"{own[0]['gb_per_s'] / best['gb_per_s']:.1f}",
                    )
                )  # fmt: skip
    head = ("work", "dtype", "MiB", "threads", "GB/s", "fastest peer", "its GB/s", "times")
    return ["### Against the fastest peer", "", *markdown(head, table), ""] if table else []


def _kernels(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["peer"] == OURS and row["op"] in ("encode", "decode")]


def _bits(quantizer: str) -> int:
    digits = "".join(char if char.isdigit() else " " for char in quantizer).split()
    return int(digits[0]) if digits else 16 if quantizer == "raw" else 0


def _codec_table(rows: Sequence[Row]) -> list[str]:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    works = (("encode", "pack", "memcpy"), ("decode", "unpack"))
    arms = list(dict.fromkeys((row["peer"], row["quantizer"]) for row in rows))
    table = []
    for peer, quantizer in arms:
        mine = [row for row in rows if (row["peer"], row["quantizer"]) == (peer, quantizer)]
        cells = []
        for dtype in dtypes:
            for names in works:
                found = [row for row in mine if row["dtype"] == dtype and row["op"] in names]
                cells.append(_speed(found[0]) if found else "")
        whole = " (pack, unpack)" if mine[0]["op"] in ("pack", "unpack") else ""
        error = mine[0]["relative_error"]
        error_text = "" if error is None else f"{error:.2g}"
        table.append((peer, quantizer + whole, f"{mine[0]['size']:.3f}", error_text, *cells))
    head = (
        "codec",
        "quantizer",
        "size",
        "error",
        *(f"{op} {dtype}" for dtype in dtypes for op in ("encode", "decode")),
    )
    return markdown(head, table)


def _speed(row: Row) -> str:
    low, high = row["ratio_quartiles"]
    return f"{row['gb_per_s']:.2f} ({row['ratio']:.2f}; {low:.2f} to {high:.2f}; n {row['n']})"


def handoff_section(result: Row, environment: Row) -> str:
    """Time to the first token; see `kvferry.report.bench_handoff`."""
    from kvferry.report.bench_handoff import render_bench

    return render_bench(result, environment)


def memory_section(result: Row, environment: Row) -> str:
    """Peaks and their bounds; what a hundred hand-offs leave behind."""
    table = [
        (
            row["work"], row["packet"], _mib(row["peak_bytes"]), _mib(row["bound_bytes"]),
            ", ".join(f"{name.replace('_', ' ')} {_mib(size)}" for name, size in row["parts"].items()),
            _yes(row["within"]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    flat = [
        (
            row["end"], str(row["handoffs"]), _mib(row["cache_bytes"]), _mib(row["growth_bytes"]),
            str(row["threads_more"]), str(row["files_more"]), _yes(row["within"]),
        )
        for row in result["flat"]
    ]  # fmt: skip
    return "\n".join(
        [
            "## Memory",
            "",
            _made_with(environment),
            "",
            "Peak of resident memory, each in a fresh process, beyond what it held before there was any cache; in MiB. "
            "*produce* and *consume* are the two ends of a hand-off over a socket; by its defaults glibc keeps freed "
            "frames for later, which the last rows count in.",
            "",
            *markdown(("work", "packet", "peak", "bound", "of", "within"), table),
            "",
            "Many hand-offs of small caches between two processes: growth from the second tenth of them to the last.",
            "",
            *markdown(("end", "hand-offs", "cache, MiB", "growth, MiB", "threads more", "files more", "flat"), flat),
        ]
    )


def faults_section(result: Row, environment: Row) -> str:
    """The fault table, and the peers that mean harm."""
    settings = result["settings"]
    outcomes = ("right", "error", "wrong", "hang", "leak", "crash")
    table = [
        (
            row["fault"], str(row["n"]), *(str(row[name]) for name in outcomes),
            ", ".join(f"{name} {count}" for name, count in row["errors"].items()), str(row["reconnects"]),
            f"{row['median_seconds']:.2f}", f"{row['longest_wait']:.2f}",
        )
        for row in result["rows"]
    ]  # fmt: skip
    peers = [
        (
            row["peer"], str(row.get("tries", "")), str(row.get("got", "")), f"{row['right']} of {row['honest']}",
            f"{row['longest_seconds']:.2f}", f"{row['memory_growth_mib']:.1f}", _yes(row["good"]),
        )
        for row in result["hostile"]
    ]  # fmt: skip
    return "\n".join(
        [
            f"## {result['n']:,} faults",
            "",
            _made_with(environment),
            "",
            "Each is one hand-off over a socket with a fault at a random byte or message; time-out "
            f"{settings['timeout']:g} s for any one wait, {settings['stall']:g} s of silence before a new connection. "
            "*right*: the cache has the very bits of the packet's; *error*: a typed error in time; *hang*: a wait "
            f"longer than the time-out and {settings['grace']:g} s of grace; *leak*: threads or files left behind.",
            "",
            *markdown(
                ("fault", "n", *outcomes, "errors", "reconnects", "median, s", "longest wait, s"),
                [*table, _total(result["rows"], outcomes)],
            ),
            "",
            "Peers that mean harm, or have no key, at work while honest hand-offs go on: *got* counts what they were "
            "given, growth is the server's memory in MiB.",
            "",
            *markdown(("peer", "tries", "got", "honest hand-offs right", "longest, s", "growth", "good"), peers),
        ]
    )


def _total(rows: Sequence[Row], outcomes: Sequence[str]) -> tuple[str, ...]:
    counts = [str(sum(row[name] for row in rows)) for name in ("n", *outcomes)]
    return ("all", *counts, "", str(sum(row["reconnects"] for row in rows)), "", "")


def fuzz_section(result: Row, environment: Row) -> str:
    """What came of the mutants."""
    table = []
    for row in result["rows"]:
        outcomes = dict(row["outcomes"])
        refused = outcomes.pop("refused", 0)
        rest = ", ".join(f"{name}: {count:,}" for name, count in outcomes.items() if name not in ("fault", "crash"))
        table.append(
            (
                row["target"], f"{row['n']:,}", f"{refused:,}", rest, str(row["faults"]),
                f"{row['slowest_seconds']:.2f}", f"{row['memory_growth_mib']:.0f}",
            )
        )  # fmt: skip
    head = ("target", "n", "refused", "accepted", "crashes and faults", "slowest, s", "growth, MiB")
    return "\n".join(
        [
            f"## {result['n']:,} fuzzed inputs",
            "",
            _made_with(environment),
            "",
            "*Blind* mutants know nothing of the format; *signed* ones have every length and checksum right. Of what "
            "is accepted it is checked that it decodes to the very cache of a valid input, or changes no more than "
            "the frame that was forged, in the size and shape that the header said beforehand.",
            "",
            *markdown(head, table),
        ]
    )


SECTIONS: dict[str, Callable[[Row, Row], str]] = {
    "bench codec": codec_section,
    "bench handoff": handoff_section,
    "bench memory": memory_section,
    "bench faults": faults_section,
    "bench fuzz": fuzz_section,
}
"""Command of a result -> its section, in the page's order."""


def plot(rows: Sequence[Row]) -> str:
    """Bars of the ratio to memcpy, on a logarithmic axis: one thread, the largest tensor, the first dtype."""
    largest = max(row["megabytes"] for row in rows)
    fewest = min(row["threads"] for row in rows)
    dtype = rows[0]["dtype"]
    shown = [
        row
        for row in rows
        if (row["megabytes"], row["threads"], row["dtype"]) == (largest, fewest, dtype) and row["op"] in _COLORS
    ]
    arms = list(dict.fromkeys((row["peer"], row["quantizer"]) for row in shown))
    low = min(-1, math.floor(math.log10(min(row["ratio"] for row in shown))))
    high = max(0.3, math.log10(max(row["ratio"] for row in shown)))

    def place(ratio: float) -> float:
        return _LEFT + (math.log10(ratio) - low) / (high - low) * (_WIDTH - _LEFT - 60)

    title = f"Ratio to memcpy by one thread: {largest:g} MiB of {dtype}, {fewest} thread{'s' * (fewest > 1)}"
    pieces, top = [_text(0, 14, title, "start", "bold")], 30
    for peer, quantizer in arms:
        pieces.append(_text(_LEFT - 8, top + _BAR + 4, f"{peer}: {quantizer}", "end"))
        for row in (row for row in shown if (row["peer"], row["quantizer"]) == (peer, quantizer)):
            end = place(row["ratio"])
            pieces.append(
                f'<rect x="{_LEFT}" y="{top}" width="{max(1.0, end - _LEFT):.1f}" height="{_BAR - 1}" '
                f'fill="{_COLORS[row["op"]]}"><title>{escape(row["op"])}: {row["ratio"]:.3f}</title></rect>'
            )
            pieces.append(_text(end + 4, top + _BAR - 1, f"{row['op']} {row['ratio']:.2g}", "start", size=9))
            top += _BAR
        top += 7
    ticks = [10.0**power for power in range(low, math.floor(high) + 1)]
    for tick in ticks:
        line = f'<line x1="{place(tick):.1f}" y1="24" x2="{place(tick):.1f}" y2="{top}" stroke="#ccc"/>'
        pieces.insert(0, line)
        pieces.append(_text(place(tick), top + 14, f"{tick:g}", "middle"))
    height = top + _FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'font-family="sans-serif" font-size="12"><rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
        f"{''.join(pieces)}</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str, weight: str = "normal", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" fill="#222">'
        f"{escape(words)}</text>"
    )


def _made_with(environment: Row) -> str:
    command = " ".join(str(part) for part in environment.get("arguments", ()))
    return (
        f"{environment.get('cpu')}, {environment.get('cpus')} CPUs; Python {environment.get('python')}, torch "
        f"{environment.get('torch')}; revision {environment.get('git_revision')}; seed {environment.get('seed')}; "
        f"`{command}`."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _yes(true: bool) -> str:
    return "yes" if true else "**no**"
