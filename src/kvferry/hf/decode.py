"""Going on from a cache: greedy decoding and teacher forcing, with explicit positions and masks.

`model.generate` counts positions over the tokens of the mask, so a token dropped from attention would shift all that
follow. Here positions are kept as they were when the cache was built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache

from kvferry.errors import InvalidInput
from kvferry.hf.compat import cache_argument, forward_parameters
from kvferry.hf.tokens import as_ids, as_mask, positions_of
from kvferry.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """What greedy decoding gave.

    Attributes:
        token_ids: int64 ``(batch, new)``, the new tokens only; rows that ended early are filled as ``generate`` does.
        logits: float32 ``(batch, new, vocabulary)`` that each was chosen from, where asked for.
        first_token_seconds: from the call to the first token known: installing a snapshot and the prompt's uncached
            tail included.
        seconds: from the call to the end.
    """

    token_ids: Int[Tensor, "batch new"]
    logits: Float[Tensor, "batch new vocabulary"] | None
    first_token_seconds: float
    seconds: float


def continue_greedy(
    model: PreTrainedModel,
    cache: Cache | Snapshot,
    token_ids: Int[Tensor, "batch seq_len"] | Sequence[int],
    *,
    max_new_tokens: int,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    eos: Literal["model"] | int | Sequence[int] | None = "model",
    keep_logits: bool = False,
    stop: Callable[[Int[Tensor, "batch new"]], bool] | None = None,
) -> Continuation:
    """Decode greedily after a prompt whose beginning is in the cache.

    Gives the tokens that ``model.generate(do_sample=False)`` gives from the same cache (settings of the model's
    generation configuration that change logits, such as a repetition penalty, are not applied).

    Args:
        model: the model.
        cache: a transformers cache, which grows in place, or a snapshot, which stays as it is.
        token_ids: the whole prompt ``(batch, seq_len)``, at least one token longer than the cache.
        max_new_tokens: how many to decode at most.
        positions: ``(batch, seq_len)``; by default the snapshot's, continued, or counted over the mask.
        mask: ``(batch, seq_len)``, 0 on tokens that attention skips; by default the snapshot's, continued with ones.
        eos: tokens that end a row: the model's own, others, or ``None`` for none.
        keep_logits: keep the logits of every step.
        stop: asked after every step, with all new tokens so far, whether they are enough.

    Raises:
        InvalidInput: a bad prompt, or one no longer than the cache.
        IncompatibleIdentity: the snapshot is of another model or of other tokens than the prompt's.
    """
    began = time.perf_counter()
    if max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens is {max_new_tokens}; it must be positive")
    state = _resume(model, cache, token_ids, mask, positions)
    _require_room(state.cache, state.ids.shape[1] + max_new_tokens - 1)
    ends = _ends(model, eos)
    fill = _fill_token(model, ends)
    done = torch.zeros(state.ids.shape[0], dtype=torch.bool)
    tokens: list[Tensor] = []
    kept: list[Tensor] = []
    first = 0.0
    ids, place = state.ids[:, state.start :], state.positions[:, state.start :]
    for _ in range(max_new_tokens):
        logits = _forward(model, state.cache, ids, place, state.mask, keep=1)[:, -1]
        token = logits.argmax(dim=-1).cpu()
        first = first or time.perf_counter() - began
        if keep_logits:
            kept.append(logits.float().cpu())
        if ends:
            token = torch.where(done, fill, token)
            done |= torch.isin(token, torch.tensor(ends))
        tokens.append(token)
        if bool(done.all()) or (stop is not None and stop(torch.stack(tokens, dim=1))):
            break
        ids, place = token.unsqueeze(1), place[:, -1:] + 1
        state.mask = torch.cat([state.mask, torch.ones_like(state.mask[:, :1])], dim=1)
    return Continuation(
        token_ids=torch.stack(tokens, dim=1),
        logits=torch.stack(kept, dim=1) if keep_logits else None,
        first_token_seconds=first,
        seconds=time.perf_counter() - began,
    )


def teacher_forced_logits(
    model: PreTrainedModel,
    cache: Cache | Snapshot,
    token_ids: Int[Tensor, "batch seq_len"] | Sequence[int],
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    step: int | None = None,
) -> Float[Tensor, "batch tail vocabulary"]:
    """Logits after each token of ``token_ids`` that is not in the cache: row i predicts the token after tail token i.

    Takes what `teacher_forced_steps` takes and raises what it raises. The result is in the model's dtype.
    """
    steps = teacher_forced_steps(model, cache, token_ids, positions=positions, mask=mask, step=step)
    return torch.cat([logits for _, logits in steps], dim=1)


def teacher_forced_steps(
    model: PreTrainedModel,
    cache: Cache | Snapshot,
    token_ids: Int[Tensor, "batch seq_len"] | Sequence[int],
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    step: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "batch step vocabulary"]]]:
    """`teacher_forced_logits` piece by piece, for tails whose logits do not fit into memory at once.

    Args:
        model: the model.
        cache: a transformers cache, which grows in place, or a snapshot, which stays as it is.
        token_ids: the whole sequence ``(batch, seq_len)``, at least one token longer than the cache.
        positions: ``(batch, seq_len)``; as in `continue_greedy`.
        mask: ``(batch, seq_len)``; as in `continue_greedy`.
        step: tokens a forward pass: 1 is the path of decoding; by default all at once.

    Yields:
        Index of the first token fed, and the logits after it and those fed with it.

    Raises:
        InvalidInput: a bad sequence or step, or a sequence no longer than the cache.
        IncompatibleIdentity: the snapshot is of another model or of other tokens than these.
    """
    if step is not None and step < 1:
        raise InvalidInput(f"step is {step}; it must be positive")
    state = _resume(model, cache, token_ids, mask, positions)
    length = state.ids.shape[1]
    _require_room(state.cache, length)
    stride = step or length - state.start
    for begin in range(state.start, length, stride):
        span = slice(begin, min(begin + stride, length))
        logits = _forward(
            model, state.cache, state.ids[:, span], state.positions[:, span], state.mask[:, : span.stop], keep=0
        )
        yield begin, logits


@dataclass(slots=True, eq=False)
class _State:
    cache: Cache
    start: int
    ids: Tensor
    mask: Tensor
    positions: Tensor


def _resume(
    model: PreTrainedModel,
    cache: Cache | Snapshot,
    token_ids: Tensor | Sequence[int],
    mask: Tensor | None,
    positions: Tensor | None,
) -> _State:
    ids = as_ids(model, token_ids)
    given = None if mask is None else as_mask(mask, ids)
    if isinstance(cache, Snapshot):
        cache.require_prefix_of(ids)
        start = cache.seq_len
        if given is None:
            given = torch.cat([cache.mask.cpu(), torch.ones_like(ids[:, start:], dtype=torch.bool)], dim=1)
        if positions is None:
            positions = _continued(cache, ids.shape[1])
    else:
        start = int(cache.get_seq_length())
    if start >= ids.shape[1]:
        raise InvalidInput(
            f"the cache holds {start} tokens and the prompt has {ids.shape[1]}: at least one must be left for the "
            "model to run on; crop the snapshot"
        )
    if given is None:
        given = as_mask(None, ids)
    if positions is None:
        positions = positions_of(given)
    elif positions.shape != ids.shape:
        raise InvalidInput(f"positions are {tuple(positions.shape)}, but the prompt is {tuple(ids.shape)}")
    installed = cache.to_cache(model) if isinstance(cache, Snapshot) else cache
    return _State(installed, start, ids, given, positions.cpu())


def _continued(snapshot: Snapshot, length: int) -> Tensor:
    """The snapshot's positions, and those of the tokens up to ``length`` that follow it."""
    before = snapshot.positions.cpu()
    last = before[:, -1:]
    nothing_yet = ~snapshot.mask.cpu().any(dim=1, keepdim=True) & (last == 0)  # a row that is padding so far
    after = torch.arange(length - snapshot.seq_len) + torch.where(nothing_yet, 0, last + 1)
    return torch.cat([before, after], dim=1)


def _forward(
    model: PreTrainedModel, cache: Cache, ids: Tensor, positions: Tensor, mask: Tensor, *, keep: int
) -> Tensor:
    named: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        named["logits_to_keep"] = keep
    with torch.no_grad():
        outputs = model(
            input_ids=ids.to(model.device),
            # As `generate` does: a mask of ones only is left out, so that the same kernels run.
            attention_mask=None if bool(mask.all()) else mask.to(model.device, torch.int64),
            position_ids=positions.to(model.device),
            **named,
        )
    logits: Tensor = outputs.logits
    return logits


def _require_room(cache: Cache, tokens: int) -> None:
    if isinstance(cache, StaticCache) and cache.get_max_length() < tokens:
        raise InvalidInput(f"the static cache has room for {cache.get_max_length()} tokens, but {tokens} are needed")


def _ends(model: PreTrainedModel, eos: str | int | Sequence[int] | None) -> list[int]:
    if eos == "model":
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        return []
    if isinstance(eos, str):
        raise InvalidInput(f'eos is {eos!r}: "model", token ids or None are')
    return [eos] if isinstance(eos, int) else [int(token) for token in eos]


def _fill_token(model: PreTrainedModel, ends: list[int]) -> Tensor:
    pad = model.generation_config.pad_token_id if model.generation_config is not None else None
    return torch.tensor(pad if pad is not None else (ends or [0])[0])
