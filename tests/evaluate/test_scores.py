"""What is measured a token, against plain definitions; logs and methods."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.evaluate.method import Method, expand
from kvferry.evaluate.scores import TokenScores, compare, fidelity, perplexity
from kvferry.evidence.log import ResultLog


def test_compare_is_by_definition() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(300, 11), torch.randn(300, 11)
    targets = torch.randint(0, 11, (300,))
    found = compare(p, q, targets)
    lp, lq = torch.log_softmax(p.double(), 1), torch.log_softmax(q.double(), 1)
    assert found.nll == pytest.approx(-lq[torch.arange(300), targets].numpy(), abs=1e-5)
    assert found.kl == pytest.approx((lp.exp() * (lp - lq)).sum(1).numpy(), abs=1e-5)
    flipped = (p.argmax(1) != q.argmax(1)).numpy()
    assert found.flips == flipped.sum()
    assert (np.isnan(found.flip_margin) == ~flipped).all()
    assert (found.flip_margin[flipped] > 0).all()


def test_scores_survive_json() -> None:
    scores = compare(torch.randn(5, 7), torch.randn(5, 7), torch.arange(5))
    again = TokenScores.from_json(json.loads(json.dumps(scores.to_json())))
    for name in ("nll", "kl", "flip_margin"):
        np.testing.assert_array_equal(getattr(again, name), getattr(scores, name))


def test_nonfinite_logits_are_counted_and_never_called_fine() -> None:
    p = torch.randn(4, 7)
    q = p.clone()
    q[2] = torch.nan
    found = compare(p, q, torch.arange(4))
    near = fidelity([found])
    assert (near.n, near.nonfinite, near.kl_mean, near.top1_agreement) == (4, 1, 0.0, 1.0)
    assert perplexity([found], [compare(p, p, torch.arange(4))]).ppl is None
    nothing = fidelity([compare(p, torch.full_like(p, torch.nan), torch.arange(4))])
    assert (nothing.nonfinite, nothing.kl_mean, nothing.top1_agreement) == (4, None, None)


def test_perplexity_difference_is_paired() -> None:
    generator = np.random.default_rng(0)
    full, method = [], []
    for _ in range(12):
        nll = generator.normal(3, 1, 50).astype(np.float32)
        shift = generator.normal(0.01, 0.001)
        none = np.full(50, np.nan, np.float32)
        full.append(TokenScores(nll, np.zeros(50, np.float32), none))
        method.append(TokenScores((nll + shift).astype(np.float32), np.zeros(50, np.float32), none))
    found = perplexity(method, full)
    assert found.delta_pct == pytest.approx(100 * math.expm1(0.01), abs=0.1)
    assert found.delta_ci is not None
    assert found.delta_ci[1] - found.delta_ci[0] < 0.2  # unpaired, it would be some tens of percent
    assert found.delta_ci[0] < found.delta_pct < found.delta_ci[1]
    assert perplexity(full[:1], full[:1]).delta_ci is None
    with pytest.raises(InvalidInput):
        perplexity(method[:3], full[:4])


def test_expand_makes_each_method_once() -> None:
    methods = expand(["full", "uniform_int8", "greedy"], [0.5, 0.3], quantizers=["sym", "chan"], nominal_budgets=[0.3])
    assert methods[0] == Method("full")
    assert [method.policy for method in methods] == ["full", *["uniform_int8"] * 2, *["greedy"] * 6]
    assert len(set(methods)) == len(methods)
    with pytest.raises(InvalidInput, match="unknown policy"):
        expand(["gready"], [0.5])
    with pytest.raises(InvalidInput, match="names no quantisers"):
        expand(["greedy"], [0.5], quantizers=["sym9"])
    with pytest.raises(InvalidInput, match="unknown scorer"):
        expand(["greedy"], [0.5], scorer="best")
    with pytest.raises(InvalidInput, match="needs budgets"):
        expand(["greedy"], [])


def test_log_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ResultLog(path) as log:
        log.add("a", {"x": 1})
        log.add("b", {"x": 2})
    path.write_bytes(path.read_bytes() + b'{"key":"c","val')  # killed while writing
    with ResultLog(path) as log:
        assert len(log) == 2
        assert "c" not in log
        log.add("c", {"x": 3})
    with ResultLog(path) as log:
        assert [log[key]["x"] for key in "abc"] == [1, 2, 3]
        with pytest.raises(InvalidInput, match="another process"), ResultLog(path):
            pass


def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for content in ("shopping\nlist\n", "shopping list"):
        path.write_text(content)
        with pytest.raises(InvalidInput, match="no result"), ResultLog(path):
            pass
        assert path.read_text() == content
