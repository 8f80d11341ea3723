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
        seed: of the shuffle and the intervals.
    """

    windows: int = 8
    prefix: int = 512
    suffix: int = 256
    arms: tuple[Arm, ...] = (Arm("mapped"), Arm("mapped, no native prefix", native_prefix=0))
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
        seconds: medians over the windows: ``map``, ``native``, ``recompute``; empty for controls.
        scores: by window.
    """

    name: str
    perplexity: Perplexity
    fidelity: Fidelity
    gain: ContextGain
    attention: tuple[float | None, ...] = ()
    share: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    scores: tuple[TokenScores, ...] = ()

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
    """

    settings: MapEvalSettings
    mapper: str
    rows: tuple[ArmResult, ...]
    identity_exact: bool
    prefill_seconds: float
    source_seconds: float

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
    if not names or len({*names, *map_arms.CONTROLS}) != len(names) + len(map_arms.CONTROLS):
        raise InvalidInput(f"arms {names}: at least one, each with a name of its own")
    if wanted.windows < 2:
        raise InvalidInput("an evaluation needs at least two windows: one text's cache is offered to another")
    windows = cut_windows(tokenizer, text, windows=wanted.windows, prefix=wanted.prefix, suffix=wanted.suffix)
    require_target(mapper, target)
    lead = len(tokenizer("", verbose=False).input_ids)
    tallies = {name: _Tally() for name in (*names, *map_arms.CONTROLS)}
    full: list[TokenScores] = []
    prefills: list[float] = []
    sources: list[float] = []
    exact = True
    before: Snapshot | None = None
    last = _first_arm(mapper, source, target, windows[-1], wanted)
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
        other = last if before is None else before
        controls = _controls(mapper, target, cache, made, other, prepared, lead, wanted.seed)
        controls["source"] = compare(prepared.reference, suffix_logits(source, cache, window), window.targets)
        for name, scores in controls.items():
            tallies[name].scores.append(scores)
        exact = exact and _equal(controls["identity"], prepared.full)
        before = made
    rows = tuple(
        _result(name, tally, full, tallies["no_prefix"].scores, wanted.seed) for name, tally in tallies.items()
    )
    return MapReport(wanted, mapper.digest, rows, exact, median(prefills), median(sources))


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
    other: Snapshot,
    prepared: PreparedWindow,
    lead: int,
    seed: int,
) -> dict[str, TokenScores]:
    window = prepared.window
    caches = {
        "identity": map_arms.identity_arm(mapper, target, cache),
        "zero": map_arms.zero_arm(made),
        "shuffled": map_arms.shuffled_arm(mapper, made, seed),
        "other_document": map_arms.other_document_arm(other, window.prefix_ids),
    }
    scores = {name: prepared.score(snapshot) for name, snapshot in caches.items()}
    alone = map_arms.no_prefix_logits(target, window, lead)
    return {**scores, "no_prefix": compare(prepared.reference, alone, window.targets)}


def _result(name: str, tally: _Tally, full: Sequence[TokenScores], none: Sequence[TokenScores], seed: int) -> ArmResult:
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
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _equal(one: TokenScores, other: TokenScores) -> bool:
    return bool((one.nll == other.nll).all()) and one.flips == 0 and float(one.kl.max()) == 0.0
