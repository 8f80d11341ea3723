"""Fuzzed frames, packets, files and messages: none may crash, and every accepted one must be harmless.

    python -m benchmarks.fuzz [--n 100000] [--json FILE]

Blind mutants know nothing of the format: bits flipped, pieces cut, doubled, moved, overwritten, spliced from another
valid input. What is accepted must decode to the very cache of a valid input. Signed mutants have every length and
checksum right, as an attacker who knows the format would write them: what is accepted may hold other numbers in the
frames that were changed, and must do nothing else. `benchmarks.fuzz_targets` says what is checked. Work is done in
processes of their own, so that the death of one is seen, and their peak memory is bounded.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, rss
from benchmarks.fuzz_targets import MAX_BYTES, REFUSALS, TARGETS, packets
from kvferry.channel.socket import message as wire
from kvferry.errors import KVFerryError

MOST_GROWTH = 512 << 20
"""Most bytes that a process may grow by over thousands of mutants, libraries that load late included."""

SECONDS = 5.0
"""Longer on inputs of a few kB is a hang."""

CHUNK = 1_000


@dataclass
class Tally:
    """What came of the mutants of one chunk."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    growth: int = 0


def run_chunk(name: str, chunk: int, count: int) -> Tally:
    """``count`` mutants of one target, in this process."""
    torch.set_num_threads(1)
    tally, make = Tally(), TARGETS[name][0]
    packets()
    before = rss.reset_peak()
    for number in range(count):
        seed = f"{name}/{chunk}/{number}"
        began = time.perf_counter()
        try:
            outcome = make(random.Random(seed))
        except REFUSALS as error:
            outcome = "refused" if len(str(error)) < 2_000 else "fault: a message of over 2,000 characters"
        except (wire.Damaged, wire.OtherVersion):
            outcome = "refused"
        except KVFerryError as error:
            outcome = f"fault: refused with {type(error).__name__}: {error}"
        except Exception as error:
            outcome = f"fault: {type(error).__name__}: {error}"
        taken = time.perf_counter() - began
        if taken > SECONDS:
            outcome = f"fault: took {taken:.1f} s"
        if outcome.startswith("fault"):
            tally.faults.append(f"{seed}: {outcome}"[:500])
            outcome = "fault"
        tally.outcomes[outcome] += 1
        tally.slowest = max(tally.slowest, taken)
    tally.growth = rss.peak() - before
    if tally.growth > MOST_GROWTH:
        tally.faults.append(f"{name}/{chunk}: the process grew by {tally.growth} bytes")
    return tally


def run(n: int, workers: int) -> list[dict[str, Any]]:
    """A row a target."""
    rows = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, (_, share) in TARGETS.items():
            count = round(n * share)
            sizes = [CHUNK] * (count // CHUNK) + ([count % CHUNK] if count % CHUNK else [])
            waiting = [pool.submit(run_chunk, name, chunk, size) for chunk, size in enumerate(sizes)]
            total = Tally()
            for chunk, future in enumerate(waiting):
                try:
                    tally = future.result()
                except BrokenProcessPool as error:
                    tally = Tally(collections.Counter(crash=1), [f"{name}/{chunk}: the process died: {error}"])
                total.outcomes += tally.outcomes
                total.faults += tally.faults
                total.slowest = max(total.slowest, tally.slowest)
                total.growth = max(total.growth, tally.growth)
            record.tell(f"{name}: {dict(total.outcomes)}, {len(total.faults)} faults")
            rows.append(
                {
                    "target": name,
                    "n": total.outcomes.total(),
                    "outcomes": dict(total.outcomes),
                    "faults": len(total.faults),
                    "examples": total.faults[:10],
                    "slowest_seconds": total.slowest,
                    "memory_growth_mib": total.growth / 2**20,
                }
            )
    return rows


def main() -> int:
    """0 when no mutant did harm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = run(options.n, options.workers)
    settings = {"chunk": CHUNK, "max_bytes": MAX_BYTES, "seeds": "TARGET/CHUNK/NUMBER", "workers": options.workers}
    result = {"n": sum(row["n"] for row in rows), "settings": settings, "rows": rows}
    record.write(options.json, "bench fuzz", result, seed=0, threads=1)
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
