"""Policies × quantisers × budgets × metrics over one model and one text, resumable."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import InvalidInput
from kvferry.evaluate.bits import BitsMap, bits_map
from kvferry.evaluate.log import code_digest
from kvferry.evaluate.method import Method
from kvferry.evaluate.needle import (
    NeedleGrid,
    NeedleScore,
    PreparedTrial,
    Trial,
    TrialResult,
    make_trials,
    needle_score,
)
from kvferry.evaluate.perplexity import PreparedWindow, WindowResult
from kvferry.evaluate.scores import TokenScores, fidelity, perplexity
from kvferry.evaluate.windows import Window, cut_windows
from kvferry.evidence.log import ResultLog, digest
from kvferry.hf.identity import identity_of
from kvferry.ship.layout import BY_LAYER
from kvferry.ship.sensitivity import kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

BASELINES = (Method("full"), Method("zero_cache"), Method("no_prefix"), Method("uniform_int8"), Method("uniform_int4"))
"""Stand beside every result, with ``random_tier`` at the sweep's own budgets."""

OnProgress = Callable[[int, int, str], None]
"""``(steps done, steps in all, what is next)``; a step is one method on one window or trial."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What is swept.

    Attributes:
        methods: from `kvferry.evaluate.method.expand`, baselines included where wanted.
        windows: windows of the text; 0 leaves perplexity out.
        prefix: tokens cached and shipped.
        suffix: tokens scored.
        needle: the needle grid, where wanted.
        attention: also the cosine of attention outputs, layer by layer.
        step: tokens a forward pass over the suffix; ``None`` for all at once.
        seed: of the bootstraps.
    """

    methods: tuple[Method, ...]
    windows: int = 16
    prefix: int = 1024
    suffix: int = 1024
    needle: NeedleGrid | None = None
    attention: bool = True
    step: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.methods:
            raise InvalidInput("a sweep needs at least one method")
        if self.windows < 0 or (self.windows == 0 and self.needle is None):
            raise InvalidInput("a sweep needs windows of a text, a needle grid, or both")


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One method; bytes and budget are means over windows (over trials, where there are no windows).

    Attributes:
        policy, quantizer, budget, nominal_budget, bytes, ppl, ppl_full, ppl_delta_pct, ppl_delta_ci, kl_mean,
        top1_agreement, needle: as the contract has them; ``budget`` is actual: bytes over those of the 16-bit packet.
        asked: the method's settings.
        full_bytes: of the 16-bit packet.
        windows, tokens: windows, and tokens scored in them.
        ppl_delta_se: standard error of ``ppl_delta_pct``.
        kl_p50, kl_p95, kl_max, flip_margin_p50, flip_margin_max, nonfinite: see `Fidelity`.
        attention_cosine: means over windows by layer: shipped keys, shipped values, both.
        reason: why there are no figures: the policy cannot meet the budget.
    """

    policy: str
    quantizer: str
    budget: float | None
    nominal_budget: float | None
    bytes: int | None
    ppl: float | None
    ppl_full: float | None
    ppl_delta_pct: float | None
    ppl_delta_ci: tuple[float, float] | None
    kl_mean: float | None
    top1_agreement: float | None
    needle: NeedleScore | None
    asked: Method
    full_bytes: int | None = None
    windows: int = 0
    tokens: int = 0
    ppl_delta_se: float | None = None
    kl_p50: float | None = None
    kl_p95: float | None = None
    kl_max: float | None = None
    flip_margin_p50: float | None = None
    flip_margin_max: float | None = None
    nonfinite: int = 0
    attention_cosine: Mapping[str, list[float | None]] | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class SweepResult:
    """All rows, and for figures the bits of each method's packet of the first window.

    Attributes:
        rows: one a method, in the order asked for.
        maps: of row i; ``None`` for what sends no packet.
        settings: what was swept.
        model: who was asked.
        resumed: steps taken from the log.
        steps: steps in all.
        seconds: spent in this run.
    """

    rows: tuple[SweepRow, ...]
    maps: tuple[BitsMap | None, ...] = field(repr=False)
    settings: SweepSettings
    model: Mapping[str, Any]
    resumed: int
    steps: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.rows],
            "settings": asdict(self.settings),
            "model": dict(self.model),
            "resumed": self.resumed,
            "steps": self.steps,
            "seconds": self.seconds,
        }


def sweep(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    settings: SweepSettings,
    *,
    haystack: str | None = None,
    results: ResultLog | None = None,
    on_progress: OnProgress | None = None,
) -> SweepResult:
    """Run every method on every window and every needle trial.

    Each prefix is prefilled once for all methods. A method that cannot meet its budget becomes a row with the reason.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        text: what windows are cut from.
        settings: what to sweep.
        haystack: text for the needles' haystacks; generated sentences without one.
        results: an open log; what it holds of these very settings is not done again.
        on_progress: told before each step.

    Raises:
        InvalidInput: settings that make no sense, or a text that is too short.
    """
    began = time.perf_counter()
    made = _Run(model, settings, results if results is not None else ResultLog(None), on_progress)
    windows = (
        cut_windows(tokenizer, text, windows=settings.windows, prefix=settings.prefix, suffix=settings.suffix)
        if settings.windows
        else []
    )
    trials = make_trials(tokenizer, settings.needle, haystack) if settings.needle else []
    made.steps = len(settings.methods) * (len(windows) + len(trials))
    by_window = [made.window(window, first=place == 0) for place, window in enumerate(windows)]
    by_trial = [made.trial(trial) for trial in trials]
    rows, maps = [], []
    for place, method in enumerate(settings.methods):
        rows.append(
            _row(
                method,
                [full for full, _ in by_window],
                [found[place] for _, found in by_window],
                trials,
                [found[place] for found in by_trial],
                settings.seed,
            )
        )
        packed = by_window[0][1][place].get("bits") if by_window else None
        maps.append(None if packed is None else BitsMap.from_json(packed))
    return SweepResult(
        tuple(rows), tuple(maps), settings, made.model_facts, made.resumed, made.steps, time.perf_counter() - began
    )


class _Run:
    """What is done, step by step: looked up in the log, or worked out and written there."""

    def __init__(
        self, model: PreTrainedModel, settings: SweepSettings, results: ResultLog, on_progress: OnProgress | None
    ):
        identity = identity_of(model)
        self.model, self.settings, self.results, self.on_progress = model, settings, results, on_progress
        self.model_facts = {
            "model": identity.model,
            "revision": identity.revision,
            "weights": identity.weights,
            "dtype": identity.dtype,
            "attention": identity.attention,
            "transformers": identity.transformers,
        }
        known = kept(identity)  # what the policies optimal and auto allocate by
        self._base = {
            "model": self.model_facts,
            "sensitivities": None if known is None else digest(known.to_json()),
            "code": code_digest(),
            "torch": torch.__version__,
            "step": settings.step,
            "attention_cosine": settings.attention,
        }
        self.steps = self.done = self.resumed = 0

    def window(self, window: Window, *, first: bool) -> tuple[TokenScores, list[dict[str, Any]]]:
        """Reference scores, and each method's record."""
        base = {**self._base, "window": window.digest, "bits": first}
        reference = digest({**base, "reference": True})
        prepared: PreparedWindow | None = None
        records = []
        for method in self.settings.methods:
            key = digest({**base, "method": method.to_json()})
            self._tell(f"window {window.index + 1}: {method.policy}", known=key in self.results)
            if key not in self.results:
                prepared = prepared or PreparedWindow(self.model, window, step=self.settings.step)
                if reference not in self.results:
                    self.results.add(reference, prepared.full.to_json())
                control = method.policy in ("zero_cache", "no_prefix")
                found = prepared.judge(method, attention=self.settings.attention and not control)
                self.results.add(key, _window_record(found, bits=first))
            records.append(self.results[key])
        if reference not in self.results:
            prepared = prepared or PreparedWindow(self.model, window, step=self.settings.step)
            self.results.add(reference, prepared.full.to_json())
        return TokenScores.from_json(self.results[reference]), records

    def trial(self, trial: Trial) -> list[TrialResult]:
        """Each method's result."""
        prepared: PreparedTrial | None = None
        found = []
        for method in self.settings.methods:
            key = digest({**self._base, "trial": trial.digest, "method": method.to_json()})
            what = f"needle {trial.needle + 1} at {trial.depth:g} of {trial.length}: {method.policy}"
            self._tell(what, known=key in self.results)
            if key not in self.results:
                prepared = prepared or PreparedTrial(self.model, trial)
                self.results.add(key, asdict(prepared.judge(method)))
            found.append(TrialResult(**self.results[key]))
        return found

    def _tell(self, what: str, *, known: bool) -> None:
        self.resumed += known
        if self.on_progress is not None:
            self.on_progress(self.done, self.steps, what)
        self.done += 1


def _window_record(result: WindowResult, *, bits: bool) -> dict[str, Any]:
    if result.scores is None:
        return {"reason": result.reason}
    packet = None if result.shipped is None else result.shipped.packet
    return {
        "scores": result.scores.to_json(),
        "nbytes": result.nbytes,
        "full_bytes": result.full_bytes,
        "nominal_budget": result.nominal_budget,
        "quantizer": result.quantizer,
        "attention": None if result.attention is None else result.attention.to_json(),
        # A packet of whole frames has no tiers to show.
        "bits": bits_map(packet).to_json() if bits and packet is not None and packet.header.cut == BY_LAYER else None,
    }


def _row(
    method: Method,
    full: Sequence[TokenScores],
    records: Sequence[Mapping[str, Any]],
    trials: Sequence[Trial],
    answers: Sequence[TrialResult],
    seed: int,
) -> SweepRow:
    row = SweepRow(method.policy, "", None, None, None, None, None, None, None, None, None, None, method)
    reasons = [record["reason"] for record in records if record.get("reason")]
    reasons += [answer.reason for answer in answers if answer.reason]
    if reasons:
        return replace(row, reason=reasons[0])
    sizes = [(record["nbytes"], record["full_bytes"]) for record in records]
    sizes = sizes or [(answer.nbytes, answer.full_bytes) for answer in answers]
    nbytes, full_bytes = (sum(column) for column in zip(*sizes, strict=True))
    row = replace(
        row, bytes=round(nbytes / len(sizes)), full_bytes=round(full_bytes / len(sizes)), budget=nbytes / full_bytes
    )
    if trials:
        row = replace(row, needle=needle_score(trials, answers, seed=seed))
    if not records:
        return row
    scores = [TokenScores.from_json(record["scores"]) for record in records]
    ppl, near = perplexity(scores, full, seed=seed), fidelity(scores)
    nominal = [record["nominal_budget"] for record in records if record["nominal_budget"] is not None]
    return replace(
        row,
        quantizer=records[0]["quantizer"],
        nominal_budget=sum(nominal) / len(nominal) if nominal else None,
        ppl=ppl.ppl,
        ppl_full=ppl.ppl_full,
        ppl_delta_pct=ppl.delta_pct,
        ppl_delta_ci=ppl.delta_ci,
        ppl_delta_se=ppl.delta_se,
        kl_mean=near.kl_mean,
        kl_p50=near.kl_p50,
        kl_p95=near.kl_p95,
        kl_max=near.kl_max,
        top1_agreement=near.top1_agreement,
        flip_margin_p50=near.flip_margin_p50,
        flip_margin_max=near.flip_margin_max,
        nonfinite=near.nonfinite,
        windows=len(records),
        tokens=near.n,
        attention_cosine=_mean_cosines([record["attention"] for record in records]),
    )


def _mean_cosines(found: Sequence[Mapping[str, list[float | None]] | None]) -> dict[str, list[float | None]] | None:
    given = [cosines for cosines in found if cosines is not None]
    if not given:
        return None
    means: dict[str, list[float | None]] = {}
    for side in ("keys", "values", "both"):
        columns = zip(*(cosines[side] for cosines in given), strict=True)
        means[side] = [None if None in column else math.fsum(filter(None, column)) / len(column) for column in columns]
    return means
