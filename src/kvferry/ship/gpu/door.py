"""Which tensors the Triton kernels take, and how they are launched.

The same contract as the door to the native kernels: ``False`` means that the work is not handled here (no GPU, no
Triton, fp64, a row too wide) and that the torch oracle must do it. Either way the bytes are the same.

``KVFERRY_GPU=0`` switches the kernels off; ``KVFERRY_GPU=interpret`` (with ``TRITON_INTERPRET=1``) lets Triton's
interpreter take tensors on the CPU, slowly, for tests.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvferry.errors import InvalidInput

WIDEST = 8192
"""Head dims above this are left to the oracle: a program holds whole rows."""

TILE = 2048
"""Elements that a program works on, about: rows are added to a program until it has that many."""

_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_SYM, _ASYM, _CHAN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Family:
    """A parsed spec: ``kind`` is None for raw; ``group`` is G, B, or 0 for a whole row."""

    kind: int | None
    nbits: int
    group: int


@lru_cache(maxsize=1024)
def _family(spec: str) -> _Family | None:
    if spec == "raw":
        return _Family(None, 0, 0)
    match = re.fullmatch(
        r"sym([234568])|asym([234568])(?:row|g([1-9][0-9]{0,5}))|chan([234568])b([1-9][0-9]{0,5})", spec
    )
    if match is None:
        return None
    sym, asym, group, chan, block = match.groups()
    if sym:
        return _Family(_SYM, int(sym), 0)
    if asym:
        return _Family(_ASYM, int(asym), int(group or 0))
    return _Family(_CHAN, int(chan), int(block))


def _interpreting() -> bool:
    return os.environ.get("KVFERRY_GPU") == "interpret"


def why_not() -> str:
    """Why there are no kernels for tensors on a GPU here; empty when there are."""
    if os.environ.get("KVFERRY_GPU") == "0":
        return "switched off by KVFERRY_GPU=0"
    return _obstacle(_interpreting())


@lru_cache(maxsize=2)
def _obstacle(interpreting: bool) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and not interpreting:
        return "torch sees no GPU"
    try:
        language = importlib.import_module("triton.language")
    except ImportError as error:
        return f"triton cannot be loaded: {error}"
    if not hasattr(language, "gather"):
        return "triton is older than 3.3 (which torch 2.7 brings)"
    if interpreting:
        interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
        return "" if isinstance(language.sum, interpreted) else "set TRITON_INTERPRET=1 before triton is loaded"
    try:
        importlib.import_module("triton.runtime").driver.active.get_current_target()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # no C compiler, no Python.h, …
        return f"triton cannot launch kernels here: {error}"
    return ""


def available() -> bool:
    """Whether tensors on a GPU are encoded and decoded there by Triton kernels."""
    return not why_not()


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    return importlib.import_module("kvferry.ship.gpu.kernels")


def _takes(family: _Family | None, x: Tensor) -> bool:
    if family is None or x.dtype not in _KINDS or x.dim() != 3 or not 1 <= x.shape[2] <= WIDEST:
        return False
    return (x.is_cuda or (_interpreting() and x.device.type == "cpu")) and available()


def encode_rows(
    spec: str,
    x: Float[Tensor, "heads tokens dim"],
    index: Int[Tensor, " selected"] | None,
    out: UInt8[Tensor, " nbytes"],
) -> bool:
    """Write the selected tokens of ``x`` (on a GPU, any strides) into ``out``; ``out`` may lie on the GPU or not.

    Returns ``False``, having done nothing, for what is not handled here. Raises `InvalidInput` for an index that is not
    strictly ascending within the tokens and for an ``out`` of the wrong size.
    """
    family = _family(spec)
    if not _takes(family, x):
        return False
    assert family is not None
    work = _Work.of(family, x, index)
    work.check_bytes(out)
    if out.numel() == 0:
        return True
    local = out if out.device == x.device and out.is_contiguous() else torch.empty_like(out, device=x.device)
    with _on(x):
        work.encode(local)
    if local is not out:
        out.copy_(local)
    return True


def decode_rows(
    spec: str,
    data: UInt8[Tensor, " nbytes"],
    index: Int[Tensor, " selected"] | None,
    out: Float[Tensor, "heads tokens dim"],
) -> bool:
    """Write the selected tokens into ``out`` (on a GPU, any strides), in place; ``data`` may lie on the GPU or not.

    Returns and raises as `encode_rows` does. Any bytes of the right number decode to something: a group whose scale or
    minimum is not finite decodes to NaN.
    """
    family = _family(spec)
    if not _takes(family, out):
        return False
    assert family is not None
    work = _Work.of(family, out, index)
    work.check_bytes(data)
    if data.numel() == 0:
        return True
    with _on(out):
        work.decode(data.to(out.device).contiguous())
    return True


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the device of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _checked(index: Tensor, tokens: int, device: torch.device) -> Tensor:
    """``index`` on ``device``, once it is known to stay within the tokens: kernels write where it says."""
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"token index: need 1-D int32 or int64, have {index.dim()}-D {index.dtype}")
    if index.numel():
        good = (index[0] >= 0) & (index[-1] < tokens) & (index[1:] > index[:-1]).all()
        if not bool(good):
            raise InvalidInput(f"token index: must be strictly ascending within 0..{tokens - 1}; sort it, drop repeats")
    return index.to(device).contiguous()


@dataclass(frozen=True, slots=True)
class _Work:
    """One section to be written or read: sizes, and the arguments that all kernels share."""

    family: _Family
    tensor: Tensor  # the source, or the target, as integers of its own size
    dtype: torch.dtype
    index: Tensor | None
    tokens: int  # selected

    @classmethod
    def of(cls, family: _Family, tensor: Tensor, index: Tensor | None) -> _Work:
        tokens = tensor.shape[1]
        if index is not None:
            index = _checked(index, tokens, tensor.device)
            tokens = index.numel()
        bits = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
        return cls(family, bits, tensor.dtype, index, tokens)

    @property
    def rows(self) -> int:
        return self.tensor.shape[0] * self.tokens

    @property
    def dim(self) -> int:
        return self.tensor.shape[2]

    @property
    def group(self) -> int:
        """Channels of a group, at most a row's; tokens of a per-channel block."""
        if self.family.kind == _CHAN:
            return self.family.group
        return min(self.family.group or self.dim, self.dim)

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.group) if self.family.kind == _CHAN else 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the minima, the scales and the codes; raw is codes alone."""
        if self.family.kind is None:
            return 0, 0, self.rows * self.dim * self.dtype.itemsize
        if self.family.kind == _CHAN:
            groups = self.tensor.shape[0] * self.blocks * self.dim
        else:
            groups = self.rows * -(-self.dim // self.group)
        lows = 0 if self.family.kind == _SYM else groups * self.dtype.itemsize
        return lows, groups * 2, self.rows * self.family.nbits * -(-self.dim // 8)

    def check_bytes(self, data: Tensor) -> None:
        if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != sum(self.sizes):
            raise InvalidInput(
                f"codec: need {sum(self.sizes)} bytes in a 1-D uint8 tensor, have {tuple(data.shape)} of {data.dtype}"
            )

    def encode(self, out: Tensor) -> None:
        kernels, lo, scale, codes = _kernels(), *self._parts(out)
        if self.family.kind is None:
            self._launch_raw(kernels.encode_raw, codes)
            return
        sizes, setup = self._sizes_and_setup()
        if self.family.kind == _CHAN:
            width = min(64, _power(self.dim))
            height = min(TILE // width, _power(self.group))
            grid = (self.tensor.shape[0] * self.blocks, -(-self.dim // width))
            kernels.channel_scales[grid](
                self.tensor, self._index(), lo, scale, *sizes, **setup, R=height, C=width, enable_fp_fusion=False
            )
        eighth = _power(-(-self.dim // 8))
        groups, member = (
            (1, 1) if self.family.kind == _CHAN else (_power(-(-self.dim // self.group)), _power(self.group))
        )
        height = self._height(max(8 * eighth, groups * member))
        kernels.encode[(-(-self.rows // height),)](
            self.tensor, self._index(), lo, scale, codes, self.rows, *sizes, **setup,
            FAMILY=self.family.kind, R=height, P=eighth, NG=groups, GP=member, enable_fp_fusion=False,
        )  # fmt: skip

    def decode(self, data: Tensor) -> None:
        kernels, lo, scale, codes = _kernels(), *self._parts(data)
        if self.family.kind is None:
            self._launch_raw(kernels.decode_raw, codes)
            return
        sizes, setup = self._sizes_and_setup()
        width = _power(self.dim)
        height = self._height(width)
        kernels.decode[(-(-self.rows // height),)](
            self.tensor, self._index(), lo, scale, codes, self.rows, *sizes, **setup,
            FAMILY=self.family.kind, LIMIT=torch.finfo(self.dtype).max, R=height, C=width, enable_fp_fusion=False,
        )  # fmt: skip

    def _sizes_and_setup(self) -> tuple[tuple[int, ...], dict[str, int | bool]]:
        """The numbers and the compile-time constants that all kernels but raw's share."""
        sizes = (self.tokens, self.blocks, *self.tensor.stride())
        setup = {"DIM": self.dim, "NBITS": self.family.nbits, "GROUP": self.group, "KIND": _KINDS[self.dtype]}
        return sizes, {**setup, "INDEXED": self.index is not None}

    def _launch_raw(self, kernel: Any, codes: Tensor) -> None:
        width = _power(self.dim)
        height = self._height(width)
        kernel[(-(-self.rows // height),)](
            self.tensor, self._index(), _aligned(codes, self.tensor.dtype), self.rows, self.tokens,
            *self.tensor.stride(), DIM=self.dim, INDEXED=self.index is not None, R=height, C=width,
        )  # fmt: skip

    def _index(self) -> Tensor:
        return self.tensor if self.index is None else self.index  # unused when there is none

    def _height(self, width: int) -> int:
        """Rows of a program whose tiles are ``width`` wide."""
        return max(1, min(TILE // width, _power(self.rows)))

    def _parts(self, data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lows, scales, _ = self.sizes
        lo, scale, codes = data[:lows], data[lows : lows + scales], data[lows + scales :]
        return _aligned(lo, self.tensor.dtype), _aligned(scale, torch.int16), codes


def _power(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def _aligned(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as ``dtype`` where their address allows it; else the bytes, which kernels then move one by one."""
    size = dtype.itemsize
    return part.view(dtype) if part.data_ptr() % size == 0 and part.storage_offset() % size == 0 else part
