"""Time to the first token over links of stated rates: many hand-offs by the same two processes, in random order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from types import TracebackType
from typing import Any, Self

from kvferry.engines.handoff.clock import at_least
from kvferry.engines.handoff.job import HandoffJob
from kvferry.engines.handoff.result import SECONDS, HandoffResult
from kvferry.engines.handoff.run import Session
from kvferry.engines.link import parse_rate
from kvferry.errors import BudgetTooSmall, InvalidInput
from kvferry.evidence.log import ResultLog, digest

LOOPBACK = "loopback"
SLACK = 1.1
"""How far above the ideal a pipelined transfer may lie."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What packet goes over the link: a budget, a policy, and whether it is refined after the first token."""

    budget: float
    policy: str = "auto"
    progressive: bool = False

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read ``0.28``, ``0.52:uniform_int8`` or, progressive, ``0.28+``; raises `ValueError` for anything else."""
        budget, _, policy = text.removesuffix("+").partition(":")
        return cls(float(budget), policy or "auto", text.endswith("+"))

    def __str__(self) -> str:
        policy = "" if self.policy == "auto" else f" {self.policy}"
        return f"{self.budget:g}{policy}{' progressive' if self.progressive else ''}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of what is varied."""

    tokens: int
    link: str
    arm: Arm
    pipelined: bool

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.link}, {self.arm}, {'pipelined' if self.pipelined else 'plain'}"


@dataclass(frozen=True, slots=True)
class HandoffBenchSettings:
    """What is measured: every combination of the lists, ``repeats`` times.

    Attributes:
        model: name, hub id or folder.
        tokens: prompt lengths.
        links: rates, or ``loopback``.
        arms: what packets.
        modes: pipelined, or the same packet after the prefill (plain); with both, a pipelined row is held against the
            plain one beside it.
        repeats: measured hand-offs a combination.
        text_file: what is prefilled; ``None``: the text that every Python installation has.
        dtype, attn, threads: of both processes.
        seed: of the order.
        timeout: longest silence of the other process, in seconds.
    """

    model: str
    tokens: tuple[int, ...] = (512, 1024, 2048, 4096)
    links: tuple[str, ...] = ("100mbit", "500mbit", "1gbit", "10gbit")
    arms: tuple[Arm, ...] = (Arm(1.0), Arm(0.52), Arm(0.28), Arm(0.28, progressive=True))
    modes: tuple[bool, ...] = (False, True)
    repeats: int = 5
    text_file: str | None = None
    dtype: str = "bfloat16"
    attn: str = "sdpa"
    threads: int | None = None
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not (self.tokens and self.links and self.arms and self.modes) or self.repeats < 1:
            raise InvalidInput("give at least one length, link, budget and mode, and one repetition")
        for link in self.links:
            if link != LOOPBACK:
                parse_rate(link)
        for cell in self.cells:
            self.job(cell)  # raises for what makes no sense

    @property
    def cells(self) -> list[Cell]:
        """Every combination; ``klt``, which codes all layers together and so cannot be pipelined, once."""
        every = [Cell(*each) for each in product(self.tokens, self.links, self.arms, self.modes)]
        return [cell for cell in every if not (cell.pipelined and cell.arm.policy == "klt" and False in self.modes)]

    def job(self, cell: Cell) -> HandoffJob:
        """The hand-off of one combination; its one new token is the first one."""
        return HandoffJob(
            self.model,
            self.model,
            budget=cell.arm.budget,
            policy=cell.arm.policy,
            progressive=cell.arm.progressive,
            text_file=self.text_file,
            max_tokens=cell.tokens,
            max_new=1,
            dtype=self.dtype,
            attn=self.attn,
            threads=self.threads,
            seed=self.seed,
            timeout=self.timeout,
            pipeline=cell.pipelined,
            plan_ahead=not cell.pipelined,
            link=None if cell.link == LOOPBACK else cell.link,
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a sample, and the sample."""

    median: float
    quartiles: tuple[float, float]
    sample: tuple[float, ...]

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        values = tuple(sample)
        if len(values) == 1:
            return cls(values[0], (values[0], values[0]), values)
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), (low, high), values)


@dataclass(frozen=True, slots=True)
class Bound:
    """What a pipelined hand-off is held against.

    Attributes:
        prefill: median seconds of the same prompt's prefill with nothing beside it (plain rows of that length).
        wire: median seconds of the same packet on the same link with nothing beside it (the plain row).
        tail: median install and first token of the plain row: nothing can overlap those.
        seconds: ``1.1 · (max(prefill, wire) + min(prefill, wire) / layers) + tail``.
        met: whether the median TTFT is at most that.
        met_by: share of the row's hand-offs that meet the same with their own prefill in place of the plain ones'
            (which what runs beside it may have slowed, but which other work on the machine slows alike).
    """

    prefill: float
    wire: float
    tail: float
    seconds: float
    met: bool
    met_by: float


@dataclass(frozen=True, slots=True)
class HandoffBenchRow:
    """One combination.

    Attributes:
        budget_asked: and ``policy`` and ``progressive``, as given.
        policy_used: and ``quantizer`` and ``scorer``, as chosen.
        budget: actual bytes over those of the 16-bit packet.
        seconds: each part's `Spread`, as `HandoffResult.seconds` explains them.
        ttft_unshipped: of the same prompt with no transfer: prefill and first token by the producer.
        wire_computed: seconds that the packet's bytes take at the link's rate; ``None`` for the loopback interface.
        link_bytes: median of the bytes that the kernel counted on the producer's interface.
        transfer_share: median wire over median TTFT.
        refined: of a progressive row, seconds until level 1 and until every bit was at the consumer.
        bound: of a pipelined row with a plain one beside it.
        kl_first: largest KL of the first token's logits to those of the cache that stayed, in nats.
    """

    tokens: int
    link: str
    budget_asked: float
    policy: str
    progressive: bool
    pipelined: bool
    n: int
    layers: int
    policy_used: str
    quantizer: str
    scorer: str | None
    packet_bytes: int
    full_bytes: int
    budget: float
    seconds: dict[str, Spread]
    ttft_unshipped: Spread
    wire_computed: float | None
    link_bytes: int | None
    transfer_share: float
    kl_first: float | None
    refined: dict[str, Spread] | None = None
    bound: Bound | None = None


@dataclass(frozen=True, slots=True)
class HandoffBenchResult:
    """All rows; ``skipped`` says which combinations have none, and why."""

    settings: HandoffBenchSettings
    rows: list[HandoffBenchRow]
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


OnProgress = Callable[[int, int, str], None]
"""Told how many hand-offs are done, of how many, and what comes next."""


def run_bench(
    settings: HandoffBenchSettings, on_progress: OnProgress | None = None, log: Path | None = None
) -> HandoffBenchResult:
    """Measure. Every repetition does all combinations once, in an order of its own.

    Each length is handed off once by each mode before anything is measured.

    Args:
        settings: what to measure.
        on_progress: told as things go on.
        log: file that keeps each hand-off as it comes: a run that was stopped goes on where it was.

    Raises: as `kvferry.engines.handoff.run_handoff`, but for `BudgetTooSmall`, which skips a combination.
    """
    order = random.Random(settings.seed)
    name = digest(asdict(replace(settings, repeats=1)))
    rounds: list[tuple[Cell, str]] = []
    for repeat in range(settings.repeats):
        cells = settings.cells
        order.shuffle(cells)
        rounds.extend((cell, f"{name} {repeat} {cell}") for cell in cells)
    found: dict[Cell, list[HandoffResult]] = {}
    skipped: dict[Cell, str] = {}
    with ResultLog(log) as kept, _Sessions() as sessions:
        if any(key not in kept for _, key in rounds):
            warm = (
                Cell(tokens, settings.links[-1], settings.arms[0], mode)
                for tokens in settings.tokens
                for mode in settings.modes
            )
            rounds = [*((cell, "") for cell in warm), *rounds]
        for number, (cell, key) in enumerate(rounds):
            if on_progress is not None:
                on_progress(number, len(rounds), str(cell))
            if cell in skipped:
                continue
            if key not in kept:
                try:
                    result = sessions.run(settings.job(cell))
                except BudgetTooSmall as error:
                    skipped[cell] = str(error)
                    continue
                if not key:
                    continue
                kept.add(key, result.to_json())
            found.setdefault(cell, []).append(HandoffResult(**kept[key]))
    rows = {cell: _row(cell, found[cell]) for cell in settings.cells if cell in found}
    return HandoffBenchResult(
        settings,
        [_bounded(cell, rows) for cell in rows],
        [{"combination": str(cell), "reason": reason} for cell, reason in skipped.items()],
    )


class _Sessions:
    """One pair of processes for all shaped links, one for the loopback interface; made when they are needed."""

    def __init__(self) -> None:
        self._open: dict[bool, Session] = {}

    def run(self, job: HandoffJob) -> HandoffResult:
        shaped = job.link is not None
        session = self._open.get(shaped)
        if session is None:
            session = Session(job.link)
            session.__enter__()
            self._open[shaped] = session
        if session.link is not None and job.link is not None and session.link.rate != job.link:
            session.link.set_rate(job.link)
        try:
            return session.run(job)
        except BaseException:
            self._open.pop(shaped).__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._open.values():
            session.__exit__(kind, error, trace)


def _row(cell: Cell, results: list[HandoffResult]) -> HandoffBenchRow:
    one = results[0]
    seconds = {part: Spread.of([result.seconds[part] for result in results]) for part in SECONDS}
    counted = [result.link["bytes_out"] for result in results if result.link is not None]
    refinements = [result.progressive["seconds"] for result in results if result.progressive is not None]
    divergences = [result.kl_mean for result in results if result.kl_mean is not None]
    return HandoffBenchRow(
        tokens=one.prompt_tokens,
        link=cell.link,
        budget_asked=cell.arm.budget,
        policy=cell.arm.policy,
        progressive=cell.arm.progressive,
        pipelined=one.pipelined,
        n=len(results),
        layers=one.layers,
        policy_used=one.policy,
        quantizer=one.quantizer,
        scorer=one.scorer,
        packet_bytes=one.packet_bytes,
        full_bytes=one.full_bytes,
        budget=one.budget,
        seconds=seconds,
        ttft_unshipped=Spread.of([result.local_seconds["ttft"] for result in results]),
        wire_computed=None if cell.link == LOOPBACK else 8 * one.packet_bytes / parse_rate(cell.link),
        link_bytes=round(median(counted)) if counted else None,
        transfer_share=seconds["wire"].median / seconds["ttft"].median,
        kl_first=max(divergences, default=None),
        refined={name: Spread.of([refinement[name] for refinement in refinements]) for name in ("level_1", "exact")}
        if refinements
        else None,
    )


def _bounded(cell: Cell, rows: dict[Cell, HandoffBenchRow]) -> HandoffBenchRow:
    row, plain = rows[cell], rows.get(replace(cell, pipelined=False))
    if not row.pipelined or plain is None:
        return row
    alone = [value for other, its in rows.items() if other.tokens == cell.tokens and not its.pipelined
             for value in its.seconds["prefill"].sample]  # fmt: skip
    prefill, wire = median(alone), plain.seconds["wire"].median
    tail = plain.seconds["install"].median + plain.seconds["first_token"].median
    ttft = row.seconds["ttft"]
    limit = _limit(prefill, wire, tail, row.layers)
    own = zip(row.seconds["prefill"].sample, ttft.sample, strict=True)
    met_by = sum(taken <= _limit(its, wire, tail, row.layers) for its, taken in own) / row.n
    return replace(row, bound=Bound(prefill, wire, tail, limit, ttft.median <= limit, met_by))


def _limit(prefill: float, wire: float, tail: float, layers: int) -> float:
    return SLACK * at_least(prefill, wire, layers) + tail
