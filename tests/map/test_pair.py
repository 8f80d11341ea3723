"""Which models are a matched-KV pair, and every reason why others are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import IncompatibleIdentity
from kvferry.map.mapper import Recipe
from kvferry.map.pair import pair_differences, require_pair
from tests.hf import tiny
from tests.map import builders


def test_depth_width_and_rotation_may_differ() -> None:
    one = builders.identity(builders.llama(4))
    other = builders.identity(
        tiny.llama(hidden_size=32, num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    )
    assert pair_differences(one, other) == {}
    require_pair(one, builders.identity(tiny.gemma3(num_key_value_heads=2)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 1}, "kv_heads"),
        ({"head_dim": 8}, "head_dim"),
    ],
)
def test_shapes_that_differ(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(IncompatibleIdentity) as raised:
        require_pair(builders.identity(tiny.llama()), builders.identity(tiny.llama(**changes)))
    assert named in raised.value.differences


def test_every_reason_is_given() -> None:
    source = builders.identity(tiny.gemma3n())
    target = replace(builders.identity(tiny.llama(num_key_value_heads=1, head_dim=8)), tokenizer="sha256:other")
    found = pair_differences(source, target)
    assert set(found) == {"tokenizer", "kv_heads", "head_dim", "value_head_dim", "source attention"}
    assert "layer 4: shared" in found["source attention"][0]


def test_a_tokenizer_that_nobody_knows() -> None:
    known = builders.identity(tiny.llama())
    with pytest.raises(IncompatibleIdentity, match="unknown"):
        require_pair(replace(known, tokenizer=None), replace(known, tokenizer=None))


def test_calibration_takes_only_a_pair() -> None:
    with pytest.raises(IncompatibleIdentity, match="no matched-KV pair"):
        builders.calibrated(tiny.llama(), tiny.llama(head_dim=8), Recipe(), sequences=1)
