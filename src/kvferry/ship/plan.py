"""A plan: which bits each token gets, and the exact size of all that will be sent, before any of it is built."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from jaxtyping import Bool
from torch import Tensor

from kvferry.errors import BudgetTooSmall, InvalidInput
from kvferry.ship import finite, importance, optimize, sizing
from kvferry.ship.allocate import Allocation, TierSpecs, allocate_tokens
from kvferry.ship.frame import encode_frame
from kvferry.ship.header import DIGEST_BYTES, MAX_TOKENS, PacketHeader, check_tokens, packet_id, render_header
from kvferry.ship.layout import Layout
from kvferry.ship.planned import Planned
from kvferry.ship.policy import POLICIES, policy
from kvferry.ship.policy.optimal import Choice
from kvferry.ship.policy.tiers import N_SINK
from kvferry.ship.sensitivity import Sensitivity, kept
from kvferry.snapshot import Snapshot

log = logging.getLogger(__name__)

CHANNEL_KEYS = TierSpecs(("raw", "sym8", "chan4b128"), ("raw", "sym8", "sym4"))
"""The paper's quantisers but for INT4 keys, which get a scale a channel: as many bytes, and at a budget of 0.3 a KL to
the 16-bit cache 4 times smaller on SmolLM2-135M, 11 times on Gemma-3-270M, whose keys have large constant offsets."""

DEFAULT = "auto"
FAST = "fast"
"""``auto`` without a transform: for a receiver that may have none, or a link faster than transform coding."""

COMPOSED = (DEFAULT, FAST)
"""Names that stand for the best of several policies; to `plan` they are the same."""

MEASURED = "optimal"
"""The policy that measures what it does to the cache at hand, and meets a budget of bytes by itself."""

AUTO = (
    (MEASURED, None),
    ("sink_protect", CHANNEL_KEYS),
    ("greedy", CHANNEL_KEYS),
    ("sink_protect", TierSpecs()),
    ("greedy", TierSpecs()),
    ("uniform_int4", TierSpecs()),
)
"""What ``auto`` and ``fast`` try below a budget of 1, best first; at 1 and above they send everything raw."""

Scores = Tensor | Sequence[float] | Sequence[Sequence[float]] | str | None
"""Importance of each token, a scorer's name, or ``None`` for the default."""

_SAMPLED_TOKENS = 64
_TRIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class EncodePlan(Planned):
    """All that is decided about a packet; its frames are built one at a time when they are asked for.

    Attributes:
        allocation: tier of each token.
    """

    allocation: Allocation

    @torch.no_grad()
    def frame(self, index: int) -> memoryview:
        """Build one frame."""
        slot = self.header.layout.slot(index)
        return encode_frame(slot, packet_id(self.header_bytes), self.snapshot.layers, self.allocation)

    def frames(self, indices: Iterable[int] | None = None) -> Iterator[memoryview]:
        """Build frames one by one: all of them, or those asked for (to resume)."""
        return (self.frame(index) for index in (range(self.header.frames) if indices is None else indices))


@torch.no_grad()
def plan(
    snapshot: Snapshot,
    budget: float | None = None,
    policy: str = DEFAULT,
    scores: Scores = None,
    *,
    nominal_budget: float | None = None,
    quantizers: TierSpecs | str | Mapping[str, tuple[str, ...]] | None = None,
    seed: int = 0,
    frame_tokens: int | None = None,
    decay: float | None = None,
    n_sink: int = N_SINK,
    int4_allowed: bool = True,
    nonce: bytes | None = None,
    sensitivity: Sensitivity | None = None,
) -> EncodePlan:
    """Decide a packet. Arguments and errors as for `kvferry.encode`, and:

    Args:
        nonce: what tells this packet from others of the same tokens, instead of a sample of the cache.
        sensitivity: of the model, for the policy ``optimal``; default: what is kept for the snapshot's model.
    """
    if budget is not None and nominal_budget is not None:
        raise InvalidInput("give either budget (of actual bytes) or nominal_budget, not both")
    for name, value in (("budget", budget), ("nominal_budget", nominal_budget)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidInput(f"{name} = {value}: it is a fraction of the 16-bit packet, above 0")
    if frame_tokens is not None and not 1 <= frame_tokens <= MAX_TOKENS:
        raise InvalidInput(f"frame_tokens = {frame_tokens}: 1 … {MAX_TOKENS:,}, or None for one frame a layer")
    if not abs(seed) < 2**32:
        raise InvalidInput(f"seed = {seed}: of at most 32 bits")
    if n_sink < 0:
        raise InvalidInput(f"n_sink = {n_sink}: at least 0")
    check_tokens(snapshot.batch_size * snapshot.seq_len, 0)
    if not (scores is None or isinstance(scores, str)):
        if decay is not None:
            raise InvalidInput("decay is for scorers; scores that are given must have it in them already")
        scores = importance.given_scores(snapshot, scores)
    if policy in (*COMPOSED, MEASURED) and scores is None:
        scores = "observation_window" if importance.has_queries(snapshot) else "positional"
    specs = TierSpecs.make(quantizers)
    job = _Job(snapshot, scores, decay, seed, n_sink, frame_tokens or 0, int4_allowed, sensitivity)
    content = content_digest(snapshot) if nonce is None else xxhash.xxh3_128_digest(nonce)
    if policy not in COMPOSED:
        own_ladder = policy == MEASURED and quantizers is None and nominal_budget is None
        return job.fit(policy, None if own_ladder else specs, budget, nominal_budget, content)
    if nominal_budget is None and (budget is None or budget >= 1):
        return job.fit("full", specs, None, None, content)
    least: dict[str, float] = {}
    for name, own in AUTO:
        if own is None and (quantizers is not None or nominal_budget is not None):
            continue  # quantisers, and what stands for a tier, are the caller's to say
        try:
            return job.fit(name, own if quantizers is None else specs, budget, nominal_budget, content)
        except BudgetTooSmall as error:
            log.info("%s", error)
            least[name] = min(error.least_budget, least.get(name, math.inf))
    assert budget is not None
    raise none_fits(budget, least, job.why_raw, policy=policy)


def none_fits(budget: float, least: Mapping[str, float], why: str = "", *, policy: str) -> BudgetTooSmall:
    """The error for ``auto`` and ``fast``, by the least budget of what they tried; ``why`` says what is in the way."""
    best = min(least, key=least.__getitem__)
    tried = ", ".join(f"{name} {value:g}" for name, value in least.items())
    return BudgetTooSmall(
        f"policy {policy} cannot meet a budget of {budget:g} for this cache{why}; its least budget is {least[best]:g} "
        f"(of {tried}). Fewer bytes take more tokens, which share what each packet needs, or policy klt",
        budget,
        least[best],
    )


class _Job:
    """One cache to encode, with what need be found out about it only once."""

    def __init__(
        self,
        snapshot: Snapshot,
        scores: Tensor | str | None,  # checked, where they are given
        decay: float | None,
        seed: int,
        n_sink: int,
        frame_tokens: int,
        int4_allowed: bool,
        sensitivity: Sensitivity | None = None,
    ):
        if not snapshot.seq_len:
            raise InvalidInput("this snapshot holds no tokens: there is nothing to encode")
        for index, layer in enumerate(snapshot.identity.layers):
            if min(layer.kv_heads, layer.head_dim, layer.value_head_dim) < 1:
                raise InvalidInput(f"layer {index} has no heads, or heads of no channels: there is nothing to encode")
        self.snapshot = snapshot
        self.mask = snapshot.mask.cpu()
        self.seed, self.n_sink, self.int4_allowed = seed, n_sink, int4_allowed
        self.given, self.decay, self.sensitivity = scores, decay, sensitivity
        self.layout = Layout.of(snapshot.identity, snapshot.seq_len, frame_tokens)
        self.pinned = nonfinite_tokens(snapshot) & self.mask
        self.sizer = sizing.Sizer(snapshot, self.layout)
        self._scores: Tensor | None = None
        self._full: int | None = None
        self._container = 0  # bytes that a file has beyond the wire's; most for the largest packet

    @property
    def full_bytes(self) -> int:
        """Bytes of the packet of policy ``full``, in the same frames."""
        if self._full is None:
            allocation, _ = self._allocate("full", TierSpecs(), 1.0)
            size = self.sizer.size(allocation, "full", self._report("full", allocation, 1.0))
            self._full = size.wire
            self._container = sizing.file_size(size, self.layout) - size.wire
        return self._full

    def fit(
        self, name: str, specs: TierSpecs | None, budget: float | None, nominal: float | None, content: bytes
    ) -> EncodePlan:
        """The largest plan of a policy within a budget; ``specs`` are ``None`` for the policy's own."""
        chosen = policy(name)
        if name == MEASURED and self.layout.count and nominal is None and budget is not None and budget < 1:
            return self._fit_measured(specs, budget, content)
        specs = specs or TierSpecs()
        if nominal is not None:
            if nominal < chosen.least:
                raise InvalidInput(
                    f"policy {name} is defined from a nominal budget of {chosen.least} on, not at {nominal}"
                )
            return self._finish(name, specs, min(nominal, chosen.most), content)
        if budget is None or (budget >= 1 and chosen.most == 1):
            return self._finish(name, specs, chosen.most, content)
        limit = math.floor(budget * self.full_bytes)
        sizes: dict[float, int] = {}

        def size_of(b: float) -> int:
            if b not in sizes:
                allocation, cost = self._allocate(name, specs, b)
                size = self.sizer.size(allocation, name, self._report(name, allocation, cost))
                sizes[b] = size.wire + self._container
            return sizes[b]

        resolution = 1 / (16 * max(1, int(self.mask.sum(dim=1).max())))
        found = sizing.largest_fitting(size_of, limit, chosen.least, chosen.most, resolution)
        if found is None:
            raise self._too_small(name, budget, min(sizes.values()), capped=chosen.most == 1)
        return self._finish(name, specs, found, content)

    @property
    def why_raw(self) -> str:
        """What keeps tokens from being quantised; empty where nothing does."""
        pinned = int(self.pinned.sum())
        return f" ({pinned} tokens hold NaN or infinity and must go raw)" if pinned else ""

    def _too_small(self, name: str, budget: float, nbytes: int, *, capped: bool) -> BudgetTooSmall:
        """The error for a policy whose smallest packet has so many bytes."""
        least = sizing.round_budget(nbytes, self.full_bytes)
        if capped:
            least = min(least, 1.0)  # from there on all goes raw, whatever a file adds
        return BudgetTooSmall(
            f"policy {name} cannot meet a budget of {budget:g} for this cache{self.why_raw}; its least budget is "
            f"{least:g}",
            budget,
            least,
        )

    def _fit_measured(self, specs: TierSpecs | None, budget: float, content: bytes) -> EncodePlan:
        ladders = (specs,) if specs is not None else optimize.ladders(self.snapshot.identity, self.layout, budget)
        smallest = []
        for ladder in ladders:
            found = self._fit_ladder(ladder, budget, content)
            if isinstance(found, EncodePlan):
                return found
            smallest.append(found)
        raise self._too_small(MEASURED, budget, min(smallest) + self._container, capped=True)

    def _fit_ladder(self, specs: TierSpecs, budget: float, content: bytes) -> EncodePlan | int:
        """The best plan of these quantisers; the bytes of their smallest where none fits."""
        limit = math.floor(budget * self.full_bytes) - self._container
        known = kept(self.snapshot.identity) if self.sensitivity is None else self.sensitivity
        measured = optimize.measure(
            self.snapshot,
            self.layout,
            self.mask,
            self.pinned,
            specs,
            sensitivity=known,
            scores=self.given,
            decay=self.decay,
            n_sink=self.n_sink,
        )
        more = {"sensitivity": "flat" if known is None else "calibrated"}
        choice = measured.problem.smallest()
        allocation, cost, size = self._sized(measured, choice, more)
        least = size.wire
        for _ in range(_TRIES):
            # What the header takes hangs a little on the choice (names of quantisers): as it was with the last one.
            found = measured.problem.solve(limit - (size.wire - choice.total))
            if found is None:
                break
            choice = found
            allocation, cost, size = self._sized(measured, choice, more)
            if size.wire <= limit:
                return self._render(MEASURED, allocation, cost, cost, more, content)
        return least

    def _sized(
        self, measured: optimize.Measured, choice: Choice, more: dict[str, Any]
    ) -> tuple[Allocation, float, sizing.Size]:
        allocation = measured.allocation(choice)
        cost = optimize.nominal_cost(allocation)
        report = self._report(MEASURED, allocation, cost) | more
        return allocation, cost, self.sizer.size(allocation, MEASURED, report)

    def _finish(self, name: str, specs: TierSpecs, nominal: float, content: bytes) -> EncodePlan:
        allocation, cost = self._allocate(name, specs, nominal)
        return self._render(name, allocation, nominal, cost, {}, content)

    def _render(
        self, name: str, allocation: Allocation, nominal: float, cost: float, more: dict[str, Any], content: bytes
    ) -> EncodePlan:
        report = self._report(name, allocation, cost) | more
        size = self.sizer.size(allocation, name, report)
        header = PacketHeader(
            identity=self.snapshot.identity,
            token_ids=self.snapshot.token_ids.cpu(),
            positions=self.snapshot.positions.cpu(),
            mask=allocation.sent,
            policy=name,
            quantizers=sizing.quantizer_names(allocation, self.layout),
            nominal_budget=nominal,
            full_bytes=self.full_bytes,
            payload_bytes=sum(size.frames),
            frames=self.layout.count,
            frame_tokens=self.layout.frame_tokens,
            content=content,
            report=report,
        )
        message = render_header(header)
        assert len(message) == size.header
        check_tokens(self.mask.numel(), len(message))
        return EncodePlan(self.snapshot, replace(header, nbytes=len(message)), message, size, allocation)

    def _allocate(self, name: str, specs: TierSpecs, nominal: float) -> tuple[Allocation, float]:
        chosen = POLICIES[name]
        scores = self._ranked() if chosen.ranked else torch.zeros(self.mask.shape)
        return allocate_tokens(
            chosen,
            scores,
            nominal,
            self.mask,
            self.pinned,
            specs,
            n_sink=self.n_sink,
            seed=self.seed,
            int4_allowed=self.int4_allowed,
        )

    def _ranked(self) -> Tensor:
        if self._scores is None:
            if isinstance(self.given, Tensor):
                self._scores = self.given
            else:
                self._scores = importance.token_scores(self.snapshot, self.given, decay=self.decay)
        return self._scores

    def _report(self, name: str, allocation: Allocation, cost: float) -> dict[str, Any]:
        report: dict[str, Any] = {
            "padding": int((~self.mask).sum()),
            "dropped": int((self.mask & ~allocation.sent).sum()),
            "nonfinite": int(self.pinned.sum()),
            "nominal_cost": round(cost, 6),
        }
        if POLICIES[name].ranked:
            given = self.given
            report["scorer"] = (
                "given" if isinstance(given, Tensor) else given or importance.default_scorer(self.snapshot)
            )
            report["n_sink"] = self.n_sink
        if name == "random_tier":
            report["seed"] = self.seed
        if name == "adaptive":
            report["int4_allowed"] = self.int4_allowed
        return report


def nonfinite_tokens(snapshot: Snapshot) -> Bool[Tensor, "batch seq"]:
    """Tokens whose keys or values hold a NaN or an infinity in any layer (also in fp32, which the quantisers use)."""
    found = torch.zeros(snapshot.batch_size, snapshot.seq_len, dtype=torch.bool)
    for layer in snapshot.layers:
        bad = finite.nonfinite_in_layer(layer)
        if bad is not None:
            found[:, layer.first :] |= bad
    return found


def content_digest(snapshot: Snapshot) -> bytes:
    """Digest of up to 64 evenly spaced tokens of every layer's keys and values.

    It tells packets of different caches of the same tokens apart, so that frames of one are refused by the other. It is
    a sample: a sender that cannot afford even that, or that needs more, passes a nonce of its own.
    """
    state = xxhash.xxh3_128()
    for layer in snapshot.layers:
        for tensor in (layer.keys, layer.values):
            if tensor is None or tensor.numel() == 0:
                continue
            count = min(_SAMPLED_TOKENS, layer.held)
            places = np.linspace(0, layer.held - 1, count).round().astype(np.int64)
            sample = tensor.index_select(2, torch.from_numpy(places).to(tensor.device)).cpu().contiguous()
            state.update(memoryview(sample.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    digest = state.digest()
    assert len(digest) == DIGEST_BYTES
    return digest
