"""Spec text -> quantiser. A new family is a module of its own and one line in `FAMILIES`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from kvferry.errors import InvalidInput, UnsupportedVersion
from kvferry.ship.quantize.asymmetric import Asymmetric
from kvferry.ship.quantize.base import Quantizer
from kvferry.ship.quantize.centred import Centred
from kvferry.ship.quantize.channel import PerChannel
from kvferry.ship.quantize.hadamard import Hadamard
from kvferry.ship.quantize.raw import Raw
from kvferry.ship.quantize.symmetric import Symmetric

_BITS = "([234568])"
_SIZE = "([1-9][0-9]{0,5})"
_POWER = "(2|4|8|16|32|64|128|256|512|1024)"

FAMILIES: dict[str, Callable[..., Quantizer]] = {
    "raw": Raw,
    f"sym{_BITS}": lambda nbits: Symmetric(int(nbits)),
    f"asym{_BITS}row": lambda nbits: Asymmetric(int(nbits), None),
    f"asym{_BITS}g{_SIZE}": lambda nbits, group: Asymmetric(int(nbits), int(group)),
    f"chan{_BITS}b{_SIZE}": lambda nbits, block: PerChannel(int(nbits), int(block)),
    f"had{_BITS}g{_POWER}": lambda nbits, group: Hadamard(int(nbits), int(group)),
    f"cen{_BITS}": lambda nbits: Centred(Symmetric(int(nbits)), f"cen{nbits}"),
    f"cen{_BITS}g{_POWER}": lambda nbits, group: Centred(Hadamard(int(nbits), int(group)), f"cen{nbits}g{group}"),
}
"""Pattern of the whole spec -> how to make the quantiser from the pattern's groups."""

EXAMPLES = ("raw", "sym8", "sym4", "asym4g64", "asym3row", "chan4b128", "had3g64", "cen4g64")


@lru_cache(maxsize=1024)
def _find(spec: str) -> Quantizer | None:
    for pattern, make in FAMILIES.items():
        match = re.fullmatch(pattern, spec)
        if match is not None:
            return make(*match.groups())
    return None


def quantizer(spec: str) -> Quantizer:
    """The quantiser that a user names; raises `InvalidInput` for an unknown one."""
    found = _find(spec)
    if found is None:
        raise InvalidInput(f"unknown quantiser {spec!r}; examples are {', '.join(EXAMPLES)} (bits 2, 3, 4, 5, 6 or 8)")
    return found


def packet_quantizer(spec: str) -> Quantizer:
    """The quantiser that a packet names; raises `UnsupportedVersion` for an unknown one."""
    found = _find(spec)
    if found is None:
        raise UnsupportedVersion(f"the packet uses quantiser {spec!r}, which this version of kvferry does not know")
    return found
