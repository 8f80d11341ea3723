"""Perplexity through the cached decode path of real models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.evaluate.attention import attention_cosine
from kvferry.evaluate.bits import BitsMap, bits_map
from kvferry.evaluate.head import fp32_logits
from kvferry.evaluate.method import Method, ship
from kvferry.evaluate.perplexity import PreparedWindow, suffix_logits
from kvferry.evaluate.scores import fidelity, perplexity
from kvferry.evaluate.windows import Window, cut_windows
from kvferry.hf.text import default_text
from tests.conftest import ModelFactory
from tests.evaluate.conftest import PREFIX, SUFFIX

pytestmark = pytest.mark.model


def test_windows_are_disjoint_and_grow(smollm2: tuple[Any, Any]) -> None:
    tokenizer = smollm2[1]
    text = default_text()[:60_000]
    few, many = (cut_windows(tokenizer, text, windows=n, prefix=100, suffix=50) for n in (3, 20))
    assert [window.digest for window in few] == [window.digest for window in many[:3]]
    assert len({window.digest for window in many}) == 20
    everything = tokenizer(text).input_ids
    starts = sorted(
        next(i for i in range(0, len(everything), 151) if everything[i : i + 151] == window.token_ids[0].tolist())
        for window in many
    )
    assert len(set(starts)) == 20
    assert starts[-1] - starts[0] > len(everything) / 2  # from all over the text
    assert len(few[0].targets) == 50
    with pytest.raises(InvalidInput, match="enough for"):
        cut_windows(tokenizer, text, windows=10_000, prefix=100, suffix=50)


def test_windows_begin_as_the_tokenizer_has_it(gemma3: tuple[Any, Any]) -> None:
    tokenizer = gemma3[1]
    for window in cut_windows(tokenizer, default_text()[:20_000], windows=2, prefix=64, suffix=16):
        assert window.token_ids.shape == (1, 81)
        assert (window.token_ids == tokenizer.bos_token_id).sum() == 1
        assert window.token_ids[0, 0] == tokenizer.bos_token_id


@pytest.mark.parametrize("budget", [1.0, 2.0])
def test_the_whole_budget_changes_nothing(prepared: PreparedWindow, budget: float) -> None:
    result = prepared.judge(Method("auto", budget=budget), attention=True)
    assert result.scores is not None
    assert result.nbytes == result.full_bytes
    found = perplexity([result.scores], [prepared.full])
    assert found.delta_pct == 0
    assert found.ppl == found.ppl_full
    near = fidelity([result.scores])
    assert (near.kl_max, near.top1_agreement, near.nonfinite) == (0, 1, 0)
    assert result.attention is not None
    assert min(result.attention.both) > 0.999_99  # type: ignore[type-var]


def test_the_same_packet_is_scored_once_whatever_it_is_called(prepared: PreparedWindow) -> None:
    named = [prepared.judge(Method(policy, budget=0.6)) for policy in ("auto", "fast", "optimal", "greedy")]
    auto, fast, optimal, greedy = (result.scores for result in named)
    assert auto is not None
    assert auto is fast is optimal
    assert greedy is not auto


def test_scoring_in_one_pass_is_scoring_token_by_token(model_of: ModelFactory, window: Window) -> None:
    model, _ = model_of("smollm2-135m", dtype="float32")
    prepared = PreparedWindow(model, window)
    for method in (Method("full"), Method("pdtrim", nominal_budget=0.5), Method("uniform_int4")):
        snapshot = ship(prepared.snapshot, method).snapshot
        at_once = suffix_logits(model, snapshot, window)
        one_by_one = suffix_logits(model, snapshot, window, step=1)
        assert at_once.shape == (SUFFIX, model.config.vocab_size)
        torch.testing.assert_close(at_once, one_by_one, atol=2e-3, rtol=1e-3)


def test_the_reference_is_the_plain_forward_pass(model_of: ModelFactory, window: Window) -> None:
    model, _ = model_of("smollm2-135m", dtype="float32")
    with torch.no_grad():
        logits = model(input_ids=window.token_ids).logits[0, PREFIX:-1]
    expected = torch.nn.functional.cross_entropy(logits, window.targets, reduction="none")
    found = PreparedWindow(model, window).full.nll
    assert found == pytest.approx(expected.numpy(), abs=2e-3)


def test_methods_come_in_the_expected_order(prepared: PreparedWindow) -> None:
    kl = {}
    for method in (
        Method("uniform_int8"),
        Method("sink_protect", nominal_budget=0.25, quantizers="chan"),
        Method("uniform_int4"),
        Method("no_prefix"),
        Method("zero_cache"),
    ):
        result = prepared.judge(method)
        assert result.scores is not None
        kl[method.policy] = fidelity([result.scores]).kl_mean or math.inf
    assert list(kl) == sorted(kl, key=lambda name: kl[name])
    assert kl["uniform_int8"] < 0.005
    assert kl["no_prefix"] > 0.1


def test_a_budget_that_cannot_be_met_has_a_reason(prepared: PreparedWindow) -> None:
    result = prepared.judge(Method("greedy", budget=0.01))
    assert result.scores is None
    assert result.reason is not None
    assert "0.01" in result.reason


def test_attention_cosine_keeps_keys_and_values_apart(prepared: PreparedWindow) -> None:
    from dataclasses import replace

    from kvferry.snapshot import Snapshot

    coarse = ship(prepared.snapshot, Method("uniform_int4")).snapshot

    def mixed(keys: Snapshot, values: Snapshot) -> Snapshot:
        layers = tuple(
            replace(own, keys=k.keys, values=v.values)
            for own, k, v in zip(prepared.snapshot.layers, keys.layers, values.layers, strict=True)
        )
        return replace(prepared.snapshot, layers=layers)

    whole = attention_cosine(prepared.snapshot, coarse)
    only_keys = attention_cosine(prepared.snapshot, mixed(coarse, prepared.snapshot))
    assert only_keys.both == whole.keys
    assert only_keys.values == pytest.approx([1.0] * 30, abs=1e-5)
    assert np.mean(whole.keys) < np.mean(whole.values)  # keys are what INT4 hurts in this model
    assert np.mean(whole.both) == pytest.approx(min(np.mean(whole.keys), np.mean(whole.values)), abs=0.02)


def test_bits_are_where_the_packet_put_them(prepared: PreparedWindow) -> None:
    shipped = ship(prepared.snapshot, Method("sink_protect", budget=0.4))
    assert shipped.packet is not None
    found = bits_map(shipped.packet)
    assert found.keys.shape == (30, PREFIX)
    assert (found.keys[:, :4] == 16).all()
    counts = shipped.packet.bits_by_layer()[7]["keys"]
    assert counts["sym8"] == (found.keys[7] == 8).sum()
    assert counts["sym4"] == (found.keys[7] == 4).sum()
    again = BitsMap.from_json(found.to_json())
    np.testing.assert_array_equal(again.values, found.values)
    dropped = ship(prepared.snapshot, Method("sws", nominal_budget=0.25))
    assert dropped.packet is not None
    assert (bits_map(dropped.packet).by_token() == 0).sum() == PREFIX - PREFIX // 4


def test_fp32_logits_leave_the_model_as_it_was(smollm2: tuple[Any, Any], window: Window) -> None:
    model, ids = smollm2[0], window.token_ids[:, :20]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with fp32_logits(model):
            inside = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
        with pytest.raises(IndexError), fp32_logits(model):
            model(input_ids=torch.tensor([[10**9]]))  # no such token: the pass fails inside
    assert "forward" not in vars(model.get_output_embeddings())
    assert torch.equal(before, after)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, before.float(), atol=0.2, rtol=0.02)
    assert not torch.equal(inside, before.float())
