"""A hand-off from one model to another of its family: the packet holds the source's cache, and the consumer maps it.

Afterwards the consumer is given the cache as it was before it was shipped, and prefills the prompt itself. So each
stage can be held against what would have been without it: mapping against the target's own cache, shipping against the
same map of the cache that was not shipped.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from kvferry.channel import Incoming, Outgoing
from kvferry.engines.handoff.clock import Stopwatch
from kvferry.engines.handoff.compare import Comparison, forced
from kvferry.engines.handoff.job import HandoffJob
from kvferry.evaluate.map_gate import CHECKED_TOKENS, guarded_transfer
from kvferry.evaluate.map_run import require_target, transfer
from kvferry.hf.decode import continue_greedy
from kvferry.hf.recompute import prefill
from kvferry.map.mapper import Mapper
from kvferry.ship.encode import encode
from kvferry.ship.reader import PacketReader
from kvferry.ship.stream import stand_in_for
from kvferry.snapshot import Snapshot

_WARM_TOKENS = 48


def open_mapper(folder: str, model: Any) -> Mapper:
    """The mapper of a hand-off to ``model``, used once in small: nothing is measured that happens only the first time.

    Raises:
        IncompatibleIdentity: it is for another model.
        InvalidInput, CorruptPacket: as `Mapper.from_pretrained`.
    """
    mapper = Mapper.from_pretrained(folder)
    require_target(mapper, model)
    ids = torch.zeros((1, _WARM_TOKENS), dtype=torch.int64)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mapper.map(stand_in_for(mapper.source, ids, torch.arange(_WARM_TOKENS).unsqueeze(0), mask))
    return mapper


def send_unshipped(reference: Outgoing, snapshot: Snapshot, token_ids: list[int], timeout: float) -> None:
    """Send the cache as it stayed at the producer, bit for bit, and what the source made of it."""
    packet = encode(snapshot, None, "full")
    note = json.dumps({"token_ids": token_ids}).encode()
    reference.begin(packet.header_bytes, [len(frame) for frame in packet.frames], note)
    for frame in packet.frames:
        reference.push(frame)
    reference.finish(timeout)


class Crossing:
    """The consumer's part: maps the source's cache, and says afterwards what that cost.

    Args:
        mapper: from `open_mapper`.
        model: its target.
        job: of the hand-off.
    """

    def __init__(self, mapper: Mapper, model: Any, job: HandoffJob):
        self.mapper = mapper
        self._model, self._job = model, job
        self._watch = Stopwatch()
        self._delivered: Snapshot | None = None
        self._told: dict[str, Any] = {"mapper": mapper.digest}

    def map(self, snapshot: Snapshot) -> Snapshot:
        """The consumer's cache of the source's: mapped, behind the gate or without it, or its own prefill."""
        last = self._job.recompute_last
        with self._watch.running():
            if self._job.gate:
                done = guarded_transfer(self.mapper, self._model, snapshot, recompute_last=last)
                made, mapped, reasons, share = done.snapshot, done.mapped, done.reasons, done.share
            else:
                free = transfer(self.mapper, self._model, snapshot, recompute_last=last, check=False)
                made, mapped, reasons, share = free.snapshot, True, (), free.share
        self._delivered = made
        self._told |= {"mapped": mapped, "reasons": list(reasons), "share": share}
        return made

    def judge(self, incoming: Incoming, ids: Tensor, tokenizer: Any) -> dict[str, Any]:
        """Hold what `map` gave against the consumer's own prefill of ``ids`` ``(1, tokens)``, stage by stage.

        Args:
            incoming: what `send_unshipped` sends.
            ids: the prompt.
            tokenizer: of the model.

        Returns:
            ``watch`` of the mapping and ``crossed``, what came of it; of the consumer's own run ``token_ids``, ``text``
            and ``seconds``; ``fidelity`` of all stages together and, where the cache was mapped, ``map`` and ``ship``.
        """
        assert self._delivered is not None
        exact = self._read(incoming)
        prefilling = Stopwatch()
        with prefilling.running():
            own = prefill(self._model, self.mapper.target, ids[:, :-1])
        went = continue_greedy(self._model, own, ids, max_new_tokens=self._job.max_new)
        token_ids = went.token_ids[0].tolist()
        whole, mapping, shipping = Comparison(), Comparison(), Comparison()
        runs = [own, self._delivered, *([self._unshipped(exact)] if self._told["mapped"] else [])]
        logits = (forced(self._model, run, ids, token_ids) for run in runs)
        for own_row, delivered, *unshipped in zip(*logits, strict=True):
            whole.add(own_row, delivered)
            for row in unshipped:
                mapping.add(own_row, row)
                shipping.add(row, delivered)
        return {
            "watch": self._watch.to_json(),
            "crossed": self._told,
            "token_ids": token_ids,
            "text": tokenizer.decode(token_ids),
            "seconds": {"prefill": prefilling.busy / 1e9, "first_token": went.first_token_seconds},
            "fidelity": whole.fidelity().to_json(),
            "map": mapping.fidelity().to_json() if self._told["mapped"] else None,
            "ship": shipping.fidelity().to_json() if self._told["mapped"] else None,
        }

    def _read(self, incoming: Incoming) -> Snapshot:
        reader = PacketReader(incoming.header, want=self.mapper.source)
        for arrival in incoming.frames():
            reader.add(arrival.data)
        return reader.snapshot()

    def _unshipped(self, exact: Snapshot) -> Snapshot:
        """The source's cache as it stayed there, mapped as the delivered one was."""
        native, last = CHECKED_TOKENS if self._job.gate else None, self._job.recompute_last
        return transfer(
            self.mapper, self._model, exact, native_prefix=native, recompute_last=last, check=False
        ).snapshot
