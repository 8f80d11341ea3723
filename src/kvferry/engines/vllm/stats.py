"""Counts of what a connector did since it was last asked; they add up over workers and intervals."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "lookups": "Requests whose prompt was looked up in the store",
        "hits": "Requests of which the store had a prefix",
        "hit_tokens": "Prompt tokens that the store had beyond the local prefix cache",
        "refusals": "Packets refused because they belong to another model",
        "saved_packets": "Packets written to the store",
        "saved_tokens": "Tokens written to the store",
        "saved_bytes": "Bytes of packets written to the store",
        "saved_full_bytes": "Bytes that those packets would have at 16 bit",
        "encode_ms": "Milliseconds of encoding packets",
        "write_ms": "Milliseconds of writing packets to the store",
        "save_failures": "Packets that could not be encoded or written",
        "loaded_packets": "Packets read from the store",
        "loaded_tokens": "Tokens put into pages",
        "loaded_bytes": "Bytes of packets read from the store",
        "loaded_full_bytes": "Bytes that those packets would have at 16 bit",
        "read_ms": "Milliseconds of reading and checking packets",
        "decode_ms": "Milliseconds of decoding packets",
        "mapped_tokens": "Tokens mapped from another model's packets",
        "declined": "Requests whose mapped prefix the gate declined",
        "map_ms": "Milliseconds of mapping, the gate's look and what the target prefills itself included",
        "install_ms": "Milliseconds of filling pages",
        "load_failures": "Requests whose prefix could not be loaded in full",
    }
)
"""Name -> what it counts."""


class Counts:
    """Counters by name; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter of `COUNTERS`."""
        if name not in COUNTERS:
            raise KeyError(name)
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the milliseconds that the block takes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, (time.perf_counter() - begin) * 1000)

    def take(self) -> dict[str, float]:
        """What was counted since the last call; empty when nothing was."""
        with self._lock:
            values, self._values = self._values, {}
        return values


def merge(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The sum of two counts."""
    return {name: first.get(name, 0) + second.get(name, 0) for name in [*first, *second]}


def summary(values: Mapping[str, float]) -> dict[str, float]:
    """Counts as a log line shows them: rounded, and with the ratio of bytes."""
    shown = {name: round(value, 1) for name, value in values.items()}
    for side in ("saved", "loaded"):
        full = values.get(f"{side}_full_bytes", 0)
        if full:
            shown[f"{side}_budget"] = round(values.get(f"{side}_bytes", 0) / full, 4)
    return shown
