"""What the page of shipping says of the default policy."""

from __future__ import annotations

from typing import Any

from kvferry.report.ship_page import goal_lines, standing


def row(policy: str, budget: float, delta: tuple[float, float, float] | None, kl: float = 0.01) -> dict[str, Any]:
    low, mean, high = delta or (None, None, None)
    return {
        "policy": policy,
        "budget": budget,
        "ppl_delta_pct": mean,
        "ppl_delta_ci": None if delta is None else [low, high],
        "kl_mean": None if delta is None else kl,
        "asked": {"policy": policy, "budget": round(budget, 2), "nominal_budget": None, "quantizers": None},
    }


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_default_is_held_against_all_of_as_many_bytes() -> None:
    default = [row("auto", 0.28, (0.1, 0.2, 0.3), 0.002), row("auto", 0.2, (0.5, 0.6, 0.7), 0.004)]
    others = [
        row("full", 1.0, (0.0, 0.0, 0.0), 0.0),
        row("near", 0.281, (-0.1, 0.0, 0.2), 0.001),  # of equal bytes; its interval meets the default's
        row("dear", 0.5, (-0.2, -0.1, 0.0), 0.0001),
        row("few", 0.199, (0.2, 0.3, 0.4), 0.003),
        row("cannot", 0.1, None),
        *default,
    ]
    first, second = cells(standing(default, others))
    assert first[0] == "0.2800"
    assert first[3] == "near at 0.2810"
    assert first[-2:] == ["2", "none"]
    assert second[3] == "few at 0.1990"
    assert second[-2:] == ["1", "**few at 0.1990**"]
    assert standing([], others) == []


def test_goals_are_of_the_fast_and_the_small_policy() -> None:
    rows = [row("fast", 0.28, (0.0, 0.1, 0.1)), row("klt", 0.1, (0.6, 0.7, 0.8)), row("greedy", 0.28, (0.0, 0.1, 0.1))]
    told = "\n".join(goal_lines(rows))
    assert "fast" in told
    assert "**not met**" in told
    assert "greedy" not in told
