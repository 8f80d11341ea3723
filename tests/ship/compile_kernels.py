"""Compiles every kind of kernel for an H100-class GPU, which need not be there, and prints the float instructions."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.ship.gpu import kernels

TARGET = GPUTarget("cuda", 90, 32)
ELEMENTS = ("i16", "i16", "i32")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT = re.compile(r"^\s*(?:@!?%\w+\s+)?(\w+\.[\w.]*f(?:16|32|64|16x2)[\w.]*)\s", re.MULTILINE)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> set[str]:
    """Names of the float instructions (arguments that are no constants have ``types``, or i32)."""
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return set(FLOAT.findall(triton.compile(source, target=TARGET, options={"enable_fp_fusion": False}).asm["ptx"]))


def main() -> None:
    """The three families, three dtypes, all widths of planes, aligned and not, with an index and without."""
    seen: set[str] = set()
    cases = [(0, 8, 0, 1, 64), (0, 3, 1, 0, 80), (1, 4, 0, 1, 64), (1, 5, 1, 1, 80), (1, 6, 2, 0, 80), (2, 4, 0, 1, 64)]
    for family, nbits, kind, aligned, dim in cases:
        group = (dim, 16 if dim == 64 else 13, 128)[family]
        eighth = 8 if dim == 64 else 16
        shared = {"DIM": dim, "NBITS": nbits, "GROUP": group, "KIND": kind, "INDEXED": bool(aligned)}
        element = f"*{ELEMENTS[kind]}"
        types = {"x": element, "out": element, "index": "*i64", "codes": "*u8", "stride_head": "i64"}
        types |= {"lo": element, "scale": "*i16"} if aligned else {"lo": "*u8", "scale": "*u8"}
        tiles = {
            "R": 16,
            "P": eighth,
            "NG": (4 if dim == 64 else 8) if family == 1 else 1,
            "GP": (8 * eighth, 16, 1)[family],
        }
        seen |= compiled(kernels.encode, types, {**shared, "FAMILY": family, **tiles})
        limit = torch.finfo(DTYPES[kind]).max
        seen |= compiled(kernels.decode, types, {**shared, "FAMILY": family, "LIMIT": limit, "R": 16, "C": 8 * eighth})
        if family == 2:
            seen |= compiled(kernels.channel_scales, types, {**shared, "R": 32, "C": 64})
    sys.stdout.write("\n".join(sorted(seen)) + "\n")


if __name__ == "__main__":
    main()
