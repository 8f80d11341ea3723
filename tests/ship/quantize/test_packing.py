"""Packing: bytes as documented, and its own inverse for every width and dim."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.ship.quantize.packing import PLANES, pack_rows, padded_dim, row_bytes, unpack_rows
from tests.ship.quantize import reference


@given(nbits=st.sampled_from(sorted(PLANES)), rows=st.integers(0, 4), dim=st.integers(0, 70), seed=st.integers(0, 99))
def test_inverse_and_layout(nbits, rows, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << nbits, (rows, dim), dtype=torch.uint8, generator=generator)
    packed = pack_rows(codes, nbits)
    assert packed.shape == (rows, row_bytes(nbits, dim))
    assert torch.equal(unpack_rows(packed, nbits, dim), codes)
    assert packed.numpy().tobytes() == b"".join(reference.planes(row.tolist(), nbits) for row in codes)


@pytest.mark.parametrize("nbits", sorted(PLANES))
def test_really_packed(nbits):
    assert row_bytes(nbits, 64) == 8 * nbits
    assert sum(PLANES[nbits]) == nbits
    assert padded_dim(1) == 8
    assert padded_dim(0) == 0


def test_a_known_row():
    row = torch.arange(16, dtype=torch.uint8).unsqueeze(0)
    assert pack_rows(row, 4).tolist() == [[0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]]
