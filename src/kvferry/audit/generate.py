"""Decoding freely along an arm: with the cache as the arm builds it, or without one."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.audit.arm import Arm
from kvferry.audit.models import ModelSet
from kvferry.audit.run import Run
from kvferry.audit.sample import GREEDY, Sampler
from kvferry.audit.watch import Watched
from kvferry.errors import InvalidInput
from kvferry.hf.restore import empty_cache, to_cache
from kvferry.hf.tokens import as_ids
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """Tokens, and by how much each led the second choice; ``ended``: by an end-of-text token, the last one."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logits: list[Float[Tensor, " vocabulary"]] = field(default_factory=list)
    ended: bool = False


def build_cache(models: ModelSet, arm: Arm, token_ids: Int[Tensor, "1 length"]) -> Snapshot:
    """The cache of a whole sequence as ``arm`` builds and changes it, in storage of its own."""
    ids = _one(models, arm, token_ids)
    with models.use(arm) as model, _changed(arm, model):
        run = Run(model, arm, ids, Watched(), models.identity(model))
        snapshot = run.snapshot_of(run.build(ids.shape[1]), ids.shape[1])
        if arm.change is not None and arm.change.cache is not None:
            snapshot = arm.change.cache(snapshot, model)
        return snapshot.clone()


def generate(
    models: ModelSet,
    arm: Arm,
    prompt: Int[Tensor, "1 length"],
    new_tokens: int,
    sampler: Sampler = GREEDY,
    *,
    sequence: int = 0,
    start: Snapshot | None = None,
    ends: Sequence[int] = (),
    until_split_from: Sequence[Sequence[int]] | None = None,
    keep_logits: bool = False,
) -> Generated:
    """Decode up to ``new_tokens`` after a prompt.

    Args:
        models: what to run on.
        arm: how; with a cache its construction is for the whole prompt, whose last pass gives the first token.
        prompt: the tokens before.
        new_tokens: how many at most.
        sampler: how each is chosen.
        sequence: number that the sampler's noise hangs on.
        start: a cache of the prompt without its last token, to go on from instead.
        ends: tokens that end the run.
        until_split_from: runs; stop behind the token with which this one has parted from each of them.
        keep_logits: keep those of every step.
    """
    ids = _one(models, arm, prompt)
    found = Generated()
    ended = False
    with models.use(arm) as model:
        steps = _steps(models, model, arm, ids, start)
        with contextlib.closing(steps):
            logits = next(steps)
            for step in range(new_tokens):
                token, margin = sampler.choose(logits, sequence, step)
                found.tokens.append(token)
                found.margins.append(margin)
                if keep_logits:
                    found.logits.append(logits.clone())
                ended = token in ends
                apart = until_split_from is not None and all(
                    list(one[: step + 1]) != found.tokens for one in until_split_from
                )
                if ended or apart or step + 1 == new_tokens:
                    break
                logits = steps.send(token)
    return Generated(found.tokens, found.margins, found.logits, ended)


def first_split(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, an end counting as one; ``None`` where all are the same."""
    for index, (mine, theirs) in enumerate(zip(a, b, strict=False)):
        if mine != theirs:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def generate_until_split(
    models: ModelSet,
    arms: Sequence[Arm],
    prompt: Int[Tensor, "1 length"],
    new_tokens: int,
    sampler: Sampler = GREEDY,
    *,
    sequence: int = 0,
    ends: Sequence[int] = (),
) -> list[Generated]:
    """Decode after a prompt along several arms, step by step, up to the first token that is not the same in all; the
    logits of the last step are kept.

    Raises:
        InvalidInput: arms of several dtypes, backends, or numbers of threads.
    """
    if len({(arm.dtype, arm.attn, arm.threads, arm.accumulation) for arm in arms}) != 1:
        raise InvalidInput("arms that are decoded together run the same model with the same settings")
    ids = [_one(models, arm, prompt) for arm in arms]
    found = [Generated() for _ in arms]
    with models.use(arms[0]) as model, contextlib.ExitStack() as stack:
        steps = [_steps(models, model, arm, own, None) for arm, own in zip(arms, ids, strict=True)]
        for one in steps:
            stack.callback(one.close)
        logits = [next(one) for one in steps]
        for step in range(new_tokens):
            for run, row in zip(found, logits, strict=True):
                token, margin = sampler.choose(row, sequence, step)
                run.tokens.append(token)
                run.margins.append(margin)
            chosen = {run.tokens[-1] for run in found}
            if len(chosen) > 1 or chosen & set(ends) or step + 1 == new_tokens:
                break
            logits = [one.send(run.tokens[-1]) for one, run in zip(steps, found, strict=True)]
    return [
        Generated(run.tokens, run.margins, [row.clone()], run.tokens[-1] in ends)
        for run, row in zip(found, logits, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Screened:
    """A run without a cache that was recomputed only where it may have chosen otherwise; ``recomputed``: steps."""

    tokens: list[int]
    margins: list[float]
    recomputed: int


def recompute_screened(
    models: ModelSet,
    arm: Arm,
    prompt: Int[Tensor, "1 length"],
    beside: Generated,
    new_tokens: int,
    factor: float,
    *,
    ends: Sequence[int] = (),
    until_split: bool = False,
) -> Screened:
    """Decode greedily without a cache, beside a run on one, with one pass over that run's text to say where to look.

    The pass gives the logits of every step at once, in another shape than recomputation does. Where the choice leads by
    more than ``factor`` times the largest difference of the pass's logits to the other run's anywhere in the text, no
    shape chooses otherwise (a flip takes twice the difference), and the token is taken as it is. All other steps, and
    all behind the first token that differs, are recomputed.

    Args:
        models: what to run on.
        arm: one that recomputes.
        prompt: the tokens before.
        beside: the run on a cache, with its logits.
        new_tokens: how many at most.
        factor: see above; more than 2.
        ends: tokens that end the run.
        until_split: stop behind the first token that differs.
    """
    if factor <= 2 or not beside.logits or arm.decode != "recompute":
        raise InvalidInput(f"arm {arm}, factor {factor}: screening is for recomputation, beside logits, above 2")
    ids = _one(models, arm, prompt)
    tokens: list[int] = []
    margins: list[float] = []
    recomputed = 0
    with models.use(arm) as model:
        text = torch.cat([ids, torch.tensor([beside.tokens[:-1]], dtype=torch.int64)], dim=1)
        whole = Run(model, arm, text, Watched())
        at_once = whole.forward(empty_cache(model), 0, text.shape[1], keep=len(beside.tokens))[0]
        apart = [float((mine - own).double().abs().max()) for mine, own in zip(at_once, beside.logits, strict=True)]
        reach = factor * max(apart)
        run = Run(model, arm, ids, Watched())
        for step in range(new_tokens):
            together = tokens == beside.tokens[:step] and step < len(beside.tokens)
            token, margin = GREEDY.choose(at_once[step], 0, step) if together else (-1, 0.0)
            if not (together and token == beside.tokens[step] and margin > reach):
                logits = run.forward(empty_cache(model), 0, run.ids.shape[1], keep=1)
                token, margin = GREEDY.choose(logits[0, -1], 0, step)
                recomputed += 1
            tokens.append(token)
            margins.append(margin)
            if token in ends or (until_split and tokens != beside.tokens[: step + 1]):
                break
            run.append(token)
    return Screened(tokens, margins, recomputed)


_Steps = Generator[Tensor, int, None]


def _steps(models: ModelSet, model: PreTrainedModel, arm: Arm, ids: Tensor, start: Snapshot | None) -> _Steps:
    return _cached(models, model, arm, ids, start) if arm.cached else _recomputed(model, arm, ids)


def _cached(models: ModelSet, model: PreTrainedModel, arm: Arm, ids: Tensor, start: Snapshot | None) -> _Steps:
    """Yields the logits after the prompt, then those after each token sent."""
    length = ids.shape[1]
    run = Run(model, arm, ids, Watched(), models.identity(model))
    if start is not None:
        start.require_prefix_of(ids)
        if start.seq_len != length - 1:
            raise InvalidInput(f"the cache has {start.seq_len} tokens, the prompt {length}: one must be left")
        cache = to_cache(start, model, check=False)
        run.mask[:, :-1] = start.mask.to(run.mask.device)
        logits = run.forward(cache, length - 1, length, keep=1)
    elif arm.change is not None and arm.change.cache is not None:
        with _changed(arm, model):
            built = arm.change.cache(run.snapshot_of(run.build(length - 1), length - 1), model)
        cache = to_cache(built, model, check=False)
        run.mask[:, :-1] = built.mask.to(run.mask.device)
        logits = run.forward(cache, length - 1, length, keep=1)
    else:
        with _changed(arm, model):
            cache = run.build(length)
        assert run.last is not None
        logits = run.last
    while True:
        token = yield logits[0, -1]
        run.append(token)
        logits = run.forward(cache, length, length + 1, keep=1)
        length += 1


def _recomputed(model: PreTrainedModel, arm: Arm, ids: Tensor) -> _Steps:
    run = Run(model, arm, ids, Watched())
    length = ids.shape[1]
    while True:
        logits = run.forward(empty_cache(model), 0, length, keep=1)
        token = yield logits[0, -1]
        run.append(token)
        length += 1


def _one(models: ModelSet, arm: Arm, ids: Tensor) -> Int[Tensor, "1 length"]:
    found = as_ids(models.own, ids)
    if found.shape[0] != 1 or found.shape[1] < 2:
        raise InvalidInput(f"token ids {tuple(found.shape)}: one sequence of at least two tokens is decoded at a time")
    if arm.batch > 1 or arm.left_padding or (arm.change is not None and arm.change.whole_run):
        raise InvalidInput(f"arm {arm} is for fixed prefixes: free runs take one sequence, without padding")
    return found


def _changed(arm: Arm, model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if arm.change is None or arm.change.model is None else arm.change.model(model)
