"""A hand-off that goes on after the first token: refinement frames upgrade the cache while the consumer decodes.

The packet goes first, and nothing else is on the link until the consumer has its first token and confirms the packet.
Then the refinement follows, a hand-off of its own. A thread of the consumer verifies its frames and upgrades the
snapshot; what has been upgraded is copied into the model's cache between two forward passes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.channel import Incoming, Outgoing, Receiver
from kvferry.engines.handoff.clock import Stopwatch, now
from kvferry.errors import TransferFailed
from kvferry.hf.decode import continue_greedy
from kvferry.hf.upgrade import holds, upgrade_cache
from kvferry.ship.layout import FrameSlot
from kvferry.ship.plan import EncodePlan
from kvferry.ship.reader import PacketReader, read_all
from kvferry.ship.refine import RefinementEncoder, Refiner
from kvferry.ship.refine.message import LEVELS
from kvferry.ship.stream import StreamPlan
from kvferry.ship.transform.plan import TransformPlan
from kvferry.snapshot import Snapshot

_ANY_SIZE = 1 << 62
"""The producer decodes what it has encoded itself."""


def send_refinement(
    outgoing: Outgoing, snapshot: Snapshot, planned: EncodePlan | StreamPlan | TransformPlan, timeout: float
) -> dict[str, Any]:
    """Build and send what the packet of ``planned`` lacks to ``snapshot``; returns when the consumer has it all.

    The consumer's state is made again here, by decoding the same packet: one more copy of the cache in memory.
    """
    encoding = Stopwatch()
    with encoding.running():
        frames = planned.frames(snapshot) if isinstance(planned, StreamPlan) else planned.frames()
        near = read_all(PacketReader(planned.header_bytes, max_bytes=_ANY_SIZE), frames)
        encoder = RefinementEncoder(snapshot, planned.header_bytes, near)
    outgoing.begin(encoder.header_bytes, encoder.limits)
    level_bytes = [0] * LEVELS
    built = encoder.frames()
    for level in range(LEVELS):
        for _ in range(encoder.header.frames):
            with encoding.running():
                frame = next(built)
            level_bytes[level] += len(frame)
            outgoing.push(frame)
    outgoing.finish(timeout)
    return {
        "bytes": encoder.header.nbytes + sum(level_bytes),
        "level_bytes": level_bytes,
        "digest": encoder.header.digest.hex(),
        "encode": encoding.to_json(),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Upgraded:
    """What came of it.

    Attributes:
        token_ids: the tokens after the first one.
        snapshot: the refined cache of the prompt.
        report: plain JSON values; see `kvferry.engines.handoff.result.progressive_report`.
    """

    token_ids: list[int]
    snapshot: Snapshot
    report: dict[str, Any]


def go_on(
    model: Any,
    cache: Any,
    snapshot: Snapshot,
    packet_header: bytes,
    receiver: Receiver,
    handoff: str,
    ids: Tensor,
    positions: Tensor,
    *,
    max_new: int,
) -> Upgraded:
    """Decode greedily while the refinement comes in, and wait for the rest of it.

    Args:
        model: the model.
        cache: its cache, made of ``snapshot``; it is upgraded in place.
        snapshot: the decoded packet; its tensors are upgraded in place.
        packet_header: header message of the packet.
        receiver: where the refinement comes from, and ``handoff`` its name there.
        ids: the prompt and the first token, ``(1, tokens)``.
        positions: theirs.
        max_new: tokens to decode, the first one included.

    Raises:
        CorruptPacket, UnsupportedVersion, IncompatibleIdentity: the refinement is not what it should be.
        TransferFailed: it did not come.
    """
    ends = _ends(model)
    levels = [0]  # of the cache, when each token was chosen
    with _Arrivals(receiver, handoff, packet_header, snapshot) as arrivals:
        while len(levels) < max_new and int(ids[0, -1]) not in ends:
            levels.append(arrivals.install(cache))
            mask = torch.cat([arrivals.mask, torch.ones_like(ids[:, snapshot.seq_len :], dtype=torch.bool)], dim=1)
            step = continue_greedy(model, cache, ids, max_new_tokens=1, positions=positions, mask=mask)
            ids = torch.cat([ids, step.token_ids], dim=1)
            positions = torch.cat([positions, positions[:, -1:] + 1], dim=1)
        generated = now()
        arrivals.wait()
        arrivals.install(cache)
        refiner = arrivals.refiner
    refiner.verify()
    refined = refiner.snapshot()
    new = ids[0, -(len(levels) - 1) :].tolist() if len(levels) > 1 else []
    report = {
        "tokens_at_level": [levels.count(level) for level in range(LEVELS + 1)],
        "levels_complete": arrivals.completed,
        "generated": generated,
        "digest": refiner.digest().hex(),
        "live_cache_equal": holds(cache, refined),
        "decode": arrivals.decoding.to_json(),
        "received": arrivals.received,
    }
    return Upgraded(new, refined, report)


class _Arrivals:
    """A thread that fetches a refinement and upgrades the snapshot, and what is still to be copied into the cache.

    The snapshot is written by the thread and read by `install`, each under the lock. An error of the thread is raised
    by the next `install` or `wait`.
    """

    def __init__(self, receiver: Receiver, handoff: str, packet_header: bytes, snapshot: Snapshot):
        self.decoding = Stopwatch()
        self.completed = [0] * LEVELS
        self.received = 0
        self.mask = snapshot.mask
        self._receiver, self._handoff, self._packet_header = receiver, handoff, packet_header
        self._snapshot = snapshot
        self._incoming: Incoming | None = None
        self._refiner: Refiner | None = None
        self._waiting: list[FrameSlot] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-refiner", daemon=True)

    def __enter__(self) -> _Arrivals:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            return  # `wait` has returned
        # What went wrong is to be said now: a thread that waits for the producer's next word is not waited for.
        with self._lock:
            self._stopped = True
            if self._incoming is not None:
                self._incoming.close()

    @property
    def refiner(self) -> Refiner:
        """The refiner; there is one once `wait` has returned."""
        assert self._refiner is not None
        return self._refiner

    def install(self, cache: Any) -> int:
        """Copy what has been upgraded since the last time into ``cache``; returns the level that all of it now has."""
        with self._lock:
            self._check()
            for slot in self._waiting:
                upgrade_cache(cache, self._snapshot, slot.first_layer, slot.start, slot.stop)
            self._waiting.clear()
            if self._refiner is None:
                return 0
            self.mask = self._refiner.mask
            return self._refiner.level

    def wait(self) -> None:
        """Return when the whole refinement is in."""
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._receiver.fetch(self._handoff, timeout=math.inf) as incoming:
                refiner = Refiner(self._packet_header, self._snapshot, incoming.header)
                with self._lock:
                    self._incoming, self._refiner = incoming, refiner
                for frame in _level_by_level(incoming.frames(), refiner):
                    with self._lock, self.decoding.running():
                        if self._stopped:
                            raise TransferFailed("the consumer failed, and takes no refinement any more")
                        self._waiting.append(refiner.add(frame))
                    for level in range(1, refiner.level + 1):
                        self.completed[level - 1] = self.completed[level - 1] or now()
                incoming.confirm()
                self.received = incoming.traffic.received
        except Exception as error:  # raised again in the thread that decodes
            self._error = error


def _level_by_level(arrivals: Iterator[Any], refiner: Refiner) -> Iterator[bytes | memoryview]:
    """The frames as they come, but none of level 2 before level 1 of the same tokens, which may overtake one another.

    What is held back is bounded by what was announced; on a link that keeps the order it is nothing.
    """
    count = refiner.header.frames
    here: set[int] = set()
    early: dict[int, bytes | memoryview] = {}
    for arrival in arrivals:
        if arrival.index >= count and arrival.index - count not in here:
            early[arrival.index] = arrival.data
            continue
        here.add(arrival.index)
        yield arrival.data
        if (held := early.pop(arrival.index + count, None)) is not None:
            yield held


def _ends(model: Any) -> set[int]:
    """Tokens that end a text."""
    config = model.generation_config
    eos = None if config is None else config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
