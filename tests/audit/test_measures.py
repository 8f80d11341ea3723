"""The arithmetic against independent implementations, on planted data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import log_softmax, softmax

from kvferry.audit.arm import Arm
from kvferry.audit.drift import relative_l2
from kvferry.audit.finding import _median_interval
from kvferry.audit.free_run import free_measures
from kvferry.audit.measures import logit_drift
from kvferry.audit.passages import final_answer, passages_of_tasks, passages_of_text
from kvferry.audit.verdict import Evidence, decide, precision_bounds, worst
from kvferry.errors import InvalidInput
from kvferry.evidence.statistics import mcnemar, wilson


def test_logit_drift_is_scipys() -> None:
    generator = np.random.default_rng(3)
    a, b = generator.normal(0, 3, (7, 40)), generator.normal(0, 3, (7, 40))
    found = logit_drift(torch.from_numpy(a), torch.from_numpy(b))
    for row in range(7):
        p, q = softmax(a[row]), softmax(b[row])
        assert found.kl[row] == pytest.approx(stats.entropy(p, q), rel=1e-12)
        assert found.kl_reverse[row] == pytest.approx(stats.entropy(q, p), rel=1e-12)
        assert found.kl[row] == pytest.approx((p * (log_softmax(a[row]) - log_softmax(b[row]))).sum(), rel=1e-12)
        assert found.max_abs[row] == np.abs(a[row] - b[row]).max()
        assert found.mean_abs[row] == pytest.approx(np.abs(a[row] - b[row]).mean(), rel=1e-14)
        assert found.flip[row] == float(a[row].argmax() != b[row].argmax())
        assert found.margin[row] == np.sort(a[row])[-1] - np.sort(a[row])[-2]
        norm = max(np.linalg.norm(a[row]), np.linalg.norm(b[row]))
        assert found.relative_l2[row] == pytest.approx(np.linalg.norm(a[row] - b[row]) / norm, rel=1e-14)


def test_relative_l2() -> None:
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    assert relative_l2(zero, zero).tolist() == [0, 0]
    assert relative_l2(zero, one).tolist() == [1, 1]
    assert relative_l2(one, -one).tolist() == [2, 2]
    assert relative_l2(torch.tensor([1.0, torch.nan]), torch.ones(2)).item() == torch.inf


def test_median_interval_is_the_binomials() -> None:
    values = [float(value) for value in range(1, 26)]
    rank = int(stats.binom.ppf(0.025, 25, 0.5))
    low, high = _median_interval(values) or (0, 0)
    assert (low, high) == (values[rank - 1], values[25 - rank])
    assert stats.binom.cdf(rank - 1, 25, 0.5) <= 0.025
    assert _median_interval([1.0, 2.0]) is None


def test_rates_are_statsmodels() -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    for hits, n in ((0, 20), (3, 20), (83, 200), (200, 200)):
        assert wilson(hits, n) == pytest.approx(proportion.proportion_confint(hits, n, method="wilson"), abs=1e-12)
    for b, c in ((0, 5), (3, 9), (12, 12)):
        want = tables.mcnemar([[10, b], [c, 10]], exact=True).pvalue
        assert mcnemar(b, c) == pytest.approx(min(1.0, want), rel=1e-12)


class _Study:
    """As much of a study as the arithmetic of free runs looks at."""

    def __init__(self, answers: list[str]):
        self.passages = [type("P", (), {"answer": answer})() for answer in answers]
        self.settings = type("S", (), {"resamples": 500, "seed": 0, "new_tokens": 10})()
        self.read = str


def test_free_runs_on_planted_data() -> None:
    splits = [3, None, 0, None, 7]
    answers = [("1", "2"), ("5", "5"), ("7", "8"), (None, None), ("9", "4")]
    records = [
        {
            "reference": list(range(10)),
            "other": list(range(10)),
            "split": split,
            "margins": None,
            "crossed": None,
            "answers": list(pair),
        }
        for split, pair in zip(splits, answers, strict=True)
    ]
    study: Any = _Study(["2", "5", "8", "3", "9"])
    found, curve = free_measures(study, records)
    assert found["prompts_diverging"].value == 3 / 5
    assert found["prompts_diverging"].ci == pytest.approx(tuple(stats.binomtest(3, 5).proportion_ci(0.95, "wilson")))
    assert found["divergence_per_token_at_risk"].n == 3 + 10 + 0 + 10 + 7 + 3
    assert curve["times"] == [0, 3, 7]
    assert curve["surviving"] == pytest.approx([4 / 5, 3 / 5, 2 / 5])
    assert found["first_divergence_median"].value == 7
    assert (found["accuracy_reference"].value, found["accuracy_other"].value) == (2 / 5, 3 / 5)
    assert found["accuracy_mcnemar_p"].value == pytest.approx(stats.binomtest(1, 3).pvalue)
    assert (found["right_in_reference_alone"].value, found["right_in_other_alone"].value) == (1 / 5, 2 / 5)
    assert found["answers_differing"].value == 3 / 5
    assert found["accuracy_difference"].value == pytest.approx(1 / 5)


def test_what_has_ended_together_never_parts() -> None:
    """An end is no loss from sight: of four prompts, three of which end early and together, one in four parts."""
    tokens = [list(range(length)) for length in (2, 3, 4, 9)]
    records = [
        {"reference": own, "other": own, "split": split, "margins": None, "crossed": None, "answers": None}
        for own, split in zip(tokens, (None, None, None, 8), strict=True)
    ]
    study: Any = _Study(["1"] * 4)
    found, curve = free_measures(study, records)
    assert curve["surviving"] == [3 / 4]
    assert found["first_divergence_median"].value is None
    assert found["prompts_ended_together"].value == 3 / 4
    assert found["divergence_per_token_at_risk"].n == 2 + 3 + 4 + 8 + 1


def test_splits_at_the_edge_are_counted() -> None:
    records = [
        {"reference": [1], "other": [2], "split": 0, "margins": [0.1, 0.1], "crossed": crossed, "answers": None}
        for crossed in (True, False, False, None)
    ]
    study: Any = _Study(["1"] * 4)
    found, _ = free_measures(study, records)
    assert (found["splits_at_the_edge"].value, found["splits_at_the_edge"].n) == (1 / 3, 3)


def test_verdicts_follow_the_evidence() -> None:
    def verdict(**given: Any) -> str:
        return decide(Evidence(**({"replicas": True, "identical": False} | given))).name

    assert verdict(identical=True) == "identical"
    assert verdict(vanishes=True) == "rounding"
    assert verdict(vanishes=True, shapes_match=True) == "kernel-shape"
    assert verdict(vanishes=False, shapes_match=True) == "semantic"
    assert verdict(vanishes=False, declared=True) == "codec"
    assert verdict(nonfinite=("reference", 3, "residual", 0), identical=True) == "overflow"
    assert verdict(unexplained_flips=1) == "semantic"
    assert worst(["rounding", "semantic", "identical"]) == "semantic"


def test_a_verdict_claims_no_run_that_there_was_not() -> None:
    def reason(**given: Any) -> str:
        return decide(Evidence(**({"replicas": True, "identical": False} | given))).reasons[0]

    assert "when shapes are matched" in reason(vanishes=True, shapes_match=True)
    assert "in the shapes of their matrices alone" in reason(vanishes=True, shapes_match=True, shapes_alone=True)
    assert "shrinks with precision" in reason(vanishes=True)
    assert "is not shown" in reason()
    assert "no larger than rounding of float64" in reason(vanishes=True, finest=True)
    assert "larger than rounding of float64 can be" in reason(vanishes=False, finest=True)


def test_bounds_lie_between_rounding_and_faults() -> None:
    own = {name: np.array([0.0, 0.02]) for name in ("keys", "values", "attention", "residual")}
    bounds = precision_bounds(own, "bfloat16", "float64")["keys"]
    assert bounds[1] == pytest.approx(0.02 * 2**-22.5)
    assert 1e-13 < bounds[0] < 1e-8


def test_answers() -> None:
    assert final_answer("so 3 + 4 = 7\n#### 1,234") == "1234"
    assert final_answer("first 12, then it is 15.50 dollars") == "15.5"
    assert final_answer("none at all") is None


class _Letters:
    """One token a character, after a begin-of-text token."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        ids = [ord(letter) % 128 for letter in text]
        return type("Ids", (), {"input_ids": [1, *ids] if add_special_tokens else ids})()


def test_passages_are_disjoint_and_stay_when_more_are_asked_for(tmp_path: Path) -> None:
    text = "".join(chr(97 + index % 26) + str(index) for index in range(400))
    few = passages_of_text(_Letters(), text, n=3, prefix=10, suffix=5)
    many = passages_of_text(_Letters(), text, n=20, prefix=10, suffix=5)
    assert [passage.token_ids.tolist() for passage in few] == [passage.token_ids.tolist() for passage in many[:3]]
    assert len({tuple(passage.token_ids[0].tolist()) for passage in many}) == 20
    assert all(passage.token_ids.shape == (1, 15) and passage.token_ids[0, 0] == 1 for passage in many)
    with pytest.raises(InvalidInput):
        passages_of_text(_Letters(), "short", n=2, prefix=10, suffix=5)
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    (task,) = passages_of_tasks(_Letters(), file)
    assert task.answer == "2"
    file.write_text("{}\n")
    with pytest.raises(InvalidInput):
        passages_of_tasks(_Letters(), file)


def test_arms_say_what_they_are() -> None:
    assert list(Arm("chunked(4)").spans(10)) == [(0, 4), (4, 8), (8, 10)]
    assert list(Arm("decoded(2)").spans(5)) == [(0, 3), (3, 4), (4, 5)]
    assert list(Arm("incremental").spans(2)) == [(0, 1), (1, 2)]
    assert Arm(batch=2, threads=1).to_json() == {
        "construction": "prefill",
        "decode": "step",
        "threads": 1,
        "batch": 2,
        "neighbours": "copies",
    }
    for wrong in ({"construction": "chunked(0)"}, {"decode": "x"}, {"batch": 0}, {"accumulation": "y"}):
        with pytest.raises(InvalidInput):
            Arm(**wrong)
