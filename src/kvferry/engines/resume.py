"""Going on from a cache at rest: what `kvferry capture` keeps, and what `kvferry generate` makes of it.

A receiver computes its own first logits, so it needs one token that is not in the cache. A cache of a whole prompt
gives it by being cropped by one. Where a sliding window has moved, cropping cannot be done: the token that leaves the
window at one end is gone when the last one comes in at the other. There `capture_prompt` holds the last token back and
names it in the construction path, as the stage ``awaits(TOKEN at LENGTH)`` (`kvferry.snapshot.awaits`), which
packets and files carry along.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvferry.errors import UnsupportedCache
from kvferry.hf.capture import capture
from kvferry.hf.decode import Continuation, continue_greedy
from kvferry.hf.identity import identity_of
from kvferry.hf.restore import empty_cache
from kvferry.snapshot import Identity, Snapshot
from kvferry.snapshot.awaits import awaited, awaits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """What going on from a cache gave.

    Attributes:
        continuation: the new tokens and times.
        prompt_tokens: tokens of the prompt.
        reused_tokens: tokens whose keys and values were taken from the cache and not computed.
    """

    continuation: Continuation
    prompt_tokens: int
    reused_tokens: int


def capture_prompt(
    model: PreTrainedModel, token_ids: Int[Tensor, "batch seq_len"], *, query_window: int = 0, full_hash: bool = False
) -> Snapshot:
    """A snapshot of a prompt that `resume` can go on from: all of its tokens, or all but the last (see above).

    Raises what `kvferry.capture` raises.
    """
    length = int(token_ids.shape[1])
    if length < 2 or can_crop_by_one(identity_of(model), length):
        return capture(model, token_ids, query_window=query_window, full_hash=full_hash)
    snapshot = capture(model, token_ids[:, :-1], query_window=query_window, full_hash=full_hash)
    return with_stage(snapshot, awaits(token_ids[:, -1].tolist(), snapshot.seq_len))


def resume(
    model: PreTrainedModel, snapshot: Snapshot, token_ids: Int[Tensor, "batch seq_len"] | None, *, max_new_tokens: int
) -> Resumed:
    """Decode greedily from ``snapshot``.

    Args:
        model: the model that the cache was made for.
        snapshot: from `capture_prompt`, `kvferry.capture` or `kvferry.decode`.
        token_ids: a prompt that begins with the cache's tokens; ``None``: the prompt that was captured.
        max_new_tokens: how many to decode at most.

    A cache of the whole prompt that can neither be cropped nor names its next token is computed anew: the tokens are
    right, nothing is reused, and a warning says so.

    Raises:
        IncompatibleIdentity: the cache is of another model, or of other tokens than the prompt's.
        InvalidInput: ``max_new_tokens`` is not positive.
    """
    # Every byte of the weights is hashed once, where the snapshot says so: by `to_cache` when it is taken up.
    snapshot.identity.require_compatible(identity_of(model))
    whole = snapshot.token_ids
    awaited = awaited_tokens(snapshot)
    if awaited is not None:
        whole = torch.cat([whole, awaited], dim=1)
    if token_ids is not None:
        snapshot.require_prefix_of(token_ids)
        whole = token_ids
    length, usable = int(whole.shape[1]), snapshot
    if length == snapshot.seq_len:
        try:
            if length == 1:
                raise UnsupportedCache("a cache of one token has nothing before it")
            usable = snapshot.crop(length - 1)
        except UnsupportedCache as reason:
            logger.warning("nothing of this cache can be reused, the prompt is computed anew: %s", reason)
            return Resumed(_from_nothing(model, snapshot, max_new_tokens), length, 0)
    return Resumed(continue_greedy(model, usable, whole, max_new_tokens=max_new_tokens), length, usable.seq_len)


def can_crop_by_one(identity: Identity, seq_len: int) -> bool:
    """Whether every layer of a cache of ``seq_len`` tokens still holds what a cache of one token less needs."""
    kinds = [geometry.kind for geometry in identity.layers if geometry.kind.name != "shared"]
    return all(seq_len - 1 - kind.held(seq_len - 1) >= seq_len - kind.held(seq_len) for kind in kinds)


def awaited_tokens(snapshot: Snapshot) -> Int[Tensor, "batch 1"] | None:
    """The token after the cache, by row, where its construction path names one."""
    tokens = awaited(snapshot.identity.construction, snapshot.batch_size, snapshot.seq_len)
    return None if tokens is None else torch.tensor(tokens, dtype=torch.int64).unsqueeze(1)


def with_stage(snapshot: Snapshot, stage: str) -> Snapshot:
    """``snapshot`` with one more stage in its construction path."""
    return replace(snapshot, identity=snapshot.identity.then(stage))


def _from_nothing(model: PreTrainedModel, snapshot: Snapshot, max_new_tokens: int) -> Continuation:
    if snapshot.identity.full_weights is not None:
        snapshot.identity.require_compatible(identity_of(model, full_hash=True))
    return continue_greedy(
        model,
        empty_cache(model),
        snapshot.token_ids,
        max_new_tokens=max_new_tokens,
        positions=snapshot.positions,
        mask=_without_padding(snapshot),
    )


def _without_padding(snapshot: Snapshot) -> Bool[Tensor, "batch seq_len"]:
    """The mask of the prompt that a cache was built from: left padding only, not what a packet has dropped since.

    Both are ``False`` at the beginning of a row, where a packet dropped the first tokens. Positions tell them apart:
    a dropped token was counted, padding was not.
    """
    shown, length = snapshot.mask.cpu(), snapshot.seq_len
    first = torch.where(shown.any(dim=1), shown.int().argmax(dim=1), length - 1)
    padding = first
    if any(stage.startswith("packet(") for stage in snapshot.identity.construction):
        counted = snapshot.positions.cpu().gather(1, first.unsqueeze(1)).squeeze(1)
        padding = (first - counted).clamp(min=0)
    return torch.arange(length) >= padding.unsqueeze(1)
