"""A packet whose frames are built layer by layer, while later layers do not exist yet.

A packet begins with a header that says how large all of it is, so what it says must be known ahead: how many tokens of
each tier every frame has, and which tokens are dropped. A `StreamPlan` settles that from the ids, the mask and the
budget alone, by ranking tokens by their position. Which tokens of a frame get the better tiers is left open until the
layer is there: its own scores decide, within those numbers, so that no size changes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kvferry.errors import BudgetTooSmall, InvalidInput, UnsupportedCache
from kvferry.ship import finite
from kvferry.ship.allocate import Allocation, TierSpecs
from kvferry.ship.frame import encode_frame
from kvferry.ship.header import PacketHeader, packet_id, render_header
from kvferry.ship.importance import scorer_named
from kvferry.ship.layout import FrameSlot
from kvferry.ship.plan import CHANNEL_KEYS, COMPOSED, EncodePlan, none_fits, plan
from kvferry.ship.policy import POLICIES, RAW
from kvferry.ship.policy.tiers import N_SINK, ranking
from kvferry.ship.transform.plan import POLICY as KLT
from kvferry.snapshot import Identity, LayerState, Snapshot, dtype_from_name

TEMPLATE = "positional"
"""Scorer of the plan itself: sinks, then the newest tokens first. It needs no cache."""

AUTO: tuple[tuple[str, TierSpecs | None], ...] = (
    ("optimal", None),
    ("sink_protect", CHANNEL_KEYS),
    ("greedy", CHANNEL_KEYS),
    ("sink_protect", TierSpecs()),
    ("greedy", TierSpecs()),
    ("uniform_int4", TierSpecs()),
)
"""What ``auto`` and ``fast`` try below a budget of 1, best first.

Sizes hang on the number of tokens and, for ``optimal``, on the errors that calibration expects of each layer; only it
takes a budget in bytes alone.
"""

_FIRST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class StreamPlan:
    """All that is known about a packet before its cache is.

    Attributes:
        template: the plan made without the cache; its header, sizes and counts hold, its map of tiers may not.
        scorer: what ranks the tokens of each layer by that layer alone; ``None``: the template's map is kept.
        decay: λ of the scorer.
        n_sink: first tokens of each sequence, which keep the template's tiers.
    """

    template: EncodePlan
    scorer: str | None
    decay: float
    n_sink: int

    @property
    def header(self) -> PacketHeader:
        return self.template.header

    @property
    def header_bytes(self) -> bytes:
        """The header message: it can go out before the prefill begins."""
        return self.template.header_bytes

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, exactly."""
        return self.template.nbytes

    @property
    def full_bytes(self) -> int:
        """Bytes of the same packet with every token raw."""
        return self.template.full_bytes

    @property
    def frame_sizes(self) -> tuple[int, ...]:
        """Bytes of each frame, exactly."""
        return self.template.frame_sizes

    @torch.no_grad()
    def layer_frames(self, index: int, layer: LayerState) -> Iterator[memoryview]:
        """Build the frames of one layer, in order, from that layer alone.

        Raises:
            UnsupportedCache: a token of this layer holds NaN or infinity, and no place at 16 bit is left for it.
            InvalidInput: the layer is not the one that was planned for, or lacks the queries that the scorer needs.
        """
        stand_in = self.template.snapshot.layers[index]
        if layer.keys is None or stand_in.keys is None or layer.keys.shape != stand_in.keys.shape:
            raise InvalidInput(f"layer {index} has another shape than the plan says")
        layers = list(self.template.snapshot.layers)
        layers[index] = layer
        bad = finite.nonfinite_in_layer(layer)
        scores = None if self.scorer is None else self._scores(layer, bad)
        layout = self.header.layout
        owner = packet_id(self.header_bytes)
        for number in range(layout.ends[index - 1] if index else 0, layout.ends[index]):
            slot = layout.slot(number)
            allocation = self.template.allocation if scores is None else self._arranged(slot, layer, scores)
            if bad is not None:
                _require_raw(allocation, slot, bad[:, slot.start - layer.first : slot.stop - layer.first])
            yield encode_frame(slot, owner, layers, allocation)

    def frames(self, snapshot: Snapshot) -> Iterator[memoryview]:
        """The frames of a whole cache: byte for byte those that `layer_frames` gives layer by layer."""
        for index, layer in enumerate(snapshot.layers):
            if layer.keys is not None:
                yield from self.layer_frames(index, layer)

    def _scores(self, layer: LayerState, bad: Tensor | None) -> Float[Tensor, "batch held"]:
        assert self.scorer is not None
        scores = scorer_named(self.scorer).score(layer, self.template.snapshot.mask).cpu()
        distance = torch.arange(layer.held - 1, -1, -1, dtype=torch.float32)
        scores = scores * torch.exp(-self.decay * distance)
        return scores if bad is None else torch.where(bad, _FIRST, scores)

    def _arranged(self, slot: FrameSlot, layer: LayerState, scores: Tensor) -> Allocation:
        """The template's tiers of a frame, given out anew: to its tokens in the order of their scores."""
        template = self.template.allocation
        here = scores[:, slot.start - layer.first : slot.stop - layer.first]
        keys = self._arrange(template.tiers(slot.first_layer, keys=True), slot, here)
        own = None if template.same_map else self._arrange(template.tiers(slot.first_layer, keys=False), slot, here)
        values = keys if own is None else own
        return Allocation(template.specs, keys, values, template.sent)

    def _arrange(
        self, tiers: UInt8[Tensor, "batch seq"], slot: FrameSlot, scores: Float[Tensor, "batch tokens"]
    ) -> UInt8[Tensor, "1 batch seq"]:
        out = tiers.clone()
        sent, mask = self.template.allocation.sent, self.template.snapshot.mask
        for row in range(out.shape[0]):
            free = sent[row].clone()
            free[mask[row].nonzero().flatten()[: self.n_sink]] = False
            tokens = free[slot.start : slot.stop].nonzero().flatten()
            order = ranking(scores[row, tokens], 0)
            out[row, slot.start + tokens[order]] = tiers[row, slot.start + tokens].sort().values
        return out.unsqueeze(0)


@torch.no_grad()
def stream_plan(
    stand_in: Snapshot,
    budget: float | None = None,
    policy: str = "auto",
    scorer: str | None = None,
    *,
    decay: float | None = None,
    n_sink: int = N_SINK,
    nonce: bytes | None = None,
    **options: Any,
) -> StreamPlan:
    """Decide a packet before its cache exists.

    Args:
        stand_in: what the cache will look like, from `stand_in_for`.
        budget: as for `kvferry.encode`.
        policy: likewise; ``auto`` is ``fast`` here, and tries `AUTO`; ``optimal`` knows expected errors only, not this
            cache's own.
        scorer: a name in `SCORERS`, asked about each layer apart; ``None``: the template's, which asks no cache.
        decay: λ a token of distance; ``None``: the scorer's own.
        n_sink: first tokens that lead every ranking.
        nonce: what tells this packet from others of the same tokens; by default random.
        options: the others of `kvferry.encode`: ``nominal_budget``, ``quantizers``, ``seed``, ``frame_tokens``,
            ``int4_allowed``.

    Raises:
        InvalidInput, BudgetTooSmall, TooLarge: as `kvferry.encode`.
    """
    own = scorer is not None and scorer != TEMPLATE
    named = scorer_named(scorer or TEMPLATE)
    rate = named.decay if decay is None else decay
    if not 0 <= rate < float("inf"):
        raise InvalidInput(f"a decay of {rate} is not a number of at least 0")
    options |= {
        "decay": None if own else decay,
        "n_sink": n_sink,
        "nonce": secrets.token_bytes(16) if nonce is None else nonce,
    }
    if policy in COMPOSED:
        template = _auto(stand_in, budget, policy, options)
    elif why := why_not(policy):
        raise InvalidInput(why)
    else:
        template = plan(stand_in, budget, policy, TEMPLATE, **options)
    chosen = POLICIES.get(template.header.policy)
    if own and chosen is not None and chosen.ranked:
        return StreamPlan(_named(template, f"{scorer} of each layer"), scorer, rate, n_sink)
    return StreamPlan(template, None, rate, n_sink)


def why_not(policy: str) -> str:
    """Why packets of this policy cannot be planned before their cache exists; empty where they can."""
    return (
        f"policy {policy} finds its step on the whole packet: it cannot be pipelined, nor planned before the cache "
        "is there"
        if policy == KLT
        else ""
    )


def _auto(stand_in: Snapshot, budget: float | None, policy: str, options: dict[str, Any]) -> EncodePlan:
    """The first of `AUTO` that meets the budget; everything raw at 1 and above."""
    in_bytes = options.get("nominal_budget") is None
    if in_bytes and (budget is None or budget >= 1):
        return plan(stand_in, budget, "full", TEMPLATE, **options)
    least: dict[str, float] = {}
    for name, specs in AUTO if in_bytes else AUTO[1:]:
        chosen = options if options.get("quantizers") is not None else {**options, "quantizers": specs}
        try:
            return plan(stand_in, budget, name, TEMPLATE, **chosen)
        except BudgetTooSmall as error:
            least[name] = min(error.least_budget, least.get(name, math.inf))
    assert budget is not None
    raise none_fits(budget, least, policy=policy)


def stand_in_for(
    identity: Identity,
    token_ids: Int[Tensor, "batch seq"],
    positions: Int[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
) -> Snapshot:
    """A snapshot of the shape that the cache of these tokens will have; its keys and values take no memory."""
    batch, seq_len = token_ids.shape
    nothing = torch.zeros((), dtype=dtype_from_name(identity.dtype))
    layers = []
    for geometry in identity.layers:
        held = geometry.kind.held(seq_len)
        if geometry.kind.name == "shared":
            layers.append(LayerState(geometry.kind, None, None, seq_len))
            continue
        keys = nothing.expand(batch, geometry.kv_heads, held, geometry.head_dim)
        values = nothing.expand(batch, geometry.kv_heads, held, geometry.value_head_dim)
        layers.append(LayerState(geometry.kind, keys, values, seq_len))
    return Snapshot(identity, token_ids, positions, mask, tuple(layers))


def _require_raw(allocation: Allocation, slot: FrameSlot, bad: Bool[Tensor, "batch tokens"]) -> None:
    tokens = slice(slot.start, slot.stop)
    coded = torch.zeros_like(bad)
    for keys in (True, False):
        coded |= allocation.tiers(slot.first_layer, keys=keys)[:, tokens] != RAW
    lost = int((bad & coded & allocation.sent[:, tokens]).sum())
    if lost:
        raise UnsupportedCache(
            f"{slot}: {lost} tokens hold NaN or infinity, which only 16 bit can carry, and the sizes of this packet "
            "were announced before that was known: send it without pipelining (--no-pipeline), which plans for them"
        )


def _named(template: EncodePlan, scorer: str) -> EncodePlan:
    """The same plan with another scorer in its report; unchanged where that would change the header's size."""
    header = replace(template.header, report={**template.header.report, "scorer": scorer})
    message = render_header(header)
    if len(message) != len(template.header_bytes):
        return template
    return replace(template, header=replace(header, nbytes=len(message)), header_bytes=message)
