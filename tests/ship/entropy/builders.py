"""Tables, bins and codes for tests of the entropy coder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvferry.ship.entropy.reference import Bank, Bins, Codes

EXTREMES = (-(2**31), -(2**31) + 1, 2**31 - 1, 2**30, -(2**30))


def make_bank(reaches: list[int], seed: int = 0, *, peaked: bool = True) -> Bank:
    """Tables of random frequencies; ``peaked``: nearly all is on one symbol, and most have the least there is."""
    rng = np.random.default_rng(seed)
    freq = np.zeros((len(reaches), 256), np.uint16)
    for row, reach in zip(freq, reaches, strict=True):
        symbols = 2 * reach + 2
        weights = rng.random(symbols) ** (30 if peaked else 1)
        spare = 4096 - symbols
        own = np.floor(weights / weights.sum() * spare).astype(np.int64) + 1
        own[rng.integers(symbols)] += 4096 - own.sum()
        row[:symbols] = own
    return Bank(freq, np.array(reaches, np.uint8))


@dataclass(frozen=True)
class Case:
    """Something to encode."""

    bank: Bank
    codes: Codes
    row_bin: Bins
    column_bin: Bins

    @property
    def bins(self) -> tuple[Bins, Bins]:
        return self.row_bin, self.column_bin

    @property
    def readable(self) -> Codes:
        """What a reader gets: 0 where nothing is written."""
        written = self.row_bin[:, None].astype(int) + self.column_bin[None] >= 0
        return np.where(written, self.codes, 0).astype(np.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any tables, any bins from not coded to split by all that there is, codes small, at the edge, and extreme."""
    reaches = draw(st.lists(st.sampled_from([1, 2, 5, 30, 126, 127]), min_size=4, max_size=7))
    rows, columns = draw(st.integers(0, 4)), draw(st.sampled_from([0, 1, 2, 31, 32, 33, 70]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bank = make_bank(reaches, int(rng.integers(2**31)), peaked=draw(st.booleans()))
    widest = draw(st.sampled_from([0, len(reaches), len(reaches) + 70]))
    row_bin = rng.integers(-4, widest + 1, rows).astype(np.int16)
    column_bin = rng.integers(-3, 4, columns).astype(np.int16)
    small = rng.integers(-3, 4, (rows, columns))
    edge = rng.choice(reaches, (rows, columns)) * rng.choice([-1, 1], (rows, columns)) + rng.integers(-1, 2)
    wide = rng.integers(-(2**31), 2**31, (rows, columns)) >> rng.integers(0, 32, (rows, columns))
    extreme = rng.choice(EXTREMES, (rows, columns))
    kind = rng.choice(
        4, (rows, columns), p=draw(st.sampled_from([[1, 0, 0, 0], [0.7, 0.2, 0.1, 0], [0.2, 0.3, 0.3, 0.2]]))
    )
    codes = np.choose(kind, [small, edge, wide, extreme]).astype(np.int32)
    return Case(bank, codes, row_bin, column_bin)
