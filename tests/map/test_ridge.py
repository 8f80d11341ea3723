"""The solution is that of the normal equations, and its R² that of its own predictions."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.map.moments import Moments
from kvferry.map.ridge import Solver, explained, single_source
from kvferry.map.select import choose, rank_sources
from tests.map.test_moments import LAYOUT, moments_of, rows


@pytest.mark.parametrize("ridge", [0.0, 0.01, 300.0])
def test_normal_equations(ridge: float) -> None:
    x, y = (part.double() for part in rows(800))
    solution = Solver(moments_of(x.float(), y.float()), ridge).solve((2, 1), 1)
    own, want = x[:, 4:], y[:, 3:]
    centred, level = own - own.mean(0), want - want.mean(0)
    exact = torch.linalg.solve(centred.T @ centred + ridge * torch.eye(8), centred.T @ level)
    assert solution.chosen == (1, 2)
    assert torch.allclose(solution.weight, exact, atol=1e-5)
    line = own @ solution.weight + solution.bias
    assert torch.allclose(line.mean(0), want.mean(0), atol=1e-4)


def test_some_outputs_alone_are_those_of_all() -> None:
    solver = Solver(moments_of(*rows(800)))
    whole, some = solver.solve((0, 1), 0), solver.solve((0, 1), 0, slice(1, 3))
    assert torch.allclose(whole.weight[:, 1:3], some.weight)
    assert torch.allclose(whole.bias[1:3], some.bias)


def test_held_out_r2_is_that_of_the_predictions() -> None:
    held_x, held_y = rows(300, seed=0)
    x, y = held_x[:200], held_y[:200]
    held_x, held_y = held_x[200:] + 0.3, held_y[200:]
    solution = Solver(moments_of(x, y), 1.0).solve((0, 1, 2), 0)
    found = explained(solution, moments_of(held_x, held_y), 0, 3)
    line = held_x.double() @ solution.weight + solution.bias
    want = held_y[:, :3].double()
    exact = 1 - (want - line).square().sum(0) / (want - want.mean(0)).square().sum(0)
    assert torch.allclose(found, exact, atol=1e-4)
    assert torch.allclose(
        explained(solution, moments_of(held_x, held_y), 0, 1),
        1 - (want - line).square().sum() / (want - want.mean(0)).square().sum(),
        atol=1e-4,
    )


def test_a_source_that_is_the_target_explains_it() -> None:
    x, _ = rows(400)
    y = torch.cat([x[:, 4:7], x[:, 5:10]], dim=1)
    moments = moments_of(x, y)
    alone = single_source(moments, moments)
    assert rank_sources(LAYOUT, alone, 0)[0] == 1
    assert float(alone[0, 1, 0]) > 1 - 1e-6
    assert torch.isnan(alone[1, 0, 0])
    assert rank_sources(LAYOUT, alone, 1) == [1, 2]


def test_the_first_layers_of_a_ranking() -> None:
    assert choose(LAYOUT, [2, 0, 1], 2) == (0, 2)
    assert choose(LAYOUT, [2, 0, 1], None) == (0, 1, 2)
    assert choose(LAYOUT, [2, 0, 1], 9) == (0, 1, 2)
    with pytest.raises(InvalidInput):
        choose(LAYOUT, [0], 0)


def test_rows_that_are_all_alike_still_give_a_map() -> None:
    x = torch.ones(50, 12)
    _, y = rows(50)
    solution = Solver(moments_of(x, y)).solve((0, 1), 0)
    assert solution.weight.isfinite().all()
    assert torch.allclose(solution.bias + x[0, :10].double() @ solution.weight, y[:, :3].double().mean(0), atol=1e-4)


def test_too_few_tokens() -> None:
    with pytest.raises(InvalidInput, match="0 tokens"):
        Solver(Moments.empty(LAYOUT))
    with pytest.raises(InvalidInput, match="ridge of -1"):
        Solver(moments_of(*rows(20)), -1.0)
