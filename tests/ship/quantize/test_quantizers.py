"""Every quantiser against slow loops from the documentation, on every kind of number, and its bound on errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InvalidInput, UnsupportedVersion
from kvferry.ship.quantize import Section, decode_sections, encode_sections, packet_quantizer, quantizer
from kvferry.ship.quantize.base import MARK
from tests.ship.quantize import reference
from tests.snapshot.builders import same_bits

BITS = (2, 3, 4, 5, 6, 8)
SPECS = (
    "raw",
    *(f"sym{n}" for n in BITS),
    *(f"asym{n}row" for n in BITS),
    *(f"asym{n}g{g}" for n, g in zip(BITS, (1, 5, 8, 32, 64, 128), strict=True)),
    *(f"chan{n}b{b}" for n, b in zip(BITS, (1, 2, 3, 7, 16, 128), strict=True)),
    *(f"had{n}g{g}" for n, g in zip(BITS, (2, 4, 8, 16, 64, 256), strict=True)),
    *(f"cen{n}" for n in (2, 4, 8)),
    *(f"cen{n}g{g}" for n, g in zip(BITS, (8, 2, 4, 64, 16, 128), strict=True)),
)
WHITE = ("had", "cen")
"""Families whose error is spread over other elements than the one it came from; they have tests of their own."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = (
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    float("-inf"),
    2.0**-149,
    -(2.0**-133),
    6e-8,
    65504.0,
    -65504.0,
    3.3e38,
    -3.3e38,
)


@st.composite
def rows(draw):
    """Small tensors of any bits: subnormals, infinities, NaNs, signed zeros, constants, huge ranges."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (draw(st.integers(1, 3)), draw(st.integers(0, 6)), draw(st.integers(1, 20)))
    kind = draw(st.sampled_from(["bits", "normal", "special", "constant", "huge"]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).squeeze(-1)
    x = torch.randn(shape, generator=generator)
    if kind == "special":
        picks = torch.randint(0, len(SPECIAL), shape, generator=generator)
        x = torch.where(torch.rand(shape, generator=generator) < 0.1, torch.tensor(SPECIAL)[picks], x)
    if kind == "constant":
        x = torch.full(shape, float(x.flatten()[0]) if x.numel() else 0.0)
    if kind == "huge":
        x = x * 10.0 ** torch.randint(-44, 38, (shape[0], shape[1], 1), generator=generator)
    return x.to(dtype)


def encoded(spec, x, index=None, encode=None):
    method = quantizer(spec)
    tokens = x.shape[1] if index is None else len(index)
    out = torch.full((method.nbytes(x.shape[0], tokens, x.shape[2], x.dtype),), 0xA5, dtype=torch.uint8)
    (encode or method.encode)(x, index, out)
    return out


@settings(deadline=None, max_examples=250)
@given(spec=st.sampled_from(SPECS), x=rows())
def test_bytes_are_those_of_the_documentation(spec, x):
    assert encoded(spec, x).numpy().tobytes() == reference.encode(spec, x)


@settings(deadline=None, max_examples=150)
@given(spec=st.sampled_from(SPECS), x=rows(), data=st.data())
def test_selection_strides_and_the_door(spec, x, data):
    """Only selected tokens are read and written, whatever the strides, and the door gives what the oracle gives."""
    tokens = sorted(
        data.draw(st.sets(st.integers(0, max(0, x.shape[1] - 1)), max_size=x.shape[1])) if x.shape[1] else []
    )
    index = torch.tensor(tokens, dtype=torch.int64)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    want = encoded(spec, x[:, tokens].contiguous())
    method = quantizer(spec)
    for encode in (None, lambda x, index, out: encode_sections(x, [Section(method, index, out)])):
        assert torch.equal(encoded(spec, x, index, encode), want)
        assert torch.equal(encoded(spec, strided, index, encode), want)
    whole = torch.zeros_like(x[:, tokens])
    method.decode(want, None, whole)
    for decode in (method.decode, lambda data, index, out: decode_sections([Section(method, index, data)], out)):
        target = torch.full_like(x, 7.0).permute(2, 0, 1).contiguous().permute(1, 2, 0)
        decode(want, index, target)
        assert same_bits(target[:, tokens], whole)
        others = [token for token in range(x.shape[1]) if token not in tokens]
        assert bool((target[:, others] == 7.0).all())


@settings(deadline=None, max_examples=150)
@given(spec=st.sampled_from([s for s in SPECS if s != "raw" and not s.startswith(WHITE)]), x=rows())
def test_error_is_within_half_a_step(spec, x):
    method = quantizer(spec)
    back = torch.zeros_like(x)
    method.decode(encoded(spec, x), None, back)
    exact = x.double()
    for values, got in groups(spec, exact, back.double()):
        if not bool(values.isfinite().all()):
            assert bool(got.isnan().all()), "a group that is not finite must decode to NaN, all of it"
            continue
        levels = 2**method.nbits - 1
        span = 2 * values.abs().max() if spec.startswith("sym") else values.max() - values.min()
        if not spec.startswith("sym") and float(span) > torch.finfo(torch.float32).max:
            continue  # max - min overflows fp32: the scale is the largest there is, and the far end out of its reach
        steps = 2 * (2 ** (method.nbits - 1) - 1) if spec.startswith("sym") else levels
        step = float(span) / steps * (1 + 2.0**-8)
        flushed = steps * 2.0**-126  # a scale below 2^-126 is 0: the group decodes to 0, or to its minimum
        ulp = float(values.abs().max()) * float(torch.finfo(x.dtype).eps) + 2.0**-24 * (x.dtype == torch.float16)
        # The stored scale is within 2^-9 of the exact one, so that the far end may be off by that much of the span.
        assert float((got - values).abs().max()) <= step / 2 + float(span) * 2.0**-8 + 2 * ulp + flushed


def groups(spec, x, back):
    """Pairs of (values, decoded values) of each group that shares a scale."""
    if spec.startswith("chan"):
        size = int(spec.split("b")[1])
        for start in range(0, x.shape[1], size):
            pair = [t[:, start : start + size].transpose(1, 2).flatten(0, 1) for t in (x, back)]
            yield from zip(*pair, strict=True)
        return
    size = int(spec.split("g")[1]) if "g" in spec else x.shape[2]
    for start in range(0, x.shape[2], size):
        pair = [t[:, :, start : start + size].flatten(0, 1) for t in (x, back)]
        yield from zip(*pair, strict=True)


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith("had")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_and_zero_rows_come_back_exactly(spec, dtype):
    for value in (0.0, 1.5, -2.0):
        x = torch.full((2, 5, 12), value, dtype=dtype)
        back = torch.empty_like(x)
        quantizer(spec).decode(encoded(spec, x), None, back)
        if spec.startswith("sym"):
            torch.testing.assert_close(back, x, rtol=2**-8, atol=0)
        else:
            assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_is_bit_exact_for_every_16_bit_pattern(dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(2, -1, 16)
    x = x.view(dtype) if dtype.itemsize == 2 else x.view(dtype).view(2, -1, 8)
    back = torch.empty_like(x)
    quantizer("raw").decode(encoded("raw", x), None, back)
    assert same_bits(back, x)


@pytest.mark.parametrize("spec", ["sym8", "sym4", "asym4g64", "chan4b128"])
def test_nan_is_canonical_and_stays_in_its_group(spec):
    x = torch.randn(1, 4, 128).to(torch.bfloat16)
    x[0, 2, 70] = float("inf")
    back = torch.empty_like(x)
    quantizer(spec).decode(encoded(spec, x), None, back)
    nan = back.isnan()
    want = torch.zeros_like(nan)
    if spec.startswith("chan"):
        want[0, :, 70] = True
    elif spec.startswith("asym"):
        want[0, 2, 64:] = True
    else:
        want[0, 2] = True
    assert torch.equal(nan, want)
    assert back.view(torch.int16)[nan].unique().tolist() == [0x7FC0]


def test_marks_are_written_for_rows_that_are_not_finite():
    x = torch.tensor([[[1.0, float("nan")], [1.0, 2.0]]])
    scales = encoded("sym8", x).numpy()[:4].view("<u2")
    assert scales[0] == MARK
    assert scales[1] != MARK


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "raw"])
def test_any_bytes_decode_to_something(spec):
    """A hostile section cannot do more than give odd numbers: no error, no value beyond the dtype."""
    method = quantizer(spec)
    generator = torch.Generator().manual_seed(3)
    for dtype in DTYPES:
        data = torch.randint(0, 256, (method.nbytes(2, 9, 12, dtype),), dtype=torch.uint8, generator=generator)
        oracle, door = torch.empty(2, 9, 12, dtype=dtype), torch.empty(2, 9, 12, dtype=dtype)
        method.decode(data, None, oracle)
        decode_sections([Section(method, None, data)], door)
        assert not oracle.isinf().any()
        assert same_bits(oracle, door)


def test_no_size_is_hidden():
    """bf16, (30, 3, 512, 64): the papers' ratios with their scales in."""
    sizes = {
        spec: quantizer(spec).nbytes(3, 512, 64, torch.bfloat16) / (3 * 512 * 128)
        for spec in ("sym8", "sym4", "asym4g64", "chan4b128")
    }
    assert sizes == {
        "sym8": 66 / 128,
        "sym4": 34 / 128,
        "asym4g64": 36 / 128,
        "chan4b128": (32 + 2 * 64 * 2 * 2 / 256 * 1.0) / 128,
    }


def test_unknown_names():
    for spec in ("sym7", "sym", "asym4", "asym4g0", "chan4", "chan4b", "sym4 ", "RAW", "", "sym8\n"):
        with pytest.raises(InvalidInput, match="unknown quantiser"):
            quantizer(spec)
        with pytest.raises(UnsupportedVersion):
            packet_quantizer(spec)


@pytest.mark.parametrize("spec", SPECS)
def test_one_element_of_any_stride(spec):
    """A dimension of one element may have any stride, which torch's views do not all accept."""
    x = torch.arange(8.0).as_strided((1, 1, 1), (5, 3, 2))
    assert torch.equal(encoded(spec, x), encoded(spec, torch.zeros(1, 1, 1)))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_nothing_is_a_section_too(spec, shape):
    method = quantizer(spec)
    x = torch.empty(shape)
    out = torch.empty(method.nbytes(*shape, x.dtype), dtype=torch.uint8)
    method.encode(x, None, out)
    method.decode(out, None, x)


@pytest.mark.parametrize("spec", SPECS)
def test_an_index_may_have_32_bits(spec):
    method = quantizer(spec)
    x = torch.randn(2, 6, 8)
    index = torch.tensor([1, 4])
    out = torch.empty(method.nbytes(2, 2, 8, x.dtype), dtype=torch.uint8)
    method.encode(x, index.int(), out)
    one, other = torch.zeros_like(x), torch.zeros_like(x)
    method.decode(out, index.int(), one)
    method.decode(out, index, other)
    assert torch.equal(one, other)
    assert one[:, index].any()


@pytest.mark.parametrize("spec", SPECS)
def test_spec_is_canonical(spec):
    assert quantizer(spec).spec == spec


def test_fp64_is_quantised_by_way_of_fp32():
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    x[0, 0, 0] = 1e300  # infinite in fp32
    back = torch.empty_like(x)
    quantizer("sym8").decode(encoded("sym8", x), None, back)
    assert back[0, 0].isnan().all()
    assert np.abs((back - x)[0, 1:].numpy()).max() < 0.02
