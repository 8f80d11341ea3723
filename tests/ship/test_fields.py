"""What a header says of the sequence: exact inverses, few bytes, one spelling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.ship import fields

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 40))


@given(shape=SHAPES, bound=st.sampled_from([1, 255, 256, 65535, 65536, 2**24, 2**32, 2**62]), seed=st.integers(0, 99))
def test_ids(shape, bound, seed):
    ids = torch.randint(0, bound + 1, shape, generator=torch.Generator().manual_seed(seed))
    ids[0, 0] = bound
    data = fields.encode_ids(ids)
    assert torch.equal(fields.decode_ids(memoryview(data), *shape), ids)
    width = next(w for w in (1, 2, 3, 4, 8) if bound < 1 << (8 * w))
    assert len(data) == 1 + width * ids.numel()


def test_negative_ids_survive():
    ids = torch.tensor([[-100, 5]])
    assert torch.equal(fields.decode_ids(memoryview(fields.encode_ids(ids)), 1, 2), ids)


@given(
    batch=st.integers(1, 3),
    rows=st.lists(st.lists(st.integers(-3, 60), min_size=6, max_size=6), min_size=3, max_size=3),
    runs=st.booleans(),
)
def test_positions(batch, rows, runs):
    values = [list(range(row[0], row[0] + 6)) if runs else row for row in rows[:batch]]
    positions = torch.tensor(values)
    data = fields.encode_positions(positions)
    assert torch.equal(fields.decode_positions(memoryview(data), batch, 6), positions)


def test_usual_positions_take_a_few_bytes():
    plain = torch.arange(100_000).unsqueeze(0)
    assert len(fields.encode_positions(plain)) <= 4
    padded = torch.stack([torch.cat([torch.ones(300, dtype=torch.int64), torch.arange(700)]), torch.arange(1000)])
    assert len(fields.encode_positions(padded)) <= 12


def test_the_farthest_positions():
    positions = torch.tensor([[2**62 - 2, 2**62 - 1, 1 - 2**62, 1 - 2**62, 2**62 - 1]])
    assert torch.equal(fields.decode_positions(memoryview(fields.encode_positions(positions)), 1, 5), positions)


def test_long_runs_are_exact_across_chunks():
    count = 200_001
    positions = torch.cat([torch.arange(7, 7 + count - 70_000), torch.full((70_000,), 5)]).unsqueeze(0)
    data = fields.encode_positions(positions)
    assert torch.equal(fields.decode_positions(memoryview(data), 1, count), positions)
    generator = torch.Generator().manual_seed(0)
    for mask in (torch.arange(count) % 65_537 > 3, torch.rand(count, generator=generator) < 0.5):
        data = fields.encode_mask(mask.unsqueeze(0))
        assert torch.equal(fields.decode_mask(memoryview(data), 1, count), mask.unsqueeze(0))


def test_positions_beyond_reason_are_refused():
    with pytest.raises(InvalidInput, match="positions"):
        fields.encode_positions(torch.tensor([[2**62]]))


@given(shape=SHAPES, share=st.floats(0, 1), seed=st.integers(0, 99))
def test_masks(shape, share, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    data = fields.encode_mask(mask)
    assert torch.equal(fields.decode_mask(memoryview(data), *shape), mask)
    assert len(data) <= 1 + (mask.numel() + 7) // 8 + 1


def test_usual_masks_take_a_few_bytes():
    mask = torch.ones(8, 4096, dtype=torch.bool)
    assert len(fields.encode_mask(mask)) <= 5
    mask[3, :1000] = False
    assert len(fields.encode_mask(mask)) <= 9


ENCODERS = {
    "ids": (fields.encode_ids, fields.decode_ids, torch.randint(0, 70_000, (2, 9))),
    "positions": (fields.encode_positions, fields.decode_positions, torch.tensor([[0, 1, 2, 3, 4, 7, 7, 7, 9]] * 2)),
    "runs": (fields.encode_mask, fields.decode_mask, torch.arange(18).view(2, 9) > 3),
    "bits": (fields.encode_mask, fields.decode_mask, torch.arange(18).view(2, 9) % 2 == 0),
}


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_every_other_spelling_is_refused_or_means_something_else(name):
    """Each flipped bit, cut and extension either is refused or decodes to other values, which encode to these bytes."""
    encode, decode, values = ENCODERS[name]
    data = encode(values)
    changed = [data[:-1], data + b"\0", data + b"\x01", b""]
    for bit in range(8 * len(data)):
        flipped = np.frombuffer(data, np.uint8).copy()
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(flipped.tobytes())
    for other in changed:
        try:
            got = decode(memoryview(other), *values.shape)
        except CorruptPacket:
            continue
        assert not torch.equal(got, values)
        assert encode(got) == other


@given(st.binary(max_size=60), st.sampled_from(sorted(ENCODERS)))
def test_any_bytes(data, name):
    encode, decode, values = ENCODERS[name]
    try:
        got = decode(memoryview(data), *values.shape)
    except CorruptPacket:
        return
    assert encode(got) == data


OTHER_SPELLINGS = {
    "a run in two": (fields.decode_positions, b"\x00\x03\x04\x03", 4),
    "a run of one that steps by 0": (fields.decode_positions, b"\x00\x00", 1),
    "two runs that are one of two": (fields.decode_positions, b"\x00\x01\x02\x01", 2),
    "the same value twice": (fields.decode_positions, b"\x04\x01\x04\x01", 2),
    "a number with a byte too many": (fields.decode_positions, b"\x80\x00\x07", 4),
    "positions and more": (fields.decode_positions, b"\x00\x07\x00", 4),
    "a mask with a byte too many": (fields.decode_mask, b"\x00\x90\x00", 16),
    "runs where bits are shorter": (fields.decode_mask, b"\x00\x01\x01\x01\x01\x04", 8),
    "bits where runs are as short": (fields.decode_mask, b"\x01\xff", 8),
    "bits behind the end": (fields.decode_mask, b"\x01\x95", 6),
    "an empty run": (fields.decode_mask, b"\x00\x08\x00\x20", 40),
    "no tokens, and no run of them": (fields.decode_mask, b"\x00\x00\x00\x28", 40),
    "a mask and more": (fields.decode_mask, b"\x00\x28\x00", 40),
}


@pytest.mark.parametrize("name", sorted(OTHER_SPELLINGS))
def test_other_spellings(name):
    decode, data, count = OTHER_SPELLINGS[name]
    with pytest.raises(CorruptPacket):
        decode(memoryview(data), 1, count)


def test_a_long_number_is_refused():
    for decode in (fields.decode_positions, fields.decode_mask):
        with pytest.raises(CorruptPacket):
            decode(memoryview(b"\x00" + b"\xff" * 20), 1, 4)
