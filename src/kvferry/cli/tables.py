"""Tables for people: Rich on a terminal, aligned plain text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


def show_pairs(pairs: Mapping[str, object], title: str = "") -> None:
    """Name and value, a line each."""
    show_rows(("", ""), [(name, str(value)) for name, value in pairs.items()], title)


def show_rows(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table; a head of empty texts is left out."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*head, title=title or None, title_justify="left", show_header=any(head))
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    lines = [list(head), *map(list, rows)] if any(head) else list(map(list, rows))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))] if lines else []
    if title:
        sys.stdout.write(f"{title}\n")
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(f"{text.rstrip()}\n")


def show_text(title: str, text: str) -> None:
    """A passage under a title."""
    sys.stdout.write(f"\n{title}\n{text}\n")


def seconds(value: float) -> str:
    """``1.234 s`` or ``12.3 ms``."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def number_of_bytes(count: int) -> str:
    """``12,345,678 (12.3 MB)``."""
    return f"{count:,} ({count / 1e6:.1f} MB)" if count >= 100_000 else f"{count:,}"


def small(value: float | None) -> str:
    """A number of any size in four digits."""
    return "none" if value is None else f"{value:.4g}"
