"""Rates of right answers from mapped caches, beside the target's and the source's own, item by item."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.errors import InvalidInput
from kvferry.evaluate.map_gain import ratio_interval
from kvferry.evidence.statistics import Interval, bootstrap_mean, mcnemar, wilson


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One arm or control on one task.

    Attributes:
        name: of the task.
        arm: how the cache was transferred, or which control it is.
        n: questions; of a control they may be fewer, and target and source are then those of the same ones.
        chance: accuracy of guessing.
        source, target, mapped: accuracies: of the source alone, of the target on its own cache, of the target on the
            mapped one.
        source_ci, target_ci, mapped_ci: Wilson's intervals.
        difference_ci: 95% of mapped less target, paired; ``None`` for a single question.
        p: exact McNemar test of mapped against target.
        retention_floor_ci: 95% of `retention_floor`, by a paired bootstrap that draws whole clusters of items; ``None``
            where the target may do no better than chance.
        over_source_ci: 95% of mapped less source, paired.
        source_p: exact McNemar test of mapped against source.
        share: mean share of a context's tokens that the target ran on; ``None`` for controls.
        oracle: whether the arm looked at the target's own cache.
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
    retention_floor_ci: Interval | None = None
    over_source_ci: Interval | None = None
    source_p: float | None = None
    share: float | None = None
    oracle: bool = False

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


@dataclass(frozen=True, slots=True)
class Item:
    """What came of one question.

    Attributes:
        hits: by arm or control, ``source`` and ``target``: whether the answer was right.
        shares: by arm: of the context's tokens, those that the target ran on.
        chance: of guessing right.
        cluster: items of the same one are drawn together; by default each is its own.
    """

    hits: Mapping[str, bool]
    shares: Mapping[str, float]
    chance: float
    cluster: Hashable = None

    def to_json(self) -> dict[str, Any]:
        return {"hits": dict(self.hits), "shares": dict(self.shares)}


def task_results(
    name: str, items: Sequence[Item], arms: Mapping[str, bool], controls: Sequence[str], *, seed: int = 0
) -> list[TaskResult]:
    """One result an arm (``True``: an oracle), then one a control, each of the items that it was tried on.

    Raises:
        InvalidInput: no items.
    """
    if not items:
        raise InvalidInput(f"{name}: there are no questions")
    found = [_result(name, arm, items, oracle, seed) for arm, oracle in arms.items()]
    tried = {key for item in items for key in item.hits}
    return found + [_result(name, control, items, False, seed) for control in controls if control in tried]


def _result(name: str, arm: str, items: Sequence[Item], oracle: bool, seed: int) -> TaskResult:
    mine = [item for item in items if arm in item.hits]
    clusters = [place if item.cluster is None else item.cluster for place, item in enumerate(mine)]
    n = len(mine)
    columns = {key: np.array([item.hits[key] for item in mine], dtype=float) for key in (arm, "target", "source")}
    mapped, target, source = columns.values()
    chance = np.array([item.chance for item in mine])
    shares = [item.shares[arm] for item in mine if arm in item.shares]
    hits = {key: round(float(column.sum())) for key, column in columns.items()}
    above, below = (_by_cluster(column - chance, clusters) for column in (mapped, target))
    return TaskResult(
        name=name,
        arm=arm,
        n=n,
        chance=float(chance.mean()),
        source=hits["source"] / n,
        target=hits["target"] / n,
        mapped=hits[arm] / n,
        source_ci=wilson(hits["source"], n),
        target_ci=wilson(hits["target"], n),
        mapped_ci=wilson(hits[arm], n),
        difference_ci=bootstrap_mean((mapped - target).tolist(), clusters, seed=seed),
        p=_mcnemar(mapped, target),
        retention_floor_ci=ratio_interval(above, below, seed=seed),
        over_source_ci=bootstrap_mean((mapped - source).tolist(), clusters, seed=seed),
        source_p=_mcnemar(mapped, source),
        share=sum(shares) / len(shares) if shares else None,
        oracle=oracle,
    )


def _by_cluster(values: np.ndarray, clusters: Sequence[Hashable]) -> np.ndarray:
    place: dict[Hashable, int] = {}
    return np.bincount([place.setdefault(cluster, len(place)) for cluster in clusters], weights=values)


def _mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    return mcnemar(int((one > other).sum()), int((other > one).sum()))
