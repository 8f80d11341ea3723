"""From moments to a basis: directions of keys or values, ordered by what leaving them out would cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.ship.transform.groups import Group

LEVELS = 32
"""Spreads and steps are whole numbers of such parts of an octave: both ends reckon with integers."""

_DIAGONAL, _FLOOR = 0.2, 1e-3
_LEAST = 2.0**-40
_ALIGNED = 64


@dataclass(slots=True, eq=False)
class Moments:
    """Sums over tokens of one group's channels, in float64.

    Attributes:
        group: which layers, keys or values.
        count, first, second: tokens, sum and sum of outer products of keys (before RoPE) or values.
        asked, felt: tokens, and sum of outer products of the gradient of the loss of what follows, by its norm.
        means: mean of each window.
    """

    group: Group
    count: int
    first: Float[Tensor, " width"]
    second: Float[Tensor, "width width"]
    asked: int
    felt: Float[Tensor, "width width"]
    means: list[Float[Tensor, " width"]]

    @classmethod
    def of(cls, group: Group) -> Moments:
        """Nothing yet."""
        width = group.width
        square = torch.zeros(width, width, dtype=torch.float64)
        return cls(group, 0, torch.zeros(width, dtype=torch.float64), square, 0, square.clone(), [])

    def add(self, rows: Float[Tensor, "tokens width"]) -> None:
        """Tokens of one window."""
        self.count += rows.shape[0]
        total = rows.sum(dim=0, dtype=torch.float64)
        self.first += total
        self.means.append(total / rows.shape[0])
        self.second += rows.T @ rows

    def add_felt(self, rows: Float[Tensor, "tokens width"]) -> None:
        """Their gradients, each by the root of its norm.

        A few tokens have most of the energy, other ones in every window. How much a token matters is for its weight to
        say (`kvferry.ship.transform.weights`); here they all have a say in which directions do.
        """
        norms = rows.norm(dim=1, keepdim=True)
        told = (norms > 1e-3 * norms.median()).squeeze(1)
        self.asked += int(told.sum())
        even = rows[told] / norms[told].sqrt()
        self.felt += even.T @ even


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """A linear map of one group's channels to components and back.

    An error of the same size in any component costs the same KL, to second order and on average over tokens of one
    weight, so one step serves all components, and the weights of tokens all groups.

    Attributes:
        group: which layers, keys or values.
        forward: ``(components, width)``.
        back: ``(width, components)``, its inverse.
        mean: ``(components,)`` of the calibration text.
        level: int16 ``(components,)``: ``LEVELS`` x log2 of the standard deviation.
        spread: int16 ``(components,)``: the same of the means of single windows about ``mean``.
    """

    group: Group
    forward: Float[Tensor, "components width"]
    back: Float[Tensor, "width components"]
    mean: Float[Tensor, " components"]
    level: Int[Tensor, " components"]
    spread: Int[Tensor, " components"]

    def __post_init__(self) -> None:
        # How they lie in memory decides how sums are rounded: let it be the same wherever they come from.
        for name in ("forward", "back"):
            own: Tensor = getattr(self, name).contiguous()
            object.__setattr__(self, name, own.clone() if own.data_ptr() % _ALIGNED else own)


def build_basis(moments: Moments) -> Basis:
    """PCA in the metric of the Fisher information.

    With ``C`` the (shrunk) second moment of the gradients, ``A`` its Cholesky factor (``A'A = C``) and ``U`` the
    eigenvectors of ``A S A'``, ``S`` the covariance of the channels: ``forward = U'A``, ``back = A^-1 U``.
    """
    mean = moments.first / moments.count
    spread = moments.second / moments.count - torch.outer(mean, mean)
    felt = moments.felt / moments.asked
    own = felt.diagonal()
    metric = (1 - _DIAGONAL) * felt + torch.diag(_DIAGONAL * own + _FLOOR * own.mean() + 1e-30)
    factor = torch.linalg.cholesky(metric, upper=True)
    size, turn = torch.linalg.eigh(factor @ spread @ factor.T)
    size, turn = size.flip(0).clamp_min(0.0), turn.flip(1)
    forward = turn.T @ factor
    wander = torch.stack(moments.means) - mean if moments.means else torch.zeros_like(mean)[None]
    return Basis(
        moments.group,
        forward.float(),
        torch.linalg.solve_triangular(factor, turn, upper=True).float(),
        (forward @ mean).float(),
        _levels(size.sqrt()),
        _levels((wander @ forward.T).square().mean(dim=0).sqrt()),
    )


def _levels(size: Tensor) -> Tensor:
    return (LEVELS * size.clamp_min(_LEAST).log2()).round().to(torch.int16)
