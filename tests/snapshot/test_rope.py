"""Rotations taken off keys and put back on."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.snapshot.rope import Rotary


def rotary(n: int, scale: float = 1.0) -> Rotary:
    return Rotary(10_000.0 ** (-torch.arange(n) / n), scale)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1.37])
@pytest.mark.parametrize(("n", "dim"), [(8, 16), (4, 16), (1, 3), (0, 16), (32, 64)])
def test_applying_undoes_stripping(n: int, dim: int, scale: float, single: bool, interleaved: bool) -> None:
    keys = torch.randn(2, 3, 7, dim)
    places = torch.tensor([[0, 1, 2, 100, 4_000, 131_071, 10_000_000], [0, 0, 0, 1, 2, 3, 4]])
    own = replace(rotary(n, scale), single=single, interleaved=interleaved)
    for there, back in ((own.strip, own.apply), (own.apply, own.strip)):
        found = back(there(keys, places), places)
        assert found.dtype == torch.float32
        assert float((found - keys).norm() / keys.norm()) < 1e-6


def test_pairs_turn_by_their_frequency_times_the_position() -> None:
    own = Rotary(torch.tensor([0.5, 2.0]), 3.0)
    keys = torch.tensor([1.0, 0.0, 0.0, 1.0, 7.0]).view(1, 1, 1, 5)
    turned = own.apply(keys, torch.tensor([[10]])).flatten().tolist()
    want = [3 * math.cos(5), -3 * math.sin(20), 3 * math.sin(5), 3 * math.cos(20), 7.0]
    assert turned == pytest.approx(want, abs=1e-6)


def test_lengths_of_pairs_stay_and_position_0_is_left_alone() -> None:
    keys = torch.randn(1, 2, 5, 16)
    own = rotary(8)
    assert torch.equal(own.apply(keys, torch.zeros(1, 5, dtype=torch.int64)), keys)
    turned = own.apply(keys, torch.arange(5)[None] * 1_000)
    before, after = (torch.hypot(x[..., :8], x[..., 8:]) for x in (keys, turned))
    torch.testing.assert_close(before, after)


def test_far_positions_are_exact() -> None:
    """In float32 the angle of position 100,000 times 0.9 is off by 0.004, that of the last bit of bfloat16."""
    own = Rotary(torch.tensor([0.9]))
    turned = own.apply(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.tensor([[100_000]])).flatten()
    angle = 100_000 * float(own.inv_freq[0])
    assert turned.tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_becomes_float32(dtype: torch.dtype) -> None:
    keys = torch.randn(1, 1, 4, 8).to(dtype)
    assert rotary(4).strip(keys, torch.arange(4)[None]).dtype == torch.float32


def test_neighbours_turn_as_halves_do() -> None:
    """The two orders of pairs differ by where a pair's channels stand, and by nothing else."""
    halves = rotary(4, 1.2)
    keys, places = torch.randn(2, 2, 6, 11), torch.arange(12).view(2, 6) * 17
    order = [0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10]
    want = halves.apply(keys, places)[..., order]
    found = replace(halves, interleaved=True).apply(keys[..., order], places)
    assert torch.equal(found, want)


def test_single_angles_are_those_of_a_float32_product() -> None:
    own = replace(rotary(8), single=True)
    keys, places = torch.randn(1, 1, 1, 16), torch.tensor([[77_777]])
    angles = 77_777.0 * own.inv_freq
    first, second = keys[..., :8], keys[..., 8:]
    want = torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
    torch.testing.assert_close(own.apply(keys, places), want)
    assert not torch.allclose(replace(own, single=False).apply(keys, places), want, atol=1e-5)


def test_positions_beyond_the_limit_are_refused() -> None:
    own = replace(rotary(4), limit=10)
    keys = torch.randn(1, 1, 3, 8)
    assert torch.equal(own.strip(keys, torch.tensor([[7, 8, 9]])), rotary(4).strip(keys, torch.tensor([[7, 8, 9]])))
    for turn in (own.strip, own.apply):
        with pytest.raises(UnsupportedCache, match="position 10 lies beyond the 10"):
            turn(keys, torch.tensor([[8, 9, 10]]))
    assert own.strip(keys[:, :, :0], torch.empty(1, 0, dtype=torch.int64)).shape == (1, 1, 0, 8)


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": True}, {"limit": "9"}, {"interleaved": 1}, {"single": None}])
def test_rotations_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="a rotation's"):
        Rotary(torch.ones(2), **wrong)
