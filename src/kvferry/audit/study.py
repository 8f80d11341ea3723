"""An audit at work: models, passages, settings, and the results so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvferry.audit.arm import Arm
from kvferry.audit.finding import Json
from kvferry.audit.models import ModelSet
from kvferry.audit.pair import Record, compare
from kvferry.audit.passages import Passage
from kvferry.audit.runs import Runs
from kvferry.audit.settings import Settings
from kvferry.evidence.log import ResultLog, digest

OnProgress = Callable[[int, int, str], None]
"""Steps done, steps in all, and what is being done."""


@dataclass(slots=True, eq=False)
class Study:
    """What protocols run on.

    Attributes:
        models: the model audited, in the dtypes that arms ask for.
        passages: sequences to run on.
        settings: sizes.
        log: where records are kept as they come.
        subject: digest of model, code, machine and whatever else a record hangs on; part of every key.
        environment: what records are made with, for whoever reads the log: its first line, and each record names it.
        ends: tokens that end a free run.
        read: tokens to text, for answers; ``None`` where no tokenizer is known.
        on_progress: told after every step.
        total: steps in all.
        done: steps so far.
    """

    models: ModelSet
    passages: list[Passage]
    settings: Settings
    log: ResultLog
    subject: str = ""
    environment: Json = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    read: Callable[[list[int]], str] | None = None
    on_progress: OnProgress | None = None
    total: int = 0
    done: int = 0
    _runs: tuple[str, Runs] | None = None

    def record(self, kind: str, arms: Iterable[Arm], passage: Passage, more: Any, make: Callable[[], Record]) -> Record:
        """The record of one experiment on one passage: out of the log, or made and kept there."""
        described = [arm.to_json() for arm in arms]
        key = digest([self.subject, kind, described, _ids(passage.token_ids), passage.start, passage.index, more])
        if key not in self.log:
            made = make()
            self.log.add(key, {"made_with": self._header(), **made})
        found: Record = self.log[key]
        return found

    def pair(self, reference: Arm, other: Arm, passage: Passage) -> Record:
        """`compare` on one passage."""
        controls = self.settings.controls
        return self.record(
            "pair",
            (reference, other),
            passage,
            [controls.replicas, controls.precision, controls.shapes],
            lambda: compare(self._runs_of(passage), reference, other, controls),
        )

    def _header(self) -> str:
        """The key of the log's line that holds the environment; written before the first record of it."""
        key = digest([self.subject, "environment", self.environment])
        if key not in self.log:
            self.log.add(key, {"environment": self.environment})
        return key

    def _runs_of(self, passage: Passage) -> Runs:
        """Runs of a passage, kept until another one's turn comes: pairs are gone through passage by passage."""
        key = digest([_ids(passage.token_ids), passage.start])
        if self._runs is None or self._runs[0] != key:
            self._runs = key, Runs(self.models, passage.token_ids, passage.start)
        return self._runs[1]

    def described(self, *arms: Arm) -> tuple[Json, ...]:
        """Arms as JSON, with what the model settles where an arm leaves it open."""
        settled = {
            "dtype": self.models.dtype,
            "attn": self.models.own.config._attn_implementation,
            "threads": torch.get_num_threads(),
        }
        return tuple({**settled, **arm.to_json()} for arm in arms)

    def step(self, what: str) -> None:
        """One more step is done."""
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total, what)


def _ids(token_ids: Tensor) -> list[int]:
    found: list[int] = token_ids.flatten().tolist()
    return found
