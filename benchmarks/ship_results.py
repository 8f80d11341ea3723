"""The studies of ``docs/results/ship.md``: each a command of its own that goes on where it was stopped.

python -m benchmarks.ship_results FOLDER DATA [--models a,b] [--parts a,b] [--windows N] [--threads N]

Windows are cut from the first 60% of WikiText-2's test text: what was chosen by looking at results was chosen on the
rest. Calibration is on a textbook.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.parts import call, keep, place
from kvferry.report.ship_page import write_ship_page

MODELS = ("smollm2-135m", "gemma3-270m")

_PAPER = "greedy,balanced,sink_protect,two_tier,random_tier,pdtrim,sws"
_WITHIN_BYTES = "auto,fast,klt,greedy,random_tier"
_FEW_BYTES = "0.2,0.15,0.1,0.07,0.05,0.04,0.03"

PARTS = {
    "paper": ("--policies", _PAPER, "--budgets", "", "--nominal-budgets", "0.3,0.5,0.7"),
    "default": ("--policies", _WITHIN_BYTES, "--budgets", "0.52,0.4,0.28,0.25,0.2", "--no-baselines"),
    "ladder": ("--policies", "sink_protect", "--quantizers", "sym,asym,chan", "--budgets", "0.3", "--no-baselines"),
    "small": ("--policies", "klt", "--budgets", _FEW_BYTES, "--no-baselines"),
    "needle": ("--policies", "fast,klt,sink_protect", "--budgets", "0.28,0.1", "--windows", "0", "--needle"),
}
"""Name → what `kvferry ship sweep` is asked."""

SHARE = 0.6
"""Of the text, from its beginning."""


def main() -> None:
    """Run what is asked for, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(("calibrate", *PARTS)))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    words = (given.data / "wikitext2" / "test.txt").read_text(encoding="utf-8")
    text = place("wikitext2-test-first-60-percent.txt", words[: int(SHARE * len(words))])
    for model in given.models.split(","):
        for part in given.parts.split(","):
            run(part, model, text, given)
    print(*write_ship_page(given.folder, sorted(given.folder.glob("ship-*-*.json"))), sep="\n")


def run(part: str, model: str, text: Path, given: argparse.Namespace) -> None:
    """One part of one model; its JSON takes the old one's place when it is whole."""
    threads = ("--threads", str(given.threads))
    if part == "calibrate":
        book = given.data / "openstax" / "biology.txt"
        call("ship", "calibrate", model, "--text", str(book), "--windows", "40", "--gradient-windows", "24", *threads)
        return
    asked = PARTS[part]
    if "--needle" not in asked:
        asked = ("--text", str(text), "--windows", str(given.windows), "--no-attention", *asked)
    found = call("ship", "sweep", model, *asked, *threads, "--json")
    keep(given.folder / f"ship-{model}-{part}.json", found)


if __name__ == "__main__":
    main()
