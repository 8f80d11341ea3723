"""Tasks answered from a mapped cache, beside the target and the source each on its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.evaluate.choices import score_ends
from kvferry.evaluate.map_arms import Arm, run_arm, source_cache
from kvferry.evaluate.map_run import require_target
from kvferry.evaluate.needle import NeedleGrid, PreparedTrial, make_trials
from kvferry.evidence.statistics import Interval, bootstrap_mean, mcnemar, wilson
from kvferry.hf.recompute import prefill
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot
from kvferry.snapshot.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One question with several ends, of which one is right.

    Attributes:
        context: int64 ``(1, tokens)``, at least two.
        ends: tokens of each end, after the context.
        lengths: of each end in bytes, by which likelihoods are divided.
        label: which is right.
    """

    context: Int[Tensor, "1 tokens"]
    ends: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    label: int


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One arm on one task.

    Attributes:
        name: of the task.
        arm: how the cache was transferred.
        n: questions.
        chance: accuracy of guessing.
        source, target, mapped: accuracies: of the source alone, of the target on its own cache, of the target on the
            mapped one.
        source_ci, target_ci, mapped_ci: Wilson's intervals.
        difference_ci: 95% of mapped less target, paired; ``None`` for a single question.
        p: exact McNemar test of mapped against target.
    """

    name: str
    arm: str
    n: int
    chance: float
    source: float
    target: float
    mapped: float
    source_ci: Interval
    target_ci: Interval
    mapped_ci: Interval
    difference_ci: Interval | None
    p: float

    @property
    def retention(self) -> float | None:
        """Mapped over target; ``None`` where the target gets none right."""
        return self.mapped / self.target if self.target else None

    @property
    def retention_floor(self) -> float | None:
        """(mapped - chance) / (target - chance); ``None`` where the target does no better than chance."""
        return (self.mapped - self.chance) / (self.target - self.chance) if self.target > self.chance else None

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {**plain, "retention": self.retention, "retention_floor": self.retention_floor}


def read_choices(path: str | Path, tokenizer: Any, count: int) -> list[Choice]:
    """The first ``count`` questions of a JSONL file of ``{"ctx": …, "endings": […], "label": …}``.

    Raises:
        InvalidInput: the file cannot be read, has fewer questions, or a line is of another form.
    """
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if count < 1 or len(lines) < count:
        raise InvalidInput(f"{path} has {len(lines)} questions, not {count}")
    found = []
    for number, line in enumerate(lines[:count], 1):
        try:
            item = json.loads(line)
            found.append(_choice(tokenizer, str(item["ctx"]), [str(end) for end in item["endings"]], item["label"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f'{path}, line {number}: not {{"ctx": …, "endings": […], "label": …}} with a label among them: {error}'
            ) from error
    return found


def _choice(tokenizer: Any, context: str, ends: list[str], label: Any) -> Choice:
    ids = tokenizer(context, verbose=False).input_ids
    if type(label) is not int or not 0 <= label < len(ends) or len(ids) < 2 or not all(ends):
        raise ValueError(f"label {label!r} of {len(ends)}, {len(ids)} tokens of context")
    tails = tuple(tuple(tokenizer(f"{context} {end}", verbose=False).input_ids[len(ids) :]) for end in ends)
    if not all(tails):
        raise ValueError("an end that adds no token")
    return Choice(torch.tensor([ids]), tails, tuple(len(end.encode()) for end in ends), label)


def answer(model: PreTrainedModel, cache: Snapshot, question: Choice) -> int:
    """The end that ``model`` finds likeliest a byte, from a cache of all of the context but its last token."""
    ends = score_ends(model, cache, question.context, question.ends)
    scores = [end.logprob / size for end, size in zip(ends, question.lengths, strict=True)]
    return max(range(len(scores)), key=scores.__getitem__)


def judge_choices(
    mapper: Mapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    questions: Sequence[Choice],
    arms: Sequence[Arm],
    *,
    name: str = "choices",
    seed: int = 0,
    on_step: OnStep | None = None,
) -> list[TaskResult]:
    """Multiple-choice questions, contexts mapped; one result an arm.

    Raises:
        IncompatibleIdentity: models that are not the mapper's.
        InvalidInput: no questions.
    """
    require_target(mapper, target)
    hits: dict[str, list[bool]] = {key: [] for key in ("source", "target", *(arm.name for arm in arms))}
    for place, question in enumerate(questions):
        if on_step is not None:
            on_step(place, len(questions), name)
        ids = question.context[:, :-1]
        cache, own = source_cache(mapper, source, ids), prefill(target, mapper.target, ids)
        hits["source"].append(answer(source, cache, question) == question.label)
        hits["target"].append(answer(target, own, question) == question.label)
        for arm in arms:
            made = run_arm(mapper, target, cache, arm, own).snapshot
            hits[arm.name].append(answer(target, made, question) == question.label)
    chance = sum(1 / len(question.ends) for question in questions) / max(1, len(questions))
    return _results(name, hits, chance, arms, seed)


def judge_needles(
    mapper: Mapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any,
    grid: NeedleGrid,
    arms: Sequence[Arm],
    *,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> list[TaskResult]:
    """Needles read back from mapped haystacks; one result an arm."""
    require_target(mapper, target)
    trials = make_trials(tokenizer, grid)
    hits: dict[str, list[bool]] = {key: [] for key in ("source", "target", *(arm.name for arm in arms))}
    for place, trial in enumerate(trials):
        if on_step is not None:
            on_step(place, len(trials), "needles")
        prepared, reader = PreparedTrial(source, trial), PreparedTrial(target, trial)
        cache = source_cache(mapper, source, trial.token_ids[:, : trial.cached])
        hits["source"].append(prepared.read(prepared.snapshot)[0])
        hits["target"].append(reader.read(reader.snapshot)[0])
        for arm in arms:
            hits[arm.name].append(reader.read(run_arm(mapper, target, cache, arm, reader.snapshot).snapshot)[0])
    return _results("needle", hits, 0.0, arms, seed)


def _results(name: str, hits: dict[str, list[bool]], chance: float, arms: Sequence[Arm], seed: int) -> list[TaskResult]:
    own, n = hits["target"], len(hits["target"])
    if not n:
        raise InvalidInput(f"{name}: there are no questions")
    rates = {key: sum(values) / n for key, values in hits.items()}
    intervals = {key: wilson(sum(values), n) for key, values in hits.items()}
    found = []
    for arm in arms:
        mapped = hits[arm.name]
        pairs = list(zip(mapped, own, strict=True))
        found.append(
            TaskResult(
                name=name,
                arm=arm.name,
                n=n,
                chance=chance,
                source=rates["source"],
                target=rates["target"],
                mapped=rates[arm.name],
                source_ci=intervals["source"],
                target_ci=intervals["target"],
                mapped_ci=intervals[arm.name],
                difference_ci=bootstrap_mean([float(a) - float(b) for a, b in pairs], seed=seed),
                p=mcnemar(sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)),
            )
        )
    return found
