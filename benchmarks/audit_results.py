"""The studies of ``docs/results/audit.md``: each a command of its own that goes on where it was stopped.

What is kept of the very same command and code is not run again, and parts of one model share a log: a pair of runs
on a passage is made once. Models run side by side, each in a process of its own with one thread, which is twice as fast
as one after the other with two.

python -m benchmarks.audit_results FOLDER DATA [--models a,b] [--parts a,b] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.parts import TEXTS, call, is_kept, keep, place
from kvferry.report.audit_page import write

CODE = tuple(f"src/kvferry/{room}" for room in ("audit", "evidence", "hf", "ship/quantize", "snapshot"))
"""What a record of an audit hangs on."""

SHIP = "src/kvferry/ship"
"""And one of a shipped cache."""

MODELS = ("smollm2-135m", "gemma3-270m")

_SHORT = ("--prefix", "32", "--suffix", "4")
_LONGER = ("--prefix", "48", "--suffix", "4")
_STAGES = ("--protocol", "stage_replay", "--new", "128", *_LONGER)
_FREE = ("--protocol", "free_run", "--new", "64", "--longest", "48", "--ignore-eos", "--explain", "5")

PARTS = {
    # The pair in float32, with the weights of bfloat16, has its float64 controls in common with the pair in bfloat16.
    "fixed": ("--dtype", "bfloat16", "--protocol", "fixed_prefix,precision_2x2", "--n", "200", *_SHORT),
    "fixed-fp16": ("--dtype", "float16", "--protocol", "fixed_prefix", "--n", "12", *_SHORT),
    "fixed-fp64": ("--dtype", "float64", "--protocol", "fixed_prefix", "--n", "8", *_SHORT),
    "faults": ("--dtype", "bfloat16", "--protocol", "self_check", "--n", "5", *_LONGER),
    # Faults of a sliding window show behind its 512 tokens alone.
    "faults-window": (
        "--dtype",
        "bfloat16",
        "--protocol",
        "self_check",
        "--n",
        "1",
        "--prefix",
        "520",
        "--suffix",
        "4",
    ),
    "free": ("--dtype", "bfloat16", *_FREE, "--n", "60"),
    # Answers are asked of greedy runs; of drawn ones, when they part.
    "free-drawn": ("--dtype", "bfloat16", *_FREE, "--n", "60", "--samplers", "top_k,top_p", "--until-split"),
    "free-fp32": ("--dtype", "float32", *_FREE, "--n", "60", "--screen", "8"),
    "free-fp16": ("--dtype", "float16", *_FREE, "--n", "20", "--screen", "8"),
    # Whole, keys and values wherever donor and recipient part; ranges of layers and tokens in fewer. Either direction
    # counts, so twelve that part are twenty-four transplants.
    "transplant": (
        *("--dtype", "bfloat16", "--protocol", "transplant", "--n", "48", "--parted", "12", "--ranges", "4"),
        *("--explain", "1", "--new", "64", *_LONGER),
    ),
    "stages": ("--dtype", "bfloat16", *_STAGES, "--n", "12"),
    "stages-fp32": ("--dtype", "float32", *_STAGES, "--n", "6"),
    "patch": (
        *("--dtype", "bfloat16", "--protocol", "residual_patch", "--n", "6", "--layer-step", "5"),
        *("--explain", "1", "--prefix", "48", "--suffix", "8"),
    ),
    "batch": ("--dtype", "bfloat16", "--protocol", "batch", "--n", "8", *_SHORT),
    # A cache that was shipped, held against the receiver's own, stage by stage.
    "packet": ("--new", "64"),
}
"""Name → what `kvferry audit` is asked; how long each takes is told when it is done."""

INSTEAD = {
    ("smollm2-135m", "faults-window"): None,  # it has no sliding layers
    ("gemma3-270m", "free-fp16"): None,  # every run overflows in the same layer
}
"""Where a model is asked otherwise, or not at all."""


def main() -> None:
    """Run what is asked for, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-page", action="store_true")
    given = parser.parse_args()
    models = given.models.split(",")
    if len(models) > 1:
        side_by_side(given, models)
    else:
        for part in given.parts.split(","):
            run(part, models[0], given)
    if not given.no_page:
        print(write(given.folder))


def side_by_side(given: argparse.Namespace, models: list[str]) -> None:
    """A process a model; a stop of this one stops them."""
    same = [str(given.folder), str(given.data), "--parts", given.parts, "--threads", str(given.threads)]
    command = [sys.executable, "-m", "benchmarks.audit_results", *same, "--no-page"]
    running = [subprocess.Popen([*command, "--models", model]) for model in models]
    try:
        statuses = [process.wait() for process in running]
    finally:
        for process in running:
            process.terminate()
    if any(statuses):
        raise SystemExit(f"not all parts ran: {dict(zip(models, statuses, strict=True))}")


SHIPPED = ("--max-tokens", "256", "--dtype", "bfloat16")
"""Of the cache of part ``packet``."""

BUDGET = "0.28"


def ship(text: Path, model: str, packet: Path) -> None:
    """Make a packet of the cache of the first tokens of a text."""
    cache = packet.with_suffix(".cache")
    call("capture", model, "--text", str(text), *SHIPPED, "-o", str(cache), "--json")
    call("ship", "encode", str(cache), "-o", str(packet), "--budget", BUDGET, "--policy", "fast", "--json")


def run(part: str, model: str, given: argparse.Namespace) -> None:
    """One part of one model, unless it is kept."""
    asked = INSTEAD.get((model, part), PARTS[part])
    if asked is None:
        return
    text = place("wikitext2-test.txt", (given.data / "wikitext2" / "test.txt").read_text(encoding="utf-8"))
    tasks = place("gsm8k-test.jsonl", (given.data / "gsm8k" / "test_a.jsonl").read_text(encoding="utf-8"))
    source: tuple[str, ...] = ("--tasks", str(tasks)) if "free_run" in asked else ("--text", str(text))
    log, packet = (TEXTS.parent / f"audit-{model}.{kind}" for kind in ("jsonl", "packet"))
    if part == "packet":
        source = ("--packet", str(packet))
    else:
        source += ("--log", str(log))
    own = ("--threads", str(given.threads), "--json")
    path, command = given.folder / f"audit-{model}-{part}.json", ["audit", model, *asked, *source, *own]
    if is_kept(path, command, (*CODE, *((SHIP,) if part == "packet" else ()))):
        return
    began = time.perf_counter()
    if part == "packet":
        ship(text, model, packet)
    found = call(*command, statuses=(0, 1))
    if json.loads(found)["result"] is None:  # status 1 is also that of a fault that was found
        raise SystemExit(f"{model}, {part}: {json.loads(found)['error']}")
    keep(path, found)
    print(f"{model}, {part}: {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
