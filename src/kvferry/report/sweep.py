"""What a sweep found, as CSV, figures, and a page that colours a text's tokens by their bits."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidInput
from kvferry.report.files import check_folder, writable_folder
from kvferry.snapshot.files import write_text

if TYPE_CHECKING:
    from kvferry.evaluate.bits import BitsMap
    from kvferry.evaluate.sweep import SweepResult, SweepRow

_COLORS = ((0.0, "#bbbbbb"), (2.0, "#4477aa"), (4.0, "#66ccee"), (8.0, "#ccbb44"), (16.0, "#ee6677"))
_STYLE = (
    "body{font:14px/1.7 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "p.text span{padding:1px 0}.key span{padding:2px 8px;margin-right:6px}"
)


def require_writable(csv_path: str | None, plots: str | None) -> None:
    """Raise `InvalidInput` before any work is done where its results could not be written."""
    if csv_path is not None:
        check_folder(Path(csv_path).parent)
    if plots is not None:
        check_folder(plots)
        _pyplot()


def write(result: SweepResult, tokenizer: Any, *, csv_path: str | None = None, plots: str | None = None) -> list[str]:
    """Write what was asked for; returns the paths."""
    written: list[str] = []
    if csv_path is not None:
        writable_folder(Path(csv_path).parent)
        write_text(Path(csv_path), as_csv(result.rows))
        written.append(csv_path)
    if plots is not None:
        folder = writable_folder(plots)
        quality = folder / "quality.svg"
        _save(quality_figure(result), quality)
        written.append(str(quality))
        shown = [(row, bits) for row, bits in zip(result.rows, result.maps, strict=True) if bits is not None]
        if shown:
            layers, page = folder / "bits.svg", folder / "tokens.html"
            _save(bits_figure(shown), layers)
            write_text(page, tokens_page(shown, tokenizer))
            written += [str(layers), str(page)]
    return written


def as_csv(rows: Sequence[SweepRow]) -> str:
    """A line a method; intervals in columns ``…_low`` and ``…_high``, settings in ``asked_…``, lists as JSON."""
    flat = [_flat(row.to_json()) for row in rows]
    names = list(dict.fromkeys(name for line in flat for name in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    line: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict) and name != "attention_cosine":
            line |= _flat(value, f"{before}{name}_")
        elif isinstance(value, tuple | list) and len(value) == 2:
            line |= {f"{before}{name}_low": value[0], f"{before}{name}_high": value[1]}
        elif isinstance(value, dict | tuple | list):
            line[before + name] = json.dumps(value)
        else:
            line[before + name] = value
    return line


def quality_figure(result: SweepResult) -> Any:
    """Loss of perplexity, and mean KL, against actual bytes: a line a policy and quantiser, bars for intervals."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
    lines: dict[str, list[SweepRow]] = {}
    for row in result.rows:
        if row.kl_mean is not None and row.budget and row.budget < 1:
            name = row.policy + (f" {row.asked.quantizers}" if row.asked.quantizers else "")
            lines.setdefault(name, []).append(row)
    for name, rows in lines.items():
        rows.sort(key=lambda row: row.budget or 0.0)
        budgets = [row.budget for row in rows]
        delta = [math.nan if row.ppl_delta_pct is None else row.ppl_delta_pct for row in rows]
        bars = [
            [
                max(0.0, value - row.ppl_delta_ci[0]) if row.ppl_delta_ci else 0.0
                for value, row in zip(delta, rows, strict=True)
            ],
            [
                max(0.0, row.ppl_delta_ci[1] - value) if row.ppl_delta_ci else 0.0
                for value, row in zip(delta, rows, strict=True)
            ],
        ]
        axes[0].errorbar(budgets, delta, yerr=bars, marker="o", capsize=3, label=name)
        axes[1].plot(budgets, [row.kl_mean for row in rows], marker="o", label=name)
    axes[0].set_yscale("symlog", linthresh=0.1)
    axes[0].axhline(0, color="#888888", linewidth=0.8)
    axes[1].set_yscale("log")
    for axis, title in zip(axes, ("change of perplexity, %", "KL(16 bit ‖ shipped), nats"), strict=True):
        axis.set_xlabel("actual bytes / bytes at 16 bit")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    if lines:
        axes[1].legend(fontsize="small")
    figure.suptitle(f"{result.model.get('model')}, {result.settings.windows} windows")
    figure.tight_layout()
    return figure


def bits_figure(shown: Sequence[tuple[SweepRow, BitsMap]]) -> Any:
    """For each method: a strip of its tokens, and its layers × tokens, keys and values apart, coloured by bits."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(shown), 3, figsize=(14, 2.0 * len(shown)), squeeze=False, width_ratios=(1, 1, 1), layout="constrained"
    )
    image = None
    for line, (row, bits) in zip(axes, shown, strict=True):
        for axis, data, title in (
            (line[0], bits.by_token()[None], f"{_title(row)}: tokens"),
            (line[1], bits.keys, "keys, by layer"),
            (line[2], bits.values, "values, by layer"),
        ):
            image = axis.imshow(data, aspect="auto", interpolation="nearest", vmin=0, vmax=16, cmap="viridis")
            axis.set_title(title, fontsize=7, loc="left")
            axis.tick_params(labelsize=6)
        line[0].set_yticks([])
    figure.colorbar(image, ax=axes, label="bits an element", shrink=0.6)
    return figure


def tokens_page(shown: Sequence[tuple[SweepRow, BitsMap]], tokenizer: Any) -> str:
    """A page with the text of the first window once a method, each token on the colour of its mean bits."""
    key = "".join(f'<span style="background:{color}">{bits:g}</span>' for bits, color in _COLORS)
    parts = []
    for row, bits in shown:
        spans = "".join(
            f'<span style="background:{color_of(value)}" title="{value:.2f} bits">'
            f"{escape(tokenizer.decode([token]))}</span>"
            for token, value in zip(bits.token_ids, bits.by_token().tolist(), strict=True)
        )
        parts.append(f'<h2>{escape(_title(row))}</h2><p class="text">{spans}</p>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Bits a token</title>'
        f"<style>{_STYLE}</style></head><body><h1>Bits a token</h1>"
        f'<p class="key">Mean bits an element over layers, keys and values, scales not counted: {key}</p>'
        f"{''.join(parts)}</body></html>\n"
    )


def color_of(bits: float) -> str:
    """The colour of a number of bits, between those of `_COLORS`."""
    below = max((pair for pair in _COLORS if pair[0] <= bits), default=_COLORS[0])
    above = min((pair for pair in _COLORS if pair[0] >= bits), default=_COLORS[-1])
    if below == above:
        return below[1]
    share = (bits - below[0]) / (above[0] - below[0])
    mixed = (
        round(int(below[1][at : at + 2], 16) * (1 - share) + int(above[1][at : at + 2], 16) * share) for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _title(row: SweepRow) -> str:
    return f"{row.policy}, {row.quantizer}" + ("" if row.budget is None else f", {row.budget:.3f} of the bytes")


def _save(figure: Any, path: Path) -> None:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    _pyplot().close(figure)
    write_text(path, out.getvalue())


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InvalidInput("figures need matplotlib: pip install 'kvferry[report]'") from error
    if "MPLBACKEND" not in os.environ:
        mpl.use("svg")
    from matplotlib import pyplot

    return pyplot
