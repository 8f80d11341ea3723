"""R² of mapped caches against the target's own, on texts that neither the map nor any choice has seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.map.blocks import SIDES, Block, block_rows, blocks_of
from kvferry.snapshot import Identity, Snapshot
from kvferry.snapshot.rope import Rotary


class RowJudge:
    """Sums over tokens of what mapped caches miss, and of what there is.

    Args:
        target: the model whose caches are judged.
        rotaries: of its layers: keys are compared without their rotary positions, about their mean.
    """

    def __init__(self, target: Identity, rotaries: Sequence[Rotary]):
        self.target, self.rotaries = target, rotaries
        self.count = dict.fromkeys(blocks_of(target), 0)
        self._sums: dict[Block, Float[Tensor, "three width"]] = {
            block: torch.zeros(3, block.width(target), dtype=torch.float64) for block in blocks_of(target)
        }

    def add(self, mapped: Snapshot, own: Snapshot, first: int) -> None:
        """Take in the tokens from ``first`` on of one sequence: earlier ones are the target's own in both."""
        for block in self.count:
            begin = max(first, own.layers[block.layer].first, mapped.layers[block.layer].first)
            tokens = torch.arange(begin, own.seq_len)
            x, y = (
                block_rows(snapshot, self.rotaries, [block], tokens)[block][0].double().cpu()
                for snapshot in (mapped, own)
            )
            more = torch.stack([(x - y).square().sum(dim=0), y.sum(dim=0), y.square().sum(dim=0)])
            self._sums[block] += more
            self.count[block] += len(tokens)

    def r2(self) -> dict[str, list[float | None]]:
        """By target layer, mean over heads: 1 less the share of a head's variance that is missed; ``None`` where there
        is nothing to explain."""
        return {side: [self._of(block) for block in self._sums if block.side == side] for side in SIDES}

    def _of(self, block: Block) -> float | None:
        missed, total, squares = self._sums[block]
        whole = squares - total.square() / max(1, self.count[block])
        missed, whole = (part.reshape(block.heads(self.target), -1).sum(dim=1) for part in (missed, whole))
        return float((1 - missed / whole).mean()) if bool((whole > 0).all()) else None
