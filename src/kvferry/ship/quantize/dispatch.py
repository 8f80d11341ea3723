"""The one door to the kernels: the torch oracle does what no kernel takes. The bytes are the same either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvferry.ship import gpu, native
from kvferry.ship.quantize.base import Quantizer


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """One tier of one sequence's keys or values.

    Attributes:
        quantizer: how it is written.
        index: its tokens, ascending; ``None`` for all.
        data: its bytes, of exactly the quantiser's size.
    """

    quantizer: Quantizer
    index: Int[Tensor, " selected"] | None
    data: UInt8[Tensor, " nbytes"]


def encode_sections(x: Float[Tensor, "heads tokens dim"], sections: Sequence[Section]) -> None:
    """Write every section: in one pass over ``x`` where the native kernels take it."""
    if native.encode_mixed(x, _tiers(sections)):
        return
    for section in sections:
        if not any(door.encode_rows(section.quantizer.spec, x, section.index, section.data) for door in (native, gpu)):
            section.quantizer.encode(x, section.index, section.data)


def decode_sections(sections: Sequence[Section], out: Float[Tensor, "heads tokens dim"]) -> None:
    """Read every section into its tokens of ``out``; tokens of no section are left alone."""
    if native.decode_mixed(out, _tiers(sections)):
        return
    for section in sections:
        if not any(
            door.decode_rows(section.quantizer.spec, section.data, section.index, out) for door in (native, gpu)
        ):
            section.quantizer.decode(section.data, section.index, out)


def _tiers(sections: Sequence[Section]) -> list[native.Tier]:
    return [native.Tier(section.quantizer.spec, section.index, section.data) for section in sections]
