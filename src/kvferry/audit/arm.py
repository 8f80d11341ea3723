"""Arms: plain descriptions of how a sequence is run. Two arms that differ in one field are an experiment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvferry.snapshot import Snapshot

DECODES = ("step", "block", "recompute", "one_shot")
"""How the tokens after the prefix are run: on the cache, one or all at a time; or without one, each time or once."""

NEIGHBOURS = ("copies", "others")
"""What the other rows of a batch hold: the same sequence, or other tokens."""

_STAGED = re.compile(r"(chunked|decoded)\(([1-9]\d{0,8})\)")


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Something done to a cache, or to the model that builds it: a codec, a mapper, a transplant, a planted fault.

    Attributes:
        name: what reports call it; two changes of one name must do the same.
        cache: takes the finished cache of the prefix and the model, gives another of the same tokens.
        model: context manager around the construction of the cache.
        whole_run: ``model`` stays while the suffix runs, too.
        position_shift: added to the positions while the cache is built.
        unmasked: the mask of left padding is lost.
        lossy: the change is meant to lose precision, as a codec does: what it loses is no fault.
    """

    name: str
    cache: Callable[[Snapshot, PreTrainedModel], Snapshot] | None = None
    model: Callable[[PreTrainedModel], AbstractContextManager[None]] | None = None
    whole_run: bool = False
    position_shift: int = 0
    unmasked: bool = False
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a sequence: how its cache is built, and how the tokens after the prefix are run.

    Attributes:
        construction: ``prefill``, ``chunked(n)``, ``incremental`` (one by one), or ``decoded(k)`` (a prefill, then the
            last k one by one, as a cache that answers have been decoded into).
        decode: ``step`` (one token a forward pass on the cache: cache ON), ``block`` (all at once on the cache),
            ``recompute`` (the whole sequence again for every token: cache OFF), ``one_shot`` (the whole sequence once:
            cheaper, and other shapes than ``recompute``).
        dtype: of weights, activations and cache; ``None``: the model's own. Another is cast from the model's weights.
        attn: attention backend; ``None``: the model's own.
        batch: rows; the sequence audited is row 0.
        neighbours: what the other rows hold.
        left_padding: tokens of padding before the sequence.
        threads: to compute with; ``None``: as torch is set.
        accumulation: of matrix products, where torch lets it be set: ``full``, or ``reduced`` (float32 products may go
            through shorter floats, and CUDA may add 16-bit products up in 16 bit); ``None``: as torch is set.
        change: to the cache, or to the model that builds it.
    """

    construction: str = "prefill"
    decode: str = "step"
    dtype: str | None = None
    attn: str | None = None
    batch: int = 1
    neighbours: str = "copies"
    left_padding: int = 0
    threads: int | None = None
    accumulation: str | None = None
    change: Change | None = None

    def __post_init__(self) -> None:
        if self.decode not in DECODES:
            raise InvalidInput(f"unknown way to decode {self.decode!r}: {', '.join(DECODES)} are")
        if self.neighbours not in NEIGHBOURS:
            raise InvalidInput(f"unknown neighbours {self.neighbours!r}: {', '.join(NEIGHBOURS)} are")
        if self.accumulation not in (None, "full", "reduced"):
            raise InvalidInput(f"unknown accumulation {self.accumulation!r}: full and reduced are")
        if self.construction not in ("prefill", "incremental") and _STAGED.fullmatch(self.construction) is None:
            raise InvalidInput(
                f"unknown construction {self.construction!r}: prefill, chunked(n), incremental and decoded(k) are"
            )
        if self.batch < 1 or self.left_padding < 0 or (self.threads is not None and self.threads < 1):
            raise InvalidInput(
                f"an arm of batch {self.batch}, {self.left_padding} tokens of padding and {self.threads} threads"
            )
        if not self.cached and self.change is not None and self.change.cache is not None:
            raise InvalidInput(f"change {self.change.name!r} is to a cache, but {self.decode!r} keeps none")

    @property
    def cached(self) -> bool:
        """Whether the suffix runs on a cache of the prefix."""
        return self.decode in ("step", "block")

    def spans(self, length: int) -> Iterator[tuple[int, int]]:
        """``(begin, end)`` of each forward pass that builds a cache of ``length`` tokens."""
        staged = _STAGED.fullmatch(self.construction)
        if staged is not None and staged[1] == "decoded":
            whole = max(0, length - int(staged[2]))
            if whole:
                yield 0, whole
            yield from ((place, place + 1) for place in range(whole, length))
            return
        step = 1 if self.construction == "incremental" else int(staged[2]) if staged is not None else length
        yield from ((begin, min(begin + step, length)) for begin in range(0, length, step))

    def to_json(self) -> dict[str, Any]:
        """Every field that is not as by default, and always construction and decode."""
        found: dict[str, Any] = {"construction": self.construction, "decode": self.decode}
        for name in ("dtype", "attn", "threads", "accumulation"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.batch > 1:
            found |= {"batch": self.batch, "neighbours": self.neighbours}
        if self.left_padding:
            found["left_padding"] = self.left_padding
        if self.change is not None:
            found["change"] = self.change.name
        return found

    def __str__(self) -> str:
        given = self.to_json()
        parts = [f"{given.pop('construction')}/{given.pop('decode')}"]
        return " ".join([*parts, *(f"{name}={value}" for name, value in given.items())])


CACHE_ON = Arm()
"""The prompt prefilled at once, then one token a step on its cache."""

CACHE_OFF = Arm(decode="recompute")
"""No cache: the whole sequence again for every token."""
