"""Times of a hand-off. All are of CLOCK_MONOTONIC, which the processes of one host share, in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

now = time.monotonic_ns


class Stopwatch:
    """Adds up the time spent in one kind of work, and remembers when it first began and last ended.

    Attributes:
        busy: nanoseconds inside.
        began: clock at the first start, 0 before.
        ended: clock at the last end.
    """

    def __init__(self) -> None:
        self.busy = 0
        self.began = 0
        self.ended = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = now()
        self.began = self.began or start
        try:
            yield
        finally:
            self.ended = now()
            self.busy += self.ended - start

    def to_json(self) -> dict[str, int]:
        return {"busy": self.busy, "began": self.began, "ended": self.ended}


def at_least(prefill: float, wire: float, layers: int) -> float:
    """Seconds that prefill and wire take when each layer goes out while the next is computed."""
    return max(prefill, wire) + min(prefill, wire) / layers


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of ``(begin, end)`` spans: time during which at least one of them lasted."""
    total, reach = 0, 0
    for begin, end in sorted(spans):
        if end > reach:
            total += end - max(begin, reach)
            reach = end
    return total
