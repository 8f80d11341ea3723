"""The scale format: exact on its own values, monotone, nearest, with the whole range of fp32's exponents."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.ship.quantize.base import LARGEST, MARK
from kvferry.ship.quantize.scale import code_bytes, codes_from_bytes, from_ue8m8, inverse, mark, to_ue8m8
from tests.ship.quantize import reference

NORMAL = torch.arange(1 << 8, LARGEST + 1, dtype=torch.int32)
"""Codes of normal numbers: every one but those of fp32's subnormals."""


def test_every_value_of_the_format_is_its_own_code():
    assert torch.equal(to_ue8m8(from_ue8m8(NORMAL)), NORMAL)
    assert from_ue8m8(torch.tensor([0], dtype=torch.int32)).item() == 0.0


def test_monotone_over_all_codes():
    values = from_ue8m8(NORMAL)
    assert bool((values[1:] > values[:-1]).all())


def test_halves_between_neighbours_round_to_the_nearest():
    low = from_ue8m8(NORMAL[:-1]).double()
    high = from_ue8m8(NORMAL[1:]).double()
    for share, want in ((0.49, NORMAL[:-1]), (0.51, NORMAL[1:])):
        assert torch.equal(to_ue8m8((low + share * (high - low)).float()), want)


@pytest.mark.parametrize(
    ("scale", "code"),
    [(0.0, 0), (2.0**-149, 0), (2.0**-126, 0x0100), (float(np.nextafter(np.float32(2.0**-126), np.float32(0))), 0),
     (3.4028234663852886e38, LARGEST), (float("inf"), LARGEST), (1.0, 0x7F00)],
)  # fmt: skip
def test_edges(scale, code):
    assert to_ue8m8(torch.tensor([scale])).item() == code


def test_no_scale_of_a_normal_number_underflows():
    smallest = torch.tensor([2.0**-126])
    assert from_ue8m8(to_ue8m8(smallest)).item() == 2.0**-126


def test_codes_that_are_no_numbers_read_as_nan():
    assert from_ue8m8(torch.arange(LARGEST + 1, MARK + 1, dtype=torch.int32)).isnan().all()


def test_sixteen_bits_hold_every_code():
    codes = torch.arange(0, MARK + 1, dtype=torch.int32)
    written = code_bytes(codes)
    assert written.numpy().view("<u2").tolist() == codes.tolist()
    assert torch.equal(codes_from_bytes(written), codes)


def test_inverse_of_zero_is_zero_and_marks_are_set():
    assert inverse(torch.tensor([0.0, 4.0])).tolist() == [0.0, 0.25]
    assert mark(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([False, True])).tolist() == [1, MARK]


@given(st.floats(0, 3.4028234663852886e38, width=32))
def test_agrees_with_the_reference_and_is_close(scale):
    code = to_ue8m8(torch.tensor([scale])).item()
    assert code == reference.scale_code(np.float32(scale))
    if scale >= 2.0**-126:
        assert from_ue8m8(torch.tensor([code], dtype=torch.int32)).item() == pytest.approx(scale, rel=2.0**-9)
