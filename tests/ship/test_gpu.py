"""The Triton kernels give the bytes and the values of the torch oracle: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.ship import gpu
from kvferry.ship.gpu.door import TILE, WIDEST
from kvferry.ship.quantize import quantizer

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # of no use once triton is loaded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, for infinities: on purpose
HAS_TRITON = importlib.util.find_spec("triton") is not None
BITS = (8, 6, 5, 4, 3, 2)
SPECS = [
    "raw",
    *(f"sym{n}" for n in BITS),
    *(f"asym{n}row" for n in BITS),
    *(f"asym{n}g{group}" for n, group in zip(BITS, (32, 1, 13, 64, 100, 5), strict=True)),
    *(f"chan{n}b{block}" for n, block in zip(BITS, (4, 128, 1, 7, 3000, 16), strict=True)),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
ODD = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, -6e-8, 3.4e38, -3.4e38, 65504.0, -1e-39)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the tensors of the kernels live: the GPU if there is one, else the CPU, under the interpreter."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    if where == "cpu":
        monkeypatch.setenv("KVFERRY_GPU", "interpret")
    if not gpu.available():
        pytest.skip(f"no Triton kernels: {gpu.why_not()}")
    return where


def some_rows(shape: tuple[int, int, int], dtype: torch.dtype, seed: int, odd: int = 4) -> Tensor:
    """Rows of many magnitudes, with a row of zeros, a constant row and, here and there, NaN, infinities, subnormals."""
    rng = torch.Generator().manual_seed(seed)
    heads, tokens, _ = shape
    x = torch.randn(shape, generator=rng) * 10.0 ** torch.randint(-4, 5, (heads, tokens, 1), generator=rng)
    if x.numel():
        for _ in range(odd):
            value = ODD[int(torch.randint(len(ODD), (1,), generator=rng))]
            x.view(-1)[torch.randint(x.numel(), (1,), generator=rng)] = value
        x[0, 0], x[-1, -1] = 0.0, -1.75
    return x.to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(INTEGER[x.dtype])


def check(spec: str, x: Tensor, index: Tensor | None, device: str, shift: int = 0) -> None:
    """Encode and decode by both, from any byte on, and compare every bit."""
    method = quantizer(spec)
    tokens = x.shape[1] if index is None else index.numel()
    size = method.nbytes(x.shape[0], tokens, x.shape[2], x.dtype)
    want = torch.full((size,), 0xA5, dtype=torch.uint8)
    have = torch.full((shift + size + 3,), 0xA5, dtype=torch.uint8, device=device)
    method.encode(x, index, want)
    there = x.to(device)
    assert gpu.encode_rows(spec, there, index, have[shift : shift + size])
    assert torch.equal(have[shift : shift + size].cpu(), want), "bytes"
    assert bool((have[:shift] == 0xA5).all() & (have[shift + size :] == 0xA5).all()), "written outside of the section"
    check_decode(spec, want, x, index, device, shift)


def check_decode(spec: str, data: Tensor, like: Tensor, index: Tensor | None, device: str, shift: int = 0) -> None:
    """Decode ``data`` by both into tensors with the strides of ``like``, full of threes, and compare every bit."""
    want, have = torch.full_like(like, 3.0), torch.full_like(like.to(device), 3.0)
    quantizer(spec).decode(data, None if index is None else index.long(), want)
    assert gpu.decode_rows(spec, torch.cat([data[:shift], data]).to(device)[shift:], index, have)
    assert torch.equal(bits(have.cpu()), bits(want)), "values"


@pytest.mark.parametrize(
    ("spec", "dtype"), [(spec, DTYPES[(at + more) % 3]) for at, spec in enumerate(SPECS) for more in (0, 1)]
)
def test_same_bytes_as_the_oracle(spec: str, dtype: torch.dtype, device: str):
    seed = SPECS.index(spec)
    wide = some_rows((2, 37, 2 * 80), dtype, seed)
    check(spec, wide[:, :, ::2], None, device, shift=1)  # strided channels, an address that fits nothing
    check(spec, wide[..., :64].transpose(0, 1).contiguous().transpose(0, 1), torch.tensor([0, 1, 5, 36]), device)
    check(spec, some_rows((3, 1, 20), dtype, seed + 1, odd=1), torch.tensor([0]), device, shift=2)
    check(spec, some_rows((1, 5, 1), dtype, seed + 2, odd=0), None, device)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 140)),
    seed=st.integers(0, 2**20),
    shift=st.integers(0, 3),
    data=st.data(),
)
def test_any_shape(spec, dtype, shape, seed, shift, data, device):
    chosen = data.draw(st.none() | st.lists(st.integers(0, shape[1] - 1), unique=True))
    index = None if chosen is None else torch.tensor(sorted(chosen), dtype=torch.int64)
    check(spec, some_rows(shape, dtype, seed), index, device, shift)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("spec", ["raw", "sym8", "asym4g16", "chan6b128"])
def test_every_sixteen_bit_pattern(spec: str, dtype: torch.dtype, device: str):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    check(spec, patterns.view(2, 512, 64), None, device)  # neighbours share a row
    shuffled = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    finite = torch.where(shuffled.isfinite(), shuffled, 0.0)
    check(spec, finite.view(1, 1024, 64), None, device)  # all magnitudes in a row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ["sym6", "sym5", "asym3g7", "asym4row", "chan8b5", "chan2b64"])
def test_hostile_bytes_decode_as_the_oracle_decodes_them(spec: str, dtype: torch.dtype, device: str):
    rng = torch.Generator().manual_seed(7)
    like = torch.empty(2, 90, 24, dtype=dtype)
    for least in (0, 250, 255):  # 255, or nearly: marks, infinities and NaN in all the scales and minima
        size = quantizer(spec).nbytes(2, 90, 24, dtype)
        data = torch.randint(least, 256, (size,), dtype=torch.uint8, generator=rng)
        check_decode(spec, data, like, None, device)
    check_decode(spec, torch.zeros(size, dtype=torch.uint8), like, None, device)


@pytest.mark.parametrize("spec", ["sym8", "asym8row", "asym2g8", "chan4b16"])
def test_the_ends_of_the_fp32_range(spec: str, device: str):
    """Scales that overflow, that are subnormal, and inverses that are subnormal: nothing may be flushed to zero."""
    rng = torch.Generator().manual_seed(3)
    sign = torch.randint(0, 2, (1, 64, 32), generator=rng) * 2.0 - 1.0
    for power in (-149, -140, -127, -126, -119, -118, 120, 126, 127):
        x = (torch.rand((1, 64, 32), generator=rng, dtype=torch.float64) + 0.5) * 2.0**power * sign
        check(spec, x.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max).float(), None, device)


def test_more_rows_than_a_program_holds(device: str):
    x = some_rows((4, 200, 64), torch.bfloat16, 11)
    assert x.numel() > 8 * TILE
    for spec in ("sym4", "asym4g32", "chan4b128"):
        check(spec, x, torch.arange(0, 200, 3), device)


def test_rows_wider_than_a_tile(device: str):
    assert TILE < 5000
    for spec in ("sym5", "asym3g128", "chan4b2"):
        check(spec, some_rows((1, 3, 5000), torch.float16, 12), None, device)


def test_int32_index(device: str):
    index = torch.tensor([1, 2, 4], dtype=torch.int32)
    check("asym4g8", some_rows((2, 6, 16), torch.float16, 5), index, device)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8)])
def test_nothing_to_do(shape: tuple[int, int, int], device: str):
    x, none = torch.empty(shape, device=device), torch.empty(0, dtype=torch.uint8, device=device)
    for spec in ("raw", "sym8", "asym4g4", "chan4b2"):
        assert gpu.encode_rows(spec, x, None, none)
        assert gpu.decode_rows(spec, none, None, x)
    check("sym8", torch.zeros(2, 4, 8), torch.empty(0, dtype=torch.int64), device)


@pytest.mark.parametrize("index", [[0, 0], [1, 0], [-1, 2], [0, 9], [[0]], [0.0]])
def test_an_index_that_would_leave_the_tensor_is_refused(index: list, device: str):
    x = torch.zeros(1, 9, 8, dtype=torch.bfloat16, device=device)
    with pytest.raises(InvalidInput, match="index"):
        gpu.decode_rows("sym8", torch.zeros(20, dtype=torch.uint8, device=device), torch.tensor(index), x)


def test_a_section_of_the_wrong_size_is_refused(device: str):
    x = torch.zeros(1, 9, 8, dtype=torch.bfloat16, device=device)
    for size in (89, 91):
        with pytest.raises(InvalidInput, match="90 bytes"):
            gpu.encode_rows("sym8", x, None, torch.zeros(size, dtype=torch.uint8, device=device))
    with pytest.raises(InvalidInput, match="90 bytes"):
        gpu.decode_rows("sym8", torch.zeros(90, dtype=torch.int8, device=device), None, x)


def test_what_is_left_to_the_oracle(device: str, monkeypatch: pytest.MonkeyPatch):
    def taken(spec: str, x: Tensor) -> bool:
        return gpu.encode_rows(spec, x, None, torch.zeros(10, dtype=torch.uint8))

    x = torch.zeros(1, 1, 8, device=device)
    assert taken("sym8", x)
    assert not taken("sym8", x.double())
    assert not taken("sym8", torch.zeros(1, 1, WIDEST + 1, device=device))
    assert not taken("sym7", x)
    assert not taken("asym4g04", x)
    monkeypatch.setenv("KVFERRY_GPU", "0")
    assert not gpu.available()
    assert "KVFERRY_GPU" in gpu.why_not()
    assert not taken("sym8", x)


def test_a_tensor_on_the_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KVFERRY_GPU", raising=False)
    out = torch.full((10,), 7, dtype=torch.uint8)
    assert not gpu.encode_rows("sym8", torch.zeros(1, 1, 8), None, out)
    assert not gpu.decode_rows("sym8", out, None, torch.zeros(1, 1, 8))
    assert bool((out == 7).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_packet_bytes_may_stay_on_the_cpu():
    x = some_rows((2, 50, 64), torch.bfloat16, 2)
    want, have = (torch.empty(quantizer("sym4").nbytes(2, 50, 64, x.dtype), dtype=torch.uint8) for _ in range(2))
    quantizer("sym4").encode(x, None, want)
    assert gpu.encode_rows("sym4", x.cuda(), None, have)
    assert torch.equal(have, want)
    check_decode("sym4", have, x, None, "cuda")


def test_triton_is_loaded_for_gpu_tensors_only():
    code = (
        "import sys, torch; from kvferry.ship import gpu\n"
        "assert not gpu.encode_rows('sym8', torch.zeros(1, 1, 8), None, torch.zeros(10, dtype=torch.uint8))\n"
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(not HAS_TRITON, reason="the package triton is not installed")
def test_compiled_code_holds_exact_operations_only(tmp_path: Path):
    """Compiled for a GPU that need not be there: no fused, approximate or flushing instruction is emitted."""
    script = Path(__file__).with_name("compile_kernels.py")
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "KVFERRY_GPU")}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script)], env=env, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seen = done.stdout.split()
    basic = {name for name in seen if re.match(r"(add|sub|mul|div|fma|mad)\.", name)}
    assert basic == {"div.rn.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32"}
    assert not [name for name in seen if re.search(r"ftz|approx|full|rcp|sqrt|ex2", name)]
