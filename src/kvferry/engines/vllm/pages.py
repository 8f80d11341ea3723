"""All pages of an engine, every layer of them, behind one door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvferry.engines.vllm.layout import Layout
from kvferry.errors import UnsupportedCache


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The caches of an engine's layers.

    Attributes:
        block: tokens a page.
        caches: one a layer that has keys and values of its own, in the model's order.
        layouts: how the pages of each are arranged.
    """

    block: int
    caches: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]

    def read(self, blocks: Sequence[int], tokens: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of pages, ``(kv_heads, tokens, dim)`` a layer, copied; the first ``tokens``, or all."""
        index = torch.tensor(blocks)
        pairs = [
            layout.read(cache, index.to(cache.device)) for cache, layout in zip(self.caches, self.layouts, strict=True)
        ]
        return [(keys[:, :tokens], values[:, :tokens]) for keys, values in pairs]

    def write(self, blocks: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fill pages, the last one perhaps in part: zeros are written behind; ``pairs`` as from `read`.

        Raises:
            UnsupportedCache: other layers, tokens or dtypes than the pages have.
        """
        index = torch.tensor(blocks)
        if len(pairs) != len(self.caches):
            raise UnsupportedCache(f"keys and values of {len(pairs)} layers for the pages of {len(self.caches)}")
        for cache, layout, (keys, values) in zip(self.caches, self.layouts, pairs, strict=True):
            room = len(blocks) * self.block - keys.shape[1]
            if not 0 <= room < self.block or keys.dtype != cache.dtype:
                raise UnsupportedCache(
                    f"{keys.shape[1]} tokens of {keys.dtype} for {len(blocks)} pages of {self.block} of {cache.dtype}"
                )
            whole = (pad(side, (0, 0, 0, room)) if room else side for side in (keys, values))
            layout.write(cache, index.to(cache.device), *(side.to(cache.device) for side in whole))
