"""The two verbs: a snapshot into a packet, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from kvferry.errors import BudgetTooSmall, InvalidInput
from kvferry.ship.allocate import TierSpecs
from kvferry.ship.packet import Packet
from kvferry.ship.plan import DEFAULT, EncodePlan, Scores, nonfinite_tokens, plan
from kvferry.ship.policy.tiers import N_SINK
from kvferry.ship.reader import FREE_BYTES, MAX_EXPANSION, PacketReader, read_all
from kvferry.ship.sizing import round_budget
from kvferry.ship.transform.outliers import outlying_tokens
from kvferry.ship.transform.plan import POLICY, TransformJob, TransformPlan
from kvferry.ship.transform.store import Given, for_model, kept_for
from kvferry.snapshot import Snapshot

TRANSFORM_BELOW = 0.4
"""Budget below which ``auto`` takes the policy ``klt`` where it can. At 0.4 both it and ``fast`` are at the noise of a
bfloat16 model; below, it loses less at equal bytes on SmolLM2-135M and Gemma-3-270M."""


def encode(
    snapshot: Snapshot,
    budget: float | None = None,
    policy: str = "auto",
    scores: Scores = None,
    *,
    nominal_budget: float | None = None,
    quantizers: TierSpecs | str | Mapping[str, tuple[str, ...]] | None = None,
    seed: int = 0,
    frame_tokens: int | None = None,
    decay: float | None = None,
    n_sink: int = N_SINK,
    int4_allowed: bool = True,
    transform: Given = None,
) -> Packet:
    """Encode a cache in at most ``budget`` of the bytes of its 16-bit packet.

    Args:
        snapshot: the cache.
        budget: actual bytes over those of the packet with every token raw, all overhead counted, also that of the file
            that `Packet.save` writes. At 1 and above the cache is carried bit for bit. ``None``: the policy's most.
        policy: a name in `kvferry.ship.policy.POLICIES`, ``klt``, ``fast``, or ``auto``: below a budget of
            `TRANSFORM_BELOW`, where a transform of the model is kept or given, ``klt``; else ``fast``; the other one
            where that has no plan of so few bytes. Settings that ``klt`` does not take (``scores``, ``nominal_budget``,
            ``quantizers``, ``decay``) ask for ``fast``.
        scores: importance of each token, a tensor or lists, ``(batch, seq)`` or ``(seq,)``, higher = keep; or a
            scorer's name;
            ``None``: attention of the last queries where the snapshot has them; else norms of keys and values, as in
            the paper, for a policy that is named, and recency for ``auto`` and ``fast``, which do better with it.
        nominal_budget: the policy's b instead of a budget, for comparison with the paper.
        quantizers: what stands behind the tiers; see `TierSpecs`. ``None``: the paper's, symmetric with a scale a
            token, for a policy that is named; for ``auto`` and ``fast`` the best that fits.
        seed: of `random_tier`.
        frame_tokens: tokens a frame; default one frame a layer.
        decay: λ a token of distance from the end; default the scorer's own. Not together with scores of your own.
        n_sink: first tokens that lead every ranking.
        int4_allowed: what a probe says of the model; the policy ``adaptive`` sends nothing at INT4 where it is false.
        transform: of policy ``klt``, which is defined by it, or its file, also for ``auto``; default: the newest one of
            the model that is kept in the cache folder. The receiver needs the same one.

    Raises:
        BudgetTooSmall: the policy has no plan that fits; ``least_budget`` would do.
        InvalidInput: an unknown name, or numbers that make no sense.
        TooLarge: more tokens than a packet can have (2^26, all sequences together).
    """
    return pack(
        any_plan(
            snapshot,
            budget,
            policy,
            scores,
            nominal_budget=nominal_budget,
            quantizers=quantizers,
            seed=seed,
            frame_tokens=frame_tokens,
            decay=decay,
            n_sink=n_sink,
            int4_allowed=int4_allowed,
            transform=transform,
        )
    )


def any_plan(
    snapshot: Snapshot,
    budget: float | None = None,
    policy: str = "auto",
    scores: Scores = None,
    *,
    transform: Given = None,
    nonce: bytes | None = None,
    **options: Any,
) -> EncodePlan | TransformPlan:
    """The plan of any policy; arguments as for `encode`."""
    given: object = budget
    if not (given is None or isinstance(given, Real)):
        raise InvalidInput(f"budget = {budget!r}: it is a number, a fraction of the 16-bit packet")
    if policy == DEFAULT:
        return _auto_plan(snapshot, budget, scores, transform, nonce, options)
    if policy != POLICY:
        if transform is not None:
            raise InvalidInput(f"a transform is for policies {POLICY} and {DEFAULT}, not for {policy}")
        return plan(snapshot, budget, policy, scores, nonce=nonce, **options)
    unused = _named(options)
    if scores is not None or unused:
        named = ", ".join(["scores"] * (scores is not None) + unused)
        raise InvalidInput(f"policy {POLICY} ranks and quantises by its transform: it takes no {named}")
    return _transform_plan(snapshot, budget, transform, nonce, options)


def _auto_plan(
    snapshot: Snapshot,
    budget: float | None,
    scores: Scores,
    given: Given,
    nonce: bytes | None,
    options: Mapping[str, Any],
) -> EncodePlan | TransformPlan:
    """The better one of ``klt`` and ``fast`` at this budget, or what is left where it has no plan of so few bytes."""

    def fast() -> EncodePlan:
        return plan(snapshot, budget, DEFAULT, scores, nonce=nonce, **options)

    def coded() -> EncodePlan | TransformPlan | None:
        transform = kept_for(snapshot.identity) if given is None else for_model(snapshot.identity, given)
        return None if transform is None else _transform_plan(snapshot, budget, transform, nonce, options)

    if budget is None or budget >= 1 or scores is not None or _named(options):
        return fast()
    failed: list[BudgetTooSmall] = []
    for way in (coded, fast) if budget < TRANSFORM_BELOW else (fast, coded):
        try:
            found = way()
        except BudgetTooSmall as error:
            failed.append(error)
        else:
            if found is not None:
                return found
    raise min(failed, key=lambda error: error.least_budget)


def _named(options: Mapping[str, Any]) -> list[str]:
    """Settings that transform coding does not take."""
    return [name for name in ("nominal_budget", "quantizers", "decay") if options.get(name) is not None]


@torch.no_grad()
def _transform_plan(
    snapshot: Snapshot, budget: float | None, given: Given, nonce: bytes | None, options: Mapping[str, Any]
) -> EncodePlan | TransformPlan:
    if budget is not None and not 0 < budget < math.inf:
        raise InvalidInput(f"budget = {budget}: it is a fraction of the 16-bit packet, above 0")
    n_sink, frame_tokens = options.get("n_sink", N_SINK), options.get("frame_tokens")
    transform = for_model(snapshot.identity, given)
    full = plan(snapshot, None, "full", nonce=nonce, n_sink=n_sink, frame_tokens=frame_tokens)
    if budget is not None and budget >= 1:
        return full
    mask = snapshot.mask.cpu()
    nonfinite = nonfinite_tokens(snapshot) & mask
    pinned = nonfinite | (outlying_tokens(snapshot, transform) & mask)
    planned = TransformJob(
        snapshot,
        transform,
        pinned,
        int(nonfinite.sum()),
        n_sink,
        full.full_bytes,
        frame_tokens or 0,
        full.header.content,
    ).fit(budget)
    least = math.ceil((planned.header.sent_bytes(1) - FREE_BYTES) / MAX_EXPANSION)
    if planned.nbytes < least:
        raise BudgetTooSmall(
            f"policy {POLICY} could meet a budget of {budget or 0:g} for this cache, but no reader takes a packet that "
            f"grows more than {MAX_EXPANSION} times; the least budget is {round_budget(least, full.full_bytes):g}",
            budget or 0.0,
            round_budget(least, full.full_bytes),
        )
    return planned


def pack(plan: EncodePlan | TransformPlan) -> Packet:
    """Build every frame of a plan."""
    return Packet(plan.header_bytes, tuple(plan.frames()), plan.header)


def decode(
    packet: Packet,
    *,
    max_bytes: int | None = None,
    device: torch.device | str | None = None,
    transform: Given = None,
) -> Snapshot:
    """Decode a packet. Dropped tokens are False in the mask and zero in the tensors, as padding is.

    Every checksum is verified here also, as a packet's frames may lie in memory, or in a file, that others can write.

    Args:
        packet: from `encode`, `Packet.load` or `Packet.from_bytes`.
        max_bytes: most bytes of keys and values to make (dropped tokens count), and of ids, positions and mask, which
            take 17 bytes a token; default 16 GiB.
        device: where its tensors go; default CPU.
        transform: what a packet of policy ``klt`` was written with, or its file; default: the one in the cache folder
            that the packet names.

    Raises:
        CorruptPacket, UnsupportedVersion: the packet is inconsistent, or newer than this kvferry.
        InvalidInput: the transform that the packet names is not here.
        TooLarge: the cache would exceed ``max_bytes``.
    """
    if not isinstance(packet, Packet):
        raise InvalidInput(f"a {type(packet).__name__} is no Packet: read it with Packet.load or Packet.from_bytes")
    reader = PacketReader(packet.header_bytes, max_bytes=max_bytes, device=device, transform=transform)
    return read_all(reader, packet.frames)


def estimate_size(snapshot: Snapshot, budget: float | None = None, policy: str = "auto", **options: Any) -> int:
    """``len(encode(snapshot, budget, policy, …))``, exactly; only for policy ``klt`` the packet is built to know."""
    return any_plan(snapshot, budget, policy, **options).nbytes
