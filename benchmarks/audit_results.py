"""The studies of ``docs/results/audit.md``: each a command of its own that goes on where it was stopped.

What is kept of the very same command and revision is not run again. Two models at once, each with one thread, are twice
as fast as one with two.

python -m benchmarks.audit_results FOLDER DATA [--models a,b] [--parts a,b] [--threads N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.parts import TEXTS, call, is_kept, keep, place
from kvferry.report.audit_page import write

MODELS = ("smollm2-135m", "gemma3-270m")

_SHORT = ("--prefix", "64", "--suffix", "8")
_FREE = ("--protocol", "free_run", "--new", "64")
_STAGES = ("--protocol", "stage_replay", "--n", "24", "--new", "128", *_SHORT)
_MANY = ("--n", "200", "--protocol", "fixed_prefix", *_SHORT)

PARTS = {
    "prefix-bf16": ("--dtype", "bfloat16", *_MANY),
    "prefix-fp32": ("--dtype", "float32", *_MANY),
    "prefix-fp16": ("--dtype", "float16", *_MANY),
    "cause": ("--dtype", "bfloat16", "--protocol", "precision_2x2,batch", "--n", "24", *_SHORT),
    "stages": ("--dtype", "bfloat16", *_STAGES),
    "stages-fp32": ("--dtype", "float32", *_STAGES),
    "carrier": (
        "--dtype",
        "bfloat16",
        "--protocol",
        "transplant,residual_patch",
        "--n",
        "12",
        "--layer-step",
        "5",
        *_SHORT,
    ),
    "faults": ("--dtype", "bfloat16", "--protocol", "self_check", "--n", "5", *_SHORT),
    "free-bf16": ("--dtype", "bfloat16", *_FREE, "--n", "60"),
    # Answers are asked of greedy runs; of drawn ones, when they part.
    "free-bf16-drawn": ("--dtype", "bfloat16", *_FREE, "--n", "60", "--samplers", "top_k,top_p", "--until-split"),
    "free-fp32": ("--dtype", "float32", *_FREE, "--n", "60"),
    "free-fp16": ("--dtype", "float16", *_FREE, "--n", "20"),
}
"""Name → what `kvferry audit` is asked."""

INSTEAD = {
    ("gemma3-270m", "prefix-fp16"): ("--dtype", "float16", "--protocol", "fixed_prefix", "--n", "20", *_SHORT),
    ("gemma3-270m", "free-fp16"): None,
    # Faults of a sliding window show behind its 512 tokens alone.
    ("gemma3-270m", "faults"): (
        *("--dtype", "bfloat16", "--protocol", "self_check", "--n", "2"),
        *("--prefix", "520", "--suffix", "8"),
    ),
}
"""Where a model is asked otherwise: every run of Gemma-3-270M in float16 overflows in the same layer."""


def main() -> None:
    """Run what is asked for, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    text = place("wikitext2-test.txt", (given.data / "wikitext2" / "test.txt").read_text(encoding="utf-8"))
    tasks = place("gsm8k-test.jsonl", (given.data / "gsm8k" / "test_a.jsonl").read_text(encoding="utf-8"))
    for part in given.parts.split(","):
        for model in given.models.split(","):
            asked = INSTEAD.get((model, part), PARTS[part])
            if asked is None:
                continue
            source = ("--tasks", str(tasks)) if "free_run" in asked else ("--text", str(text))
            log = TEXTS.parent / f"audit-{model}.jsonl"  # parts share what they have in common
            own = ("--log", str(log), "--threads", str(given.threads), "--json")
            path, command = given.folder / f"audit-{model}-{part}.json", ["audit", model, *asked, *source, *own]
            if is_kept(path, command):
                continue
            found = call(*command, statuses=(0, 1))
            if json.loads(found)["result"] is None:  # status 1 is also that of a fault that was found
                raise SystemExit(f"{model}, {part}: {json.loads(found)['error']}")
            keep(path, found)
    print(write(given.folder))


if __name__ == "__main__":
    main()
