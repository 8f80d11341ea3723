"""A cache handed from one model to another: mapped, but for some tokens that the target computes itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.hf.identity import identity_of
from kvferry.hf.recompute import prefill, recompute
from kvferry.hf.tokens import positions_of
from kvferry.map.mapper import Mapper
from kvferry.snapshot import LayerState, Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What `transfer` gives.

    Attributes:
        snapshot: of the target.
        computed: tokens of a sequence that the target ran on, the first ones included.
        share: of the sequence's tokens: what the transfer costs of the target's own prefill, mapping apart.
        seconds: ``map``, ``native`` (the first tokens) and ``recompute``.
    """

    snapshot: Snapshot
    computed: int
    share: float
    seconds: dict[str, float]


def transfer(
    mapper: Mapper,
    target: PreTrainedModel,
    source: Snapshot,
    *,
    native_prefix: int | None = None,
    recompute_last: int = 0,
    recompute_tokens: Sequence[int] | Int[Tensor, " chosen"] = (),
    mapped: Snapshot | None = None,
    native: Snapshot | None = None,
    check: bool = True,
) -> Transfer:
    """The target's cache of the tokens of ``source``: mapped, then completed by the target.

    Args:
        mapper: from the model of ``source`` to ``target``.
        target: the model that will go on.
        source: the cache to be mapped.
        native_prefix: first real tokens of each sequence that the target prefills itself; by default as many as the
            mapper was fitted for. All of them: the target's own cache, exactly.
        recompute_last: last tokens that the target computes anew on top of the mapped cache.
        recompute_tokens: others, by index.
        mapped: what ``mapper`` made of ``source`` already; its storage is written to.
        native: the target's own cache of exactly the first tokens, where it has prefilled them already.
        check: require that ``target`` is the mapper's, by its weights. Without it only `Snapshot.to_cache` does, when
            the cache is taken up.

    Raises:
        IncompatibleIdentity: the cache, the mapper and the target do not belong together.
        InvalidInput: negative numbers, tokens outside of the sequence, or a cache with tokens dropped from its middle.
        UnsupportedCache: see `kvferry.hf.recompute.recompute`.
    """
    first = mapper.recipe.native_prefix if native_prefix is None else native_prefix
    if first < 0 or recompute_last < 0:
        raise InvalidInput(f"{first} first and {recompute_last} last tokens: neither is negative")
    if check:
        require_target(mapper, target)
    began = time.perf_counter()
    made = mapper.map(source) if mapped is None else mapped
    placed = time.perf_counter()
    if first:
        made = _with_native(made, target, first, native)
    prefilled = time.perf_counter()
    length = source.seq_len
    chosen = set(range(max(0, length - recompute_last), length)) | {int(token) for token in recompute_tokens}
    chosen -= set(range(min(length, int(_starts(source).min()) + first)))
    if chosen:
        made = recompute(target, made, sorted(chosen), check=False)
    done = time.perf_counter()
    computed = min(length, first) + len(chosen)
    seconds = {"map": placed - began, "native": prefilled - placed, "recompute": done - prefilled}
    return Transfer(made, computed, computed / length, seconds)


def require_target(mapper: Mapper, target: PreTrainedModel) -> None:
    """Raise `IncompatibleIdentity` unless ``target`` is the model that the mapper maps to."""
    identity_of(target).require_compatible(mapper.target, "this model is not the mapper's target")


def _with_native(mapped: Snapshot, target: PreTrainedModel, first: int, own: Snapshot | None = None) -> Snapshot:
    """The first ``first`` real tokens of each sequence prefilled by the target itself, in the storage of ``mapped``.

    Sliding layers that no longer hold them keep what they have.
    """
    if not torch.equal(positions_of(mapped.mask.cpu()), mapped.positions.cpu()):
        raise InvalidInput("a cache whose positions are not counted over its tokens has no prefix to prefill")
    starts = _starts(mapped)
    end = min(mapped.seq_len, int(starts.max()) + first)
    if own is None:
        own = prefill(target, mapped.identity, mapped.token_ids[:, :end], mapped.mask[:, :end])
    elif own.seq_len != end:
        raise InvalidInput(f"the target's own cache is of {own.seq_len} first tokens; {end} are asked for")
    taken = torch.arange(end) < (starts + first).unsqueeze(1)
    for new, old in zip(mapped.layers, own.layers, strict=True):
        _take(new, old, taken)
    stages = mapped.identity.construction
    return replace(mapped, identity=replace(mapped.identity, construction=(*stages, f"native({first})")))


def _take(mapped: LayerState, own: LayerState, taken: Tensor) -> None:
    """Write the tokens ``taken`` (of the first ones) of the target's own layer over a mapped one's."""
    assert mapped.keys is not None
    assert mapped.values is not None
    assert own.keys is not None
    assert own.values is not None
    begin = max(mapped.first, own.first)
    end = own.seen
    if begin >= end:
        return
    where = taken[:, begin:end, None].unsqueeze(1)
    for tensor, native in ((mapped.keys, own.keys), (mapped.values, own.values)):
        span = slice(begin - mapped.first, end - mapped.first)
        mine = native[:, :, begin - own.first :].to(tensor.device)
        tensor[:, :, span] = torch.where(where.to(tensor.device), mine, tensor[:, :, span])


def _starts(snapshot: Snapshot) -> Int[Tensor, " batch"]:
    """The first real token of each sequence."""
    return snapshot.mask.cpu().long().argmax(dim=1)
