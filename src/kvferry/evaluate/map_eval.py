"""A mapper judged by what the target makes of its caches, beside the controls that say what that is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidInput
from kvferry.evaluate import map_arms
from kvferry.evaluate.attention import attention_cosine
from kvferry.evaluate.map_arms import Arm
from kvferry.evaluate.map_fit import with_tokenizer
from kvferry.evaluate.map_gain import ContextGain, context_gain
from kvferry.evaluate.map_run import require_target
from kvferry.evaluate.perplexity import PreparedWindow, suffix_logits
from kvferry.evaluate.scores import Fidelity, Perplexity, TokenScores, compare, fidelity, perplexity
from kvferry.evaluate.windows import Window, cut_windows
from kvferry.hf.capture import capture
from kvferry.hf.recompute import prefill
from kvferry.map.judge import RowJudge
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class MapEvalSettings:
    """What is run.

    Attributes:
        windows, prefix, suffix: see `cut_windows`; the text must be none that the mapper was fitted or chosen on.
        arms: transfers to be judged; the first one counts as the mapper's own.
        controls: of `kvferry.evaluate.map_arms.CONTROLS`, those that are run on every window. With none of them the
            identity is still held against the target on the first one, and a context's worth measured by no prefix.
        seed: of the shuffle and the intervals.
    """

    windows: int = 8
    prefix: int = 512
    suffix: int = 256
    arms: tuple[Arm, ...] = (Arm("mapped"), Arm("mapped, no native prefix", native_prefix=0))
    controls: tuple[str, ...] = map_arms.CONTROLS
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ArmResult:
    """One arm or control over all windows.

    Attributes:
        name: of the arm.
        perplexity: beside the target's own prefill.
        fidelity: to the target's own prefill: KL with tails, flips.
        gain: see `ContextGain`.
        attention: mean cosine of attention outputs by layer, for mapped caches.
        share: of the prefix's tokens that the target ran on.
        seconds: medians over the windows: ``map``, ``native``, ``recompute`` and, where tokens are chosen, ``choose``;
            empty for controls.
        scores: by window.
        oracle: whether it looked at the target's own cache, which a transfer is to spare.
        over_source: perplexity beside the source model alone; ``None`` where that was not run.
    """

    name: str
    perplexity: Perplexity
    fidelity: Fidelity
    gain: ContextGain
    attention: tuple[float | None, ...] = ()
    share: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    scores: tuple[TokenScores, ...] = ()
    oracle: bool = False
    over_source: Perplexity | None = None

    def to_json(self) -> dict[str, Any]:
        known = [value for value in self.attention if value is not None]
        return {
            "name": self.name,
            "ppl": self.perplexity.ppl,
            "ppl_target": self.perplexity.ppl_full,
            "ppl_delta_pct": self.perplexity.delta_pct,
            "ppl_delta_ci": self.perplexity.delta_ci,
            **{key: value for key, value in asdict(self.fidelity).items() if key != "n"},
            "n": self.fidelity.n,
            "context_gain": self.gain.to_json(),
            "attention_cosine": sum(known) / len(known) if known else None,
            "attention_by_layer": list(self.attention),
            "share": self.share,
            "seconds": self.seconds,
            "oracle": self.oracle,
            "over_source": None
            if self.over_source is None
            else {"ppl_delta_pct": self.over_source.delta_pct, "ci": self.over_source.delta_ci},
        }


@dataclass(frozen=True, slots=True, eq=False)
class MapReport:
    """What `evaluate_mapper` gives.

    Attributes:
        settings: as run.
        mapper: its digest.
        rows: the arms, then the controls.
        identity_exact: whether the target's own cache, through the whole path, scored exactly as it does by itself:
            if not, no row counts.
        prefill_seconds: median of the target's own prefill of the prefix.
        source_seconds: median of the source's prefill of it.
        r2: of the first arm's keys and values by layer, on these windows; tokens that the target itself computed first
            are left out.
    """

    settings: MapEvalSettings
    mapper: str
    rows: tuple[ArmResult, ...]
    identity_exact: bool
    prefill_seconds: float
    source_seconds: float
    r2: dict[str, list[float | None]]

    def row(self, name: str) -> ArmResult:
        """An arm or control by its name."""
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> dict[str, Any]:
        main = self.rows[0]
        whole = sum(main.seconds.values())
        return {
            "mapper": self.mapper,
            "settings": asdict(self.settings),
            "identity_exact": self.identity_exact,
            "attention_cosine": main.to_json()["attention_cosine"],
            "kl_mean": main.fidelity.kl_mean,
            "ppl": main.perplexity.ppl,
            "ppl_target": main.perplexity.ppl_full,
            "context_gain": main.gain.to_json(),
            "r2_judged": self.r2,
            "tasks": [],
            "rows": [row.to_json() for row in self.rows],
            "seconds": {
                "map": main.seconds.get("map"),
                "transfer": whole,
                "prefill": self.prefill_seconds,
                "source_prefill": self.source_seconds,
                "speedup": self.prefill_seconds / whole if whole else None,
            },
        }


@dataclass(slots=True, eq=False)
class _Tally:
    scores: list[TokenScores] = field(default_factory=list)
    attention: list[tuple[float | None, ...]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)


def evaluate_mapper(
    mapper: Mapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any,
    text: str,
    settings: MapEvalSettings | None = None,
    *,
    on_step: OnStep | None = None,
) -> MapReport:
    """Judge a mapper on windows of a text.

    Each window's prefix is prefilled by both models. The suffix is scored by the target on its own cache, on each
    arm's and on each control's, and by the source on its own.

    Raises:
        IncompatibleIdentity: the models are not the mapper's.
        InvalidInput: a text too short, arms without a name of their own, or less than two windows.
    """
    wanted = settings or MapEvalSettings()
    names = [arm.name for arm in wanted.arms]
    asked = _controls_of(wanted)
    if not names or len({*names, *map_arms.CONTROLS}) != len(names) + len(map_arms.CONTROLS):
        raise InvalidInput(f"arms {names}: at least one, each with a name of its own")
    if wanted.windows < 2:
        raise InvalidInput("an evaluation needs at least two windows: one text's cache is offered to another")
    windows = cut_windows(tokenizer, text, windows=wanted.windows, prefix=wanted.prefix, suffix=wanted.suffix)
    require_target(mapper, target)
    lead = len(tokenizer("", verbose=False).input_ids)
    tallies = {name: _Tally() for name in (*names, *asked)}
    judge = RowJudge(mapper.target, mapper.target_rotaries)
    full: list[TokenScores] = []
    prefills: list[float] = []
    sources: list[float] = []
    exact = True
    before: Snapshot | None = None
    last = _first_arm(mapper, source, target, windows[-1], wanted) if "other_document" in asked else None
    for place, window in enumerate(windows):
        if on_step is not None:
            on_step(place, len(windows), f"window {place + 1}")
        began = time.perf_counter()
        cache = map_arms.source_cache(mapper, source, window.prefix_ids)
        sources.append(time.perf_counter() - began)
        began = time.perf_counter()
        prefill(target, mapper.target, window.prefix_ids)
        prefills.append(time.perf_counter() - began)
        prepared = PreparedWindow(target, window)
        full.append(prepared.full)
        made = _judge_arms(mapper, target, cache, prepared, wanted, tallies)
        judge.add(made, prepared.snapshot, round(tallies[names[0]].shares[-1] * made.seq_len))
        other = last if before is None else before
        run = asked if place or "identity" in asked else (*asked, "identity")
        controls = _controls(mapper, target, cache, made, other, prepared, lead, wanted.seed, run)
        if "source" in run:
            controls["source"] = compare(prepared.reference, suffix_logits(source, cache, window), window.targets)
        if "identity" in run:
            exact = exact and _equal(controls["identity"], prepared.full)
        for name in asked:
            tallies[name].scores.append(controls[name])
        before = made
    none, alone = tallies["no_prefix"].scores, tallies["source"].scores if "source" in asked else None
    oracles = {arm.name for arm in wanted.arms if arm.oracle}
    rows = tuple(
        _result(name, tally, full, none, alone, wanted.seed, name in oracles) for name, tally in tallies.items()
    )
    return MapReport(wanted, mapper.digest, rows, exact, median(prefills), median(sources), judge.r2())


def _controls_of(settings: MapEvalSettings) -> tuple[str, ...]:
    """The controls that are run, in their own order; without no prefix there is no context gain."""
    unknown = sorted(set(settings.controls) - set(map_arms.CONTROLS))
    if unknown:
        raise InvalidInput(f"unknown controls {', '.join(unknown)}: {', '.join(map_arms.CONTROLS)} are")
    return tuple(name for name in map_arms.CONTROLS if name in settings.controls or name == "no_prefix")


def _first_arm(
    mapper: Mapper, source: PreTrainedModel, target: PreTrainedModel, window: Window, settings: MapEvalSettings
) -> Snapshot:
    """The mapped cache that the first window gets as another document's."""
    cache = map_arms.source_cache(mapper, source, window.prefix_ids)
    own = _own(mapper, target, window) if settings.arms[0].chooser == "error" else None
    return map_arms.run_arm(mapper, target, cache, settings.arms[0], own).snapshot


def _own(mapper: Mapper, target: PreTrainedModel, window: Window) -> Snapshot:
    return with_tokenizer(capture(target, window.prefix_ids), mapper.target)


def _judge_arms(
    mapper: Mapper,
    target: PreTrainedModel,
    cache: Snapshot,
    prepared: PreparedWindow,
    settings: MapEvalSettings,
    tallies: dict[str, _Tally],
) -> Snapshot:
    """All arms on one window; returns the first one's cache."""
    first: Snapshot | None = None
    for arm in settings.arms:
        done = map_arms.run_arm(mapper, target, cache, arm, prepared.snapshot)
        tally = tallies[arm.name]
        tally.scores.append(prepared.score(done.snapshot))
        tally.attention.append(attention_cosine(prepared.snapshot, done.snapshot).both)
        tally.shares.append(done.share)
        tally.seconds.append(done.seconds)
        first = first or done.snapshot
    assert first is not None
    return first


def _controls(
    mapper: Mapper,
    target: PreTrainedModel,
    cache: Snapshot,
    made: Snapshot,
    other: Snapshot | None,
    prepared: PreparedWindow,
    lead: int,
    seed: int,
    names: Sequence[str],
) -> dict[str, TokenScores]:
    """Scores of the controls ``names`` but the source's."""
    window = prepared.window
    made_by: dict[str, Callable[[], Snapshot]] = {
        "identity": lambda: map_arms.identity_arm(mapper, target, cache),
        "zero": lambda: map_arms.zero_arm(made),
        "shuffled": lambda: map_arms.shuffled_arm(mapper, made, seed),
    }
    if other is not None:
        made_by["other_document"] = lambda: map_arms.other_document_arm(other, window.prefix_ids)
    scores = {name: prepared.score(make()) for name, make in made_by.items() if name in names}
    alone = map_arms.no_prefix_logits(target, window, lead)
    return {**scores, "no_prefix": compare(prepared.reference, alone, window.targets)}


def _result(
    name: str,
    tally: _Tally,
    full: Sequence[TokenScores],
    none: Sequence[TokenScores],
    alone: Sequence[TokenScores] | None,
    seed: int,
    oracle: bool,
) -> ArmResult:
    attention: tuple[float | None, ...] = ()
    if tally.attention:
        attention = tuple(_mean(column) for column in zip(*tally.attention, strict=True))
    return ArmResult(
        name=name,
        perplexity=perplexity(tally.scores, full, seed=seed),
        fidelity=fidelity(tally.scores),
        gain=context_gain(tally.scores, full, none, seed=seed),
        attention=attention,
        share=sum(tally.shares) / len(tally.shares) if tally.shares else None,
        seconds={key: median(one[key] for one in tally.seconds) for key in (tally.seconds[0] if tally.seconds else ())},
        scores=tuple(tally.scores),
        oracle=oracle,
        over_source=None if alone is None or name == "source" else perplexity(tally.scores, alone, seed=seed),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _equal(one: TokenScores, other: TokenScores) -> bool:
    return bool((one.nll == other.nll).all()) and one.flips == 0 and float(one.kl.max()) == 0.0
