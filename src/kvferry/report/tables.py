"""Tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
    ]


def made_with(environment: Mapping[str, Any]) -> str:
    """What a result was made with, in one line of Markdown."""
    words = " ".join(environment["arguments"])
    command = words if words.startswith("python ") else f"kvferry {words}"
    return (
        f"`{command}`, revision {environment['git_revision']}, torch {environment['torch']}, "
        f"transformers {environment['transformers']}, {environment['cpu']}, {environment['threads']} threads, "
        f"seed {environment['seed']}"
    )


_SPEC = re.compile("([a-z]+)([0-9])(.*)")


def brief_quantizers(text: str) -> str:
    """Quantisers that differ by their bits alone as one: ``raw+cen8g64+cen6g64+cen4g64`` as ``raw+cen8,6,4g64``."""
    return " / ".join(_brief(side) for side in text.split(" / "))


def _brief(side: str) -> str:
    bits: dict[tuple[str, str], list[str]] = {}
    for spec in side.split("+"):
        match = _SPEC.fullmatch(spec)
        family, own, rest = match.groups() if match else (spec, "", "")
        bits.setdefault((family, rest), []).append(own)
    return "+".join(f"{family}{','.join(filter(None, own))}{rest}" for (family, rest), own in bits.items())
