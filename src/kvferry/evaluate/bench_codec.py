"""GB/s of encode and decode, beside memcpy of the same bytes and other codecs on the same tensors, in one run.

Every sample of a codec is taken right after a sample of memcpy (one thread, the source's bytes), arms in random order
within a round; figures are medians, the ratio is the median of the ratios within such a pair. GB/s count bytes of the
*source*, whatever the encoded form has. Buffers are written before they are timed.

A peer is a function from the tensor to its `Arm`s; it raises `Unavailable` (or ImportError) where it cannot run, and
the result then says why.
"""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.ship import native
from kvferry.ship.encode import decode as decode_packet
from kvferry.ship.encode import encode as encode_snapshot
from kvferry.ship.quantize import Section, decode_sections, encode_sections, quantizer
from kvferry.snapshot import FULL, Identity, LayerGeometry, LayerState, RopeSpec, Snapshot, dtype_from_name

QUANTIZERS = (
    *("sym8", "sym4", "asym8g64", "asym4g64", "asym3g64", "chan4b128", "chan5b128", "had4g64", "cen4g64", "mixed"),
)
MIXED = (("raw", 0.1), ("sym8", 0.4), ("sym4", 0.5))
"""Tiers of ``mixed`` and their shares of the tokens, scattered as a ranking by importance scatters them."""

PACKETS = {"uniform_int8": 0.5, "uniform_int4": 0.25, "sink_protect": 0.4}
"""Policies of the whole-packet rows, and their nominal budgets."""

OURS = "kvferry"
_LEAST_SAMPLES = 3
_SAMPLE_SECONDS = 0.002

Heads = Float[Tensor, "heads tokens dim"]


class Unavailable(Exception):
    """A peer cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One codec's work on one tensor.

    Attributes:
        peer: whose it is.
        quantizer: what it does to the numbers.
        encode: makes the encoded form, and leaves it for ``decode``.
        decode: makes values of it again and returns them; ``None`` is returned where they lie in a buffer.
        nbytes: bytes of the encoded form, asked after ``encode``.
        values: the decoded values as a tensor like the source, asked after ``decode``; ``None`` skips the check.
        ops: names of the two works.
    """

    peer: str
    quantizer: str
    encode: Callable[[], object]
    decode: Callable[[], object]
    nbytes: Callable[[], int]
    values: Callable[[], Tensor] | None = None
    ops: tuple[str, str] = ("encode", "decode")


Peer = Callable[[Heads], Iterable[Arm]]


@dataclass(frozen=True, slots=True)
class CodecBenchSettings:
    """What is measured.

    Attributes:
        quantizers: specs, or ``mixed``.
        dtypes: of the source.
        threads: numbers of threads.
        megabytes: sizes of the source in MiB.
        head_dim, kv_heads: of the source.
        rounds: samples of an arm, fewer when they take longer together than ``seconds``.
        seconds: most time for one arm's samples of one work.
        seed: of the data, the mixture and the order.
        packets: whether the whole verbs are measured too, header, checksums and fresh memory included.
    """

    quantizers: tuple[str, ...] = QUANTIZERS
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    threads: tuple[int, ...] = (1, 2)
    megabytes: tuple[float, ...] = (64.0,)
    head_dim: int = 128
    kv_heads: int = 8
    rounds: int = 15
    seconds: float = 4.0
    seed: int = 0
    packets: bool = True

    def __post_init__(self) -> None:
        for name in (spec for spec in self.quantizers if spec != "mixed"):
            quantizer(name)
        if min((*self.threads, self.head_dim, self.kv_heads, self.rounds)) < 1 or min(self.megabytes) <= 0:
            raise InvalidInput("threads, head_dim, kv_heads, rounds and megabytes must be positive")


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One work of one codec on one tensor; the quartiles stand beside each median."""

    op: str
    quantizer: str
    dtype: str
    threads: int
    gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float
    peer: str
    megabytes: float
    n: int
    gb_per_s_quartiles: tuple[float, float]
    ratio_quartiles: tuple[float, float]
    size: float
    """Bytes of the encoded form over those of the source."""
    relative_error: float | None
    """Relative L2 distance of the decoded values, where they were looked at."""


@dataclass(slots=True)
class CodecBenchResult:
    """All rows, and who was not measured and why."""

    settings: CodecBenchSettings
    isa: str
    rows: list[SpeedRow] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "skipped": self.skipped,
            "settings": asdict(self.settings),
            "isa": self.isa,
        }


def run(
    settings: CodecBenchSettings,
    peers: Mapping[str, Peer] | None = None,
    tell: Callable[[str], object] | None = None,
) -> CodecBenchResult:
    """Measure everything; ``tell`` gets a line before each step."""
    result = CodecBenchResult(settings, native.isa())
    before = torch.get_num_threads()
    try:
        for threads in settings.threads:
            torch.set_num_threads(threads)
            for megabytes in settings.megabytes:
                for dtype in settings.dtypes:
                    if tell is not None:
                        tell(f"{dtype}, {megabytes:g} MiB, {threads} thread(s)")
                    _measure_tensor(settings, result, megabytes, dtype, threads, peers or {})
    finally:
        torch.set_num_threads(before)
    return result


def source(settings: CodecBenchSettings, megabytes: float, dtype: str) -> Heads:
    """A random ``(heads, tokens, dim)`` tensor of about that many MiB, tokens a multiple of 128."""
    kind = dtype_from_name(dtype)
    row = settings.kv_heads * settings.head_dim * kind.itemsize
    tokens = max(128, int(megabytes * 2**20) // row // 128 * 128)
    generator = torch.Generator().manual_seed(settings.seed)
    return torch.randn(settings.kv_heads, tokens, settings.head_dim, generator=generator).to(kind)


def _measure_tensor(
    settings: CodecBenchSettings,
    result: CodecBenchResult,
    megabytes: float,
    dtype: str,
    threads: int,
    peers: Mapping[str, Peer],
) -> None:
    x = source(settings, megabytes, dtype)
    arms = [_own_arm(name, x, settings.seed) for name in settings.quantizers]
    if settings.packets:
        arms += [_packet_arm(name, x) for name in PACKETS]
    for name, peer in peers.items():
        try:
            arms += list(peer(x))
        except (Unavailable, ImportError) as reason:
            _skip(result, name, dtype, str(reason) or type(reason).__name__)
    checked: list[tuple[Arm, float | None]] = []
    for arm in arms:
        try:
            checked.append((arm, _warm_up(arm, x)))
        except (Unavailable, ImportError, RuntimeError) as reason:  # a compiler or kernel that is not there
            if arm.peer == OURS:
                raise
            _skip(result, arm.peer, dtype, f"{arm.quantizer}: {str(reason).strip().splitlines()[0][:300]}")
    with _copies(x, threads) as (memcpy, parallel_memcpy):
        works = [(arm, error, side) for arm, error in checked for side in (0, 1)]
        if threads > 1:
            copy = Arm("memcpy", f"{threads} threads", parallel_memcpy, parallel_memcpy, lambda: x.nbytes)
            works.append((copy, 0.0, 0))
        samples = _interleaved([arm.decode if side else arm.encode for arm, _, side in works], memcpy, settings)
    base = statistics.median(seconds for taken in samples for seconds, _ in taken)
    for (arm, error, side), taken in zip(works, samples, strict=True):
        speeds = [x.nbytes / seconds / 1e9 for _, seconds in taken]
        ratios = [copied / seconds for copied, seconds in taken]
        op = "memcpy" if arm.peer == "memcpy" else arm.ops[side]
        result.rows.append(
            SpeedRow(
                op, arm.quantizer, dtype, threads, statistics.median(speeds), x.nbytes / base / 1e9,
                statistics.median(ratios), arm.peer, megabytes, len(taken), _quartiles(speeds), _quartiles(ratios),
                arm.nbytes() / x.nbytes, error,
            )
        )  # fmt: skip


def _skip(result: CodecBenchResult, peer: str, dtype: str, reason: str) -> None:
    entry = {"peer": peer, "dtype": dtype, "reason": " ".join(reason.split())}
    if entry not in result.skipped:
        result.skipped.append(entry)


def _warm_up(arm: Arm, x: Heads) -> float | None:
    """Run both works, and the relative error of what comes out."""
    arm.encode()
    arm.decode()
    if arm.values is None:
        return None
    values = arm.values()
    if values.shape != x.shape:
        raise RuntimeError(f"decoded to {tuple(values.shape)}, not {tuple(x.shape)}")
    want = x.double()
    return float((values.double() - want).norm() / want.norm())


def _interleaved(
    works: Sequence[Callable[[], object]], memcpy: Callable[[], object], settings: CodecBenchSettings
) -> list[list[tuple[float, float]]]:
    """For each work, pairs ``(seconds of memcpy, seconds of the work)``."""
    order = random.Random(settings.seed)
    repeats = [max(1, math.ceil(_SAMPLE_SECONDS / max(_seconds(work, 1), 1e-6))) for work in works]
    copies = max(1, math.ceil(_SAMPLE_SECONDS / max(_seconds(memcpy, 1), 1e-6)))
    taken: list[list[tuple[float, float]]] = [[] for _ in works]
    spent = [0.0] * len(works)
    for turn in range(settings.rounds):
        for place in order.sample(range(len(works)), len(works)):
            if turn >= _LEAST_SAMPLES and spent[place] > settings.seconds:
                continue
            copied = _seconds(memcpy, copies)
            seconds = _seconds(works[place], repeats[place])
            spent[place] += seconds * repeats[place]
            taken[place].append((copied, seconds))
    return taken


def _seconds(work: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@contextmanager
def _copies(x: Heads, threads: int) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """memcpy of the source by one thread, and by ``threads``."""
    copy = torch.zeros_like(x)
    to, start, size = copy.data_ptr(), x.data_ptr(), x.nbytes
    step = -(-size // threads)
    pieces = [(to + at, start + at, min(step, size - at)) for at in range(0, size, step)]
    with ThreadPoolExecutor(threads) as pool:
        yield (
            lambda: ctypes.memmove(to, start, size),
            lambda: list(pool.map(lambda piece: ctypes.memmove(*piece), pieces)),
        )


def sections(name: str, x: Heads, seed: int) -> list[Section]:
    """The tiers that one quantiser, or the mixture, makes of ``x``, with their buffers."""
    heads, tokens, dim = x.shape
    if name != "mixed":
        method = quantizer(name)
        return [Section(method, None, torch.zeros(method.nbytes(heads, tokens, dim, x.dtype), dtype=torch.uint8))]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    found = []
    for spec, share in MIXED:
        chosen, order = order[: round(share * tokens)].sort().values, order[round(share * tokens) :]
        method = quantizer(spec)
        size = method.nbytes(heads, chosen.numel(), dim, x.dtype)
        found.append(Section(method, chosen, torch.zeros(size, dtype=torch.uint8)))
    return found


def _own_arm(name: str, x: Heads, seed: int) -> Arm:
    parts, out = sections(name, x, seed), torch.zeros_like(x)
    return Arm(
        OURS,
        name,
        lambda: encode_sections(x, parts),
        lambda: decode_sections(parts, out),
        lambda: sum(part.data.numel() for part in parts),
        lambda: out,
    )


def _packet_arm(policy: str, x: Heads) -> Arm:
    """The whole verbs on a cache whose keys and values are the two halves of ``x``."""
    heads, tokens, dim = x.shape
    half = tokens // 2
    geometry = LayerGeometry(FULL, heads, dim, dim, RopeSpec("default", 10_000.0))
    dtype = str(x.dtype).removeprefix("torch.")
    identity = Identity(model="bench", weights="0" * 16, layers=(geometry,), dtype=dtype, construction=("bench",))
    sides = [part.contiguous() for part in (x[None, :, :half], x[None, :, half : 2 * half])]  # as a cache holds them
    layer = LayerState(FULL, sides[0], sides[1], half)
    places = torch.arange(half).unsqueeze(0)
    snapshot = Snapshot(identity, places, places, torch.ones_like(places, dtype=torch.bool), (layer,))
    held: dict[str, Any] = {}

    def encode() -> None:
        held["packet"] = encode_snapshot(snapshot, None, policy, "positional", nominal_budget=PACKETS[policy])

    def decode() -> None:
        held["snapshot"] = decode_packet(held["packet"])

    def values() -> Tensor:
        found = held["snapshot"].layers[0]
        return torch.cat([found.keys[0], found.values[0]], dim=1)

    return Arm(OURS, policy, encode, decode, lambda: len(held["packet"]), values, ("pack", "unpack"))
