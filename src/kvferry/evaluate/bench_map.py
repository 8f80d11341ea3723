"""What a mapped cache costs beside the target's own prefill, over lengths of context, in one run."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.evaluate.map_run import require_target, transfer
from kvferry.hf.recompute import prefill
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[int, int, str], None]

COLD = 3
"""Cold starts, at least."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Medians over the repeats, in seconds, and the spread of the two that are compared.

    Attributes:
        tokens: of the context.
        native_prefix, recompute_last: tokens that the target computes itself; their time is in ``transfer``.
        map: mapping alone, no model.
        transfer: mapping and what the target computes.
        install: handing the cache to the model.
        prefill: the target's own prefill of the context, into a cache that is ready for use.
        source_prefill: the source's, which has been paid before.
        cold: loading the mapper from its folder and mapping for the first time, from files that the system may hold in
            memory; ``None`` where no folder is known.
        transfer_range, prefill_range, cold_range: least and most.
        cold_repeats: how many times that was done.
    """

    tokens: int
    native_prefix: int
    recompute_last: int
    map: float
    transfer: float
    install: float
    prefill: float
    source_prefill: float
    cold: float | None
    transfer_range: tuple[float, float]
    prefill_range: tuple[float, float]
    cold_range: tuple[float, float] | None = None
    cold_repeats: int = 0

    @property
    def speedup(self) -> float:
        """The target's own prefill over transfer and install."""
        return self.prefill / (self.transfer + self.install)

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__}
        cold = None if self.cold is None else self.cold + self.transfer - self.map + self.install
        return {
            "op": "map",
            **plain,
            "speedup": self.speedup,
            "speedup_map_only": self.prefill / self.map,
            "speedup_cold": None if cold is None else self.prefill / cold,
        }


def bench_map(
    mapper: Mapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    token_ids: Int[Tensor, "1 seq_len"],
    lengths: Sequence[int],
    *,
    recompute_last: int = 0,
    repeats: int = 5,
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> list[Latency]:
    """Time both ways to a cache of the target, warm, in random order, for each length.

    Args:
        mapper: from ``source`` to ``target``.
        source, target: the models.
        token_ids: a text of at least the longest length.
        lengths: tokens of context.
        recompute_last: see `transfer`.
        repeats: of each.
        folder: the mapper's, for the cold figures.
        seed: of the order.
        on_step: told ``(done, in all, at what)``.

    Raises:
        InvalidInput: a text too short, or nothing to repeat.
        IncompatibleIdentity: models that are not the mapper's.
    """
    if not lengths or min(lengths) < 1 or max(lengths) > token_ids.shape[1] or repeats < 1:
        raise InvalidInput(f"lengths {list(lengths)} of a text of {token_ids.shape[1]} tokens, {repeats} times")
    require_target(mapper, target)
    order = random.Random(seed)
    found = []
    for place, length in enumerate(lengths):
        if on_step is not None:
            on_step(place, len(lengths), f"{length} tokens")
        ids = token_ids[:, :length]
        cache = prefill(source, mapper.source, ids)
        cold = [] if folder is None else [_cold(folder, cache) for _ in range(max(COLD, repeats))]
        found.append(_latency(mapper, source, target, ids, cache, cold, recompute_last, repeats, order))
    return found


def _latency(
    mapper: Mapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    ids: Tensor,
    cache: Snapshot,
    cold: Sequence[float],
    recompute_last: int,
    repeats: int,
    order: random.Random,
) -> Latency:
    maps: list[float] = []
    installs: list[float] = []

    def transferred() -> float:
        began = time.perf_counter()
        done = transfer(mapper, target, cache, recompute_last=recompute_last, check=False)
        ended = time.perf_counter()
        done.snapshot.to_cache(target, check=False)
        maps.append(done.seconds["map"])
        installs.append(time.perf_counter() - ended)
        return ended - began

    def prefilled() -> float:
        began = time.perf_counter()
        prefill(target, mapper.target, ids)
        return time.perf_counter() - began

    def source_prefilled() -> float:
        began = time.perf_counter()
        prefill(source, mapper.source, ids)
        return time.perf_counter() - began

    arms = {"transfer": transferred, "prefill": prefilled, "source": source_prefilled}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():  # once for warmth
        arm()
    maps.clear()
    installs.clear()
    for _ in range(repeats):
        for name in order.sample(list(arms), len(arms)):
            seconds[name].append(arms[name]())
    return Latency(
        tokens=int(ids.shape[1]),
        native_prefix=min(mapper.recipe.native_prefix, int(ids.shape[1])),
        recompute_last=recompute_last,
        map=median(maps),
        transfer=median(seconds["transfer"]),
        install=median(installs),
        prefill=median(seconds["prefill"]),
        source_prefill=median(seconds["source"]),
        cold=median(cold) if cold else None,
        cold_range=(min(cold), max(cold)) if cold else None,
        cold_repeats=len(cold),
        transfer_range=(min(seconds["transfer"]), max(seconds["transfer"])),
        prefill_range=(min(seconds["prefill"]), max(seconds["prefill"])),
    )


def _cold(folder: str | os.PathLike[str], cache: Snapshot) -> float:
    began = time.perf_counter()
    with torch.no_grad():
        Mapper.from_pretrained(folder).map(cache)
    return time.perf_counter() - began
