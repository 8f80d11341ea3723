"""The compiled kernels give the oracle's bytes and values at every CPU level; the door refuses what is not for them."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.ship import native
from kvferry.ship.quantize.registry import quantizer

LEVELS = native.levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason=native.why_not() or "no compiled kernels")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = (8, 6, 5, 4, 3, 2)
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaNs included."""
    return torch.equal(a.view(INTEGERS[a.dtype]), b.view(INTEGERS[b.dtype]))


def section(spec: str, x: Tensor, index: Tensor | None) -> Tensor:
    """A buffer of the section's size, filled with something."""
    tokens = x.shape[1] if index is None else index.numel()
    return torch.full((quantizer(spec).nbytes(x.shape[0], tokens, x.shape[2], x.dtype),), 0x5A, dtype=torch.uint8)


def check(spec: str, x: Tensor, index: Tensor | None = None, threads: int = 1) -> None:
    """Encode and decode ``x`` by the oracle and by the kernels, and compare."""
    want, got = section(spec, x, index), section(spec, x, index)
    quantizer(spec).encode(x, index, want)
    assert native.encode_rows(spec, x, index, got, threads)
    assert torch.equal(want, got), f"{spec} {x.dtype} {tuple(x.shape)}: encoded bytes differ"
    check_decode(spec, want, x, index, threads)


def check_decode(spec: str, data: Tensor, like: Tensor, index: Tensor | None = None, threads: int = 1) -> None:
    """Decode any bytes by both."""
    want, got = torch.full_like(like, 7.0), torch.full_like(like, 7.0)
    quantizer(spec).decode(data, index, want)
    assert native.decode_rows(spec, data, index, got, threads)
    assert same(want, got), f"{spec} {like.dtype} {tuple(like.shape)}: decoded values differ"


SWEPT = [
    "raw",
    *(spec for b in BITS for spec in (f"sym{b}", f"asym{b}row", f"chan{b}b64")),
    *("had8g64", "had5g16", "had4g64", "had3g32", "had2g256", "cen8g64", "cen6g64", "cen4g64", "cen3g16", "cen2g64"),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_16_bit_pattern(level: str, dtype: torch.dtype) -> None:
    """Rows of neighbouring patterns, of both signs, of finite patterns at random, and of anything at random."""
    everything = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = everything[everything.isfinite()]
    finite = finite[: finite.numel() // 64 * 64]
    generator = torch.Generator().manual_seed(0)
    signs = torch.stack([everything, everything.neg()], dim=1)[: 1 << 15]
    arranged = [
        everything.view(4, -1, 64),
        signs.reshape(4, -1, 64),
        finite[torch.randperm(finite.numel(), generator=generator)].view(1, -1, 64),
        everything[torch.randperm(everything.numel(), generator=generator)].view(4, -1, 64),
    ]
    with native.forced_isa(level):
        for x in arranged:
            for spec in SWEPT:
                check(spec, x)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec", ["sym8", "sym4", "asym8row", "asym5row", "asym4row", "chan8b64", "chan4b64", "had8g64", "had4g32"]
)
def test_every_scale(level: str, dtype: torch.dtype, spec: str) -> None:
    """All 65,536 scale codes, also those that no encoder writes, with minima and codes at random."""
    units, by_channel = 1 << 16, spec.startswith("chan")
    generator = torch.Generator().manual_seed(1)
    like = torch.zeros(64 if by_channel else 1, 1024 if by_channel else units, 64, dtype=dtype)
    data = section(spec, like, None)
    data.random_(0, 256, generator=generator)
    start = 0 if spec.startswith(("sym", "had")) else units * like.element_size()
    codes = torch.randperm(units, generator=generator) if by_channel else torch.arange(units)
    data[start : start + 2 * units] = codes.to(torch.int16).view(torch.uint8)
    with native.forced_isa(level):
        check_decode(spec, data, like)


@st.composite
def specs(draw: st.DrawFn) -> str:
    bits = draw(st.sampled_from(BITS))
    group = draw(st.sampled_from([1, 3, 8, 10, 16, 24, 32, 60, 64, 100, 128, 300]))
    width = draw(st.sampled_from([2, 4, 8, 16, 32, 64, 128, 256, 1024]))
    rotated = [f"had{bits}g{width}", f"cen{bits}g{width}"]
    plain = ["raw", f"sym{bits}", f"asym{bits}row", f"asym{bits}g{group}", f"chan{bits}b{group}"]
    return draw(st.sampled_from([*plain, *rotated]))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A ``(heads, tokens, dim)`` view of any strides, of tame or wild values."""
    dtype = draw(st.sampled_from(DTYPES))
    dim = draw(st.one_of(st.sampled_from([64, 128, 192, 256, 512]), st.integers(1, 300)))
    sizes = [draw(st.integers(1, 3)), draw(st.integers(0, 150)), dim]
    order = draw(st.permutations([0, 1, 2]))
    steps = [draw(st.integers(1, 2)) for _ in sizes]
    starts = [draw(st.integers(0, 3)) for _ in sizes]
    laid = [sizes[axis] * steps[axis] + starts[axis] for axis in order]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    kind = draw(st.sampled_from(["normal", "offset", "wild", "bits", "constant"]))
    values = torch.randn(laid, generator=generator)
    if kind == "offset":
        values = values + 50
    if kind == "wild":
        values = values * torch.pow(10.0, torch.randint(-46, 38, laid, generator=generator))
    if kind == "constant":
        values = torch.full(laid, draw(st.sampled_from([0.0, -0.0, 1.5, -3.0, 1e-40, 6e-8, 65504.0, 3e38])))
    base = values.to(dtype)
    if kind == "bits":
        wide = torch.randint(-(1 << 31), 1 << 31, laid, generator=generator)
        base = wide.to(INTEGERS[dtype]).view(dtype)
    if draw(st.booleans()) and base.numel():
        special = draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0, torch.finfo(dtype).max]))
        base.view(-1)[torch.randint(0, base.numel(), (3,), generator=generator)] = special
    x = base.permute([order.index(axis) for axis in range(3)])
    return x[
        tuple(slice(start, start + size * step, step) for start, size, step in zip(starts, sizes, steps, strict=True))
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    x = draw(tensors())
    kept = draw(st.sampled_from([None, 0.0, 0.1, 0.5, 0.9]))
    if kept is None:
        return x, None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    index = (torch.rand(x.shape[1], generator=generator) < kept).nonzero().flatten()
    return x, index.to(draw(st.sampled_from([torch.int32, torch.int64])))


@settings(max_examples=1000, deadline=None)
@given(
    case=cases(),
    spec=specs(),
    level=st.sampled_from(LEVELS or ("none",)),
    offset=st.integers(0, 9),
    damage=st.integers(0, 2**30),
)
def test_any_view_any_quantiser(
    case: tuple[Tensor, Tensor | None], spec: str, level: str, offset: int, damage: int
) -> None:
    """Same bytes and values as the oracle, nothing written outside of the buffer, other tokens left alone."""
    x, index = case
    wide_index = None if index is None else index.long()
    want = section(spec, x, index)
    quantizer(spec).encode(x.clone(memory_format=torch.contiguous_format), wide_index, want)
    around = torch.full((want.numel() + 2 * offset,), 0xA5, dtype=torch.uint8)
    inside = around[offset : offset + want.numel()]
    with native.forced_isa(level):
        assert native.encode_rows(spec, x, index, inside)
        assert torch.equal(inside, want)
        assert (around[:offset] == 0xA5).all()
        assert (around[offset + want.numel() :] == 0xA5).all()

        # Into a view of the same strides, with every element around it watched; every other time from damaged bytes.
        if damage % 2 and want.numel():
            generator = torch.Generator().manual_seed(damage)
            places = torch.randint(0, want.numel(), (8,), generator=generator)
            want[places] = torch.randint(0, 256, (8,), generator=generator).to(torch.uint8)
        elements = x.untyped_storage().nbytes() // x.element_size()
        by_oracle, by_kernel = torch.full((2, elements), 7.0, dtype=x.dtype)
        views = [
            s.as_strided(x.shape, x.stride(), s.storage_offset() + x.storage_offset()) for s in (by_oracle, by_kernel)
        ]
        quantizer(spec).decode(want, wide_index, views[0])
        assert native.decode_rows(spec, want, index, views[1])
        assert same(by_oracle, by_kernel)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), (torch.float16, 100), (torch.float32, 256)])
def test_long_tensors_and_threads(level: str, threads: int, dtype: torch.dtype, dim: int) -> None:
    """Many tiles, cut by several threads: blocks of channels are never shared between two."""
    x = torch.randn(2, 5003, dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    odd = torch.arange(1, 5003, 2)
    with native.forced_isa(level):
        plain = [("sym4", None), ("asym3g64", odd), ("chan5b100", None), ("chan4b128", odd), ("raw", odd)]
        for spec, index in [*plain, ("had4g64", None), ("cen4g64", None), ("cen3g256", odd)]:
            check(spec, x, index, threads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 300, 9000, 45000])
def test_mixed_tiers_in_one_pass(level: str, dtype: torch.dtype, tokens: int) -> None:
    """Each tier's bytes are those of the tier alone; 45,000 tokens also take the path that bypasses the caches."""
    names = ["raw", "sym8", "asym4g64", "chan3b128", "cen4g64", "had3g64", "cen2g64"]
    x = torch.randn(3, tokens, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    choice = torch.randint(-1, len(names), (tokens,), generator=torch.Generator().manual_seed(3))
    indices = [(choice == k).nonzero().flatten() for k in range(len(names))]
    tiers = [native.Tier(name, index, section(name, x, index)) for name, index in zip(names, indices, strict=True)]
    want, got = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
    with native.forced_isa(level):
        assert native.encode_mixed(x, tiers, threads=2)
        for tier in tiers:
            alone = torch.zeros_like(tier.data)
            quantizer(tier.spec).encode(x, tier.index, alone)
            assert torch.equal(tier.data, alone)
            if alone.numel():
                quantizer(tier.spec).decode(tier.data, tier.index, want)
        assert native.decode_mixed(got, tiers, threads=2)
    assert same(want, got)


def test_what_does_not_fit_the_caches() -> None:
    """Codes and rows then go past them, whole lines at a time, wherever the section begins."""
    x = torch.randn(2, 66_001, 128, generator=torch.manual_seed(3)).to(torch.bfloat16)
    even = torch.arange(0, x.shape[1], 2)
    for specs in (("sym8",), ("asym8g64",), ("had4g64",), ("cen4g64",), ("sym8", "asym8g64")):
        indices = (None,) if len(specs) == 1 else (even, even[:-1] + 1)
        want, tiers = [], []
        for place, (spec, index) in enumerate(zip(specs, indices, strict=True)):
            want.append(section(spec, x, index))
            quantizer(spec).encode(x, index, want[-1])
            room = torch.empty(want[-1].numel() + 64, dtype=torch.uint8)[13 + place :][: want[-1].numel()]
            tiers.append(native.Tier(spec, index, room))
        back = torch.zeros_like(x)
        for tier, data in zip(tiers, want, strict=True):
            quantizer(tier.spec).decode(data, tier.index, back)
        for level in LEVELS:
            with native.forced_isa(level):
                for tier in tiers:
                    tier.data.fill_(0x5A)
                assert native.encode_mixed(x, tiers, 1)
                assert all(torch.equal(tier.data, data) for tier, data in zip(tiers, want, strict=True)), (specs, level)
                out = torch.full_like(x, 7.0)
                assert native.decode_mixed(out, tiers, 1)
                assert same(out, back), (specs, level)


def test_subnormals_survive_a_flushing_caller() -> None:
    """A thread that flushes subnormals to zero still gets the exact bytes, and its mode back."""
    x = (torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(5)) * 1e-37).to(torch.float32)
    want, got = section("asym4row", x, None), section("asym4row", x, None)
    quantizer("asym4row").encode(x, None, want)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert native.encode_rows("asym4row", x, None, got)
        assert (torch.full((1,), 2e-38) * 0.1).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(want, got)


def test_several_callers_at_once() -> None:
    x = torch.randn(4, 4000, 64, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    want = section("sym4", x, None)
    quantizer("sym4").encode(x, None, want)
    results: list[bool] = []

    def call() -> None:
        for _ in range(20):
            got = section("sym4", x, None)
            results.append(native.encode_rows("sym4", x, None, got, threads=3) and torch.equal(want, got))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [True] * 80


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_threads_after_fork() -> None:
    """A forked child has none of the parent's helpers and must not wait for them."""
    x = torch.randn(4, 4000, 64, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    want, got = section("sym8", x, None), section("sym8", x, None)
    assert native.encode_rows("sym8", x, None, want, threads=3)
    child = os.fork()
    if child == 0:
        done = native.encode_rows("sym8", x, None, got, threads=3)
        done = done and want.numpy().tobytes() == got.numpy().tobytes()  # torch's own threads may not survive a fork
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "index",
    [[0, 5], [-1, 2], [3, 3], [4, 1], [0, 1 << 40]],
    ids=["beyond the end", "negative", "repeated", "descending", "huge"],
)
@pytest.mark.parametrize("encode", [True, False])
def test_bad_index_is_refused(index: list[int], encode: bool) -> None:
    x = torch.zeros(1, 5, 64, dtype=torch.bfloat16)
    tiers = [native.Tier("sym8", torch.tensor(index), section("sym8", x, torch.tensor(index)))]
    with pytest.raises(InvalidInput, match="token index"):
        (native.encode_mixed if encode else native.decode_mixed)(x, tiers)


@pytest.mark.parametrize("difference", [-1, 1])
def test_wrong_size_is_refused(difference: int) -> None:
    x = torch.zeros(1, 5, 64, dtype=torch.bfloat16)
    data = torch.zeros(section("asym4g64", x, None).numel() + difference, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match=r"holds \d+ bytes where the section takes \d+"):
        native.encode_rows("asym4g64", x, None, data)
    with pytest.raises(InvalidInput, match="bytes"):
        native.decode_rows("asym4g64", data, None, x)


def test_what_is_not_for_the_kernels() -> None:
    """Left to the oracle: False, and nothing written."""
    x = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    data = section("sym8", x, None)
    shrunk = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    shrunk.untyped_storage().resize_(16)
    assert not native.encode_rows("sym7", x, None, data)
    assert not native.encode_rows("asym4g0", x, None, data)
    assert not native.encode_rows("had4g48", x, None, data)
    assert not native.encode_rows("cen4g2048", x, None, data)
    assert not native.encode_rows("sym8", x.double(), None, data)
    assert not native.encode_rows("sym8", x[0], None, data)
    assert not native.encode_rows("sym8", x.to("meta"), None, data)
    assert not native.encode_rows("sym8", x.to_sparse(), None, data)
    assert not native.encode_rows("sym8", shrunk, None, data)
    assert not native.encode_rows("sym8", x[:, :, :0], None, data)
    assert not native.encode_rows("sym8", x, torch.tensor([0.0, 1.0]), data)
    assert not native.encode_rows("sym8", x, None, data.to(torch.int8))
    assert not native.encode_rows("sym8", x, None, torch.zeros(2 * data.numel(), dtype=torch.uint8)[::2])
    assert not native.decode_rows("sym8", data, None, torch.ones(1, 1, 64).to(torch.bfloat16).expand(1, 4, 64))
    assert not native.encode_mixed(x, [native.Tier("sym8", None, data), native.Tier("klt", None, data)])
    assert (data == 0x5A).all()


@pytest.mark.parametrize("spec", ["raw", "sym4", "asym4g64", "chan4b128", "had4g64", "cen4g64"])
def test_nothing_to_do(spec: str) -> None:
    empty = torch.zeros(0, dtype=torch.uint8)
    for shape in [(0, 5, 64), (2, 0, 64), (0, 0, 64)]:
        x = torch.zeros(shape, dtype=torch.bfloat16)
        assert native.encode_rows(spec, x, None, empty)
        assert native.decode_rows(spec, empty, None, x)
    some, none = torch.ones(2, 5, 64, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.int64)
    assert native.encode_rows(spec, some, none, empty)
    assert native.decode_rows(spec, empty, none, some)
    assert (some == 1).all()


def test_expanded_source_is_read() -> None:
    x = torch.randn(1, 1, 64).to(torch.bfloat16).expand(3, 20, 64)
    want, got = section("chan4b8", x, None), section("chan4b8", x, None)
    quantizer("chan4b8").encode(x, None, want)
    assert native.encode_rows("chan4b8", x, None, got)
    assert torch.equal(want, got)


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    data = section("sym8", x, None)
    monkeypatch.setenv("KVFERRY_NATIVE", "0")
    assert not native.available()
    assert "KVFERRY_NATIVE=0" in native.why_not()
    assert native.isa() == "torch"
    assert not native.encode_rows("sym8", x, None, data)
    monkeypatch.delenv("KVFERRY_NATIVE")
    monkeypatch.setenv("KVFERRY_ISA", "abacus")
    assert not native.available()
    assert "KVFERRY_ISA=abacus" in native.why_not()
    assert not native.encode_rows("sym8", x, None, data)
    monkeypatch.setenv("KVFERRY_ISA", LEVELS[-1])
    assert native.isa() == LEVELS[-1]
    monkeypatch.delenv("KVFERRY_ISA")
    assert native.isa() == LEVELS[0]
    with pytest.raises(InvalidInput, match="abacus"), native.forced_isa("abacus"):
        pass


def test_kernels_share_no_inline_functions() -> None:
    """A standard header's inline function, compiled for a newer CPU, could be linked into the code for an older one."""
    folder = Path(__file__).resolve().parents[2] / "native"
    kernels = {*folder.glob("isa_*.cpp"), *folder.glob("avx*.hpp"), *folder.glob("kernels*.hpp")}
    kernels |= {folder / "codec.hpp", folder / "scalar.hpp"}
    allowed = {path.name for path in kernels} | {"immintrin.h", "cstddef", "cstdint"}
    assert len(kernels) >= 11
    for path in kernels:
        included = set(re.findall(r'#include [<"](.+?)[>"]', path.read_text()))
        assert included <= allowed, f"{path.name} includes {included - allowed}"
