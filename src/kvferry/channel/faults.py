"""Errors as data: a typed error crosses a process boundary and is raised as itself on the other side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvferry import errors
from kvferry.errors import BudgetTooSmall, IncompatibleIdentity, KVFerryError, TransferFailed

MAX_FAULT_BYTES = 12 << 10
"""An error that needs more than this as JSON is cut: the text first, then the differences."""

_TYPES: dict[str, type[KVFerryError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KVFerryError)
}


def describe(error: BaseException) -> dict[str, Any]:
    """``error`` as a JSON object: ``type``, ``message`` and, where the type has them, its attributes."""
    found: dict[str, Any] = {"type": type(error).__name__, "message": _short(str(error) or type(error).__name__, 4_000)}
    if isinstance(error, IncompatibleIdentity):
        shown = list(error.differences.items())[:256]
        found["differences"] = {field: [_plain(have), _plain(want)] for field, (have, want) in shown}
    if isinstance(error, BudgetTooSmall):
        found["budget"] = error.budget
        found["least_budget"] = error.least_budget
    return found


def revive(fault: object) -> KVFerryError:
    """Inverse of `describe`. A type that is not one of `kvferry.errors` comes back as `TransferFailed`, named."""
    if not isinstance(fault, Mapping):
        return TransferFailed(f"the other side reported an error that is no JSON object: {_short(repr(fault), 200)}")
    name, message = str(fault.get("type")), _short(str(fault.get("message")), 4_000)
    kind = _TYPES.get(name)
    if kind is IncompatibleIdentity:
        revived = IncompatibleIdentity("", {})
        revived.args = (message,)
        revived.differences = _differences(fault.get("differences"))
        return revived
    if kind is BudgetTooSmall:
        return BudgetTooSmall(message, _number(fault.get("budget")), _number(fault.get("least_budget")))
    if kind is None:
        return TransferFailed(f"the other side failed with {name}: {message}")
    return kind(message)


def to_bytes(error: BaseException) -> bytes:
    """`describe` as JSON of at most `MAX_FAULT_BYTES`."""
    fault = describe(error)
    text = json.dumps(fault).encode()
    if len(text) > MAX_FAULT_BYTES:
        text = json.dumps({**fault, "message": _short(fault["message"], 1_000), "differences": {}}).encode()
    return text


def from_bytes(data: bytes) -> KVFerryError:
    """Inverse of `to_bytes`, for data that nobody vouches for."""
    try:
        fault = json.loads(data[:MAX_FAULT_BYTES])
    except (ValueError, RecursionError):
        return TransferFailed("the other side reported an error that cannot be read")
    return revive(fault)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _differences(value: object) -> dict[str, tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        return {}
    pairs = ((str(field), pair) for field, pair in value.items())
    return {field: (pair[0], pair[1]) for field, pair in pairs if isinstance(pair, list) and len(pair) == 2}
