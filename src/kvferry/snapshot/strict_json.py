"""JSON from a file that may be hostile: one meaning only, and no more objects than the caller allows."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from kvferry.errors import CorruptPacket

MAX_VALUES = 32_768
"""Values that one text may hold unless the caller says otherwise: each costs some hundred bytes once parsed."""

_MAX_DIGITS = 19


def parse_json(text: str, what: str, *, most: int = MAX_VALUES) -> Any:
    """The value of a JSON ``text``.

    Refused: repeated keys, ``NaN`` and infinities (also those by overflow), integers of more than 19 digits, nesting
    beyond the interpreter's recursion limit, and texts with more than ``most`` values (counted before parsing, by
    their commas and brackets).

    Args:
        text: what to parse.
        what: its name in messages, such as ``"the identity"``.
        most: the largest number of values.

    Raises:
        CorruptPacket: the text is none of what is allowed.
    """
    count = text.count(",") + text.count("[") + text.count("{") + 1
    if count > most:
        raise CorruptPacket(f"{what} has about {count} JSON values, more than the {most} that it may have")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise CorruptPacket(f"{what} repeats a JSON key")
        return found

    def constant(name: str) -> NoReturn:
        raise CorruptPacket(f"{what} holds {name}, which is not JSON")

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise CorruptPacket(f"{what} holds a number that is too large")
        return value

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS + 1:
            raise CorruptPacket(f"{what} holds an integer of {len(digits)} digits")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=real, parse_int=integer)
    except (ValueError, RecursionError) as error:
        raise CorruptPacket(f"{what} is not JSON: {error}") from error
