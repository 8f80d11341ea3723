"""Tables of the entropy coder, from how often each code came up in calibration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from kvferry.ship.entropy.reference import BINS_PER_OCTAVE, SCALE_BITS, Bank

LOWEST = 6
"""Bin 0 is of components whose standard deviation is ``2^(-LOWEST / BINS_PER_OCTAVE)`` steps; below, none is sent."""

BINS = 25
"""The last table is of 2^4.5 steps; codes of wider components are split."""

THRESHOLD = 0.55
"""A value below so many steps becomes 0: it costs least that way."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The coder's tables, and where within its step a code's values lie on average.

    Attributes:
        bank: frequencies.
        shift: float32 ``(bins, 2)``: to be added to the magnitude of codes of 1, and of larger ones, in steps.
    """

    bank: Bank
    shift: Float[Tensor, "bins 2"]


class Counts:
    """Codes of calibration by bin."""

    def __init__(self) -> None:
        self.seen = np.zeros((BINS, 2 * 127 + 1), np.int64)
        self.offset = np.zeros((BINS, 2), np.float64)

    def add(self, values: Float[Tensor, "components tokens"], bins: Tensor) -> None:
        """Values in steps, with the bin of each; those outside of the tables are left out."""
        inside = (bins >= 0) & (bins < BINS)
        v, b = values[inside].double(), bins[inside].long()
        size = (v.abs() + (1 - THRESHOLD)).floor().clamp_max(127)
        code = (size * v.sign()).long()
        flat = torch.bincount(b * 255 + code + 127, minlength=BINS * 255)
        self.seen += flat.view(BINS, 255).numpy()
        for place, own in enumerate((size == 1, size > 1)):
            self.offset[:, place] += torch.bincount(b[own], (v.abs() - size)[own], minlength=BINS).numpy()

    def tables(self) -> Tables:
        """Smoothed a little towards a Laplace distribution of the bin's spread."""
        freq, reach = np.zeros((BINS, 256), np.uint16), np.zeros(BINS, np.uint8)
        for place in range(BINS):
            spread = 2.0 ** ((place - LOWEST) / BINS_PER_OCTAVE)
            far = int(min(127, np.ceil(6 * spread) + 1))
            v = np.arange(-far, far + 1)
            prior = np.exp(-np.abs(v) / (0.7 * spread))
            own = self.seen[place]
            inside = own[127 - far : 128 + far] + 200 * prior / prior.sum()
            weights = np.append(inside, own.sum() - own[127 - far : 128 + far].sum() + 0.01)
            freq[place, : 2 * far + 2] = _to_scale(weights)
            reach[place] = far
        ones = self.seen[:, 126] + self.seen[:, 128]
        more = self.seen.sum(1) - ones - self.seen[:, 127]
        shift = self.offset / np.maximum(np.stack([ones, more], axis=1), 1)
        return Tables(Bank(freq, reach), torch.from_numpy(shift.clip(-0.5, 0.5).astype(np.float32)))


def _to_scale(weights: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Whole numbers of at least 1 in these proportions, that sum to the coder's scale."""
    total = 1 << SCALE_BITS
    exact = weights / weights.sum() * total
    whole = np.maximum(1, np.floor(exact)).astype(np.int64)
    while (short := total - int(whole.sum())) != 0:
        if short > 0:
            order = np.argsort(whole - exact, kind="stable")[:short]
            whole[order] += 1
        else:
            able = np.flatnonzero(whole > 1)
            order = able[np.argsort((exact - whole)[able], kind="stable")[:-short]]
            whole[order] -= 1
    found: NDArray[np.uint16] = whole.astype(np.uint16)
    return found
