"""Progressive packets on real caches: bytes, speed, and how good the cache is at each level.

    python -m benchmarks.progressive [--json FILE] [--text FILE] [--model NAME]… [--dtype NAME]… [--budget B]

A prefix is cached, encoded, and refined; the suffix is scored through the cached decode path from the packet, from
level 1, from the exact cache, and, to be compared with, from a uniform INT8 packet. Each text window is one sample.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from kvferry.engines.handoff.compare import Comparison
from kvferry.evaluate.windows import Window, cut_windows
from kvferry.hf.capture import capture
from kvferry.hf.decode import teacher_forced_logits
from kvferry.hf.models import load_model
from kvferry.hf.text import default_text
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.refine import Refinement, Refiner, refine
from kvferry.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and how often."""

    budget: float
    windows: int
    prefix: int
    suffix: int
    rounds: int


def main() -> None:
    """Parse the options, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append")
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's own reference topics")
    parser.add_argument("--budget", type=float, default=0.27)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--suffix", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = Settings(options.budget, options.windows, options.prefix, options.suffix, options.rounds)
    text = default_text() if options.text is None else options.text.read_text(encoding="utf-8")
    rows = []
    for name in options.model or ("smollm2-135m", "gemma3-270m"):
        for dtype in options.dtype or ("bfloat16", "float32"):
            record.tell(f"{name} {dtype}")
            rows.append({"model": name, "dtype": dtype, **measure(name, dtype, text, settings)})
    record.write(options.json, "bench progressive", {"rows": rows}, seed=0, threads=options.threads)


def measure(name: str, dtype: str, text: str, settings: Settings) -> dict[str, Any]:
    """One row: sums of bytes over the windows, medians of speeds, means of fidelity."""
    model, tokenizer = load_model(name, dtype=dtype)
    windows = cut_windows(tokenizer, text, windows=settings.windows, prefix=settings.prefix, suffix=settings.suffix)
    fidelity = {level: Comparison() for level in ("packet", "level_1", "exact", "uniform_int8")}
    sizes = {"first": 0, "level_1": 0, "total": 0, "full": 0}
    speeds: dict[str, list[float]] = {}
    bit_exact = True
    for window in windows:
        snapshot = capture(model, window.prefix_ids)
        packet = encode(snapshot, settings.budget)
        refinement = refine(snapshot, packet)
        exact = refinement.apply(packet)
        bit_exact &= _same(exact, snapshot)
        first = len(packet) + refinement.header.nbytes
        for part, nbytes in zip(
            sizes,
            (first, first + refinement.level_bytes[0], len(packet) + len(refinement), packet.full_bytes),
            strict=True,
        ):
            sizes[part] += nbytes
        candidates = {
            "packet": decode(packet),
            "level_1": refinement.apply(packet, level=1),
            "exact": exact,
            "uniform_int8": decode(encode(snapshot, policy="uniform_int8")),
        }
        _judge(model, window, snapshot, candidates, fidelity)
        for part, seconds in _times(snapshot, packet, refinement, settings.rounds).items():
            speeds.setdefault(part, []).append(snapshot.nbytes / seconds / 1e9)
    return {
        "budget": settings.budget,
        "windows": len(windows),
        "prefix": settings.prefix,
        "suffix": settings.suffix,
        "first_share": sizes["first"] / sizes["full"],
        "level_1_share": sizes["level_1"] / sizes["full"],
        "total_share": sizes["total"] / sizes["full"],
        "bit_exact": bit_exact,
        "gb_per_s": {part: statistics.median(values) for part, values in speeds.items()},
        "fidelity": {level: comparison.fidelity().to_json() for level, comparison in fidelity.items()},
    }


def _judge(
    model: Any, window: Window, snapshot: Snapshot, candidates: dict[str, Snapshot], fidelity: dict[str, Comparison]
) -> None:
    want = teacher_forced_logits(model, snapshot, window.fed_ids)[0].float()
    for level, candidate in candidates.items():
        got = teacher_forced_logits(model, candidate, window.fed_ids)[0].float()
        for one, other in zip(want, got, strict=True):
            fidelity[level].add(one, other)


def _times(snapshot: Snapshot, packet: Packet, refinement: Refinement, rounds: int) -> dict[str, float]:
    """Median seconds of each part, the parts interleaved; memcpy of the same bytes among them."""
    count = refinement.header.frames
    taken: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        taken.setdefault(part, []).append(time.perf_counter() - began)

    for _ in range(rounds):
        timed("memcpy", snapshot.clone)
        timed("refine", lambda: refine(snapshot, packet))
        refiner = Refiner(packet.header_bytes, decode(packet), refinement.header_bytes)
        for level in (1, 2):
            frames = refinement.frames[(level - 1) * count : level * count]
            timed(f"level_{level}", lambda frames=frames, refiner=refiner: [refiner.add(frame) for frame in frames])
    return {part: statistics.median(values) for part, values in taken.items()}


def _same(one: Snapshot, other: Snapshot) -> bool:
    return all(
        torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
        for mine, theirs in zip(one.layers, other.layers, strict=True)
        for left, right in ((mine.keys, theirs.keys), (mine.values, theirs.values))
        if left is not None and right is not None
    )


if __name__ == "__main__":
    main()
