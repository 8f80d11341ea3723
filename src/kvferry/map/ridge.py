"""Ridge regression from moments alone, and how well it predicts tokens that it was not fitted on.

``W = (XᵀX + λI)⁻¹XᵀY`` of centred rows, moments not divided by the number of tokens, one Cholesky factorisation for all
heads of a layer (arXiv 2608.03893, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.map.moments import Moments

RIDGE = 0.01
"""The paper's λ, on moments that are sums over tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """An affine map ``x W + b`` from some sources to one target, or to some of its heads.

    Attributes:
        chosen: sources, rising indices into the layout.
        weight: float64 ``(width of the sources, outputs)``.
        bias: float64 ``(outputs,)``.
    """

    chosen: tuple[int, ...]
    weight: Float[Tensor, "inputs outputs"]
    bias: Float[Tensor, " outputs"]


class Solver:
    """Solutions from the moments of the tokens to be fitted on; one factorisation serves all targets of the same
    sources.

    Args:
        moments: of at least two tokens.
        ridge: λ.
    """

    def __init__(self, moments: Moments, ridge: float = RIDGE):
        if moments.count < 2 or moments.shift_x is None:
            raise InvalidInput(f"a map cannot be fitted on {moments.count} tokens")
        if not 0 <= ridge < float("inf"):
            raise InvalidInput(f"a ridge of {ridge}: it is not negative")
        self.moments, self.ridge = moments, ridge
        self.mean_x, self.mean_y = moments.mean_x(), moments.mean_y()
        self._factor: tuple[tuple[int, ...], Tensor] | None = None

    def solve(self, chosen: Sequence[int], target: int, outputs: slice = slice(None)) -> Solution:
        """The map from ``chosen`` to ``target``, or to some of its numbers."""
        own = tuple(sorted(chosen))
        columns, rows = _columns(self.moments, own), _span(self.moments, target)
        weight = torch.cholesky_solve(self._cross(own, columns, target)[:, outputs], self._factored(own, columns))
        bias = self.mean_y[rows][outputs] - self.mean_x[columns] @ weight
        return Solution(own, weight, bias)

    def _cross(self, own: tuple[int, ...], columns: Tensor, target: int) -> Tensor:
        moments, rows = self.moments, _span(self.moments, target)
        centre = torch.outer(moments.sum_x[columns], moments.sum_y[rows]) / moments.count
        return moments.cross_of(own, target) - centre

    def _factored(self, own: tuple[int, ...], columns: Tensor) -> Tensor:
        if self._factor is None or self._factor[0] != own:
            total = self.moments.sum_x[columns]
            gram = self.moments.gram_of(own)
            gram.addr_(total, total, alpha=-1 / self.moments.count)
            self._factor = own, _cholesky(gram, self.ridge)
        return self._factor[1]


def _cholesky(gram: Float[Tensor, "n n"], ridge: float) -> Float[Tensor, "n n"]:
    """Lower factor of ``gram + ridge I``; what rounding leaves below zero is lifted by as little as it takes."""
    diagonal = gram.diagonal()
    diagonal += ridge
    lift = float(diagonal.mean()) * 1e-12
    for _ in range(8):
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(gram)
        if not int(failed):
            return factor
        diagonal += lift
        lift *= 10
    raise InvalidInput("the source's rows are too alike to be mapped from: give more text, or a larger ridge")


def explained(
    solution: Solution, held: Moments, target: int, heads: int, outputs: slice = slice(None)
) -> Float[Tensor, " heads"]:
    """R² of each head on tokens held out, from their moments: one less the share of the variance that is missed.

    A head without variance counts as explained where it is met and as missed where it is not.
    """
    columns, rows = _columns(held, solution.chosen), _span(held, target)
    assert held.shift_x is not None
    assert held.shift_y is not None
    n, weight = held.count, solution.weight
    # Everything is moved to where the map's own line passes: x' about the shift, y' about what the map makes of it.
    sum_x = held.sum_x[columns]
    line = held.shift_x[columns] @ weight + solution.bias
    sum_y = held.sum_y[rows][outputs]
    offset = held.shift_y[rows][outputs] - line
    energy_y = held.energy[rows][outputs] + 2 * offset * sum_y + n * offset.square()
    cross = held.cross_of(solution.chosen, target)[:, outputs] + torch.outer(sum_x, offset)
    missed = energy_y - 2 * (weight * cross).sum(dim=0)
    missed += (weight * (held.gram_of(solution.chosen) @ weight)).sum(dim=0)
    whole = held.energy[rows][outputs] - sum_y.square() / n
    missed, whole = (part.reshape(heads, -1).sum(dim=1) for part in (missed.clamp_min(0), whole.clamp_min(0)))
    return torch.where(whole > 0, 1 - missed / whole.clamp_min(1e-300), (missed <= 0).double())


def single_source(fit: Moments, held: Moments, ridge: float = RIDGE) -> Float[Tensor, "targets sources heads"]:
    """R² of each target's heads from each source alone, held out; NaN where a source is no candidate."""
    layout = fit.layout
    heads = max(layout.target_heads)
    found = torch.full((len(layout.targets), len(layout.sources), heads), torch.nan, dtype=torch.float64)
    solver = Solver(fit, ridge)
    for source in range(len(layout.sources)):
        for target, own in enumerate(layout.candidates):
            if source in own:
                count = layout.target_heads[target]
                solution = solver.solve((source,), target)
                found[target, source, :count] = explained(solution, held, target, count)
    return found


def _columns(moments: Moments, chosen: Sequence[int]) -> Tensor:
    starts = moments.layout.source_starts
    return torch.cat([torch.arange(starts[index], starts[index + 1]) for index in chosen])


def _span(moments: Moments, target: int) -> slice:
    ends = moments.layout.target_starts
    return slice(ends[target], ends[target + 1])
