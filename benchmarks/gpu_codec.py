"""Encode and decode on a GPU beside a copy of the same bytes in its memory, in one run, interleaved; medians.

    python benchmarks/gpu_codec.py --json gpu_codec.json

GB/s are bytes of the *source* (16 or 32 bits an element) over wall time with the GPU drained, the launch from Python
included. Two sizes: one layer of a long prompt, where launches count, and many layers' worth, where memory does. The
bytes are compared with the CPU's first. Without a GPU it says so, and that is no failure.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.ship import gpu
from kvferry.ship.quantize import quantizer

SPECS = ("raw", "sym8", "sym4", "sym3", "sym2", "asym4g32", "asym4g64", "asym2g32", "chan4b128", "chan2b128")
SHAPES = {"one layer": (8, 4096, 128), "thirty-two layers": (256, 4096, 128)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MIXED = (("raw", 0.02), ("sym8", 0.38), ("sym4", 0.60))
"""Tiers of the mixed case and their shares of the tokens, scattered as a ranking by importance scatters them."""

Section = tuple[str, Tensor | None, int]
"""Spec, index of its tokens (on the CPU, as a packet's map gives it), bytes."""


def sections(spec: str, x: Tensor) -> list[Section]:
    """The tiers that one case is made of."""
    heads, tokens, dim = x.shape
    if spec != "mixed":
        return [(spec, None, quantizer(spec).nbytes(heads, tokens, dim, x.dtype))]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    found: list[Section] = []
    for name, share in MIXED:
        count = min(round(share * tokens), order.numel())
        chosen, order = order[:count].sort().values, order[count:]
        found.append((name, chosen, quantizer(name).nbytes(heads, count, dim, x.dtype)))
    return found


def encode(x: Tensor, parts: list[Section], data: list[Tensor]) -> None:
    """All tiers of one case; a tier that the kernels leave to the oracle is an error here."""
    for (spec, index, _), out in zip(parts, data, strict=True):
        if not gpu.encode_rows(spec, x, index, out):
            raise RuntimeError(f"{spec} was not taken by the kernels: {gpu.why_not()}")


def decode(out: Tensor, parts: list[Section], data: list[Tensor]) -> None:
    """Inverse of `encode`."""
    for (spec, index, _), section in zip(parts, data, strict=True):
        if not gpu.decode_rows(spec, section, index, out):
            raise RuntimeError(f"{spec} was not taken by the kernels: {gpu.why_not()}")


def same_as_cpu(spec: str, dtype: torch.dtype) -> bool:
    """Whether bytes and values equal the oracle's on the CPU, odd values and odd strides included."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(4, 700, 256, generator=rng) * 10.0 ** torch.randint(-4, 5, (4, 700, 1), generator=rng)
    for value in (float("nan"), float("inf"), -0.0, 1e-45, -6e-8, 3.4e38, 65504.0):
        x.view(-1)[torch.randint(x.numel(), (3,), generator=rng)] = value
    x = x.to(dtype)[..., ::2]
    parts = sections(spec, x)
    want = [torch.empty(size, dtype=torch.uint8) for _, _, size in parts]
    have = [torch.empty(size + 1, dtype=torch.uint8, device="cuda")[1:] for _, _, size in parts]
    values, there = torch.zeros_like(x), torch.zeros_like(x, device="cuda")
    for (name, index, _), out in zip(parts, want, strict=True):
        quantizer(name).encode(x, index, out)
        quantizer(name).decode(out, index, values)
    encode(x.cuda(), parts, have)
    decode(there, parts, have)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    bytes_same = all(torch.equal(a, b.cpu()) for a, b in zip(want, have, strict=True))
    return bytes_same and torch.equal(values.view(bits), there.cpu().view(bits))


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call, the GPU idle before and drained after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(spec: str, x: Tensor, repeats: int) -> dict[str, float]:
    """Medians of GB/s: encode, decode and a copy, taken in turns."""
    parts = sections(spec, x)
    data = [torch.empty(size, dtype=torch.uint8, device="cuda") for _, _, size in parts]
    out = torch.empty_like(x)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: encode(x, parts, data),
        "decode": lambda: decode(out, parts, data),
    }
    for work in works.values():  # compiles, and fills the allocator
        work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats):
        for name in (*list(works)[turn % 3 :], *list(works)[: turn % 3]):
            taken[name].append(seconds(works[name]))
    source = x.numel() * x.element_size()
    return {name: source / statistics.median(times) / 1e9 for name, times in taken.items()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, printed as they come."""
    device = torch.cuda.get_device_name()
    result: dict[str, Any] = {
        "device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "repeats": options.repeats, "rows": [],
    }  # fmt: skip
    import triton

    result["triton"] = triton.__version__
    print(
        f"{device}, torch {torch.__version__}, triton {triton.__version__}; GB/s of source, median of {options.repeats}"
    )
    columns = ("copy", "encode", "decode", "enc/copy", "dec/copy")
    print(f"{'size':18} {'dtype':5} {'spec':10} " + " ".join(f"{name:>8}" for name in columns) + "  bytes")
    for dtype in options.dtypes:
        for spec in (*options.specs, "mixed"):
            same = same_as_cpu(spec, DTYPES[dtype])
            for size, shape in SHAPES.items():
                x = torch.randn(shape, device="cuda", dtype=torch.float32).to(DTYPES[dtype])
                speed = measure(spec, x, options.repeats)
                copy, enc, dec = speed["copy"], speed["encode"], speed["decode"]
                result["rows"].append({"size": size, "dtype": dtype, "spec": spec, "same_bytes": same, **speed})
                speeds = f"{copy:8.0f} {enc:8.0f} {dec:8.0f} {enc / copy:8.2f} {dec / copy:8.2f}"
                print(f"{size:18} {dtype:5} {spec:10} {speeds}  {'same' if same else 'DIFFERENT'}")
    return result


def main() -> int:
    """0 when all bytes are the CPU's, or when there is no GPU to ask; 1 otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp16"])
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    result = run(options) if gpu.available() else {"skipped": gpu.why_not()}
    if "skipped" in result:
        print(f"not measured: {result['skipped']}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["same_bytes"] for row in result.get("rows", ())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
