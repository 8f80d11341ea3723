"""From moments to a mapper: sources chosen, ridge solved, all measured on tokens held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.map.blocks import SIDES
from kvferry.map.calibration import Calibration
from kvferry.map.mapper import Mapper
from kvferry.map.part import Part
from kvferry.map.ridge import Solution, Solver, explained, single_source
from kvferry.map.select import choose, rank_sources

LINEAR = ("ridge", "head_local")
"""Variants that moments alone determine."""

OnLayer = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A solution for some heads of one target."""

    target: int
    first_head: int
    heads: int
    solution: Solution
    r2: Float[Tensor, " heads"]


def fit_linear(calibration: Calibration, made: Mapping[str, Any], *, on_layer: OnLayer | None = None) -> Mapper:
    """The mapper of the calibration's recipe, for the variants `LINEAR` (others begin as ``ridge``).

    Sources are ranked by the R² that each reaches alone on the tokens held out; the measures are of these tokens, too.

    Raises:
        InvalidInput: too few tokens.
    """
    calibration.flush()
    _require_tokens(calibration)
    recipe = calibration.recipe
    parts: list[Part] = []
    r2: dict[str, list[float]] = {side: [] for side in SIDES}
    single: dict[str, Any] = {}
    for place, layout in enumerate(calibration.layouts):
        fit, held = calibration.moments["fit"][place], calibration.moments["held"][place]
        alone = single_source(fit, held, recipe.ridge)
        solver = Solver(fit, recipe.ridge)
        for target, block in enumerate(layout.targets):
            if on_layer is not None:
                on_layer(target, len(layout.targets))
            heads = layout.target_heads[target]
            groups = [(head, 1) for head in range(heads)] if recipe.variant == "head_local" else [(0, heads)]
            pieces = [_solve(calibration, solver, place, alone, target, *group) for group in groups]
            r2[block.side].append(float(torch.cat([piece.r2 for piece in pieces]).mean()))
            parts += [_part(calibration, place, piece) for piece in pieces]
        for side in {block.side for block in layout.targets}:
            mine = [index for index, block in enumerate(layout.targets) if block.side == side]
            single[side] = _heat_map(alone[mine])
        single["sources"] = [block.to_json() for block in calibration.layouts[0].sources]
    measures = {"r2": r2, "r2_single": single}
    mapper_recipe = replace(recipe, top_k=1) if recipe.variant == "head_local" else recipe
    return Mapper(
        calibration.source,
        calibration.target,
        tuple(parts),
        *calibration.rotaries,
        mapper_recipe,
        {
            **made,
            **{f"tokens_{split}": count for split, count in calibration.tokens.items()},
            "stride": calibration.stride,
        },
        measures,
    )


def r2_table(calibration: Calibration, top_ks: Sequence[int | None], ridges: Sequence[float]) -> list[dict[str, Any]]:
    """Mean held-out R² of keys and values for each number of source layers and each ridge: what to choose by."""
    calibration.flush()
    _require_tokens(calibration)
    rows: list[dict[str, Any]] = []
    for ridge in ridges:
        found: dict[int | None, dict[str, list[float]]] = {k: {side: [] for side in SIDES} for k in top_ks}
        for place, layout in enumerate(calibration.layouts):
            fit, held = calibration.moments["fit"][place], calibration.moments["held"][place]
            alone = single_source(fit, held, ridge)
            solver = Solver(fit, ridge)
            for top_k in top_ks:
                for target, block in enumerate(layout.targets):
                    heads = layout.target_heads[target]
                    solution = solver.solve(choose(layout, rank_sources(layout, alone, target), top_k), target)
                    found[top_k][block.side].append(float(explained(solution, held, target, heads).mean()))
        for top_k, sides in found.items():
            means = {side: sum(values) / len(values) for side, values in sides.items()}
            rows.append({"top_k": top_k, "ridge": ridge, **means})
    return rows


def _solve(
    calibration: Calibration, solver: Solver, place: int, alone: Tensor, target: int, first: int, heads: int
) -> _Piece:
    layout, recipe = calibration.layouts[place], calibration.recipe
    every = layout.target_heads[target]
    size = layout.target_widths[target] // every
    local = recipe.variant == "head_local"
    ranked = rank_sources(layout, alone, target, first if local else None)
    chosen = choose(layout, ranked, 1 if local else recipe.top_k)
    outputs = slice(first * size, (first + heads) * size)
    solution = solver.solve(chosen, target, outputs)
    return _Piece(
        target, first, heads, solution, explained(solution, calibration.moments["held"][place], target, heads, outputs)
    )


def _part(calibration: Calibration, place: int, piece: _Piece) -> Part:
    layout, solution = calibration.layouts[place], piece.solution
    return Part(
        target=layout.targets[piece.target],
        first_head=piece.first_head,
        heads=piece.heads,
        sources=tuple(layout.sources[index] for index in solution.chosen),
        affine=(solution.weight.float().contiguous(), solution.bias.float().contiguous()),
    )


def _heat_map(alone: Float[Tensor, "targets sources heads"]) -> list[list[float | None]]:
    means = torch.nanmean(alone, dim=2)
    return [[None if value != value else round(value, 4) for value in row] for row in means.tolist()]  # noqa: PLR0124


def _require_tokens(calibration: Calibration) -> None:
    counts = calibration.tokens
    if min(counts.values()) < 2:
        raise InvalidInput(
            f"{counts['fit']} tokens to fit on and {counts['held']} held out: both are needed; give a longer text"
        )
