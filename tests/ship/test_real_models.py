"""Packets of real caches: what `generate` does with the decoded cache is what counts."""

from dataclasses import replace

import pytest
import torch

import kvferry as kv
from kvferry.hf.compat import cache_argument
from kvferry.ship.importance import layer_scores, token_scores
from tests.ship.test_packet import assert_same_cache

pytestmark = pytest.mark.model

TEXT = (
    "The ferry left the northern harbour before sunrise, carrying grain, letters and forty passengers. Its captain "
    "kept a careful journal of winds, currents and cargo, and he wrote that a boat should carry all that it was given, "
    "no more and no less. "
)


def prompt(tokenizer, tokens):
    ids = tokenizer(TEXT * (tokens // 40 + 1), return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens
    return ids


def cache_of(model, snapshot):
    return {cache_argument(model): snapshot.to_cache(model)}


def continued(model, snapshot, ids, new=8):
    """Greedy continuation of ``ids`` on a cache of all of them but the last."""
    length = ids.shape[1] + new
    out = model.generate(ids, max_length=length, do_sample=False, **cache_of(model, snapshot))
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize(("name", "tokens"), [("smollm2-135m", 160), ("gemma3-270m", 530)])
def test_at_full_budget_the_shipped_cache_is_the_cache(model_of, name, tokens, tmp_path):
    model, tokenizer = model_of(name)
    ids = prompt(tokenizer, tokens)
    snapshot = kv.capture(model, ids[:, :-1])
    packet = kv.encode(snapshot, budget=1.0)
    packet.save(tmp_path / "packet")
    decoded = kv.decode(kv.Packet.load(tmp_path / "packet"))
    assert_same_cache(decoded, snapshot)
    assert decoded.identity.construction[-1] == f"packet(full; raw / raw, {len(packet)})"
    assert torch.equal(continued(model, decoded, ids), continued(model, snapshot, ids))


def test_a_left_padded_batch_survives(model_of):
    model, tokenizer = model_of("smollm2-135m")
    ids = prompt(tokenizer, 90).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    snapshot = kv.capture(model, ids[:, :-1], attention_mask=mask[:, :-1])
    decoded = kv.decode(kv.encode(snapshot, budget=1.0))
    assert_same_cache(decoded, snapshot)
    with torch.no_grad():
        want, got = (
            model(ids[:, -1:], attention_mask=mask, **cache_of(model, one)).logits for one in (snapshot, decoded)
        )
    assert torch.equal(got, want)


def test_dropped_tokens_are_masked(model_of):
    """A cache with dropped tokens gives what the model gives when it never could see them."""
    model, tokenizer = model_of("smollm2-135m")
    ids = prompt(tokenizer, 120)
    snapshot = kv.capture(model, ids[:, :-1])
    decoded = kv.decode(kv.encode(snapshot, policy="pdtrim", nominal_budget=0.5))
    assert int(decoded.mask.sum()) == 59
    kept = replace(snapshot, mask=decoded.mask)
    with torch.no_grad():
        seen = torch.cat([decoded.mask, torch.ones(1, 1, dtype=torch.bool)], 1)
        got, want = (
            model(
                ids[:, -1:],
                attention_mask=seen.long(),
                position_ids=torch.tensor([[119]]),
                **cache_of(model, one),
            ).logits
            for one in (decoded, kept)
        )
    assert torch.equal(got, want)


def test_attention_ranks_better_than_chance_and_int8_is_nearly_free(model_of):
    model, tokenizer = model_of("smollm2-135m")
    ids = prompt(tokenizer, 300)
    snapshot = kv.capture(model, ids[:, :-1], query_window=16)
    scores = token_scores(snapshot, "observation_window")
    assert int(scores[0].argmax()) == 0  # the sink, as in every model of this kind
    with torch.no_grad():
        logits = {
            budget: model(ids[:, -1:], **cache_of(model, kv.decode(kv.encode(snapshot, budget)))).logits
            for budget in (1.0, 0.52, 0.28)
        }
    exact = torch.log_softmax(logits[1.0][0, -1].float(), -1)
    kl = {
        budget: float((exact.exp() * (exact - torch.log_softmax(other[0, -1].float(), -1))).sum())
        for budget, other in logits.items()
    }
    assert kl[1.0] == 0.0
    assert kl[0.52] < 0.02
    assert kl[0.28] < 0.5


def test_observation_window_is_the_attention_that_the_model_paid(model_of):
    """Scores of the last 8 queries against the attention weights that the model itself reports, layer by layer."""
    model, tokenizer = model_of("smollm2-135m", attn="eager")
    ids = prompt(tokenizer, 60)
    snapshot = kv.capture(model, ids, query_window=8)
    scores = layer_scores(snapshot, "observation_window", decay=0.0)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    seen = torch.arange(60) <= torch.arange(52, 60).unsqueeze(1)
    for layer, weights in enumerate(attentions):
        paid = weights[0, :, -8:].float().mean(dim=0).sum(dim=0) / seen.sum(dim=0)
        torch.testing.assert_close(scores[layer, 0], paid, rtol=0.05, atol=2e-3)
