"""Keys and values at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_WORTH_A_THREAD = 1 << 16
"""Values below which starting a thread costs more than it saves."""


def both(work: Callable[[int], Result], sides: list[Tensor]) -> list[Result]:
    """``work(0)`` for the keys and ``work(1)`` for the values, in two threads where torch may use two.

    Sorting and zstd use one core and hold no lock of the interpreter.
    """
    if torch.get_num_threads() < 2 or sides[0].numel() < _WORTH_A_THREAD:
        return [work(0), work(1)]
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(work, 1)
        return [work(0), values.result()]
