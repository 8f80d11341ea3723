"""The studies of ``docs/results/map.md``: a matched pair, its mappers in both directions, and what they are worth.

python -m benchmarks.map_results FOLDER DATA [--parent M] [--parts a,b] [--directions up,down] [--dtype D] [--items N]

Each part is made of commands, each of a file of its own. What an earlier run has kept of the very same command and
revision is not measured again; distillation, fits, training, questions and the gate go on where they were stopped.
Mappers are fitted on textbooks and judged on WikiText-2 and HellaSwag, on which nothing was chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.parts import call, is_kept, keep, place
from kvferry.report.map_page import write_map_page

CODE = tuple(f"src/kvferry/{room}" for room in ("evaluate", "evidence", "hf", "map", "snapshot"))
"""What a mapper and its figures hang on."""

CHILD = Path("build/pairs/child")
DTYPE = Path("build/pairs/dtype")
MAPPERS = Path("build/mappers")
"""By paths that mean the same on every machine."""

LINEAR: dict[str, tuple[str, ...]] = {
    "ridge-k4": ("--top-k", "4"),
    "ridge-k1": ("--top-k", "1"),
    "ridge-k8": ("--top-k", "8"),
    "ridge-all": ("--top-k", "all"),
    "head_local": ("--variant", "head_local"),
    "ridge": ("--top-k", "1,4,8,all", "--ridge", "0.01,10,1000"),
}
TRAINED: dict[str, tuple[str, ...]] = {
    "ridge+e2e": ("--variant", "ridge+e2e", "--top-k", "4", "--epochs", "4"),
    "residual+e2e": ("--variant", "residual+e2e", "--top-k", "4", "--epochs", "4"),
    "ridge+residual": ("--variant", "ridge+residual", "--top-k", "4", "--epochs", "2", "--train-sequences", "80"),
    "mlp": ("--variant", "mlp", "--top-k", "4", "--epochs", "2", "--train-sequences", "90"),
}
"""Name → what `kvferry map fit` is asked. The paper trains its perceptron for 20 epochs; here it is what fits."""

_FEW = ("--top-k", "4", "--sequences", "40")
ABLATIONS: dict[str, tuple[str, ...]] = {
    "sequences-40": _FEW,
    "sequences-10": ("--top-k", "4", "--sequences", "10"),
    "no-strip": (*_FEW, "--no-strip"),
    "no-reapply": (*_FEW, "--no-reapply"),
    "lambda-1000": (*_FEW, "--ridge", "1000"),
}
"""The paper's ablations, each beside ``sequences-40``; that itself beside ``ridge-k4``, of all sequences."""

BEST = "ridge+e2e"
"""Judged by questions and needles with all controls, in turns and at the gate, unless `--best` names another."""

WHOLE = ("--native", "0,16", "--recompute-last", "5%,12.5%", "--recompute", "attention:0.05,error:0.05")
PARTS: dict[str, tuple[str, ...]] = {
    "pair": ("pair",),
    "linear": (*LINEAR,),
    "e2e": ("ridge+e2e",),
    "residual": ("ridge+residual",),
    "mlp": ("mlp",),
    "ablations": (*ABLATIONS,),
    "tasks": (),
    "bench": (),
    "turns": (),
    "gate": (),
    "residual-e2e": ("residual+e2e",),
}
"""Name → mappers that it fits and judges."""

ASKED_FOR = ("residual-e2e",)
"""Run only where it is named: as long as ``e2e``."""


def main() -> None:
    """Run what is asked for, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--parent", default="smollm2-135m")
    parser.add_argument("--parts", default=",".join(part for part in PARTS if part not in ASKED_FOR))
    parser.add_argument("--best", default=BEST, help="mapper of tasks, turns and the gate")
    parser.add_argument("--directions", default="up,down", help="up: child to parent; down: parent to child")
    parser.add_argument("--dtype", help="of models and products; by default the faster one of this machine")
    parser.add_argument("--minutes", type=float, default=40.0, help="of distillation")
    parser.add_argument("--tokens", type=int, default=930_000, help="of distillation, at most")
    parser.add_argument("--sequences", type=int, default=160, help="of 1,024 tokens, to fit on: every fourth token")
    parser.add_argument("--windows", type=int, default=16, help="that a mapper is judged on; those beside it: half")
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    asked = given.parts.split(",")
    if unknown := sorted(set(asked) - set(PARTS)):
        parser.error(f"unknown parts {', '.join(unknown)}: {', '.join(PARTS)} are")
    given.folder.mkdir(parents=True, exist_ok=True)
    study = Study(given)
    for part in asked:
        began = time.perf_counter()
        study.run(part)
        print(f"{part}: {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)
    print(write_map_page(given.folder, sorted(given.folder.glob("map-*.json"))))


def faster_dtype(path: Path = DTYPE) -> str:
    """The dtype that this machine multiplies faster in; found once, so that all parts are of one.

    Where a processor has no instructions for bfloat16, it costs more than twice as much as float32.
    """
    if not path.exists():
        import torch

        def seconds(dtype: torch.dtype) -> float:
            rows, weight = torch.ones(1024, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
            tries = []
            for _ in range(8):
                began = time.process_time()
                torch.nn.functional.linear(rows, weight)
                tries.append(time.process_time() - began)
            return min(tries)

        name = "bfloat16" if seconds(torch.bfloat16) < seconds(torch.float32) else "float32"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


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
        self.common = ("--threads", str(given.threads), "--dtype", given.dtype or faster_dtype())
        self.directions = given.directions.split(",")

    def run(self, part: str) -> None:
        """One part, in the directions that were asked for."""
        if part == "pair":
            limits = ("--minutes", str(self.given.minutes), "--tokens", str(self.given.tokens))
            self.run_once("pair", "pair", "make", self.given.parent, *self.texts, *limits, "-o", str(CHILD))
        elif part in ("turns", "gate"):
            self.between(part)
        else:
            own: dict[str, Callable[[str], None]] = {"tasks": self.ask, "bench": self.bench}
            for direction in self.directions:
                if part in own:
                    own[part](direction)
                else:
                    for name in PARTS[part]:
                        self.fit(direction, name)
                        self.judge(direction, name)

    def between(self, part: str) -> None:
        """Turns and the gate, which need both directions."""
        from benchmarks.map_studies import gate_rates, turns

        mappers = {name: self.mapper(name, self.given.best) for name in ("up", "down")}
        path = self.given.folder / f"map-{part}.json"
        if part == "turns":
            turns(mappers, path, self.judged)
        else:
            gate_rates(mappers, path, self.judged, log=MAPPERS / "gate.jsonl")

    def mapper(self, direction: str, name: str) -> Path:
        return MAPPERS / f"{direction}-{name}"

    def fit(self, direction: str, name: str) -> None:
        """Fit a mapper; those that are made of the same moments share them."""
        asked = {**LINEAR, **TRAINED, **ABLATIONS}[name]
        child, parent = str(CHILD), self.given.parent
        ends = (child, parent) if direction == "up" else (parent, child)
        count = asked[asked.index("--sequences") + 1] if "--sequences" in asked else str(self.given.sequences)
        kind = [word.lstrip("-") for word in asked if word in ("--no-strip", "--no-reapply")]
        moments = MAPPERS / "-".join([direction, "moments", count, *kind])
        sizes = () if "--sequences" in asked else ("--sequences", count)
        place_of = str(self.mapper(direction, name))
        arguments = ("map", "fit", *ends, *self.texts, "-o", place_of, *asked, "--resume", str(moments), *sizes)
        self.run_once(f"{direction}-{name}-fit", *arguments)
        if name == "ridge-k4":
            plot = str(self.given.folder / f"map-{direction}-r2.svg")
            self.run_once(f"{direction}-explain", "map", "explain", place_of, "--plot", plot, common=())

    def judge(self, direction: str, name: str) -> None:
        """Score a mapper on what nothing was chosen on; by every kind of transfer where it is a variant of its own."""
        if name == "ridge":
            return  # the tries; each k stands beside it
        whole = name in (*TRAINED, "ridge-k4", "head_local")
        controls = name in ("ridge-k4", "ridge+e2e", self.given.best)
        windows = self.given.windows if controls else self.given.windows // 2
        arguments = ("map", "eval", str(self.mapper(direction, name)), "--text", str(self.judged))
        size = ("--windows", str(windows), "--prefix", "512", "--suffix", "512")
        more = (*(WHOLE if whole else ()), "--controls", "all" if controls else "few")
        self.run_once(f"{direction}-{name}-eval", *arguments, *size, *more)

    def ask(self, direction: str) -> None:
        """Questions and needles: the best mapper with all controls; the paper's up alone, as its mappers go."""
        for name in (self.given.best, *(("ridge-k4",) if direction == "up" else ())):
            best = name == self.given.best
            arms = ("--native", "", *(("--recompute-last", "10%") if best else ()))
            size = ("--windows", "2", "--prefix", "256", "--suffix", "64", "--controls", "few")
            asked = ("--tasks", str(self.tasks), "--items", str(self.given.items), "--needle")
            more = ("--control-items", "100" if best else "0", "--log", str(MAPPERS / f"{direction}-{name}.jsonl"))
            arguments = ("map", "eval", str(self.mapper(direction, name)), "--text", str(self.judged))
            self.run_once(f"{direction}-{name}-tasks", *arguments, *size, *arms, *asked, *more)

    def bench(self, direction: str) -> None:
        """Latency over lengths of context."""
        lengths = ("--lengths", "256,512,1024,2048,4096", "--repeats", "3")
        mapper = str(self.mapper(direction, "ridge-k4"))
        self.run_once(f"{direction}-bench", "bench", "map", mapper, "--text", str(self.judged), *lengths)

    def run_once(self, name: str, *arguments: str, common: tuple[str, ...] | None = None) -> None:
        """Run a command and keep what it says, unless it is kept already."""
        path = self.given.folder / f"map-{name}.json"
        asked = [*arguments, *(self.common if common is None else common), "--json"]
        if is_kept(path, asked, CODE):
            print(f"{path} is there", flush=True)
        else:
            keep(path, call(*asked))


if __name__ == "__main__":
    main()
