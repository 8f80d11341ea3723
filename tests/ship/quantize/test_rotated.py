"""Hadamard-rotated and centred rows: what they promise beyond what the matrix of all quantisers holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InvalidInput
from kvferry.ship.quantize import quantizer
from kvferry.ship.quantize.base import MARK
from kvferry.ship.quantize.centred import mean_of
from kvferry.ship.quantize.hadamard import group_sizes, rotate
from tests.ship.quantize.test_quantizers import DTYPES, encoded, rows


def decoded(spec, x):
    back = torch.empty_like(x)
    quantizer(spec).decode(encoded(spec, x), None, back)
    return back


@pytest.mark.parametrize("size", [1, 2, 8, 64, 256])
def test_rotation_is_hadamards_and_its_own_inverse(size):
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    assert torch.equal(rotate(torch.eye(size)), matrix)
    x = torch.randint(-50, 50, (3, size)).float()
    assert torch.equal(rotate(rotate(x)), x * size)


def test_groups_are_powers_of_two_that_cover_the_row():
    assert group_sizes(64, 64) == [64]
    assert group_sizes(80, 64) == [64, 16]
    assert group_sizes(100, 64) == [64, 64]
    assert group_sizes(12, 64) == [16]
    assert group_sizes(0, 64) == []
    for dim in range(1, 200):
        sizes = group_sizes(dim, 32)
        assert sum(sizes[:-1]) < dim <= sum(sizes)


@settings(deadline=None, max_examples=150)
@given(nbits=st.sampled_from([2, 3, 4, 5, 6, 8]), group=st.sampled_from([2, 8, 64]), x=rows())
def test_error_of_a_rotated_group(nbits, group, x):
    """A group's error, in the root of its mean square, is within half a step times the root of its size."""
    back = decoded(f"had{nbits}g{group}", x).double()
    at = 0
    for size in group_sizes(x.shape[2], group):
        values, got = x[:, :, at : at + size].double().flatten(0, 1), back[:, :, at : at + size].flatten(0, 1)
        at += size
        for have, want in zip(got, values, strict=True):
            if not bool(want.isfinite().all()):
                assert bool(have.isnan().all())
                continue
            padded = torch.nn.functional.pad(want, (0, size - len(want)))
            peak = float(rotate(padded.unsqueeze(0) / size).abs().max())
            step = peak / 2 ** (nbits - 1)
            # The scale may round down by 2^-9, which takes that much off the largest; fp32 and the dtype round, too.
            allowed = size * (step / 2 + peak * 2.0**-8) + size * 2.0**-120
            ulp = size * float(want.abs().max()) * (float(torch.finfo(x.dtype).eps) + 2.0**-20)
            error = float((have - want).pow(2).sum().sqrt())
            assert error <= allowed + ulp + 2.0**-23 * size * (x.dtype == torch.float16), (error, allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_and_offsets_are_what_they_are_for(dtype):
    """Same bits, far less error: rotation where one channel sticks out, centring where all tokens share an offset."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 200, 64, generator=generator)
    spread = x.clone()
    spread[:, :, 5] *= 12
    offset = x + 8 * torch.randn(2, 1, 64, generator=generator)

    def error(spec, exact):
        return float((decoded(spec, exact.to(dtype)).float() - exact.to(dtype).float()).pow(2).mean())

    assert error("had4g64", spread) < 0.5 * error("sym4", spread)
    assert error("cen4", offset) < 0.1 * error("sym4", offset)
    assert error("cen4g64", offset) < 0.1 * error("had4g64", offset)


@pytest.mark.parametrize("spec", ["had8g64", "had2g16", "cen3", "cen4g64"])
def test_zero_rows_are_exact_and_constant_ones_are_close(spec):
    assert not decoded(spec, torch.zeros(2, 5, 24)).any()
    x = torch.full((1, 4, 64), 3.0)
    torch.testing.assert_close(decoded("had8g64", x), x, rtol=0.3, atol=0)


def test_one_bad_row_marks_its_group_and_leaves_the_mean_alone():
    x = torch.randn(1, 6, 128)
    x[0, 2, 70] = float("nan")
    back = decoded("cen4g64", x)
    want = torch.zeros_like(back, dtype=torch.bool)
    want[0, 2, 64:] = True
    assert torch.equal(back.isnan(), want)
    codes = encoded("had4g64", x).numpy()[: 6 * 2 * 2].view("<u2").reshape(6, 2)
    assert (codes == MARK).nonzero()[0].tolist() == [2]
    others = torch.cat([x[:, :2], x[:, 3:]], 1)
    torch.testing.assert_close(mean_of(x), others.mean(1), rtol=1e-5, atol=1e-6)


def test_huge_rows_stay_finite():
    x = torch.full((1, 2, 64), 3.3e38)
    x[0, 1, ::2] = -3.3e38
    for spec in ("had4g64", "cen4", "cen8g64"):
        assert decoded(spec, x).isfinite().all()


def test_a_section_of_one_token_is_its_mean():
    x = torch.randn(2, 1, 32).to(torch.bfloat16)
    assert torch.equal(decoded("cen2g32", x), x)


@pytest.mark.parametrize("spec", ["had4g63", "had4g0", "had4", "had7g64", "cen4g48", "cen7", "cen4g2048"])
def test_no_such_quantiser(spec):
    with pytest.raises(InvalidInput, match="unknown quantiser"):
        quantizer(spec)


def test_sizes():
    sizes = {spec: quantizer(spec).nbytes(3, 512, 64, torch.bfloat16) for spec in ("had3g64", "cen3g64", "cen4")}
    assert sizes == {
        "had3g64": 3 * 512 * (24 + 2),
        "cen3g64": 3 * 512 * (24 + 2) + 3 * 64 * 2,
        "cen4": 3 * 512 * 34 + 3 * 64 * 2,
    }
    assert np.isclose(quantizer("cen2g64").nbits, 2)
