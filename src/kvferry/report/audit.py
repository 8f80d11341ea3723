"""Figures of audits, drawn from findings as JSON: nothing is computed again."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import InvalidInput
from kvferry.report.files import check_folder, writable_folder
from kvferry.snapshot.files import write_text

Row = Mapping[str, Any]


def require_writable(folder: str) -> None:
    """Raise `InvalidInput` before any work is done where figures could not be written or drawn."""
    check_folder(folder)
    _pyplot()


def write(findings: Sequence[Row], folder: str, *, title: str = "") -> list[str]:
    """Write every figure that the findings have data for, as SVG; returns their paths.

    Args:
        findings: `Finding.to_json` of each.
        folder: where they go.
        title: stands above each.
    """
    target = writable_folder(folder)
    written = []
    for index, finding in enumerate(findings):
        for name in FIGURES:
            path = target / f"{index:02d}-{finding['protocol']}-{name}.svg"
            if draw(finding, name, path, title=title):
                written.append(str(path))
    return written


def draw(finding: Row, name: str, path: Path, *, title: str = "") -> bool:
    """Draw one figure of a finding into an SVG file, the same bytes each time; ``False``: it has no data for it."""
    needs, function = FIGURES[name]
    if not all(key in finding["detail"] for key in needs):
        return False
    pyplot = _pyplot()
    with pyplot.rc_context({"svg.hashsalt": "kvferry", "svg.fonttype": "none"}):
        figure = function(finding)
        figure.suptitle(f"{title} {finding['protocol']}: {_arms(finding)}", fontsize=9)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    write_text(path, out.getvalue())
    return True


def heat(finding: Row) -> Any:
    """Drift by layer × position: keys, values, attention, residual."""
    pyplot = _pyplot()
    maps = finding["detail"]["heat"]
    figure, axes = pyplot.subplots(1, len(maps), figsize=(4 * len(maps), 3.6), layout="constrained")
    image = None
    for axis, (name, rows) in zip(axes, maps.items(), strict=True):
        data = [[math.nan if value is None or value <= 0 else math.log10(value) for value in row] for row in rows]
        tokens = finding["detail"]["heat_tokens"]
        image = axis.imshow(
            data,
            aspect="auto",
            origin="lower",
            vmin=-8,
            vmax=0,
            cmap="magma",
            extent=(0, tokens, -0.5, len(rows) - 0.5),
        )
        axis.axvline(finding["detail"]["start"], color="#66ccee", linewidth=0.8)
        axis.set_title(name)
        axis.set_xlabel("position")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="log10 of relative L2", shrink=0.8)
    return figure


def survival(finding: Row) -> Any:
    """Share of runs still together, by position, with its interval."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    detail = finding["detail"]
    curve = detail["survival"]
    times, surviving = [0, *curve["times"]], [1.0, *curve["surviving"]]
    low, high = (
        [
            1.0,
            *[share if bound is None else bound for bound, share in zip(curve[side], curve["surviving"], strict=True)],
        ]
        for side in ("low", "high")
    )
    # Runs go on behind the last divergence, up to where they are censored.
    times.append(max(times[-1], detail.get("new_tokens") or detail.get("suffix_tokens") or 0))
    for course in (surviving, low, high):
        course.append(course[-1])
    axis.step(times, surviving, where="post", color="#4477aa")
    axis.fill_between(times, low, high, step="post", color="#4477aa", alpha=0.2)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("token after the prompt")
    axis.set_ylabel("share not yet diverged")
    axis.set_title(f"{curve['events']} of {curve['n']} diverged", fontsize=9)
    return figure


def margins(finding: Row) -> Any:
    """At every flip, the reference's margin against the largest logit difference: a flip lies below the line."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(4.6, 4), layout="constrained")
    points = finding["detail"]["flips"]
    axis.scatter([b for _, b in points], [a for a, _ in points], s=14, color="#ee6677")
    most = max((max(pair) for pair in points), default=1.0) or 1.0
    axis.plot([0, most / 2], [0, most], color="#888888", linewidth=0.8)
    axis.set_xlabel("largest difference of a logit")
    axis.set_ylabel("margin of the reference")
    axis.set_title(f"{len(points)} flips; line: margin = twice the difference", fontsize=9)
    return figure


def oracle(finding: Row) -> Any:
    """Errors of both arms against float64, position by position."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(4.6, 4), layout="constrained")
    points = [(a, b) for a, b in finding["detail"]["oracle_points"] if a and b]
    axis.scatter([a for a, _ in points], [b for _, b in points], s=8, alpha=0.6, color="#228833")
    if points:
        least, most = min(map(min, points)), max(map(max, points))
        axis.plot([least, most], [least, most], color="#888888", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_yscale("log")
    axis.set_xlabel("error of the reference")
    axis.set_ylabel("error of the other arm")
    axis.set_title("logits, relative L2 to float64", fontsize=9)
    return figure


def matrix(finding: Row) -> Any:
    """Transplants: what part recovers what; or patches: layer × steps after."""
    pyplot = _pyplot()
    table = finding["detail"]["matrix"]
    if isinstance(table, Mapping):
        names = list(table)
        shares = [
            [
                row["exact"] / row["n_exact"] if row["n_exact"] else math.nan,
                row["recovered"] / row["n"] if row["n"] else math.nan,
                math.nan if row["restored_median"] is None else row["restored_median"],
            ]
            for row in table.values()
        ]
        columns = ["logits to the bit", "tokens", "first logits restored"]
    else:
        names = [f"layer {row['layer']}" for row in table]
        shares = [[math.nan if value is None else value for value in row["restored"]] for row in table]
        columns = ["patched step", *[f"+{offset}" for offset in range(1, len(shares[0]))]]
    figure, axis = pyplot.subplots(figsize=(2 + 1.3 * len(columns), 1.2 + 0.3 * len(names)), layout="constrained")
    axis.imshow(shares, aspect="auto", vmin=0, vmax=1, cmap="viridis")
    for line, row in enumerate(shares):
        for column, value in enumerate(row):
            if not math.isnan(value):
                ink = "#000000" if value > 0.6 else "#ffffff"
                axis.text(column, line, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    axis.set_xticks(range(len(columns)), columns, fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    return figure


FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Row], Any]]] = {
    "drift": (("heat",), heat),
    "survival": (("survival",), survival),
    "margins": (("flips",), margins),
    "oracle": (("oracle_points",), oracle),
    "matrix": (("matrix",), matrix),
}
"""Name -> what a finding's detail must hold, and the function that draws it."""


def _arms(finding: Row) -> str:
    shown = []
    for arm in finding["arms"]:
        shown.append(", ".join(str(value) for name, value in arm.items() if name not in ("attn", "threads")))
    return "  |  ".join(shown)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InvalidInput("figures need matplotlib: pip install 'kvferry[report]'") from error
    if "MPLBACKEND" not in os.environ:
        mpl.use("svg")
    from matplotlib import pyplot

    return pyplot
