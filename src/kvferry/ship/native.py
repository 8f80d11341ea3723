"""The door to the compiled CPU kernels: what they take, they do; what they don't, the torch oracle does.

Every function that does work answers ``False`` (or ``None``) when the work is not for the kernels (another device,
dtype, layout or quantiser, or no kernels at all) and leaves everything untouched; the caller then uses the oracle,
which gives the same bytes. Environment: ``KVFERRY_NATIVE=0`` switches the kernels off, ``KVFERRY_ISA`` names the CPU
level to use (one of ``levels()``).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kvferry.errors import InvalidInput


def _load() -> tuple[ModuleType | None, str]:
    """The compiled module, or None and why it is not there."""
    if importlib.util.find_spec("kvferry._native") is None:
        return None, (
            "the compiled kernels are not there: this installation was made without a usable C++ compiler, so the "
            "codec runs on torch alone, slower; install GCC or Clang and reinstall kvferry"
        )
    try:
        return importlib.import_module("kvferry._native"), ""
    except ImportError as error:
        return None, f"the compiled kernels cannot be loaded ({error}); the codec runs on torch alone, slower"


_kernels, _reason = _load()

logger = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_INFINITIES = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x47EFFFFFE0000001,  # the first beyond fp32
}
"""Patterns of the smallest magnitudes that are not finite in fp32."""
_FAMILIES = {"raw": 0, "sym": 1, "asym": 2, "chan": 3, "had": 4, "cen": 5}
_SPEC = re.compile(
    r"(raw)|(sym)([234568])|(asym)([234568])(?:row|g([1-9][0-9]{0,5}))|(chan)([234568])b([1-9][0-9]{0,5})"
    r"|(had|cen)([234568])g([1-9][0-9]{0,3})"
)
_WHOLE_ROW = 1 << 31
_ROTATED = frozenset(1 << k for k in range(1, 11))  # widths of Hadamard matrices
_TENSORS = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Tier:
    """One precision tier of a tensor: which tokens, how they are written, and the bytes of its section.

    Attributes:
        spec: the quantiser's canonical text.
        index: the tier's tokens, strictly ascending int32 or int64; None for all.
        data: uint8 buffer of exactly the section's size; written by encode, read by decode.
    """

    spec: str
    index: Int[Tensor, " selected"] | None
    data: UInt8[Tensor, " nbytes"]


def available() -> bool:
    """Whether the kernels are there, allowed by the environment, and can run on this CPU."""
    return _usable() is not None


def kernels() -> ModuleType | None:
    """The compiled module, for what has a door of its own (the entropy coder); ``None`` where it is not to be used."""
    return _usable()


def why_not() -> str:
    """Why the kernels are not used; empty when they are."""
    if _kernels is None:
        return _reason
    if os.environ.get("KVFERRY_NATIVE") == "0":
        return "KVFERRY_NATIVE=0 switches the compiled kernels off"
    wanted = os.environ.get("KVFERRY_ISA", "")
    if wanted and wanted not in levels():
        return f"KVFERRY_ISA={wanted} is not a level that this CPU and build can run ({', '.join(levels())})"
    return ""


@cache
def levels() -> tuple[str, ...]:
    """CPU levels that can run here, best first; empty without kernels."""
    return () if _kernels is None else tuple(_kernels.levels())


def isa() -> str:
    """The CPU level in use, one of ``levels()``; ``torch`` without kernels."""
    kernels = _usable()
    return "torch" if kernels is None else str(kernels.level())


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Use one CPU level within the block; raises `InvalidInput` where it cannot run. For tests and benchmarks."""
    if name not in levels():
        raise InvalidInput(f"CPU level {name!r} cannot run here; levels are {', '.join(levels()) or 'none'}")
    before = os.environ.get("KVFERRY_ISA")
    os.environ["KVFERRY_ISA"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["KVFERRY_ISA"]
        else:
            os.environ["KVFERRY_ISA"] = before


def encode_rows(
    spec: str,
    x: Float[Tensor, "heads tokens dim"],
    index: Int[Tensor, " selected"] | None,
    out: UInt8[Tensor, " nbytes"],
    threads: int | None = None,
) -> bool:
    """Write the selected tokens of ``x`` (any strides) into ``out``; False when the oracle must do it.

    Raises `InvalidInput` for an index that is not ascending or not within the tokens, and for a wrong size of ``out``.
    ``threads`` defaults to torch's; small tensors use fewer.
    """
    return _work(True, x, (Tier(spec, index, out),), threads)


def decode_rows(
    spec: str,
    data: UInt8[Tensor, " nbytes"],
    index: Int[Tensor, " selected"] | None,
    out: Float[Tensor, "heads tokens dim"],
    threads: int | None = None,
) -> bool:
    """Write the section's values into the selected tokens of ``out`` (any strides); as `encode_rows` otherwise."""
    return _work(False, out, (Tier(spec, index, data),), threads)


def encode_mixed(x: Float[Tensor, "heads tokens dim"], tiers: Sequence[Tier], threads: int | None = None) -> bool:
    """Write several tiers in one pass over ``x``; all of them or, when one is not for the kernels, none (False)."""
    return _work(True, x, tiers, threads)


def decode_mixed(out: Float[Tensor, "heads tokens dim"], tiers: Sequence[Tier], threads: int | None = None) -> bool:
    """Read several tiers in one pass over ``out``; tokens of no tier are left alone."""
    return _work(False, out, tiers, threads)


def measure_rows(
    spec: str,
    x: Float[Tensor, "heads tokens dim"],
    index: Int[Tensor, " selected"] | None,
    weights: Float[Tensor, "heads dim"],
    out: Float[Tensor, " selected"],
    threads: int | None = None,
) -> bool:
    """Write what the quantiser does to each selected token of ``x``; False when the oracle must do it.

    That is the squared error, channels multiplied by ``weights`` before they are squared, of all heads together, in
    fp32 and in the order of sums of `kvferry.ship.distortion.token_sums`. Raises `InvalidInput` as `encode_rows` does.
    """
    kernels, parsed, dtype = _usable(), _parse(spec), _DTYPES.get(x.dtype)
    if kernels is None or parsed is None or dtype is None or x.dim() != 3 or not _is_plain(x) or x.shape[2] < 1:
        return False
    selected = _index(index, x.shape[1])
    if selected is None or any(side.dtype != torch.float32 or not _is_plain(side) for side in (weights, out)):
        return False
    kept, place = selected
    weights = weights.contiguous()
    if not out.is_contiguous() or out.numel() != place[2] or weights.shape != (x.shape[0], x.shape[2]):
        return False
    try:
        kernels.measure(
            *_where(x), dtype, (*parsed, *place, 0, 0), weights.data_ptr(), out.data_ptr(), _threads(threads)
        )
    except ValueError as error:
        raise InvalidInput(f"measuring {tuple(x.shape)} as {spec}: {error}") from error
    del kept
    return True


def all_finite(x: Float[Tensor, "*shape"], threads: int | None = None) -> bool | None:
    """Whether ``x`` (any strides) holds only numbers that are finite in fp32; None when the oracle must say."""
    kernels, known = _usable(), _INFINITIES.get(x.dtype)
    if kernels is None or known is None or x.dim() > 4 or not _is_plain(x):
        return None
    item = x.element_size()
    sizes = (*(1 for _ in range(4 - x.dim())), *x.shape)
    strides = (*(0 for _ in range(4 - x.dim())), *(stride * item for stride in x.stride()))
    return bool(kernels.all_below(x.data_ptr(), sizes, strides, item, known, _threads(threads)))


def choose(
    error: Float[Tensor, "parts tiers batch tokens"],
    cost: Float[Tensor, "parts tiers"],
    sent: Bool[Tensor, "parts batch tokens"],
    tables: Int[Tensor, " sizes"],
    start: Int[Tensor, "parts tiers"],
    names: Int[Tensor, "parts tiers"],
    threads: int | None = None,
) -> tuple[UInt8[Tensor, "parts batch tokens"], Float[Tensor, " parts"], Int[Tensor, " parts"]] | None:
    """Tiers, errors and bytes of `kvferry.ship.policy.optimal.Problem.choose`; None when the oracle must do it."""
    kernels = _usable()
    if kernels is None or error.shape[1] > 64:
        return None
    tiers = torch.empty(sent.shape, dtype=torch.uint8)
    errors = torch.empty(len(sent), dtype=torch.float64)
    nbytes = torch.empty(len(sent), dtype=torch.int64)
    given = (error, cost, sent.view(torch.uint8), tables, start, names, tiers, errors, nbytes)
    kernels.choose(*(array.numpy() for array in given), _threads(threads))
    return tiers, errors, nbytes


def _work(encode: bool, x: Tensor, tiers: Sequence[Tier], threads: int | None) -> bool:
    kernels = _usable()
    if kernels is None:
        return False
    dtype = _DTYPES.get(x.dtype)
    if dtype is None or x.dim() != 3 or not _is_plain(x) or x.shape[2] < 1:
        return False
    arguments, kept = [], []
    for tier in tiers:
        parsed = _parse(tier.spec)
        data = tier.data
        if parsed is None or not _is_plain(data) or data.dtype != torch.uint8 or data.dim() != 1:
            return False
        if not data.is_contiguous():
            return False
        selected = _index(tier.index, x.shape[1])
        if selected is None:
            return False
        kept.append(selected[0])  # a copy must outlive the call
        arguments.append((*parsed, *selected[1], data.data_ptr(), data.numel()))
    if not encode and x.numel() > 0 and _overlaps(x):
        return False
    try:
        kernels.work(encode, *_where(x), dtype, arguments, _threads(threads))
    except ValueError as error:
        raise InvalidInput(
            f"{'encoding' if encode else 'decoding'} {tuple(x.shape)} as {', '.join(t.spec for t in tiers)}: {error}"
        ) from error
    return True


def _where(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, shape and strides in bytes."""
    size = x.element_size()
    return x.data_ptr(), tuple(x.shape), tuple(stride * size for stride in x.stride())


def _threads(asked: int | None) -> int:
    return max(1, torch.get_num_threads() if asked is None else asked)


def _index(index: Tensor | None, tokens: int) -> tuple[Tensor | None, tuple[int, int, int]] | None:
    """The index that lies where the address says; its address, item size and count. None: not for the kernels."""
    if index is None:
        return None, (0, 0, tokens)
    if not _is_plain(index) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        return None
    index = index.contiguous()
    # An empty tensor has no address, and no address means all tokens.
    return index, (index.data_ptr() or 1, index.element_size(), index.numel())


def _is_plain(x: Tensor) -> bool:
    """Whether the elements of ``x`` lie in CPU memory, all within its storage, where its strides say."""
    if type(x) not in _TENSORS or not x.is_cpu or x.layout is not torch.strided or x.is_neg():
        return False
    count = x.numel()
    if count == 0:
        return True
    if not x.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + count) * x.element_size() <= x.untyped_storage().nbytes()


def _overlaps(x: Tensor) -> bool:
    """Whether two elements of ``x`` may share memory (an expanded tensor): decoding into it is not for the kernels."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@lru_cache(maxsize=1024)
def _parse(spec: str) -> tuple[int, int, int] | None:
    """Family, bits and group of a spec that the kernels know, else None."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        return None
    raw, sym, sym_bits, asym, asym_bits, group, chan, chan_bits, block, rotated, rotated_bits, size = match.groups()
    if raw:
        return _FAMILIES["raw"], 0, 0
    if sym:
        return _FAMILIES["sym"], int(sym_bits), 0
    if asym:
        return _FAMILIES["asym"], int(asym_bits), int(group or _WHOLE_ROW)
    if chan:
        return _FAMILIES["chan"], int(chan_bits), int(block)
    if int(size) not in _ROTATED:
        return None
    return _FAMILIES[rotated], int(rotated_bits), int(size)


_in_use = ""


def _usable() -> ModuleType | None:
    """The kernels, at the level that the environment names; None where `why_not` has a reason."""
    global _in_use  # noqa: PLW0603
    if _kernels is None or os.environ.get("KVFERRY_NATIVE") == "0":
        return None
    wanted = os.environ.get("KVFERRY_ISA", "")
    if wanted != _in_use:
        if not _kernels.use_level(wanted):
            return None
        _in_use = wanted
        logger.info("codec kernels run at level %s", _kernels.level())
    return _kernels
