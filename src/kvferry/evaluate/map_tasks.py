"""Tasks answered from a mapped cache, beside the target and the source each on its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.evaluate.choices import score_ends
from kvferry.evaluate.log import code_digest
from kvferry.evaluate.map_arms import (
    CONTROLS,
    Arm,
    identity_arm,
    other_document_arm,
    run_arm,
    shuffled_arm,
    source_cache,
    zero_arm,
)
from kvferry.evaluate.map_fit import with_tokenizer
from kvferry.evaluate.map_rates import Item, TaskResult, task_results
from kvferry.evaluate.map_run import require_target
from kvferry.evaluate.needle import NeedleGrid, PreparedTrial, Trial, make_trials
from kvferry.evidence.log import ResultLog, digest
from kvferry.hf.recompute import prefill
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot
from kvferry.snapshot.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[int, int, str], None]

_CONTROLS = tuple(name for name in CONTROLS if name != "source")
"""The source stands in every row."""


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


def answer(model: PreTrainedModel, cache: Snapshot | None, question: Choice) -> int:
    """The end that ``model`` finds likeliest a byte, from a cache of its context but the last token, or none."""
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
    controls: int = 0,
    log: str | Path | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> list[TaskResult]:
    """Multiple-choice questions, contexts mapped; one result an arm, then one a control.

    Each model prefills a context once: the arms share what the mapper makes of it, and take their native tokens from
    the target's own cache.

    Args:
        mapper, source, target: see `kvferry.evaluate.map_eval.evaluate_mapper`.
        questions: from `read_choices`.
        arms: transfers to be judged.
        name: of the task.
        controls: first questions that the controls (`kvferry.evaluate.map_arms.CONTROLS`) are tried on, too.
        log: file that answers are kept in as they come; a run that was killed goes on there.
        seed: of the shuffle and the intervals.
        on_step: told ``(done, in all, at what)``.

    Raises:
        IncompatibleIdentity: models that are not the mapper's.
        InvalidInput: no questions, or a log that another process writes to.
    """
    require_target(mapper, target)

    def judged(place: int) -> Item:
        question = questions[place]
        ids = question.context[:, :-1]
        cache, own = source_cache(mapper, source, ids), prefill(target, mapper.target, ids)
        hits = {
            "source": answer(source, cache, question) == question.label,
            "target": answer(target, own, question) == question.label,
        }
        caches, shares = _transferred(mapper, target, cache, own, arms)
        if place < controls:
            other = _other_context([one.context for one in questions], place, ids.shape[1])
            caches |= _controls(mapper, target, cache, own, source_cache(mapper, source, other), seed)
        hits |= {key: answer(target, made, question) == question.label for key, made in caches.items()}
        if place < controls:
            bare = replace(question, context=question.context[:, -1:])
            hits["no_prefix"] = answer(target, None, bare) == question.label
        return Item(hits, shares, 1 / len(question.ends))

    what = [(f"{digest(one.context.tolist())} {one.ends}", 1 / len(one.ends), None) for one in questions]
    items = _kept(name, mapper, what, arms, controls, judged, log, seed, on_step)
    return task_results(name, items, {arm.name: arm.oracle for arm in arms}, _CONTROLS, seed=seed)


def judge_needles(
    mapper: Mapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any,
    grid: NeedleGrid,
    arms: Sequence[Arm],
    *,
    controls: int = 0,
    log: str | Path | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> list[TaskResult]:
    """Needles read back from mapped haystacks; one result an arm, then one a control. Arguments as of `judge_choices`.

    Another document's cache is that of another needle's haystack; with one needle there is none.
    """
    require_target(mapper, target)
    trials = make_trials(tokenizer, grid)

    def judged(place: int) -> Item:
        trial = trials[place]
        prepared, reader = PreparedTrial(source, trial), PreparedTrial(target, trial)
        cache, own = with_tokenizer(prepared.snapshot, mapper.source), reader.snapshot
        hits = {"source": prepared.read(prepared.snapshot)[0], "target": reader.read(own)[0]}
        caches, shares = _transferred(mapper, target, cache, own, arms)
        if place < controls:
            others = [one for one in trials if one.needle != trial.needle and one.cached == trial.cached]
            other = None if not others else source_cache(mapper, source, others[0].token_ids[:, : trial.cached])
            caches |= _controls(mapper, target, cache, own, other, seed)
        hits |= {key: reader.read(made)[0] for key, made in caches.items()}
        if place < controls:
            hits["no_prefix"] = _read_bare(target, trial)
        return Item(hits, shares, 0.0, f"{trial.needle} {trial.depth}")

    what = [(trial.digest, 0.0, f"{trial.needle} {trial.depth}") for trial in trials]
    items = _kept("needle", mapper, what, arms, controls, judged, log, seed, on_step)
    return task_results("needle", items, {arm.name: arm.oracle for arm in arms}, _CONTROLS, seed=seed)


def _read_bare(target: PreTrainedModel, trial: Trial) -> bool:
    """Whether the number is read back from what follows the cached tokens alone."""
    bare = replace(trial, token_ids=trial.token_ids[:, trial.cached - 1 :], cached=1)
    reader = PreparedTrial(target, bare)
    return reader.read(reader.snapshot)[0]


def _transferred(
    mapper: Mapper, target: PreTrainedModel, cache: Snapshot, own: Snapshot, arms: Sequence[Arm]
) -> tuple[dict[str, Snapshot], dict[str, float]]:
    """Each arm's cache, and the share of tokens that the target ran on."""
    mapped = mapper.map(cache)
    caches, shares = {}, {}
    for arm in arms:
        done = run_arm(mapper, target, cache, arm, own, mapped=mapped.clone(), native=own)
        caches[arm.name], shares[arm.name] = done.snapshot, done.share
    return caches, shares


def _controls(
    mapper: Mapper, target: PreTrainedModel, cache: Snapshot, own: Snapshot, other: Snapshot | None, seed: int
) -> dict[str, Snapshot]:
    made = run_arm(mapper, target, cache, Arm("mapped"), own, native=own).snapshot
    found = {
        "identity": identity_arm(mapper, target, cache, own),
        "zero": zero_arm(made),
        "shuffled": shuffled_arm(mapper, made, seed),
    }
    if other is not None:
        found["other_document"] = other_document_arm(mapper.map(other), cache.token_ids)
    return found


def _other_context(contexts: Sequence[Tensor], place: int, length: int) -> Tensor:
    """As many tokens of the questions that come after one."""
    found: list[Tensor] = []
    for step in range(1, len(contexts) * length + 2):
        found.append(contexts[(place + step) % len(contexts)])
        if sum(one.shape[1] for one in found) >= length:
            break
    return torch.cat(found, dim=1)[:, :length]


def _kept(
    name: str,
    mapper: Mapper,
    what: Sequence[tuple[str, float, Hashable]],
    arms: Sequence[Arm],
    controls: int,
    judged: Callable[[int], Item],
    log: str | Path | None,
    seed: int,
    on_step: OnStep | None,
) -> list[Item]:
    """Every item: from the log where it is there, else judged now."""
    items = []
    of = digest([name, mapper.digest, [asdict(arm) for arm in arms], seed, code_digest()])
    with ResultLog(log) as done:
        for place, (said, chance, cluster) in enumerate(what):
            if on_step is not None:
                on_step(place, len(what), name)
            key = f"{of} {digest([said, place < controls])}"
            if key not in done:
                done.add(key, judged(place).to_json())
            items.append(Item(**done[key], chance=chance, cluster=cluster))
    return items
