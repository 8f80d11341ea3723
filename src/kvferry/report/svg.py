"""The few drawings that reports need, as SVG text: no library, no font, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Spans = Mapping[str, tuple[float, float]]

_LABEL, _ROW, _GAP, _AXIS = 110, 16, 26, 30


def timeline(groups: Sequence[tuple[str, Spans]], colors: Mapping[str, str], unit: str = "s", width: int = 860) -> str:
    """Spans on one common axis, in groups one below the other: what happened when, and what overlapped.

    Args:
        groups: title, and part → (begin, end).
        colors: part → colour; also the order of the parts, the last ones left out where a group lacks them.
        unit: of the numbers.
        width: of the drawing, in pixels.
    """
    longest = max((end for _, spans in groups for _, end in spans.values()), default=1.0) or 1.0
    scale = (width - _LABEL - 70) / longest
    pieces: list[str] = []
    top = 4
    for title, spans in groups:
        pieces.append(_text(0, top + 13, title, weight="bold"))
        top += 20
        for part in (name for name in colors if name in spans):
            begin, end = spans[part]
            left, length = _LABEL + begin * scale, max(1.0, (end - begin) * scale)
            pieces.append(_text(_LABEL - 8, top + 12, part.replace("_", " "), anchor="end"))
            pieces.append(
                f'<rect x="{left:.1f}" y="{top + 1}" width="{length:.1f}" height="{_ROW - 3}" fill="{colors[part]}">'
                f"<title>{escape(part)}: {begin:.4f} to {end:.4f} {escape(unit)}</title></rect>"
            )
            pieces.append(_text(left + length + 4, top + 12, _short(end - begin, unit), fill="#555"))
            top += _ROW
        top += _GAP - _ROW
    for tick in ticks(longest):
        x = _LABEL + tick * scale
        pieces.insert(0, f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{top}" stroke="#ddd"/>')
        pieces.append(_text(x, top + 14, f"{tick:g} {unit}", anchor="middle", fill="#555"))
    body = "".join(pieces)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + _AXIS}" width="{width}" role="img" '
        f'font-family="sans-serif" font-size="12">{body}</svg>'
    )


def ticks(longest: float, most: int = 8) -> list[float]:
    """Round numbers from 0 to ``longest``."""
    if not (math.isfinite(longest) and longest > 0):
        return [0.0]
    raw = longest / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [round(index * step, 12) for index in range(int(longest / step) + 1)]


def _short(value: float, unit: str) -> str:
    return f"{value * 1e3:.1f} m{unit}" if value < 1 else f"{value:.2f} {unit}"


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal", fill: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">'
        f"{escape(words)}</text>"
    )
