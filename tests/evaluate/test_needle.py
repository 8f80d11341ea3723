"""Needles: where they lie, and who finds them."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.errors import InvalidInput
from kvferry.evaluate.method import Method
from kvferry.evaluate.needle import NeedleGrid, judge_trials, make_trials, needle_score
from kvferry.hf.text import default_text

pytestmark = pytest.mark.model


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("text", [None, "given"])
def test_a_trial_is_what_it_says(name: str, text: str | None, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)[1]
    grid = NeedleGrid((96, 160), (0.0, 0.5, 1.0), 2)
    trials = make_trials(tokenizer, grid, default_text()[:50_000] if text else None)
    assert len(trials) == 12
    numbers = set()
    for trial in trials:
        prompt = tokenizer.decode(trial.token_ids[0])
        number = tokenizer.decode(list(trial.answer)).strip()
        numbers.add(number)
        assert len(number) == 5
        assert tokenizer.decode(list(trial.answer[:1])).strip()  # the first token already tells something
        assert prompt.count(number) == 1
        assert trial.token_ids.shape[1] in (trial.length, trial.length + 1)
        assert trial.cached == trial.token_ids.shape[1] - 1
        where = prompt.index(number) / len(prompt)
        assert abs(where - (0.12 + 0.7 * trial.depth)) < 0.25
    assert len(numbers) == 2
    assert [trial.digest for trial in make_trials(tokenizer, grid, default_text()[:50_000] if text else None)] == [
        trial.digest for trial in trials
    ]


@pytest.mark.parametrize("question_cached", [True, False])
def test_needles_are_found_in_a_cache_that_has_them(smollm2: tuple[Any, Any], question_cached: bool) -> None:
    model, tokenizer = smollm2
    trials = make_trials(tokenizer, NeedleGrid((224,), (0.2, 0.8), 2, question_cached=question_cached))
    methods = [Method("full"), Method("uniform_int8"), Method("zero_cache"), Method("greedy", budget=0.01)]
    results = [found for _, found in judge_trials(model, trials, methods)]
    full, int8, zero, small = (needle_score(trials, [found[i] for found in results]) for i in range(4))
    assert (full.n, full.hits, int8.hits, zero.hits) == (4, 4, 4, 0)
    assert full.ci[0] > zero.ci[1]
    assert full.ci_clustered == (1.0, 1.0)
    assert small.hits == 0
    assert results[0][3].reason is not None
    if not question_cached:
        assert trials[0].cached < trials[0].token_ids.shape[1] - 4


def test_grids_that_make_no_sense(smollm2: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidInput):
        NeedleGrid((), (0.5,), 1)
    with pytest.raises(InvalidInput):
        NeedleGrid((512,), (1.5,), 1)
    with pytest.raises(InvalidInput, match="alone take"):
        make_trials(smollm2[1], NeedleGrid((20,), (0.5,), 1))
    with pytest.raises(InvalidInput, match="haystack needs"):
        make_trials(smollm2[1], NeedleGrid((512,), (0.5,), 1), "too short")
