"""A hand-off from one model to another of its family: the packet holds the source's cache, and the consumer maps it.

Afterwards the consumer is given the cache as it was before it was shipped, and prefills the prompt itself. So each
stage can be held against what would have been without it: mapping against the target's own cache, shipping against the
same map of the cache that was not shipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.channel import Incoming, Outgoing
from kvferry.engines.handoff.clock import Stopwatch
from kvferry.engines.handoff.compare import Comparison
from kvferry.engines.handoff.job import HandoffJob
from kvferry.evaluate.map_gate import CHECKED, guarded_transfer
from kvferry.evaluate.map_run import require_target, transfer
from kvferry.hf.capture import capture
from kvferry.hf.decode import continue_greedy, teacher_forced_steps
from kvferry.map.mapper import Mapper
from kvferry.ship.encode import encode
from kvferry.ship.reader import PacketReader
from kvferry.snapshot import Snapshot

_FORCED_AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Crossed:
    """What the consumer made of the source's cache.

    Attributes:
        snapshot: of the consumer's model.
        mapped: whether it is mapped, and not the consumer's own prefill.
        reasons: why it is its own.
        share: of the shipped tokens that the consumer's model ran on.
    """

    snapshot: Snapshot
    mapped: bool
    reasons: tuple[str, ...]
    share: float


def open_mapper(folder: str, model: Any) -> Mapper:
    """The mapper of a hand-off to ``model``. Raises `IncompatibleIdentity` for one to another model."""
    mapper = Mapper.from_pretrained(folder)
    require_target(mapper, model)
    return mapper


def cross(mapper: Mapper, model: Any, snapshot: Snapshot, job: HandoffJob) -> Crossed:
    """Map the source's cache, behind the gate or without it."""
    if job.gate:
        guarded = guarded_transfer(mapper, model, snapshot, recompute_last=job.recompute_last)
        return Crossed(guarded.snapshot, guarded.mapped, guarded.reasons, guarded.share)
    done = transfer(mapper, model, snapshot, recompute_last=job.recompute_last, check=False)
    return Crossed(done.snapshot, True, (), done.share)


def send_unshipped(reference: Outgoing, snapshot: Snapshot, token_ids: list[int], timeout: float) -> None:
    """Send the cache as it stayed at the producer, bit for bit, and what the source made of it."""
    packet = encode(snapshot, None, "full")
    reference.begin(packet.header_bytes, [len(frame) for frame in packet.frames], _note(token_ids))
    for frame in packet.frames:
        reference.push(frame)
    reference.finish(timeout)


def judge(
    incoming: Incoming, mapper: Mapper, model: Any, job: HandoffJob, crossed: Crossed, ids: Tensor
) -> dict[str, Any]:
    """Hold what was delivered against the consumer's own prefill of ``ids`` ``(1, tokens)``, stage by stage.

    Returns:
        ``token_ids`` of the consumer's own run with its ``seconds``, and ``fidelity`` of all stages together and, where
        the cache was mapped, of ``map`` and of ``ship``.
    """
    reader = PacketReader(incoming.header, want=mapper.source)
    for arrival in incoming.frames():
        reader.add(arrival.data)
    watch = Stopwatch()
    with watch.running():
        own = capture(model, ids[:, :-1])
    went = continue_greedy(model, own, ids, max_new_tokens=job.max_new)
    token_ids = went.token_ids[0].tolist()
    whole, map_alone, ship_alone = Comparison(), Comparison(), Comparison()
    runs = [own, crossed.snapshot]
    if crossed.mapped:
        native = CHECKED if job.gate else None
        exact = reader.snapshot()
        runs.append(
            transfer(
                mapper, model, exact, native_prefix=native, recompute_last=job.recompute_last, check=False
            ).snapshot
        )
    for own_row, delivered, *unshipped in zip(*(forced(model, run, ids, token_ids) for run in runs), strict=True):
        whole.add(own_row, delivered)
        for row in unshipped:
            map_alone.add(own_row, row)
            ship_alone.add(row, delivered)
    return {
        "token_ids": token_ids,
        "seconds": {"prefill": watch.busy / 1e9, "first_token": went.first_token_seconds},
        "fidelity": whole.fidelity().to_json(),
        "map": map_alone.fidelity().to_json() if crossed.mapped else None,
        "ship": ship_alone.fidelity().to_json() if crossed.mapped else None,
    }


def forced(model: Any, snapshot: Snapshot, ids: Tensor, token_ids: list[int]) -> Iterator[Tensor]:
    """Logits that predict each of ``token_ids``, from the snapshot, float32; every run takes the same steps."""
    whole = torch.cat([ids, torch.tensor([token_ids[:-1]], dtype=torch.int64)], dim=1)
    for _, logits in teacher_forced_steps(model, snapshot, whole, step=_FORCED_AT_ONCE):
        yield from logits[0].float().cpu()


def _note(token_ids: list[int]) -> bytes:
    return json.dumps({"token_ids": token_ids}).encode()
