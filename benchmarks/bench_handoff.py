"""Time to the first token over shaped links: the whole table.

    python -m benchmarks.bench_handoff [--json FILE] [--small] [--log FILE] [--model NAME] [--threads N]

`kvferry bench handoff` is the same, with every list an option. One of the packets is of policy `klt`, which needs the
model's transform: run `kvferry ship calibrate` before. Where no shaped link can be made there are no rows, and the
result says why. About an hour on two quiet cores; ``--small`` takes minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks import record
from kvferry.engines.handoff.bench import Arm, HandoffBenchResult, HandoffBenchSettings, run_bench
from kvferry.engines.link import why_no_link

ARMS = (Arm(1.0), Arm(0.52), Arm(0.28), Arm(0.28, progressive=True), Arm(0.05, "klt"))
"""16 bit, the fast policy's budgets, a progressive packet, and the small policy's least one."""

SMALL = {
    "tokens": (512, 1024),
    "links": ("100mbit", "1gbit", "10gbit"),
    "arms": (Arm(1.0), Arm(0.52), Arm(0.28)),
    "repeats": 3,
}


def main() -> None:
    """Parse the options, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--small", action="store_true", help="two lengths, three links, three budgets, 3 repetitions")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each process: one core for each role")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, metavar="FILE", help="a stopped run goes on from it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    settings = HandoffBenchSettings(
        options.model, arms=ARMS, repeats=options.repeats, threads=options.threads, seed=options.seed
    )
    if options.small:
        settings = replace(settings, **SMALL)
    if missing := why_no_link():
        result = HandoffBenchResult(settings, [], [{"combination": "every shaped link", "reason": missing}])
    else:
        result = run_bench(settings, lambda done, total, what: record.tell(f"{done + 1}/{total} {what}"), options.log)
    record.write(options.json, "bench handoff", result.to_json(), seed=options.seed, threads=options.threads)


if __name__ == "__main__":
    main()
