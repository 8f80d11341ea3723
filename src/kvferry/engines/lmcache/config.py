"""Settings of the serde, as LMCache hands them over: the ``"serde"`` object of an L2 adapter, less its ``type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvferry.errors import InvalidInput
from kvferry.ship.quantize import quantizer

NAME = "kvferry"
"""What an adapter's settings call the serde."""

RAW = "raw"


@dataclass(frozen=True, slots=True)
class SerdeConfig:
    """What a deployment chooses; the same for all that share a store.

    Attributes:
        num_kv_heads: key-value heads of one worker (under tensor parallelism, of one rank).
        head_dim: channels of a head. LMCache's chunks do not say how their channels are cut into heads.
        quantizer: a fixed rate for every token: a quantiser of ``docs/quantizers.md``, or those of keys and values
            apart by a colon, as in ``chan4b128:asym4g64``. ``raw`` is bit-exact.
        budget: instead of a quantiser, actual bytes over those of the raw packet, below 1: each chunk gets the
            precisions that lose least on it within so many bytes.
        weights: names the model's weights, where a model's name alone does not; chunks under another one are refused.
        max_workers: threads that encode and decode.
    """

    num_kv_heads: int
    head_dim: int
    quantizer: str = RAW
    budget: float | None = None
    weights: str = ""
    max_workers: int = 1

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SerdeConfig:
        """Read the settings.

        Raises:
            InvalidInput: a setting that is missing, unknown, or out of its range; says which are there.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(given.keys() - known)
        if unknown:
            raise _wrong(f"has no setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        missing = sorted({"num_kv_heads", "head_dim"} - given.keys())
        if missing:
            raise _wrong(
                f"needs {' and '.join(missing)}: LMCache's chunks do not say how their channels are cut into heads"
            )
        for name in ("num_kv_heads", "head_dim", "max_workers"):
            number = given.get(name, 1)
            if type(number) is not int or number < 1:
                raise _wrong(f"has {name} = {number!r}: a positive integer is possible")
        for name in ("quantizer", "weights"):
            if not isinstance(given.get(name, RAW), str):
                raise _wrong(f"has a {name} that is no text: {given[name]!r}")
        budget = given.get("budget")
        if budget is not None:
            if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
                raise _wrong(f"has budget = {budget!r}: a fraction of the raw bytes, above 0 and below 1, is possible")
            if "quantizer" in given:
                raise _wrong("has both a quantizer and a budget: give one of them")
        config = cls(**given)
        for spec in config.quantizers:
            quantizer(spec)
        return config

    @property
    def quantizers(self) -> tuple[str, str]:
        """Quantisers of keys and of values."""
        keys, colon, values = self.quantizer.partition(":")
        return keys, values if colon else keys

    @property
    def hidden(self) -> int:
        """Channels of a token's keys, all heads together."""
        return self.num_kv_heads * self.head_dim


def _wrong(what: str) -> InvalidInput:
    return InvalidInput(f"the serde kvferry {what}")
