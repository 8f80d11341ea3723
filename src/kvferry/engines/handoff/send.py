"""The producer's prefill, encode and send: one after another, or all at once, layer by layer.

Pipelined, a second thread encodes and sends layer i while the first one prefills layer i + 1; the header, with every
size in it, goes out when the prefill begins. The packet is then a `StreamPlan`'s: which tokens get the better tiers is
decided layer by layer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from kvferry.channel import Outgoing
from kvferry.engines.handoff.clock import Stopwatch
from kvferry.engines.handoff.job import HandoffJob
from kvferry.errors import IncompatibleIdentity
from kvferry.evaluate.kept import Int4Answer
from kvferry.hf.capture import capture
from kvferry.hf.observe import OBSERVABLE, QUERY_WINDOW
from kvferry.hf.stream import stream_capture
from kvferry.hf.tokens import as_mask, positions_of
from kvferry.ship.encode import any_plan
from kvferry.ship.plan import COMPOSED, FAST, EncodePlan
from kvferry.ship.policy import POLICIES
from kvferry.ship.stream import TEMPLATE, StreamPlan, stand_in_for, stream_plan, why_not
from kvferry.ship.transform.plan import POLICY as KLT
from kvferry.ship.transform.plan import TransformPlan
from kvferry.snapshot import Identity, LayerState, Snapshot

_LARGEST_FRAME = 16 << 20

_STREAMED_WINDOW = 16
"""Last queries that rank the tokens of a layer while later layers are prefilled: asked about one layer alone, 16 choose
as well as 32 (KL to the 16-bit cache on SmolLM2-135M), in half the time, which prefill and encode share."""

Say = Callable[[str], None]
"""Told the name of each stage as it begins."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What went out, and what it took.

    Attributes:
        snapshot: the cache as it stayed here.
        planned: of the packet.
        prefill, encode: clocks of the two.
        why_plain: why layers did not go out while later ones were being prefilled; empty where they did.
    """

    snapshot: Snapshot
    planned: EncodePlan | StreamPlan | TransformPlan
    prefill: Stopwatch
    encode: Stopwatch
    why_plain: str

    def describe(self) -> dict[str, Any]:
        """The packet, for the report."""
        return {
            "packet_bytes": self.planned.nbytes,
            "full_bytes": self.planned.full_bytes,
            "cache_bytes": self.snapshot.nbytes,
            "nominal_budget": self.planned.header.nominal_budget,
            "policy": self.planned.header.policy,
            "quantizer": self.planned.header.quantizer,
            "scorer": self.planned.header.report.get("scorer"),
        }


def send(
    model: Any,
    identity: Identity,
    job: HandoffJob,
    ids: Tensor,
    answer: Int4Answer,
    outgoing: Outgoing,
    note: bytes,
    say: Say,
) -> Sent:
    """Prefill ``ids`` ``(1, tokens)`` and send their cache; returns when the last frame is pushed."""
    why = why_not(job.policy)
    if why and (job.pipeline or job.plan_ahead):
        job = replace(job, pipeline=False, plan_ahead=False)
    if not job.pipeline:
        why = why or "not asked for"
        return _send_whole(model, identity, job, ids, answer, outgoing, note, say, why)
    return _send_pipelined(model, identity, job, ids, answer, outgoing, note, say)


def _send_whole(
    model: Any,
    identity: Identity,
    job: HandoffJob,
    ids: Tensor,
    answer: Int4Answer,
    outgoing: Outgoing,
    note: bytes,
    say: Say,
    why: str,
) -> Sent:
    say("prefill")
    prefill, encoding = Stopwatch(), Stopwatch()
    with prefill.running():
        snapshot = capture(model, ids, query_window=_window(job))
    say("encode and send")
    with encoding.running():
        planned, frames = _whole(identity, job, ids, answer, snapshot)
    outgoing.begin(planned.header_bytes, planned.frame_sizes, note)
    while True:
        with encoding.running():
            frame = next(frames, None)
        if frame is None:
            break
        outgoing.push(frame)
    return Sent(snapshot, planned, prefill, encoding, why)


def _whole(
    identity: Identity, job: HandoffJob, ids: Tensor, answer: Int4Answer, snapshot: Snapshot
) -> tuple[EncodePlan | StreamPlan | TransformPlan, Iterator[memoryview]]:
    """The plan of a cache that is whole, and its frames."""
    if job.plan_ahead:
        ahead = _plan_ahead(identity, job, ids, answer)
        return ahead, ahead.frames(snapshot)
    # As pipelined; which transforms the consumer has is not known.
    policy = FAST if job.policy in COMPOSED else job.policy
    whole = any_plan(snapshot, job.budget, policy, job.scorer, decay=job.decay, **_options(job, answer, snapshot))
    return whole, whole.frames()


def _plan_ahead(identity: Identity, job: HandoffJob, ids: Tensor, answer: Int4Answer) -> StreamPlan:
    mask = as_mask(None, ids)
    stand_in = stand_in_for(identity, ids, positions_of(mask), mask)
    return stream_plan(
        stand_in, job.budget, job.policy, _scorer(job), decay=job.decay, **_options(job, answer, stand_in)
    )


def _send_pipelined(
    model: Any,
    identity: Identity,
    job: HandoffJob,
    ids: Tensor,
    answer: Int4Answer,
    outgoing: Outgoing,
    note: bytes,
    say: Say,
) -> Sent:
    say("prefill")
    prefill = Stopwatch()
    with LayerSender(lambda: _plan_ahead(identity, job, ids, answer), outgoing, note) as sender, prefill.running():
        snapshot = stream_capture(model, ids, sender.take, query_window=_window(job))
    if snapshot.identity != identity:
        raise IncompatibleIdentity(
            "the model has changed since the hand-off began", identity.differences(snapshot.identity)
        )
    assert sender.planned is not None
    return Sent(snapshot, sender.planned, prefill, sender.encode, "")


class LayerSender:
    """A thread that plans a packet, and then encodes and pushes each layer as it is given.

    Leaving the block waits for the last frame; what failed in the thread is raised there, or by the next `take`.

    Args:
        decide: makes the plan; called in the thread.
        outgoing: where the header and the frames go.
        note: goes with the header.
    """

    def __init__(self, decide: Callable[[], StreamPlan], outgoing: Outgoing, note: bytes):
        self.planned: StreamPlan | None = None
        self.encode = Stopwatch()
        self._decide, self._outgoing, self._note = decide, outgoing, note
        self._layers: queue.SimpleQueue[tuple[int, LayerState] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-encoder", daemon=True)

    def take(self, index: int, layer: LayerState) -> None:
        """Give the next layer; returns at once. Raises what the thread failed with, if it did."""
        if self._error is not None:
            raise self._error
        self._layers.put((index, layer))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._layers.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self.encode.running():
                self.planned = self._decide()
            self._outgoing.begin(self.planned.header_bytes, self.planned.frame_sizes, self._note)
            while (given := self._layers.get()) is not None:
                frames = self.planned.layer_frames(*given)
                while True:
                    with self.encode.running():
                        frame = next(frames, None)
                    if frame is None:
                        break
                    self._outgoing.push(frame)
        except Exception as error:  # raised again in the thread that prefills
            self._error = error


def _needs_queries(job: HandoffJob) -> bool:
    """Whether the policy ranks tokens by the attention of the last queries."""
    if job.scorer not in (None, "observation_window") or job.attn not in OBSERVABLE:
        return False
    if job.policy in (*COMPOSED, KLT):
        return (job.budget or job.nominal_budget or 0.0) < 1
    return POLICIES[job.policy].ranked


def _window(job: HandoffJob) -> int:
    """Last queries of each layer to observe; 0 for none."""
    if not _needs_queries(job):
        return 0
    return _STREAMED_WINDOW if job.pipeline or job.plan_ahead else QUERY_WINDOW


def _scorer(job: HandoffJob) -> str:
    """What ranks the tokens of a layer, where nothing was asked for: as `plan` chooses."""
    if job.scorer is not None:
        return job.scorer
    if _needs_queries(job):
        return "observation_window"
    return TEMPLATE if job.policy in COMPOSED else "kv_norm"


def _options(job: HandoffJob, answer: Int4Answer, shape: Snapshot) -> dict[str, Any]:
    return {
        "nominal_budget": job.nominal_budget,
        "seed": job.seed,
        "frame_tokens": job.frame_tokens or (None if job.policy == KLT else _frame_tokens(shape)),
        "quantizers": answer.quantizers,
        "int4_allowed": answer.allowed,
    }


def _frame_tokens(snapshot: Snapshot) -> int | None:
    """Tokens a frame so that none is larger than `_LARGEST_FRAME`; ``None`` where one frame a layer does that."""
    largest = max((layer.nbytes for layer in snapshot.layers), default=0)
    if largest <= _LARGEST_FRAME:
        return None
    return max(128, snapshot.seq_len * _LARGEST_FRAME // largest // 128 * 128)
