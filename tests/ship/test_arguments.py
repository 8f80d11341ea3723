"""What `encode` accepts, and what it says of the rest."""

import pytest
import torch

import kvferry as kv
from kvferry.errors import InvalidInput
from kvferry.ship.allocate import TierSpecs
from tests.snapshot.builders import make_snapshot


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0.5, "nominal_budget": 0.5}, "not both"),
        ({"budget": 0.0}, "above 0"),
        ({"budget": float("nan")}, "above 0"),
        ({"budget": "0.5"}, "it is a number"),
        ({"budget": "0.5", "policy": "klt"}, "it is a number"),
        ({"nominal_budget": -1.0}, "above 0"),
        ({"budget": 0.5, "policy": "best"}, "unknown policy"),
        ({"policy": "greedy", "nominal_budget": 0.2}, "0.25"),
        ({"budget": 0.6, "scores": "attention"}, "unknown scorer"),
        ({"budget": 0.6, "scores": torch.zeros(2, 3)}, "scores"),
        ({"budget": 0.6, "scores": [[0.5], [0.1, 0.2]]}, "scores"),
        ({"budget": 0.6, "scores": ["a"] * 50}, "scores"),
        ({"budget": 0.6, "scores": {"a": 1.0}}, "scores"),
        ({"budget": 0.6, "scores": torch.zeros(50, dtype=torch.complex64)}, "complex"),
        ({"budget": 0.6, "scores": torch.zeros(50), "decay": 0.01}, "decay"),
        ({"budget": 0.6, "quantizers": "sym7/sym4"}, "unknown quantiser"),
        ({"budget": 0.6, "quantizers": "sym8"}, "names no quantisers"),
        ({"budget": 0.6, "quantizers": {"keys": ("raw",)}}, "keys"),
        ({"budget": 0.6, "quantizers": {"keys": ("sym8",), "values": ("sym8",)}}, "first tier"),
        ({"budget": 0.6, "quantizers": {"keys": ("raw",), "values": ("raw",)}}, "tiers"),
        ({"budget": 1.0, "frame_tokens": 0}, "frame_tokens"),
        ({"budget": 1.0, "frame_tokens": 2**64}, "frame_tokens"),
        ({"budget": 0.6, "policy": "random_tier", "seed": 2**64}, "seed"),
        ({"budget": 0.6, "policy": "random_tier", "seed": -(2**40)}, "seed"),
        ({"budget": 1.0, "n_sink": -1}, "n_sink"),
        ({"budget": 0.6, "decay": -0.1}, "decay"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        kv.encode(make_snapshot(seq_len=50, head_dim=64), **arguments)


def test_only_packets_are_decoded():
    with pytest.raises(InvalidInput, match="a bytes is no Packet"):
        kv.decode(kv.encode(make_snapshot(), 1.0).to_bytes())


def test_a_cache_without_heads_is_refused():
    with pytest.raises(InvalidInput, match="no heads"):
        kv.encode(make_snapshot(seq_len=4, kv_heads=0))


def test_an_empty_snapshot_is_refused():
    with pytest.raises(InvalidInput, match="no tokens"):
        kv.encode(make_snapshot(seq_len=0))


def test_tier_specs():
    assert TierSpecs.make(None) == TierSpecs()
    assert TierSpecs.parse("sym8/sym4") == TierSpecs()
    mixed = TierSpecs.parse("chan8b128:asym8g64/chan4b128:asym3g64")
    assert mixed == TierSpecs(("raw", "chan8b128", "chan4b128"), ("raw", "asym8g64", "asym3g64"))
    assert TierSpecs.make({"keys": mixed.keys, "values": mixed.values}) == mixed
