"""One map from some blocks of a source to heads of one block of a target: affine, with or without a hidden part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvferry.map.blocks import Block

Layer = tuple[Float[Tensor, "inputs outputs"], Float[Tensor, " outputs"]]
"""Weight and bias of ``x W + b``."""

TILE = 128
"""Tokens multiplied at once. A row's last bits hang on the shape of the product that it is in, so every product has
this many rows, and a token always the same place among them: mapping more tokens later gives the same bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """``y = x W + b + hidden(x)`` for heads ``first_head … first_head + heads - 1`` of ``target``.

    Attributes:
        target: the block that it makes a part of.
        first_head, heads: which kv heads of it.
        sources: blocks whose rows, side by side, are ``x``.
        affine: ``W`` and ``b``, or ``None``.
        hidden: layers of a perceptron with GELU between them; empty for none.
    """

    target: Block
    first_head: int
    heads: int
    sources: tuple[Block, ...]
    affine: Layer | None
    hidden: tuple[Layer, ...] = field(default=())

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum(tensor.numel() for layer in self.layers for tensor in layer)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All weights and biases."""
        return (() if self.affine is None else (self.affine,)) + self.hidden

    def to(self, dtype: torch.dtype, device: torch.device) -> Part:
        """The same with weights of another type and place."""

        def moved(layer: Layer) -> Layer:
            # Outputs by rows in memory, as libraries multiply fastest; the shape stays.
            return layer[0].to(device, dtype).T.contiguous().T, layer[1].to(device, dtype)

        return Part(
            self.target,
            self.first_head,
            self.heads,
            self.sources,
            None if self.affine is None else moved(self.affine),
            tuple(map(moved, self.hidden)),
        )

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """The outputs of rows of exactly the type of the weights."""
        y = None if self.affine is None else nn.functional.linear(x, self.affine[0].T, self.affine[1])
        for place, (weight, bias) in enumerate(self.hidden):
            x = nn.functional.linear(nn.functional.gelu(x, approximate="tanh") if place else x, weight.T, bias)
        if not self.hidden:
            assert y is not None
            return y
        return x if y is None else x + y


def run_part(
    part: Part, rows: Mapping[Block, Float[Tensor, "batch tokens width"]], start: int
) -> Float[Tensor, "batch tokens outputs"]:
    """``part`` over tokens whose first one is the sequence's token ``start``, tile by tile (see `TILE`).

    Args:
        part: with weights of the type of the rows.
        rows: of its sources; ``start`` is a multiple of `TILE`.
        start: place of the first row in the sequence.
    """
    assert start % TILE == 0
    first = rows[part.sources[0]]
    tokens = first.shape[1]
    outputs: list[Tensor] = []
    for begin in range(0, tokens, TILE):
        end = min(begin + TILE, tokens)
        x = torch.cat([rows[block][:, begin:end] for block in part.sources], dim=-1)
        if end - begin < TILE:
            x = nn.functional.pad(x, (0, 0, 0, TILE - (end - begin)))
        outputs.append(torch.cat([part(one)[None, : end - begin] for one in x]))
    return torch.cat(outputs, dim=1)


def parameters(parts: Sequence[Part]) -> int:
    """Weights and biases of all."""
    return sum(part.parameters for part in parts)
