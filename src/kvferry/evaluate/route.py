"""How the cache of a context reaches the model that goes on from it: as it is, shipped, mapped, or both."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from kvferry.errors import BudgetTooSmall, InvalidInput
from kvferry.evaluate.map_arms import source_cache
from kvferry.evaluate.map_run import require_target, transfer
from kvferry.evaluate.method import Method, ship
from kvferry.hf.capture import capture
from kvferry.hf.observe import OBSERVABLE, QUERY_WINDOW
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Toll:
    """What the caches of a route have cost so far.

    Attributes:
        caches: that went over it.
        tokens: that they held.
        nbytes: of their packets, all overhead counted.
        full_bytes: of their 16-bit packets.
        over_budget: caches so short that the policy could not meet the budget, and took the least that it can.
    """

    caches: int = 0
    tokens: int = 0
    nbytes: int = 0
    full_bytes: int = 0
    over_budget: int = 0

    def to_json(self) -> dict[str, Any]:
        """The counts, and ``actual_budget``: bytes over 16-bit bytes of all caches together."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {**plain, "actual_budget": self.nbytes / self.full_bytes if self.full_bytes else None}


class Route:
    """Caches for ``model``, made the way that a deployment would make them.

    Args:
        model: the model that goes on from the caches.
        method: how they are shipped.
        mapper: maps caches of ``source`` to ``model``, behind the wire: what is shipped is the source's cache.
        source: the model that prefills, with a mapper.
        native_prefix: see `kvferry.evaluate.map_run.transfer`.

    Raises:
        InvalidInput: a mapper without a source, or a source without a mapper.
        IncompatibleIdentity: a mapper for another model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        mapper: Mapper | None = None,
        source: PreTrainedModel | None = None,
        native_prefix: int | None = None,
    ):
        if (mapper is None) != (source is None):
            raise InvalidInput("a mapper and the source model that it maps from go together")
        if mapper is None and native_prefix is not None:
            raise InvalidInput("native_prefix is for a mapper")
        if mapper is not None:
            require_target(mapper, model)
        self.model, self.method, self.mapper = model, method, mapper
        self.toll = Toll()
        self._source, self._native_prefix = source, native_prefix

    def cache(self, token_ids: Int[Tensor, "1 tokens"]) -> Snapshot:
        """The cache of a context as the model receives it."""
        if self.mapper is None:
            observed = self.model.config._attn_implementation in OBSERVABLE
            made = capture(self.model, token_ids, query_window=QUERY_WINDOW if observed else 0)
        else:
            assert self._source is not None
            made = source_cache(self.mapper, self._source, token_ids)
        made = self._shipped(made)
        if self.mapper is None:
            return made
        return transfer(self.mapper, self.model, made, native_prefix=self._native_prefix, check=False).snapshot

    def _shipped(self, snapshot: Snapshot) -> Snapshot:
        method = self.method
        try:
            shipped = ship(snapshot, method)
        except BudgetTooSmall as error:
            self.toll.over_budget += 1
            logger.debug("a cache of %d tokens takes a budget of %g", snapshot.seq_len, error.least_budget)
            shipped = ship(snapshot, replace(method, budget=error.least_budget))
        self.toll.caches += 1
        self.toll.tokens += snapshot.seq_len
        self.toll.nbytes += shipped.nbytes
        self.toll.full_bytes += shipped.full_bytes
        return shipped.snapshot
