"""The map of floats to integers, on every 16-bit pattern, and differences through the lossless coder."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import CorruptPacket
from kvferry.ship.refine import lossless
from kvferry.ship.refine.ordinals import CONTEXTS, add_differences, bits_of, contexts, differences, ordinals
from tests.snapshot.builders import same_bits

EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ordinals_order_every_number_and_lose_no_pattern(dtype):
    values = EVERY.view(dtype)
    order = ordinals(bits_of(values))
    assert np.array_equal(ordinals(order), bits_of(values))
    numbers = ~values.isnan().numpy()
    by_ordinal = values.double().numpy()[numbers][np.argsort(order[numbers])]
    assert (np.diff(by_ordinal) >= 0).all()
    assert order[(values == 0).numpy()].tolist() == [-1, 0]  # -0 and 0


def random_bits(dtype, count, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-128, 128, (count * dtype.itemsize,), generator=generator, dtype=torch.int8)
    return raw.view(dtype)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(list(INTEGERS)),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 9)),
    near_by=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_any_bits_come_back_from_their_differences(dtype, shape, near_by, seed):
    count = int(np.prod(shape))
    exact = random_bits(dtype, count, seed).view(shape)
    near = exact.clone() if near_by else random_bits(dtype, count, seed + 1).view(shape)
    if near_by:  # a few of the last bits differ
        near.view(INTEGERS[dtype]).bitwise_xor_(torch.randint(0, 4, shape, dtype=INTEGERS[dtype]))
    folded, context = differences(exact, near), contexts(near)
    assert context.max() < CONTEXTS
    data = b"".join(lossless.compress(folded, context))
    assert len(data) <= lossless.most_bytes([count], dtype.itemsize)
    back = lossless.decompress(memoryview(data), folded.dtype, context, "frame")
    assert same_bits(add_differences(near, back), exact)


def test_strided_tensors_have_the_bits_of_dense_ones():
    x = torch.randn(2, 3, 6, 8).to(torch.bfloat16)
    strided = x.transpose(1, 2)[:, ::2]
    assert np.array_equal(bits_of(strided), bits_of(strided.clone(memory_format=torch.contiguous_format)))
    assert np.array_equal(contexts(strided), contexts(strided.clone(memory_format=torch.contiguous_format)))


def coded(values=5000):
    exact = torch.randn(1, 1, values // 10, 10, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    near = (exact.float() * 1.01).to(torch.bfloat16)
    folded, context = differences(exact, near), contexts(near)
    return b"".join(lossless.compress(folded, context)), folded.dtype, context


def test_every_cut_and_every_byte_too_many_is_refused():
    data, dtype, context = coded(600)
    for length in range(len(data)):
        with pytest.raises(CorruptPacket):
            lossless.decompress(memoryview(data)[:length], dtype, context, "frame 3")
    with pytest.raises(CorruptPacket, match="1 bytes too many"):
        lossless.decompress(memoryview(data + b"\0"), dtype, context, "frame 3")
    body = b"".join(lossless.joined([data], [data[:7]]))
    assert [bytes(part) for part in lossless.parts(memoryview(body), "frame 3")] == [data, data[:7]]
    for length in range(8 + len(data)):
        with pytest.raises(CorruptPacket):
            lossless.parts(memoryview(body)[:length], "frame 3")


def test_a_plane_that_would_become_gigabytes_is_refused():
    import zstandard

    data, dtype, context = coded()
    first = int((context == context.min()).sum())
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))  # 16 MiB in a few hundred bytes, its size declared
    quiet = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24))
    for plane in (bomb, quiet, bomb[:7], b"not zstd"):
        assert len(plane) < max(first, 2000)
        forged = len(plane).to_bytes(4, "little") + plane + data
        with pytest.raises(CorruptPacket, match="frame 3"):
            lossless.decompress(memoryview(forged), dtype, context, "frame 3")
