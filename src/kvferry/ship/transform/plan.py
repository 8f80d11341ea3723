"""A plan for policy ``klt``: one step for the whole cache, found on the packet itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvferry.errors import BudgetTooSmall
from kvferry.ship import sizing
from kvferry.ship.frame import CODED, LEAST_FRAME, SPECS, envelope
from kvferry.ship.header import PacketHeader, check_tokens, packet_id, render_header
from kvferry.ship.layout import WHOLE, Layout
from kvferry.ship.planned import Planned
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.basis import LEVELS
from kvferry.ship.transform.block import STEP_CODES, Components, cost
from kvferry.ship.transform.body import Span, encode_body, group_rows
from kvferry.ship.transform.weights import MOST, attention_scores, token_octaves
from kvferry.snapshot import Snapshot

POLICY = "klt"

FRAME_TOKENS = 4096
"""Tokens a frame unless the caller says otherwise: what is held in float32 at a time at the receiver."""

_LARGEST_BITS = 29
"""A value is at most so many bits wide in steps: codes have 30, and one is for the mean that is taken off."""

_SAMPLED = 256
"""Tokens of a block that the search for the step looks at."""


@dataclass(frozen=True, slots=True, eq=False)
class TransformPlan(Planned):
    """A packet of policy ``klt``, with every frame's body built already: its size is known by that alone.

    Attributes:
        bodies: of the frames.
    """

    bodies: tuple[bytes, ...]

    def frame(self, index: int) -> memoryview:
        """The frame of that index."""
        return envelope(self.header.layout.slot(index), packet_id(self.header_bytes), CODED, self.bodies[index])

    def frames(self) -> Iterator[memoryview]:
        """All of them, in order."""
        return (self.frame(index) for index in range(len(self.bodies)))


class TransformJob:
    """One cache to encode by a transform, analysed once.

    Args:
        snapshot: the cache.
        transform: of its model.
        pinned: tokens that are sent raw whatever they cost.
        nonfinite: how many of them hold NaN or infinity.
        n_sink: first tokens of each sequence, which are sent raw.
        full_bytes: of the packet with every token raw.
        frame_tokens: tokens a frame; 0 for `FRAME_TOKENS`.
        content: digest of the cache, or the sender's nonce.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        transform: Transform,
        pinned: Bool[Tensor, "batch seq"],
        nonfinite: int,
        n_sink: int,
        full_bytes: int,
        frame_tokens: int,
        content: bytes,
    ):
        self.snapshot, self.transform, self.full_bytes, self.content = snapshot, transform, full_bytes, content
        self.mask = snapshot.mask.cpu()
        self.raw = (pinned | (self.mask & (self.mask.cumsum(dim=1) <= n_sink))) & self.mask
        self.layout = Layout.of(snapshot.identity, snapshot.seq_len, frame_tokens or FRAME_TOKENS, WHOLE)
        self.n_sink, self.nonfinite, self.outlying = n_sink, nonfinite, int(pinned.sum()) - nonfinite
        self.spans = [Span(slot.start, slot.stop, self.layout.firsts, self.mask, self.raw) for slot in self.layout]
        self.blocks = self._analyse()
        self.raw_bytes = sum(self._raw_bytes())

    def fit(self, budget: float | None) -> TransformPlan:
        """The finest step whose packet has at most ``budget`` of the bytes.

        Args:
            budget: ``None``: all of them, or the coarsest packet where that has more (of a few tokens).

        Raises:
            BudgetTooSmall: not even the coarsest has.
        """
        limit = max(1, math.floor((1.0 if budget is None else budget) * self.full_bytes))
        low, high = self._finest() - 1, STEP_CODES[1]  # coarser is smaller
        while high - low > 1:
            middle = (low + high) // 2
            if self._estimate(middle) > limit:
                low = middle
            else:
                high = middle
        code = max(low + 1, high - 1)
        while True:
            plan = self._build(code)
            nbytes = plan.nbytes + sizing.file_size(plan.size, plan.header.layout) - plan.size.wire
            if nbytes <= limit or (budget is None and code >= STEP_CODES[1]):
                return plan
            if budget is not None and code >= STEP_CODES[1]:
                least = sizing.round_budget(nbytes, self.full_bytes)
                raise BudgetTooSmall(
                    f"policy {POLICY} cannot meet a budget of {budget:g} for this cache; its least budget is {least:g}",
                    budget,
                    least,
                )
            # A step more than a small excess needs is lost quality; one less is another round.
            code = min(STEP_CODES[1], code + max(1, round(32 * math.log2(nbytes / limit))))

    def _finest(self) -> int:
        """The finest step code at which nothing is beyond the largest code."""
        most = max((float(own.values.abs().max()) for blocks in self.blocks for own in blocks.values()), default=0.0)
        if most == 0:
            return STEP_CODES[0]
        code = math.ceil(LEVELS * (math.log2(most) + MOST / 2 - _LARGEST_BITS))
        return min(max(code, STEP_CODES[0]), STEP_CODES[1])

    def _analyse(self) -> list[dict[tuple[int, int], Components]]:
        scores = attention_scores(self.snapshot)
        found: list[dict[tuple[int, int], Components]] = [{} for _ in self.spans]
        for row in range(self.snapshot.batch_size):
            for group, (basis, importance) in enumerate(
                zip(self.transform.bases, self.transform.importance, strict=True)
            ):
                first = basis.group.layers[0]
                held = [span.tokens(row, first, raw=False) for span in self.spans]
                tokens = torch.cat(held)
                if not len(tokens):
                    continue
                own = None if scores is None else scores[:, row]
                octaves = token_octaves(importance, basis.group, tokens, self.snapshot.seq_len, own)
                parts = torch.split(octaves, [len(part) for part in held])
                for blocks, part, weights in zip(found, held, parts, strict=True):
                    if len(part):
                        rows = group_rows(self.snapshot, self.transform.rotaries, basis.group, row, part)
                        blocks[row, group] = Components.of(basis, rows, weights)
        return found

    def _estimate(self, code: int) -> float:
        """About how many bytes the packet has at that step, from a sample of its tokens."""
        total = float(self.raw_bytes)
        for blocks in self.blocks:
            for (_, group), own in blocks.items():
                count = own.values.shape[1]
                stride = max(1, count // _SAMPLED)
                part = own.every(stride)
                basis = self.transform.bases[group]
                total += cost(part, basis, self.transform.tables, code) * count / part.values.shape[1]
                total += count / 2 + len(basis.mean)
        return total

    def _raw_bytes(self) -> Iterator[int]:
        for span in self.spans:
            for index, layer in enumerate(self.snapshot.layers):
                if layer.keys is not None and layer.held:
                    each = layer.nbytes // (layer.held * self.snapshot.batch_size)
                    yield each * sum(len(span.tokens(row, index, raw=True)) for row in range(self.snapshot.batch_size))

    def _build(self, code: int) -> TransformPlan:
        bodies = tuple(
            encode_body(self.snapshot, self.transform, span, blocks, code)
            for span, blocks in zip(self.spans, self.blocks, strict=True)
        )
        sizes = tuple(LEAST_FRAME + len(body) for body in bodies)
        header = PacketHeader(
            identity=self.snapshot.identity,
            token_ids=self.snapshot.token_ids.cpu(),
            positions=self.snapshot.positions.cpu(),
            mask=self.mask,
            policy=POLICY,
            quantizers={"keys": list(SPECS), "values": list(SPECS)},
            nominal_budget=min(1.0, sum(sizes) / self.full_bytes),
            full_bytes=self.full_bytes,
            payload_bytes=sum(sizes),
            frames=self.layout.count,
            frame_tokens=self.layout.frame_tokens,
            content=self.content,
            report=self._report(code),
            cut=WHOLE,
        )
        message = render_header(header)
        check_tokens(self.mask.numel(), len(message))
        return TransformPlan(
            self.snapshot, replace(header, nbytes=len(message)), message, sizing.Size(len(message), sizes), bodies
        )

    def _report(self, code: int) -> dict[str, Any]:
        return {
            "padding": int((~self.mask).sum()),
            "dropped": 0,
            "nonfinite": self.nonfinite,
            "outlying": self.outlying,
            "n_sink": self.n_sink,
            "raw_tokens": int(self.raw.sum()),
            "step_code": code,
            "transform": self.transform.digest,
        }
