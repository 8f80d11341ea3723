"""All pages of an engine, every layer of them, behind one door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def read(self, blocks: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of whole pages, ``(kv_heads, tokens, dim)`` a layer, copied."""
        index = torch.tensor(blocks)
        return [
            layout.read(cache, index.to(cache.device)) for cache, layout in zip(self.caches, self.layouts, strict=True)
        ]

    def write(self, blocks: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fill whole pages; ``pairs`` as from `read`.

        Raises:
            UnsupportedCache: other layers, tokens or dtypes than the pages have.
        """
        index = torch.tensor(blocks)
        if len(pairs) != len(self.caches):
            raise UnsupportedCache(f"keys and values of {len(pairs)} layers for the pages of {len(self.caches)}")
        for cache, layout, (keys, values) in zip(self.caches, self.layouts, pairs, strict=True):
            if keys.shape[1] != len(blocks) * self.block or keys.dtype != cache.dtype:
                raise UnsupportedCache(
                    f"{keys.shape[1]} tokens of {keys.dtype} for {len(blocks)} pages of {self.block} of {cache.dtype}"
                )
            layout.write(cache, index.to(cache.device), keys.to(cache.device), values.to(cache.device))
