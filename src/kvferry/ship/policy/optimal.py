"""Precision for every (layer, token), keys and values apart: least predicted error in a number of bytes.

A multiple-choice knapsack. Every token of every part (the keys, or the values, of a frame) takes one tier of a ladder;
a tier has a weighted distortion for that very token and a price. For a price λ of a byte the best choice is each
token's own, so that all that is to be found is λ (Lagrangian relaxation; the answer lies on the convex hull of what
can be had). Two things tie the tokens of a part together: the map that names each token's tier, and the minima and
scales of per-channel blocks, which cost the more the fewer tokens share them. So tiers are taken out of a part, one
after the other, wherever that lowers error + λ · exact bytes: down to one tier for all, which needs no map.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kvferry.ship import native
from kvferry.ship.policy.tiers import INT4, INT8, RAW, TIER_COST, PolicyContext, ranking

_RANGE, _NEAR = 70.0, 1.0
_STEPS = (22, 14, 14)
"""Halvings of the range of prices, and then of what lies near the price found."""


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """The tiers that the tokens of one part may take.

    Attributes:
        specs: of the quantisers.
        nbytes: ``[tier, count]`` → bytes of a section of so many tokens, int64 ``(tiers, tokens + 1)``.
    """

    specs: tuple[str, ...]
    nbytes: Int[Tensor, "tiers counts"]

    def descriptions(self) -> Int[Tensor, " tiers"]:
        """Bytes that each tier in use adds to the part's description."""
        return torch.tensor([1 + len(spec) for spec in self.specs])


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A tier for each token of each part.

    Attributes:
        tiers: ``(parts, batch, tokens)``, padded as the problem is.
        error: predicted, of each part.
        nbytes: of each part: sections, descriptions and maps, exactly.
    """

    tiers: UInt8[Tensor, "parts batch tokens"]
    error: Float[Tensor, " parts"]
    nbytes: Int[Tensor, " parts"]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return int(self.nbytes.sum())


class Problem:
    """What there is to choose from.

    Args:
        ladders: of each part.
        distortions: of each part, weighted error of each tier and token, ``(tiers, batch, tokens)``; infinite where a
            tier cannot carry a token. The first tier carries all. Taken one after the other and not kept.
        sent: of each part, which tokens count, ``(batch, tokens)``.
    """

    def __init__(
        self,
        ladders: Sequence[Ladder],
        distortions: Iterable[Float[Tensor, "tiers batch tokens"]],
        sent: Sequence[Bool[Tensor, "batch tokens"]],
    ):
        parts, batch = len(ladders), sent[0].shape[0]
        most, tokens = max(len(ladder.specs) for ladder in ladders), max(mask.shape[1] for mask in sent)
        self.sent = torch.zeros(parts, batch, tokens, dtype=torch.bool)
        self.error = _given_back(parts, most, batch, tokens).fill_(torch.inf)
        self.price = torch.full((parts, most), torch.inf)
        self.start = torch.zeros(parts, most, dtype=torch.int64)
        self.names = torch.zeros(parts, most, dtype=torch.int64)
        unique = {id(ladder): ladder for ladder in ladders}  # the parts of many layers share one
        self.tables = torch.cat([ladder.nbytes.flatten() for ladder in unique.values()])
        sizes = torch.tensor([0, *(ladder.nbytes.numel() for ladder in unique.values())])
        starts = dict(zip(unique, sizes.cumsum(0).tolist(), strict=False))
        dearest = 0.0
        for place, (ladder, error, mask) in enumerate(zip(ladders, distortions, sent, strict=True)):
            tiers, length = len(ladder.specs), mask.shape[1]
            self.sent[place, :, :length] = mask
            self.error[place, :tiers, :, :length] = error
            self.error[place, :tiers, :, length:] = 0
            here = self.error[place, :tiers].masked_fill_(~self.sent[place], 0.0)
            here.masked_fill_(here.isnan(), torch.inf)  # overflowed, and of no weight
            rows = torch.arange(tiers) * ladder.nbytes.shape[1]
            self.start[place, :tiers] = starts[id(ladder)] + rows
            self.names[place, :tiers] = ladder.descriptions()
            count = max(1, int(mask.sum(dim=1).max()))
            self.price[place, :tiers] = ladder.nbytes[:, count] / count
            finite = here[here.isfinite()]
            dearest = max(dearest, float(finite.max()) if finite.numel() else 0.0)
        self._dearest = max(1e-30, dearest) * 1e6  # a price at which bytes are all that counts

    def choose(self, price: float, allowed: Bool[Tensor, "parts tiers"]) -> Choice:
        """Each token's best tier of those allowed, at a price of a byte."""
        cost = (self.price * price).masked_fill(~allowed, torch.inf)
        chosen = native.choose(self.error, cost, self.sent, self.tables, self.start, self.names)
        return Choice(*(self._choose(cost) if chosen is None else chosen))

    def _choose(self, given: Float[Tensor, "parts tiers"]) -> tuple[Tensor, Tensor, Tensor]:
        """Tiers, errors and bytes: what the compiled kernel gives."""
        cost = given[:, :, None, None]
        most = self.price.shape[1]
        # Tier by tier: an argmin over an inner dimension is ten times slower.
        chosen = self.error[:, 0].clone()
        least = chosen + cost[:, 0]
        tiers = torch.zeros(least.shape, dtype=torch.uint8)
        for tier in range(1, most):
            here = self.error[:, tier] + cost[:, tier]
            better = here < least
            tiers.masked_fill_(better, tier)
            torch.where(better, self.error[:, tier], chosen, out=chosen)
            torch.minimum(least, here, out=least)
        counts = torch.stack([(tiers.eq(tier) & self.sent).sum(dim=2) for tier in range(most)], dim=2)
        nbytes = self.tables[self.start.unsqueeze(2) + counts.transpose(1, 2)].sum(dim=(1, 2))
        used = counts.sum(dim=1) > 0
        number = used.sum(dim=1)
        width = torch.tensor([max(0, n - 1).bit_length() for n in range(most + 1)])[number]
        maps = (width * counts.sum(dim=(1, 2)) + 7) // 8
        return tiers, _sums(chosen.flatten(1)), 1 + nbytes + (self.names * used).sum(dim=1) + maps

    def prune(self, price: float) -> tuple[Choice, Bool[Tensor, "parts tiers"]]:
        """The best choice at a price, with tiers taken out of each part where that pays, and the tiers left."""
        allowed = self.price.isfinite()
        best = self.choose(price, allowed)
        singles = torch.eye(allowed.shape[1], dtype=torch.bool)
        for single in singles:  # one tier for all but those that nothing else than the first can carry
            best, allowed = self._better(price, best, allowed, allowed & (single | singles[0]))
        for single in singles:
            best, allowed = self._better(price, best, allowed, allowed & ~single)
        return best, allowed

    def _better(self, price: float, best: Choice, allowed: Tensor, trial: Tensor) -> tuple[Choice, Tensor]:
        possible = trial.any(dim=1) & (trial != allowed).any(dim=1)
        if not bool(possible.any()):
            return best, allowed
        other = self.choose(price, torch.where(possible.unsqueeze(1), trial, allowed))
        gain = (other.error + price * other.nbytes) < (best.error + price * best.nbytes)
        taken = possible & gain
        if not bool(taken.any()):
            return best, allowed
        return (
            Choice(
                torch.where(taken[:, None, None], other.tiers, best.tiers),
                torch.where(taken, other.error, best.error),
                torch.where(taken, other.nbytes, best.nbytes),
            ),
            torch.where(taken.unsqueeze(1), trial, allowed),
        )

    def smallest(self) -> Choice:
        """The choice of the fewest bytes, whatever the error."""
        return self.prune(self._dearest)[0]

    def solve(self, limit: int) -> Choice | None:
        """The least error that is found in at most ``limit`` bytes; ``None`` where nothing fits."""
        top = math.log(self._dearest)
        smallest = self.smallest()
        if smallest.total > limit:
            return None
        best, allowed = smallest, self.price.isfinite()
        low, high = top - _RANGE, top
        for steps in _STEPS:
            found, price = self._cheapest(allowed, limit, low, high, steps)
            if found is not None and float(found.error.sum()) < float(best.error.sum()):
                best = found
            # With these tiers taken out a lower price fits too; with those of the next price, maybe one lower still.
            allowed = self.prune(math.exp(price))[1]
            low, high = price - _NEAR, min(top, price + _NEAR)
        return best

    def _cheapest(
        self, allowed: Tensor, limit: int, low: float, high: float, steps: int
    ) -> tuple[Choice | None, float]:
        """The choice at the lowest price (its logarithm between two) that fits, and that price."""
        best, price = None, high
        for _ in range(steps):
            middle = (low + high) / 2
            found = self.choose(math.exp(middle), allowed)
            if found.total <= limit:
                best, price, high = found, middle, middle
            else:
                low = middle
        return best, price


def _given_back(*shape: int) -> Tensor:
    """fp32 that the system has back as soon as it is free: glibc keeps what is below 32 MiB, beside the packet then."""
    nbytes = 4 * math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, max(4, nbytes)), dtype=torch.float32, count=nbytes // 4).view(shape)


def _sums(errors: Float[Tensor, "parts tokens"]) -> Float[Tensor, " parts"]:
    """Sums in float64, in the one order that the compiled kernel has too.

    Every eighth token is added to the one before it; of the eight sums the first half takes the second, until one is
    left.
    """
    lanes = torch.nn.functional.pad(errors, (0, -errors.shape[1] % 8)).view(len(errors), -1, 8)
    sums = lanes.to(torch.float64).cumsum(dim=1)[:, -1]
    for half in (4, 2, 1):
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def nominal(scores: Float[Tensor, " n"], b: float, n: int, context: PolicyContext) -> UInt8[Tensor, " n"]:
    """The same knapsack in the paper's terms, for one sequence: 16 bit, INT8 and INT4 at their nominal costs.

    Least sum of score × error for a mean cost of at most b, a uniform quantiser's error being the square of its step
    (sinks count as much as the most important token; scores below 0 as 0). Needs b of at least 0.25.
    """
    order = ranking(scores, context.n_sink)
    weight = scores.to(torch.float64)[order].clamp_min(0)
    weight[: context.n_sink] = weight.max() if n else 0
    int8, int4 = (1 / (2 ** (bits - 1) - 1) ** 2 for bits in (8, 4))
    up = (TIER_COST[INT8] - TIER_COST[INT4], TIER_COST[RAW] - TIER_COST[INT8])
    gains = torch.cat([weight * (int4 - int8) / up[0], weight * int8 / up[1]])
    prices = torch.tensor(up, dtype=torch.float64).repeat_interleave(n)
    best = torch.argsort(gains, descending=True, stable=True)  # a token's second upgrade never comes before its first
    spent = prices[best].cumsum(0) <= (b - TIER_COST[INT4]) * n + 1e-9
    taken = torch.zeros(2 * n, dtype=torch.bool)
    taken[best[spent]] = True
    tiers = torch.empty(n, dtype=torch.uint8)
    tiers[order] = INT4 - taken[:n].to(torch.uint8) - taken[n:].to(torch.uint8)
    return tiers
