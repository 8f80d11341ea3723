"""The studies of ``docs/results/map.md``: a matched pair, its mappers in both directions, and what they are worth.

python -m benchmarks.map_results FOLDER DATA [--parent M] [--parts a,b] [--minutes M] [--windows N] [--items N]

Each part is a command of its own. What an earlier run has kept of the very same command and revision is not measured
again; fits and the distillation go on where they were stopped. Mappers are fitted on textbooks and judged on
WikiText-2, on which nothing was chosen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.map_studies import gate_rates, turns
from benchmarks.parts import call, is_kept, keep, place
from kvferry.report.map_page import write_map_page

CODE = tuple(f"src/kvferry/{room}" for room in ("evaluate", "evidence", "hf", "map", "snapshot"))
"""What a mapper and its figures hang on."""

CHILD = Path("build/pairs/child")
MAPPERS = Path("build/mappers")
"""By paths that mean the same on every machine."""

_LINEAR = ("--top-k", "1,4,8,all", "--ridge", "0.01,10,1000")
VARIANTS: dict[str, tuple[str, ...]] = {
    "ridge": _LINEAR,
    "ridge-k1": ("--top-k", "1"),
    "ridge-k4": ("--top-k", "4"),
    "ridge-k8": ("--top-k", "8"),
    "ridge-all": ("--top-k", "all"),
    "head_local": ("--variant", "head_local"),
    "ridge+residual": ("--variant", "ridge+residual", "--top-k", "4"),
    "mlp": ("--variant", "mlp", "--top-k", "4"),
}
"""Name → what `kvferry map fit` is asked."""

ABLATIONS: dict[str, tuple[str, ...]] = {
    "no-strip": ("--top-k", "4", "--no-strip"),
    "no-reapply": ("--top-k", "4", "--no-reapply"),
    "lambda-1000": ("--top-k", "4", "--ridge", "1000"),
    "sequences-20": ("--top-k", "4", "--sequences", "20"),
    "sequences-60": ("--top-k", "4", "--sequences", "60"),
}
"""The paper's ablations, each beside ``ridge-k4``."""

WHOLLY = ("ridge-k4", "head_local", "ridge+residual", "mlp")
"""Judged by every kind of transfer, by tasks and needles: what `ridge-k4` is the basis of, and itself."""

WHOLE = ("--native", "0,4", "--recompute-last", "64,128", "--recompute", "attention:0.05,error:0.05")
PARTS = ("pair", "variants", "ablations", "bench", "turns", "gate")


def main() -> None:
    """Run what is asked for, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--parent", default="smollm2-135m")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--variants", default=",".join((*VARIANTS, *ABLATIONS)))
    parser.add_argument("--directions", default="up,down", help="up: child to parent; down: parent to child")
    parser.add_argument("--minutes", type=float, default=40.0, help="of distillation")
    parser.add_argument("--tokens", type=int, default=930_000, help="of distillation, at most")
    parser.add_argument("--sequences", type=int, default=180, help="of 1,024 tokens, to fit on: every fourth token")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    Study(given).run(given.parts.split(","))
    print(write_map_page(given.folder, sorted(given.folder.glob("map-*.json"))))


class Study:
    """The parts, for one pair."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        books = [given.data / "openstax" / f"{name}.txt" for name in ("biology", "psychology")]
        placed = [place(book.name, book.read_text(encoding="utf-8")) for book in books]
        self.texts = [word for book in placed for word in ("--text", str(book))]
        words = (given.data / "wikitext2" / "test.txt").read_text(encoding="utf-8")
        self.judged = place("wikitext2-test.txt", words)
        questions = (given.data / "hellaswag" / "val_a.jsonl").read_text(encoding="utf-8")
        self.tasks = place("hellaswag.jsonl", questions)
        self.threads = ("--threads", str(given.threads))
        self.chosen = given.variants.split(",")

    def run(self, parts: list[str]) -> None:
        if "pair" in parts:
            limits = ("--minutes", str(self.given.minutes), "--tokens", str(self.given.tokens))
            self.run_once("pair", "pair", "make", self.given.parent, *self.texts, *limits, "-o", str(CHILD))
        child = str(CHILD)
        for direction in self.given.directions.split(","):
            ends = (child, self.given.parent) if direction == "up" else (self.given.parent, child)
            if "variants" in parts:
                for name in [name for name in VARIANTS if name in self.chosen]:
                    self.fit(direction, name, VARIANTS[name], ends)
                    self.judge(direction, name, full=name in WHOLLY)
            if "ablations" in parts:
                for name in [name for name in ABLATIONS if name in self.chosen]:
                    self.fit(direction, name, ABLATIONS[name], ends)
                    self.judge(direction, name, full=False)
            if "bench" in parts:
                lengths = ("--lengths", "256,512,1024,2048,4096")
                self.run_once(f"{direction}-bench", "bench", "map", str(self.mapper(direction, "ridge-k4")), *lengths)
        mappers = {name: self.mapper(name, "ridge-k4") for name in ("up", "down")}
        if "turns" in parts:
            turns(mappers, self.given.folder / "map-turns.json", self.judged)
        if "gate" in parts:
            gate_rates(mappers, self.given.folder / "map-gate.json", self.judged)

    def mapper(self, direction: str, name: str) -> Path:
        return MAPPERS / f"{direction}-{name}"

    def fit(self, direction: str, name: str, asked: tuple[str, ...], ends: tuple[str, str]) -> None:
        """Fit a mapper; those that are made of the same moments share them."""
        count = asked[asked.index("--sequences") + 1] if "--sequences" in asked else str(self.given.sequences)
        kind = [word.lstrip("-") for word in asked if word in ("--no-strip", "--no-reapply")]
        moments = MAPPERS / "-".join([direction, "moments", count, *kind])
        place_of = self.mapper(direction, name)
        arguments = ("map", "fit", *ends, *self.texts, "-o", str(place_of), *asked, "--resume", str(moments))
        self.run_once(
            f"{direction}-{name}-fit", *arguments, *(() if "--sequences" in asked else ("--sequences", count))
        )

    def judge(self, direction: str, name: str, *, full: bool) -> None:
        """Score a mapper on what nothing was chosen on; ``full``: with tasks, needles and every kind of transfer."""
        size = ("--windows", str(self.given.windows), "--prefix", "512", "--suffix", "512")
        more: tuple[Any, ...] = ()
        if full:
            more = (*WHOLE, "--tasks", str(self.tasks), "--items", str(self.given.items), "--needle")
        arguments = ("map", "eval", str(self.mapper(direction, name)), "--text", str(self.judged), *size, *more)
        self.run_once(f"{direction}-{name}-eval", *arguments)

    def run_once(self, name: str, *arguments: str) -> None:
        """Run a command and keep what it says, unless it is kept already."""
        path = self.given.folder / f"map-{name}.json"
        asked = [*arguments, *self.threads, "--json"]
        if is_kept(path, asked, CODE):
            print(f"{path} is there", flush=True)
        else:
            keep(path, call(*asked))


if __name__ == "__main__":
    main()
