"""Every error that a caller of kvferry may catch, in one hierarchy.

A message says what is wrong, where, and what to do about it. Nothing else is raised for bad input: a bare
``ValueError`` or ``KeyError`` from inside the library is a fault of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KVFerryError(Exception):
    """Base of every error raised on purpose by kvferry. Pools and engines may send it from process to process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, vars(self))


def _again(kind: type[KVFerryError], args: tuple[Any, ...], fields: Mapping[str, Any]) -> KVFerryError:
    """An error with this message and these fields; not through its own ``__init__``, which words the message anew."""
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class InvalidInput(KVFerryError, ValueError):
    """An argument is outside of what the function accepts: a wrong shape, an unknown name, an empty prompt."""


class CorruptPacket(KVFerryError):
    """A snapshot, packet or frame is damaged or hostile: truncated, edited, or inconsistent with itself."""


class UnsupportedVersion(KVFerryError):
    """Well formed, but written by a version, or with a codec, that this version cannot read."""


class IncompatibleIdentity(KVFerryError):
    """A cache was offered to a model, prompt or mapper that it was not made for.

    Attributes:
        differences: every field that differs, as ``field -> (have, want)``: what the cache holds, what the
            receiver needs.
    """

    def __init__(self, message: str, differences: Mapping[str, tuple[Any, Any]]):
        self.differences: dict[str, tuple[Any, Any]] = dict(differences)
        shown = "; ".join(
            f"{field}: have {have!r}, want {want!r}" for field, (have, want) in list(self.differences.items())[:8]
        )
        hidden = len(self.differences) - 8
        more = f"; and {hidden} more" if hidden > 0 else ""
        super().__init__(f"{message} ({shown}{more})" if shown else message)


class UnsupportedCache(KVFerryError):
    """The cache (or one layer of it) is of a kind that kvferry does not carry; named, never guessed."""


class TooLarge(KVFerryError):
    """The input declares, or would need, more memory than the limit that the caller set."""


class TransferFailed(KVFerryError):
    """The peer, the link or the other process failed before the cache was whole."""


class BudgetTooSmall(KVFerryError):
    """No plan of the chosen policy fits the byte budget.

    Attributes:
        budget: the budget asked for, as a fraction of the 16-bit packet.
        least_budget: the smallest budget that this policy can meet for this cache.
    """

    def __init__(self, message: str, budget: float, least_budget: float):
        self.budget = budget
        self.least_budget = least_budget
        super().__init__(message)


class ModelUnavailable(KVFerryError):
    """A model could not be found, fetched, verified or loaded."""
