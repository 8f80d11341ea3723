"""Sensitivities: gathered from Fisher information, kept by a model's weights, turned into weights of tokens."""

import json
import logging
import math
from dataclasses import replace

import pytest
import torch

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.ship.sensitivity import (
    ATTENTION_PROFILE,
    EDGES,
    POSITION_PROFILE,
    Gathered,
    Sensitivity,
    flat,
    keep,
    kept,
    kept_path,
    tempered,
    token_weights,
)
from tests.ship.builders import MIXED, realistic, unmasked
from tests.snapshot.builders import make_snapshot


def gathered(snapshot, scale=1.0):
    total = Gathered()
    keys = [None if layer.keys is None else torch.ones(layer.keys.shape) * scale for layer in snapshot.layers]
    values = [None if layer.values is None else torch.ones(layer.values.shape) for layer in snapshot.layers]
    total.add(snapshot, keys, values)
    return total


@pytest.mark.parametrize("profile", [ATTENTION_PROFILE, POSITION_PROFILE, tempered(ATTENTION_PROFILE, 0.5)])
def test_profiles_are_of_as_many_steps_as_there_are(profile):
    assert len(profile) == len(EDGES) - 1
    widths = torch.tensor(EDGES).diff()
    assert float((torch.tensor(profile) * widths).sum()) == pytest.approx(1, abs=0.1)


def test_gathering_averages_windows_and_leaves_sinks_out():
    snapshot = unmasked(make_snapshot(MIXED, seq_len=60, head_dim=16, dtype="float32"))
    total = gathered(snapshot, 3.0)
    keys = [None if layer.keys is None else torch.ones(layer.keys.shape) for layer in snapshot.layers]
    for index, layer in enumerate(snapshot.layers):
        if layer.keys is not None and layer.first == 0:
            keys[index][:, :, :4] = 1e6
    total.add(snapshot, keys, keys)
    found = total.sensitivity()
    assert found.fits(snapshot.identity)
    for layer, side in zip(snapshot.layers, found.keys, strict=True):
        assert side is None if layer.keys is None else torch.equal(side, torch.full_like(side, 2.0))
    own = snapshot.layers[0].keys[:, :, 4:].var(dim=2).sum()
    assert found.key_energy[0] == pytest.approx(2 * float(own), rel=1e-5)
    assert found.key_profile == ATTENTION_PROFILE  # no queries, no ranking


def test_a_profile_follows_attention():
    snapshot = realistic(400, layers=1, heads=1, dim=16)
    queries = torch.randn(1, 2, 8, 16)
    layer = replace(snapshot.layers[0], queries=queries)
    snapshot = replace(snapshot, layers=(layer,))
    from kvferry.ship.importance import layer_scores

    scores = layer_scores(snapshot)[0, 0]
    fisher = scores.view(1, 1, -1, 1).expand(layer.keys.shape)
    total = Gathered()
    total.add(snapshot, [fisher], [fisher.flip(2)])
    found = total.sensitivity()
    assert found.key_profile[-1] > 3 * found.key_profile[0]
    assert list(found.key_profile) == sorted(found.key_profile)


def test_nothing_gathered():
    with pytest.raises(InvalidInput, match="at least one window"):
        Gathered().sensitivity()


def test_kept_and_found_again(tmp_path, caplog):
    snapshot = unmasked(make_snapshot(MIXED, seq_len=40, head_dim=16, dtype="bfloat16"))
    found = gathered(snapshot).sensitivity()
    assert kept(snapshot.identity, tmp_path) is None
    path = keep(found, snapshot.identity, tmp_path)
    assert path == kept_path(snapshot.identity, tmp_path)
    back = kept(snapshot.identity, tmp_path)
    assert back.to_json() == found.to_json()
    assert kept(replace(snapshot.identity, dtype="float32", model="other name"), tmp_path) is not None
    assert kept(replace(snapshot.identity, weights="others"), tmp_path) is None
    other = replace(snapshot.identity, layers=snapshot.identity.layers[:2])
    with caplog.at_level(logging.WARNING):
        assert kept(other, tmp_path) is None
    assert "another shape" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"keys": None},
        {"keys": [[[1.0, math.nan]]]},
        {"key_energy": [1.0]},
        {"value_profile": [1.0, 2.0]},
        {"values": [[["x"]]]},
    ],
)
def test_damaged_files_are_left_out(change, tmp_path, caplog):
    snapshot = realistic(30, layers=2)
    data = gathered(snapshot).sensitivity().to_json()
    with pytest.raises(CorruptPacket):
        Sensitivity.from_json({**data, **change})
    path = kept_path(snapshot.identity, tmp_path)
    path.write_text(json.dumps({**data, **change}))
    with caplog.at_level(logging.WARNING):
        assert kept(snapshot.identity, tmp_path) is None
    assert str(path) in caplog.text


def test_token_weights_rank_what_is_sent():
    scores = torch.arange(100.0).unsqueeze(0)
    sent = torch.ones(1, 100, dtype=torch.bool)
    sent[0, 50:] = False
    sinks = torch.zeros(1, 100, dtype=torch.bool)
    sinks[0, :4] = True
    weights = token_weights(scores, sent, ATTENTION_PROFILE, sinks)[0]
    assert not weights[50:].any()
    assert not weights[:4].any()
    assert weights[4] == pytest.approx(ATTENTION_PROFILE[0])
    assert weights[49] == pytest.approx(ATTENTION_PROFILE[-2])  # the best of 46: its quantile is 0.989
    assert (weights[5:50] >= weights[4:49]).all()


def test_the_prior_weighs_keys_by_the_queries_that_meet_them():
    snapshot = realistic(50, layers=2, heads=2, dim=16)
    queries = torch.ones(1, 4, 8, 16)
    queries[:, :, :, 3] = 5.0
    layers = (replace(snapshot.layers[0], queries=queries), snapshot.layers[1])
    found = flat(replace(snapshot, layers=layers))
    assert found.fits(snapshot.identity)
    assert found.keys[0][:, 3].tolist() == [25.0, 25.0]
    assert found.keys[0][:, 2].tolist() == [1.0, 1.0]
    assert found.keys[1].flatten().unique().tolist() == [1 / 16]
    power = snapshot.layers[0].values.float().pow(2).mean() * 16
    assert found.values[0].flatten().unique().item() == pytest.approx(1 / float(power))
