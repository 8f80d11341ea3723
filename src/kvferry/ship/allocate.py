"""Tiers for every token, what stands behind each tier, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.ship.policy import DROP, RAW, TIER_COST, Policy, PolicyContext
from kvferry.ship.quantize import quantizer

FAMILIES: dict[str, tuple[str, str, str, str]] = {
    "sym": ("sym8", "sym8", "sym4", "sym4"),
    "asym": ("asym8g64", "asym8g64", "asym4g64", "asym4g64"),
    "chan": ("chan8b128", "asym8g64", "chan4b128", "asym4g64"),
}
"""Names for `TierSpecs.parse`: INT8 keys and values, INT4 keys and values."""


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """The quantiser behind each tier, keys and values apart, dearest tier first.

    The paper's, and the default: ``raw``, ``sym8``, ``sym4`` for both.
    """

    keys: tuple[str, ...] = ("raw", "sym8", "sym4")
    values: tuple[str, ...] = ("raw", "sym8", "sym4")

    def __post_init__(self) -> None:
        if not (1 <= len(self.keys) <= 15 and 1 <= len(self.values) <= 15):
            raise InvalidInput(f"{len(self.keys)} tiers for keys and {len(self.values)} for values; each has 1 to 15")
        for spec in (*self.keys, *self.values):
            quantizer(spec)
        if self.keys[0] != "raw" or self.values[0] != "raw":
            raise InvalidInput("the first tier must be 'raw': tokens that no quantiser can carry are sent by it")

    @classmethod
    def parse(cls, text: str) -> TierSpecs:
        """Read a family (``sym``, ``asym``, ``chan``) or ``INT8/INT4`` with keys and values apart by a colon.

        ``"sym8/sym4"`` and ``"chan8b128:asym8g64/chan4b128:asym3g64"`` are such.
        """
        if text in FAMILIES:
            k8, v8, k4, v4 = FAMILIES[text]
            return cls(("raw", k8, k4), ("raw", v8, v4))
        pairs = [tier.split(":") for tier in text.split("/")]
        if len(pairs) != 2 or any(len(pair) > 2 for pair in pairs):
            raise InvalidInput(
                f"{text!r} names no quantisers: give one of {', '.join(FAMILIES)}, or those of the INT8 and INT4 tiers "
                "as in 'sym8/sym4' or 'chan8b128:asym8g64/chan4b128:asym3g64' (keys:values)"
            )
        return cls(("raw", *(pair[0] for pair in pairs)), ("raw", *(pair[-1] for pair in pairs)))

    @classmethod
    def make(cls, given: TierSpecs | str | Mapping[str, tuple[str, ...]] | None) -> TierSpecs:
        """From what `encode` takes: ``None``, a text for `parse`, a mapping ``{"keys": …, "values": …}``."""
        if given is None:
            return cls()
        if isinstance(given, TierSpecs):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if set(given) != {"keys", "values"}:
            raise InvalidInput(f"quantizers has {sorted(given)}, not 'keys' and 'values'")
        return cls(tuple(given["keys"]), tuple(given["values"]))


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """Which tier each token has, in each layer, keys and values apart.

    Attributes:
        specs: the quantisers behind the tiers.
        key_tiers: index into ``specs.keys``; the first axis is 1 where all layers agree.
        value_tiers: index into ``specs.values``; may be the same tensor.
        sent: False for tokens of which nothing is sent: padding, and those that the policy drops.
    """

    specs: TierSpecs
    key_tiers: UInt8[Tensor, "layers_or_1 batch seq"]
    value_tiers: UInt8[Tensor, "layers_or_1 batch seq"]
    sent: Bool[Tensor, "batch seq"]

    @property
    def shared(self) -> bool:
        """Whether all layers have the same tiers."""
        return self.key_tiers.shape[0] == 1 and self.value_tiers.shape[0] == 1

    @property
    def same_map(self) -> bool:
        """Whether values have the tiers of their keys, so that one map serves both."""
        return self.key_tiers is self.value_tiers and len(self.specs.keys) == len(self.specs.values)

    def tiers(self, layer: int, *, keys: bool) -> UInt8[Tensor, "batch seq"]:
        """Tiers of one layer's keys or values."""
        tiers = self.key_tiers if keys else self.value_tiers
        return tiers[0 if tiers.shape[0] == 1 else layer]


def allocate_tokens(
    policy: Policy,
    scores: Float[Tensor, "batch seq"],
    nominal_budget: float,
    mask: Bool[Tensor, "batch seq"],
    pinned: Bool[Tensor, "batch seq"],
    specs: TierSpecs,
    *,
    n_sink: int = 4,
    seed: int = 0,
    int4_allowed: bool = True,
) -> tuple[Allocation, float]:
    """Apply a policy to each sequence of a batch; the same tiers in every layer, for keys and values.

    Masked tokens are not sent and take no part; pinned ones go raw, whatever the policy says.

    Returns:
        the allocation, and the mean nominal cost of a token.
    """
    tiers = torch.zeros(mask.shape, dtype=torch.uint8)
    sent = mask.clone()
    cost, count = 0.0, 0
    costs = torch.tensor(TIER_COST, dtype=torch.float64)
    for row in range(mask.shape[0]):
        here = mask[row].nonzero().flatten()
        if here.numel() == 0:
            continue
        context = PolicyContext(n_sink=n_sink, seed=seed, row=row, int4_allowed=int4_allowed)
        given = policy.assign(scores[row, here], nominal_budget, int(here.numel()), context)
        given = torch.where(pinned[row, here], RAW, given)
        cost, count = cost + float(costs[given.long()].sum()), count + int(here.numel())
        sent[row, here] = given != DROP
        tiers[row, here] = torch.where(given == DROP, RAW, given)
    if int(tiers.max()) >= len(specs.keys):
        raise InvalidInput(
            f"the policy uses {int(tiers.max()) + 1} tiers, but quantisers are given for {len(specs.keys)}"
        )
    stacked = tiers.unsqueeze(0)
    return Allocation(specs, stacked, stacked, sent), cost / max(1, count)
