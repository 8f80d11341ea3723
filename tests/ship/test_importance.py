"""Scores: what attention really pays, decayed, averaged over layers that hold the token."""

from dataclasses import replace

import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.ship.importance import SCORERS, default_scorer, given_scores, layer_scores, token_scores
from kvferry.snapshot import FULL, LayerKind
from tests.snapshot.builders import SLIDING, make_snapshot


def whole(snapshot):
    return replace(snapshot, mask=torch.ones_like(snapshot.mask))


def attention_by_hand(snapshot, index):
    """Softmax of queries and keys under the model's mask, one query, one head at a time."""
    layer = snapshot.layers[index]
    batch, heads, window, _ = layer.queries.shape
    group = heads // layer.keys.shape[1]
    total, seen = torch.zeros(batch, layer.held), torch.zeros(batch, layer.held)
    for row in range(batch):
        for q in range(window):
            at = layer.seen - window + q
            allowed = [
                j for j in range(layer.held)
                if layer.first + j <= at and snapshot.mask[row, layer.first + j]
                and (layer.kind.name != "sliding" or layer.first + j > at - layer.kind.argument)
            ]  # fmt: skip
            if not allowed:
                continue
            seen[row, allowed] += 1
            for head in range(heads):
                logits = layer.keys[row, head // group, allowed].float() @ layer.queries[row, head, q].float()
                total[row, allowed] += torch.softmax(logits, 0) / heads
    return total / seen.clamp_min(1)


@pytest.mark.parametrize("kind", [FULL, SLIDING])
@pytest.mark.parametrize("heads", [2, 4])
def test_observation_window_is_the_attention_paid(kind, heads):
    snapshot = make_snapshot([kind, FULL], batch=3, seq_len=17, heads=heads, window=4, seed=5)
    scores = layer_scores(snapshot, "observation_window", decay=0.0)
    for index in range(2):
        layer = snapshot.layers[index]
        torch.testing.assert_close(scores[index, :, layer.first :], attention_by_hand(snapshot, index))
        assert scores[index, :, : layer.first].isnan().all()


def test_a_window_longer_than_the_prompt_uses_the_queries_that_there_are():
    snapshot = make_snapshot(seq_len=3, heads=4, window=3)
    assert not token_scores(snapshot, "observation_window").isnan().any()


def test_padding_scores_nothing_and_breaks_nothing():
    snapshot = make_snapshot(batch=2, seq_len=12, heads=4)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :9] = False
    mask[0, :] = False
    snapshot = replace(snapshot, mask=mask)
    for name in ("observation_window", "kv_norm"):
        scores = token_scores(snapshot, name)
        assert scores.isfinite().all()
        assert scores[~mask].eq(0).all()
        assert scores[1, 9:].gt(0).all()


def test_decay_is_the_papers():
    snapshot = whole(make_snapshot(seq_len=50))
    plain, decayed = token_scores(snapshot, "kv_norm", decay=0.0), token_scores(snapshot, "kv_norm", decay=0.01)
    torch.testing.assert_close(decayed, plain * torch.exp(-0.01 * torch.arange(49, -1, -1)))


def test_positional_prefers_the_recent():
    scores = token_scores(make_snapshot(seq_len=30), "positional")
    assert bool((scores[0, 1:] > scores[0, :-1]).all())


def test_kv_norm_follows_the_norms():
    snapshot = whole(make_snapshot(seq_len=9))
    layers = list(snapshot.layers)
    keys = layers[1].keys.clone()
    keys[:, :, 6] *= 100
    layers[1] = replace(layers[1], keys=keys)
    scores = token_scores(replace(snapshot, layers=tuple(layers)), "kv_norm")
    assert int(scores[0].argmax()) == 6


def test_tokens_that_no_layer_holds_score_zero():
    snapshot = make_snapshot([SLIDING, SLIDING], seq_len=20)
    scores = token_scores(snapshot, "positional")
    assert scores[0, :13].eq(0).all()
    assert scores[0, 13:].gt(0).all()


def test_shared_layers_take_no_part():
    snapshot = make_snapshot([FULL, LayerKind("shared", 0)], seq_len=6)
    scores = layer_scores(snapshot, "kv_norm")
    assert scores[1].isnan().all()
    torch.testing.assert_close(token_scores(snapshot, "kv_norm"), scores[0])


def test_values_that_are_not_finite_do_not_poison_the_ranking():
    snapshot = whole(make_snapshot(seq_len=9, heads=4))
    keys = snapshot.layers[0].keys.clone()
    keys[0, 0, 3] = float("inf")
    snapshot = replace(snapshot, layers=(replace(snapshot.layers[0], keys=keys), *snapshot.layers[1:]))
    for name in SCORERS:
        assert token_scores(snapshot, name).isfinite().all(), name


@pytest.mark.parametrize("name", sorted(SCORERS))
def test_every_scorer_on_every_kind_and_dtype(name):
    for dtype in ("float32", "bfloat16", "float16"):
        snapshot = make_snapshot([FULL, SLIDING], batch=2, seq_len=19, heads=4, dtype=dtype)
        scores = token_scores(snapshot, name)
        assert scores.shape == (2, 19)
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()


def test_missing_queries_say_how_to_get_them():
    with pytest.raises(InvalidInput, match=r"query_window"):
        token_scores(make_snapshot(), "observation_window")


def test_the_default_is_attention_where_there_are_queries():
    assert default_scorer(make_snapshot()) == "kv_norm"
    assert default_scorer(make_snapshot(heads=2)) == "observation_window"


def test_bad_arguments():
    snapshot = make_snapshot(batch=2)
    with pytest.raises(InvalidInput, match="positional"):
        token_scores(snapshot, "attention")
    with pytest.raises(InvalidInput, match="decay"):
        token_scores(snapshot, "kv_norm", decay=-1.0)
    with pytest.raises(InvalidInput, match="batch, seq_len"):
        given_scores(snapshot, torch.zeros(3, 5))
    with pytest.raises(InvalidInput, match="NaN"):
        given_scores(snapshot, torch.full((2, 5), float("nan")))
    assert given_scores(snapshot, torch.arange(5)).tolist() == [[0, 1, 2, 3, 4]] * 2
