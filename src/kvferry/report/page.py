"""Any results of ``--json`` as one page: what a table can show as tables, and what each was made with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvferry.errors import InvalidInput
from kvferry.report.tables import markdown
from kvferry.version import __version__

Row = Mapping[str, Any]
Table = tuple[str, list[str], list[list[str]]]
"""Title, head and rows."""

_MOST_ROWS = 400
_MOST_COLUMNS = 14
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}"
    "td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left}small{color:#555}"
)


def read(path: str | Path) -> Row:
    """A file that a command's ``--json`` printed. Raises `InvalidInput` for any other."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        found["kvferry"], found["command"], found["environment"].items()
        if found["result"] is not None:
            found["result"].items()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{path} is no result of a kvferry command: make one with --json") from error
    content: Row = found
    return content


def render(results: Mapping[str, Row], *, html: bool) -> str:
    """The page.

    Args:
        results: name → what `read` gave.
        html: as HTML, in one piece; else as Markdown.
    """
    parts: list[str] = []
    for name, content in results.items():
        title = f"{content['command'] or 'kvferry'}: {name}"
        parts += [_heading(title, 2, html), *_provenance(content, html)]
        if content["result"] is None:
            error = content.get("error", {})
            parts.append(_paragraph(f"failed: {error.get('type')}: {error.get('message')}", html))
            continue
        for table in tables_of(content["result"]):
            parts += _table(table, html)
    if not html:
        return "\n".join(["# Results", "", *parts]).rstrip("\n") + "\n"
    body = "".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Results</title>'
        f"<style>{_STYLE}</style></head><body><h1>Results</h1>{body}<small>kvferry {__version__}</small>"
        "</body></html>\n"
    )


def tables_of(result: Row) -> list[Table]:
    """Scalars in one table, each list of objects in one of its own; objects within are spread over columns."""
    plain = [[key, _text(value)] for key, value in _flat(result).items()]
    found: list[Table] = [("", ["", ""], plain)] if plain else []
    for key, value in result.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            rows = [_flat(item) for item in value[:_MOST_ROWS]]
            columns = list(dict.fromkeys(name for row in rows for name in row))
            shown = [name for name in columns if any(_text(row.get(name)) for row in rows)][:_MOST_COLUMNS]
            left = f", the first {_MOST_ROWS} of {len(value)}" if len(value) > _MOST_ROWS else ""
            left += f", {len(columns) - len(shown)} more columns in the file" if len(columns) > len(shown) else ""
            found.append((key + left, shown, [[_text(row.get(name)) for name in shown] for row in rows]))
    return found


def _flat(item: Row, before: str = "") -> dict[str, Any]:
    """Scalars, pairs of numbers (intervals), and those of objects within, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in item.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{key}.")
        elif not isinstance(value, list) or _is_interval(value):
            found[f"{before}{key}"] = value
    return found


def _is_interval(value: Sequence[Any]) -> bool:
    return len(value) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(_text(end) for end in value)}]"
    return " ".join(str(value).split())[:300]


def _provenance(content: Row, html: bool) -> list[str]:
    given = content["environment"]
    words = " ".join(map(str, given.get("arguments", [])))
    told = [f"{name} {given[name]}" for name in _TOLD if given.get(name) is not None]
    return [_paragraph(f"{words or content['command']} ({', '.join(told)})", html)]


_TOLD = ("kvferry", "git_revision", "torch", "transformers", "cpu", "threads", "dtype", "attn", "seed")


def _heading(text: str, level: int, html: bool) -> str:
    return f"<h{level}>{escape(text)}</h{level}>" if html else f"{'#' * level} {text}\n"


def _paragraph(text: str, html: bool) -> str:
    return f"<p>{escape(text)}</p>" if html else f"{text}\n"


def _table(table: Table, html: bool) -> list[str]:
    title, head, rows = table
    if not html:
        return [*([f"### {title}", ""] if title else []), *markdown(head, rows), ""]
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    heads = "".join(f"<th>{escape(name)}</th>" for name in head) if any(head) else ""
    return [f"<h3>{escape(title)}</h3>" if title else "", f"<table><tr>{heads}</tr>{cells}</table>"]
