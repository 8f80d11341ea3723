"""Does a model bear four bits? The paper's probe, and a calibrated one that tries other quantisers before it says no.

SpectrumKV (arXiv 2606.08635) asks with three needle trials under its three-tier greedy policy at a nominal budget of
0.3 and allows INT4 when two succeed: half of the models whose true success is 0.5 pass, and a model that cannot
retrieve at all is judged by what it cannot do. The calibrated probe feeds a few prompts through the cached decode path,
judges every position against the 16-bit cache, tests the rate of bad positions sequentially with stated error rates,
and climbs a ladder of quantisers until one is good enough.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import InvalidInput
from kvferry.evaluate.kept import probes_folder
from kvferry.evaluate.log import code_digest
from kvferry.evaluate.method import Method
from kvferry.evaluate.needle import NeedleGrid, PreparedTrial, Trial, make_trials
from kvferry.evaluate.perplexity import PreparedWindow
from kvferry.evaluate.scores import TokenScores
from kvferry.evaluate.sprt import Decision, Sprt
from kvferry.evaluate.windows import Window, cut_windows
from kvferry.evidence.log import digest
from kvferry.evidence.statistics import Interval, bootstrap_mean, wilson
from kvferry.hf.identity import identity_of
from kvferry.hf.text import default_text
from kvferry.snapshot.files import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

LADDER = (
    "sym8/sym4",
    "sym8/asym4g64",
    "sym8/chan4b128:asym4g64",
    "sym8/chan5b128:asym5g64",
    "sym8/chan6b128:asym6g64",
    "sym8/sym8",
)
"""What stands behind the INT8 and INT4 tiers, cheapest first; the last is INT8 alone, for models that bear no less."""

FOUR_BITS = 3
"""Rungs of `LADDER` that are INT4."""

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
"""Rates of bad positions at which the operating characteristic is reported."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How a model is probed.

    Attributes:
        prefix: tokens cached and shipped a prompt.
        suffix: positions judged after it.
        prompts: prompts at most.
        least_prompts: prompts at least, whatever the test says sooner: the mean KL needs some too.
        spacing: every so many positions are given to the test, since neighbors are not independent.
        bad_kl: a position is bad when its KL(16 bit ‖ shipped) exceeds this, in nats.
        most_kl: mean KL that is tolerated, in nats.
        sprt: the test of the rate of bad positions.
        needle_length: tokens of the paper's probe's prompts.
        ladder: quantisers to try, cheapest first; the last one is taken if none passes.
        four_bits: how many of them are INT4.
        seed: of needles and bootstrap.
    """

    prefix: int = 512
    suffix: int = 256
    prompts: int = 8
    least_prompts: int = 2
    spacing: int = 4
    bad_kl: float = 0.1
    most_kl: float = 0.02
    sprt: Sprt = field(default_factory=Sprt)
    needle_length: int = 512
    ladder: tuple[str, ...] = LADDER
    four_bits: int = FOUR_BITS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.least_prompts <= self.prompts or self.spacing < 1:
            raise InvalidInput("a probe needs 1 <= least_prompts <= prompts, and a spacing of at least 1")
        if not self.ladder or not 0 <= self.four_bits <= len(self.ladder):
            raise InvalidInput("a probe needs a ladder of quantisers")


@dataclass(frozen=True, slots=True)
class Rung:
    """One quantiser's answer.

    Attributes:
        quantizer: as `TierSpecs.parse` reads it.
        budget: actual, of a packet all in its low tier but for the sinks.
        kl_mean: over all positions, in nats.
        kl_ci: its interval, prompts drawn anew; ``None`` for one prompt.
        flip_rate: share of positions whose most likely token changed.
        flip_ci: Wilson's interval of it.
        bad_rate: share of all positions with a KL above the bar.
        decision: of the sequential test.
        bad, looks: what the test saw.
        prompts: prompts used.
        passed: the test accepts, and the mean KL is tolerated.
    """

    quantizer: str
    budget: float
    kl_mean: float | None
    kl_ci: Interval | None
    flip_rate: float
    flip_ci: Interval
    bad_rate: float
    decision: Decision
    bad: int
    looks: int
    prompts: int
    passed: bool


@dataclass(frozen=True, slots=True)
class PaperProbe:
    """The paper's three trials.

    Attributes:
        hits: numbers read back under greedy at b = 0.3.
        full_hits: numbers that the 16-bit cache itself gave back: where few, the model cannot be asked this way.
        trials: in all.
        int4_allowed: at least two hits.
    """

    hits: int
    full_hits: int
    trials: int
    int4_allowed: bool


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        int4_allowed: some INT4 quantiser of the ladder passed.
        quantizer: the first that passed, or the ladder's last.
        trials: the paper's probe.
        rungs: the ladder as far as it was climbed.
        kl: mean KL of the quantiser chosen.
        error_rates: of the sequential test: rates, α, β, and the chance to accept at various true rates, exact for
            independent positions; the same of the paper's two of three, by the true chance of a needle.
        settings, model: what was asked, and whom.
    """

    int4_allowed: bool
    quantizer: str
    trials: PaperProbe
    rungs: tuple[Rung, ...]
    kl: float | None
    error_rates: Mapping[str, Any]
    settings: Mapping[str, Any]
    model: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeResult:
        """Inverse of `to_json`."""

        def pair(value: Sequence[float] | None) -> Interval | None:
            return None if value is None else (value[0], value[1])

        rungs = tuple(
            Rung(**{**rung, "kl_ci": pair(rung["kl_ci"]), "flip_ci": pair(rung["flip_ci"])}) for rung in data["rungs"]
        )
        return cls(**{**data, "trials": PaperProbe(**data["trials"]), "rungs": rungs})


OnProgress = Callable[[str], None]


def probe(
    model: PreTrainedModel,
    tokenizer: Any,
    settings: ProbeSettings | None = None,
    *,
    text: str | None = None,
    cache: bool | Path = True,
    on_progress: OnProgress | None = None,
) -> ProbeResult:
    """Find the cheapest quantiser that a model bears.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        settings: how to probe.
        text: what prompts are cut from; Python's own reference topics by default.
        cache: keep the answer, and give a kept one, in kvferry's cache folder (or another folder); an answer is bound
            to the model's weights, dtype and attention backend, to all settings, the text and kvferry's own code.
        on_progress: told what is being tried.

    Raises:
        InvalidInput: the text is too short, or settings make no sense.
    """
    chosen = settings or ProbeSettings()
    words = default_text() if text is None else text
    facts = _facts(model)
    kept = None
    if cache is not False:
        folder = probes_folder() if cache is True else Path(cache)
        kept = folder / f"{digest([facts, asdict(chosen), digest(words), code_digest()])}.json"
        found = _load(kept)
        if found is not None:
            return found
    tell = on_progress or log.debug
    tell("the paper's three needles")
    trials = paper_probe(model, tokenizer, length=chosen.needle_length, seed=chosen.seed)
    windows = cut_windows(tokenizer, words, windows=chosen.prompts, prefix=chosen.prefix, suffix=chosen.suffix)
    rungs = _climb(model, windows, chosen, tell)
    last = rungs[-1]
    result = ProbeResult(
        int4_allowed=last.passed and len(rungs) <= chosen.four_bits,
        quantizer=last.quantizer,
        trials=trials,
        rungs=tuple(rungs),
        kl=last.kl_mean,
        error_rates=error_rates(chosen.sprt),
        settings={**asdict(chosen), "ladder": list(chosen.ladder)},
        model=facts,
    )
    if kept is not None:
        _save(kept, result)
    return result


def paper_probe(model: PreTrainedModel, tokenizer: Any, *, length: int = 512, seed: int = 0) -> PaperProbe:
    """Three needle trials at three depths under 3-tier greedy at nominal 0.3; INT4 is allowed when two succeed."""
    method = Method("greedy", nominal_budget=0.3, quantizers="sym8/sym4")
    hits = full = 0
    trials = paper_trials(tokenizer, length=length, seed=seed)
    for trial in trials:
        prepared = PreparedTrial(model, trial)
        full += prepared.read(prepared.snapshot)[0]
        hits += prepared.judge(method).hit
    return PaperProbe(hits, full, len(trials), hits >= 2)


def paper_trials(tokenizer: Any, *, length: int = 512, seed: int = 0) -> list[Trial]:
    """Three needles, each in a haystack of its own and at a depth of its own: 0.1, 0.5, 0.9."""
    depths = (0.1, 0.5, 0.9)
    grid = NeedleGrid((length,), depths, len(depths), seed=seed)
    return [trial for trial in make_trials(tokenizer, grid) if trial.depth == depths[trial.needle]]


def error_rates(sprt: Sprt) -> dict[str, Any]:
    """The test's error rates and its operating characteristic, beside that of the paper's two of three."""
    curve = []
    for rate in sorted({*RATES, sprt.tolerable, sprt.intolerable}):
        accept, undecided, looks = sprt.operating_characteristic(rate)
        curve.append({"rate": rate, "accept": accept, "undecided": undecided, "mean_looks": looks})
    paper = [{"needle_rate": p / 10, "accept": 3 * (p / 10) ** 2 - 2 * (p / 10) ** 3} for p in range(11)]
    return {**asdict(sprt), "operating_characteristic": curve, "paper_operating_characteristic": paper}


def _climb(model: PreTrainedModel, windows: Sequence[Window], settings: ProbeSettings, tell: OnProgress) -> list[Rung]:
    prepared: dict[int, PreparedWindow] = {}
    rungs: list[Rung] = []
    for spec in settings.ladder:
        method = Method("sink_protect", nominal_budget=0.25, quantizers=spec)
        scores: list[TokenScores] = []
        budgets: list[float] = []
        for number, window in enumerate(windows):
            tell(f"{spec}, prompt {number + 1}")
            if number not in prepared:
                prepared[number] = PreparedWindow(model, window)
            found = prepared[number].judge(method)
            assert found.scores is not None, found.reason
            scores.append(found.scores)
            budgets.append(found.nbytes / found.full_bytes)
            decision, bad, looks = settings.sprt.decide(_bad(scores, settings))
            if len(scores) >= settings.least_prompts and (decision != "undecided" or looks >= settings.sprt.most):
                break
        rungs.append(_rung(spec, scores, budgets, (decision, bad, looks), settings))
        log.info("%s", rungs[-1])
        if rungs[-1].passed:
            break
    return rungs


def _bad(scores: Sequence[TokenScores], settings: ProbeSettings) -> list[bool]:
    """Bad or not, of the positions that the test looks at; one with a KL that is no number is bad."""
    kl = np.concatenate([score.kl[:: settings.spacing] for score in scores])
    return [bool(bad) for bad in ~(kl <= settings.bad_kl)]


def _rung(
    spec: str,
    scores: Sequence[TokenScores],
    budgets: Sequence[float],
    tested: tuple[Decision, int, int],
    settings: ProbeSettings,
) -> Rung:
    kl = np.concatenate([score.kl for score in scores]).astype(np.float64)
    finite = bool(np.isfinite(kl).all())
    prompts = [place for place, score in enumerate(scores) for _ in score.kl]
    mean = float(kl.mean()) if finite else None
    flips = sum(score.flips for score in scores)
    return Rung(
        quantizer=spec,
        budget=sum(budgets) / len(budgets),
        kl_mean=mean,
        kl_ci=bootstrap_mean(kl.tolist(), prompts, seed=settings.seed) if finite else None,
        flip_rate=flips / len(kl),
        flip_ci=wilson(flips, len(kl)),
        bad_rate=float((~(kl <= settings.bad_kl)).mean()),
        decision=tested[0],
        bad=tested[1],
        looks=tested[2],
        prompts=len(scores),
        passed=tested[0] == "accept" and mean is not None and mean <= settings.most_kl,
    )


def _facts(model: PreTrainedModel) -> dict[str, Any]:
    identity = identity_of(model)
    names = ("model", "revision", "weights", "dtype", "attention", "transformers", "tokenizer")
    return {name: getattr(identity, name) for name in names}


def _load(path: Path) -> ProbeResult | None:
    """A kept answer; one that cannot be read is found out anew."""
    try:
        return ProbeResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be used and is written anew: %s", path, error)
        return None


def _save(path: Path, result: ProbeResult) -> None:
    """Keep the answer. Where that cannot be done it is still an answer: a warning says why it will be asked again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result.to_json(), indent=1, allow_nan=False))
    except (OSError, InvalidInput) as error:
        log.warning("the answer cannot be kept (%s); KVFERRY_CACHE names another folder", error)
