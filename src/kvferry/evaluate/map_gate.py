"""The gate before a mapped cache: measured by the receiver, and where it does not open, the target prefills itself."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvferry.errors import IncompatibleIdentity, InvalidInput, UnsupportedCache
from kvferry.evaluate.attention import attention_cosine
from kvferry.evaluate.map_arms import Arm
from kvferry.evaluate.map_eval import MapEvalSettings, evaluate_mapper
from kvferry.evaluate.map_fit import with_tokenizer
from kvferry.evaluate.map_run import Transfer, transfer
from kvferry.hf.capture import capture
from kvferry.hf.identity import identity_of
from kvferry.map.gate import Acceptance, Floors, Measured, objections, standing, too_native, weights_of
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot
from kvferry.snapshot.rope import Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_TOKENS = 24
"""First tokens that the target prefills itself at each hand-off, to compare with what was mapped."""

LEAST_COMPARED = 8
"""Of them so many must be mapped ones."""


def accept(
    mapper: Mapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    floors: Floors | None = None,
    windows: int = 6,
    prefix: int = 256,
    suffix: int = 64,
    seed: int = 0,
    on_step: Callable[[int, int, str], None] | None = None,
) -> Acceptance:
    """Judge a mapper by the receiver's own floors on the receiver's own text, control arms included.

    Raises:
        IncompatibleIdentity: the models are not the mapper's.
        InvalidInput: a text too short.
    """
    bar = floors or Floors()
    controls = ("identity", "no_prefix", "other_document")
    settings = MapEvalSettings(windows, prefix, suffix, (Arm("mapped"),), controls, seed)
    report = evaluate_mapper(mapper, source, target, tokenizer, text, settings, on_step=on_step)
    main, control = report.row("mapped"), report.row("other_document")
    measured = Measured(
        n=main.fidelity.n,
        identity_exact=report.identity_exact,
        attention_cosine=_finite(main.to_json()["attention_cosine"]),
        kl=_whole(main.fidelity.kl_mean, main.fidelity.nonfinite),
        agreement=_whole(main.fidelity.top1_agreement, main.fidelity.nonfinite),
        context_gain=_finite(main.gain.recovered),
        context_gain_low=None if main.gain.ci is None else _finite(main.gain.ci[0]),
        control_kl=_finite(control.fidelity.kl_mean),
    )
    return Acceptance(
        mapper=mapper.digest,
        source=weights_of(identity_of(source)),
        target=weights_of(identity_of(target)),
        floors=bar,
        measured=measured,
        reasons=(*too_native(mapper, bar), *objections(measured, bar)),
        text=hashlib.sha256(text.encode()).hexdigest(),
    )


def _whole(value: float | None, nonfinite: int) -> float | None:
    """A mean that leaves nothing out."""
    return None if nonfinite else _finite(value)


def _finite(value: float | None) -> float | None:
    """Nothing in place of what is no number: a record has to be written of mappers that overflow above all."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Check:
    """What a look at one mapped cache found.

    Attributes:
        tokens: that the target prefilled to compare with.
        cosine: between attention outputs on the mapped tokens and on the target's own, mean over layers.
        control: the same with other tokens' mapped keys and values in their place.
    """

    tokens: int
    cosine: float
    control: float


def check(mapped: Snapshot, own: Snapshot, skip: int, rotaries: Sequence[Rotary]) -> Check:
    """Compare the first tokens of a mapped cache with the target's own of them.

    Args:
        mapped: of the target, mapped, no token native.
        own: of the first tokens of it, prefilled by the target, with their queries.
        skip: first tokens of it that will be native anyway.
        rotaries: of the target's layers: other tokens stand in for the first ones at the first ones' positions.
    """
    tokens = own.seq_len
    if tokens - skip < LEAST_COMPARED or mapped.seq_len < 2 * tokens:
        raise InvalidInput(f"{tokens} tokens of {mapped.seq_len}, {skip} of them native, are too few to judge a map by")
    here = _cut(mapped, 0, own, skip, rotaries)
    elsewhere = _cut(mapped, mapped.seq_len - tokens, own, skip, rotaries)
    found = [[value for value in attention_cosine(own, made).both if value is not None] for made in (here, elsewhere)]
    return Check(tokens, *(sum(values) / len(values) for values in found))


def _cut(mapped: Snapshot, start: int, own: Snapshot, skip: int, rotaries: Sequence[Rotary]) -> Snapshot:
    """``own`` with its tokens after ``skip`` from ``mapped``, at ``start`` on, moved to the positions of those."""
    layers = []
    taken = slice(start + skip, start + own.seq_len)
    for index, (layer, native) in enumerate(zip(mapped.layers, own.layers, strict=True)):
        if layer.first > 0 or native.first > 0:
            raise UnsupportedCache(f"layer {index} ({layer.kind}) no longer holds the tokens to be compared")
        assert layer.keys is not None
        assert layer.values is not None
        assert native.keys is not None
        assert native.values is not None
        keys, values = layer.keys[:, :, taken], layer.values[:, :, taken]
        if start:
            rotary, device = rotaries[index], keys.device
            bare = rotary.strip(keys, mapped.positions[:, taken].to(device))
            keys = rotary.apply(bare, own.positions[:, skip:].to(device)).to(keys.dtype)
        layers.append(
            native.map_tensors(
                torch.cat([native.keys[:, :, :skip], keys], dim=2),
                torch.cat([native.values[:, :, :skip], values], dim=2),
            )
        )
    return replace(own, layers=tuple(layers))


@dataclass(frozen=True, slots=True, eq=False)
class Guarded:
    """What `guarded_transfer` gives.

    Attributes:
        snapshot: of the target: mapped, or its own prefill.
        mapped: which of the two.
        reasons: why it is its own; empty where it is mapped.
        check: what was found on this cache; ``None`` where it did not come to that.
        share: of the prompt's tokens that the target ran on; 1 where it prefilled all.
    """

    snapshot: Snapshot
    mapped: bool
    reasons: tuple[str, ...]
    check: Check | None
    share: float


def guarded_transfer(
    mapper: Mapper,
    target: PreTrainedModel,
    source: Snapshot,
    *,
    acceptance: Acceptance | None = None,
    floors: Floors | None = None,
    checked: int = CHECKED_TOKENS,
    recompute_last: int = 0,
) -> Guarded:
    """A mapped cache where the gate opens, the target's own prefill where it does not: never a wrong one in silence.

    Args:
        mapper: from the model of ``source`` to ``target``.
        target: the model that will go on.
        source: the cache to be mapped; one sequence.
        acceptance: the receiver's record on the mapper; by default the kept one. Without any the gate stays shut.
        floors: the receiver's, now; the record's measures are held against them again.
        checked: first tokens that the target prefills to compare with; they stay native.
        recompute_last: see `transfer`.
    """
    bar = floors or Floors()
    identity = identity_of(target)
    reasons = standing(mapper, identity, bar, acceptance)
    found: Check | None = None
    if not reasons:
        try:
            identity.require_compatible(mapper.target, "this model is not the mapper's target")
            looked = judged_transfer(mapper, target, source, bar, checked=checked, recompute_last=recompute_last)
            done, found, reasons = looked.transfer, looked.check, looked.reasons
            if done is not None:
                return Guarded(done.snapshot, True, (), found, done.share)
        except (IncompatibleIdentity, UnsupportedCache, InvalidInput) as error:
            reasons = (str(error),)
    mask = source.mask if not bool(source.mask.all()) else None
    own = capture(target, source.token_ids, attention_mask=mask)
    return Guarded(own, False, reasons, found, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What `judged_transfer` gives.

    Attributes:
        transfer: ``None`` where the mapped cache fell short.
        check: what was found on it.
        reasons: why it fell short.
    """

    transfer: Transfer | None
    check: Check
    reasons: tuple[str, ...]


def judged_transfer(
    mapper: Mapper,
    target: PreTrainedModel,
    source: Snapshot,
    floors: Floors,
    *,
    checked: int = CHECKED_TOKENS,
    recompute_last: int = 0,
) -> Judged:
    """The second half of the gate: one mapped cache against the target's own first tokens.

    For who has held the receiver's record on the mapper against the models and the floors (`Acceptance.against`); the
    target is not asked again whether it is the mapper's. Arguments as of `guarded_transfer`.

    Raises:
        IncompatibleIdentity: ``source`` is not of the mapper's source.
        InvalidInput: more than one sequence, padding, fewer than twice ``checked`` tokens, or fewer than
            `LEAST_COMPARED` of them that the mapper does not leave to the target.
        UnsupportedCache: a layer no longer holds the first tokens.
    """
    own = _first_tokens(mapper, target, source, checked)
    mapped = mapper.map(source)
    found = check(mapped, own, mapper.recipe.native_prefix, mapper.target_rotaries)
    reasons = _too_far(found, floors)
    if reasons:
        return Judged(None, found, reasons)
    done = transfer(
        mapper,
        target,
        source,
        native_prefix=checked,
        recompute_last=recompute_last,
        mapped=mapped,
        native=own,
        check=False,
    )
    return Judged(done, found, ())


def _first_tokens(mapper: Mapper, target: PreTrainedModel, source: Snapshot, checked: int) -> Snapshot:
    if source.batch_size != 1 or not bool(source.mask.all()):
        raise InvalidInput("the gate looks at one sequence without padding at a time")
    ids: Tensor = source.token_ids[:, :checked]
    return with_tokenizer(capture(target, ids, query_window=max(1, ids.shape[1] - 8)), mapper.target)


def _too_far(found: Check, floors: Floors) -> tuple[str, ...]:
    reasons = []
    if not found.cosine >= floors.attention_cosine:
        reasons.append(
            f"on this cache's first {found.tokens} tokens the attention cosine is {found.cosine:.3f}, below "
            f"{floors.attention_cosine:g}"
        )
    if not 1 - found.control >= floors.control_margin * (1 - found.cosine):
        reasons.append(
            f"other tokens' keys and values serve nearly as well (cosine {found.control:.3f} beside {found.cosine:.3f})"
        )
    return tuple(reasons)
