"""What the two processes do: `produce` and `consume`, each from a job to a report of plain JSON values."""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvferry.channel import Incoming, Outgoing, Receiver
from kvferry.engines.handoff.clock import Stopwatch, covered, now
from kvferry.engines.handoff.compare import Comparison, first_difference, forced
from kvferry.engines.handoff.job import HandoffJob, HandoffNames
from kvferry.engines.handoff.mapped import Crossing, open_mapper, send_unshipped
from kvferry.engines.handoff.progressive import go_on, send_refinement
from kvferry.engines.handoff.send import Say, send
from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.evaluate.kept import Int4Answer, int4_answer
from kvferry.hf.capture import capture
from kvferry.hf.decode import continue_greedy
from kvferry.hf.identity import identity_of
from kvferry.hf.models import load_model
from kvferry.hf.observe import OBSERVABLE, QUERY_WINDOW
from kvferry.hf.text import tokens_of
from kvferry.map.mapper import Mapper
from kvferry.ship.encode import decode, encode
from kvferry.ship.importance import scorer_named
from kvferry.ship.plan import COMPOSED
from kvferry.ship.policy import policy
from kvferry.ship.reader import PacketReader
from kvferry.ship.transform.plan import POLICY as KLT
from kvferry.ship.transform.store import for_model
from kvferry.snapshot import Snapshot

logger = logging.getLogger(__name__)

_LOADING_SECONDS = 600.0
"""A consumer may take so long to load its libraries and its model; only then does it have a voice."""

_WARM_TOKENS = 48
_PROMPT_END = 300


class Models:
    """The model, and the mapper, that a process has loaded: another hand-off with the same ones finds them warm."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._loaded: tuple[Any, Any] | None = None
        self._mapper: tuple[str, Mapper] | None = None

    def get(self, name: str, job: HandoffJob) -> tuple[Any, Any]:
        """Model and tokenizer, loaded as ``job`` says and run once."""
        key = (name, job.dtype, job.attn, job.threads)
        torch.manual_seed(job.seed)
        if self._loaded is None or key != self._key:
            self._loaded = self._mapper = None
            if job.threads is not None:
                torch.set_num_threads(job.threads)
            model, tokenizer = load_model(name, dtype=job.dtype, attn=job.attn)
            _warm_up(model, job)
            self._key, self._loaded = key, (model, tokenizer)
        return self._loaded

    def mapper(self, folder: str, model: Any) -> Mapper:
        """The mapper in ``folder``, to ``model``, read once."""
        if self._mapper is None or self._mapper[0] != folder:
            self._mapper = folder, open_mapper(folder, model)
        return self._mapper[1]


def produce(
    models: Models, job: HandoffJob, outgoing: Outgoing, refinement: Outgoing, reference: Outgoing, say: Say
) -> dict[str, Any]:
    """Prefill, encode and send on ``outgoing``; afterwards send what stayed here on ``reference``, to be compared.

    A progressive hand-off sends on ``refinement`` between the two.
    """
    say("loading")
    _check_names(job)
    model, tokenizer = models.get(job.producer_model, job)
    ids = tokens_of(tokenizer, job.read_text(), job.max_tokens)
    if ids.shape[1] < 2:
        raise InvalidInput("the prompt has one token; at least two are needed: one to ship, one to go on with")
    identity = identity_of(model)
    if job.policy == KLT:
        for_model(identity)  # one that is missing is missed now, and not after the prefill
    answer = int4_answer(identity, job.int4_allowed) if job.policy == "adaptive" else Int4Answer(True)
    say("waiting for the consumer")
    outgoing.wait_consumer(max(job.timeout, _LOADING_SECONDS))

    note = json.dumps({"rest": ids[0, -1:].tolist()}).encode()
    sent = send(model, identity, job, ids[:, :-1], answer, outgoing, note, say)
    snapshot = sent.snapshot
    # The consumer confirms when it is done, and says meanwhile that it is there: both runs have the machine to
    # themselves, and none is hurried.
    say("waiting for the consumer's tokens")
    outgoing.finish(job.timeout)
    refined = None
    if job.progressive:
        say("refine")
        refined = send_refinement(refinement, snapshot, sent.planned, job.timeout)

    say("the unshipped run")
    local = continue_greedy(model, snapshot, ids, max_new_tokens=job.max_new)
    token_ids = local.token_ids[0].tolist()
    if job.mapper is None:
        _send_reference(reference, model, snapshot, ids, token_ids, job.timeout)
    else:
        send_unshipped(reference, snapshot, token_ids, job.timeout)
    return {
        "packet": sent.describe(),
        "refinement": refined,
        "why_plain": sent.why_plain,
        "prompt_tokens": int(ids.shape[1]),
        "layers": len(snapshot.layers),
        "prefill": sent.prefill.to_json(),
        "encode": sent.encode.to_json(),
        "local_first_token": local.first_token_seconds,
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids),
        "prompt_end": tokenizer.decode(ids[0, -_PROMPT_END:].tolist())[-_PROMPT_END:],
        "process": _process(model, job),
    }


def consume(models: Models, job: HandoffJob, names: HandoffNames, receiver: Receiver, say: Say) -> dict[str, Any]:
    """Fetch, decode into place, install, generate; afterwards compare with what the producer kept."""
    say("loading")
    model, tokenizer = models.get(job.consumer_model, job)
    crossing = None if job.mapper is None else Crossing(models.mapper(job.mapper, model), model, job)
    want = identity_of(model) if crossing is None else crossing.mapper.source
    say("waiting for the cache")
    decoding, install, first = Stopwatch(), Stopwatch(), Stopwatch()
    spans: list[tuple[int, int]] = []
    with receiver.fetch(names.cache, timeout=math.inf) as incoming:
        say("decode")
        with decoding.running():
            rest = _rest(incoming.note)
            reader = PacketReader(incoming.header, want=want)
        for arrival in incoming.frames():
            spans.append((arrival.sent_ns, arrival.received_ns))
            with decoding.running():
                reader.add(arrival.data)
        with decoding.running():
            snapshot = reader.snapshot()
        if crossing is not None:
            say("map")
            snapshot = crossing.map(snapshot)
        with install.running():
            cache = snapshot.to_cache(model)
        ids, positions, mask = _continued(snapshot, rest)
        say("generate")
        first.began = now()
        at_once = 1 if job.progressive else job.max_new
        went = continue_greedy(model, cache, ids, max_new_tokens=at_once, positions=positions, mask=mask)
        first.busy = int(went.first_token_seconds * 1e9)
        first.ended = first.began + first.busy
        incoming.confirm()
        traffic, packet_header = incoming.traffic, incoming.header
    token_ids = went.token_ids[0].tolist()
    refined = None
    if job.progressive:
        say("generate and refine")
        begun, places = (torch.cat(pair, dim=1) for pair in ((ids, went.token_ids), (positions, positions[:, -1:] + 1)))
        upgraded = go_on(
            model,
            cache,
            snapshot,
            packet_header,
            receiver,
            names.refinement,
            begun,
            places,
            max_new=job.max_new,
        )
        snapshot, refined = upgraded.snapshot, upgraded.report
        token_ids += upgraded.token_ids
    say("compare")
    with receiver.fetch(names.reference, timeout=math.inf) as incoming:
        reference = _token_list(json.loads(incoming.note), "token_ids")
        mapped = None
        if crossing is None:
            fidelity = _compare(incoming, model, snapshot, ids, reference)
        else:
            mapped = crossing.judge(incoming, ids, tokenizer)
            fidelity, reference = mapped["fidelity"], mapped["token_ids"]
        incoming.confirm()
    wire = {
        "busy": covered(spans),
        "began": min((sent for sent, _ in spans), default=decoding.began),
        "ended": max((received for _, received in spans), default=decoding.began),
    }
    return {
        "wire": wire,
        "refinement": refined,
        "decode": decoding.to_json(),
        "install": install.to_json(),
        "first_token": first.to_json(),
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids),
        "first_difference": first_difference(token_ids, reference),
        "map": mapped,
        "fidelity": fidelity,
        "traffic": traffic.to_json(),
        "process": _process(model, job),
    }


def _check_names(job: HandoffJob) -> None:
    """Raise `InvalidInput` for what is unknown or does not go with the policy: now, and not after the prefill."""
    if job.policy == KLT:
        named = [name for name in ("nominal_budget", "scorer", "decay") if getattr(job, name) is not None]
        if named:
            raise InvalidInput(f"policy {KLT} ranks and quantises by its transform: it takes no {', '.join(named)}")
    elif job.policy not in COMPOSED:
        policy(job.policy)
    if job.scorer is not None:
        scorer_named(job.scorer)


def _warm_up(model: Any, job: HandoffJob) -> None:
    """Run everything once in small, so that nothing is measured which happens only the first time."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(1, _WARM_TOKENS + 1) % vocabulary).unsqueeze(0)
    snapshot = capture(model, ids[:, :-1], query_window=QUERY_WINDOW if job.attn in OBSERVABLE else 0)
    shipped = decode(encode(snapshot, policy="sink_protect", nominal_budget=0.4))
    continue_greedy(model, shipped, ids, max_new_tokens=2, eos=None)


def _rest(note: bytes) -> list[int]:
    """The prompt's tokens behind the cache, out of the hand-off's note."""
    try:
        return _token_list(json.loads(note), "rest")
    except ValueError as error:
        raise CorruptPacket(f"the note beside the packet is no JSON: {error}") from error


def _token_list(note: object, name: str) -> list[int]:
    found = note.get(name) if isinstance(note, dict) else None
    if not isinstance(found, list) or not found or not all(type(token) is int and token >= 0 for token in found):
        raise CorruptPacket(f"the note beside the packet has no list of tokens {name!r}")
    return found


def _continued(snapshot: Snapshot, rest: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and mask of the whole prompt: those of the snapshot, then ``rest``."""
    new = torch.tensor([rest], dtype=torch.int64)
    places = snapshot.positions[:, -1:] + 1 + torch.arange(len(rest))
    return (
        torch.cat([snapshot.token_ids, new], dim=1),
        torch.cat([snapshot.positions, places], dim=1),
        torch.cat([snapshot.mask, torch.ones_like(new, dtype=torch.bool)], dim=1),
    )


def _send_reference(
    reference: Outgoing, model: Any, snapshot: Snapshot, ids: Tensor, token_ids: list[int], timeout: float
) -> None:
    # All rows before the first is sent: a consumer waits for a header as long as it takes, for a frame it does not.
    rows = [row.numpy().tobytes() for row in forced(model, snapshot, ids, token_ids)]
    note = json.dumps({"token_ids": token_ids}).encode()
    reference.begin(b"float32 logits", [len(row) for row in rows], note)
    for row in rows:
        reference.push(row)
    reference.finish(timeout)


def _compare(incoming: Incoming, model: Any, snapshot: Snapshot, ids: Tensor, token_ids: list[int]) -> dict[str, Any]:
    """Feed the unshipped run's tokens to the shipped cache and compare the logits, position by position."""
    comparison = Comparison()
    arrivals = incoming.frames()
    early: dict[int, bytes | memoryview] = {}
    for index, shipped in enumerate(forced(model, snapshot, ids, token_ids)):
        while index not in early:
            arrival = next(arrivals)
            early[arrival.index] = arrival.data
        row = np.frombuffer(early.pop(index), dtype=np.float32)
        if row.size != shipped.numel():
            raise CorruptPacket(f"the producer's logits have {row.size} entries, this model's {shipped.numel()}")
        comparison.add(torch.from_numpy(row.copy()), shipped)
    return comparison.fidelity().to_json()


def _process(model: Any, job: HandoffJob) -> dict[str, Any]:
    identity = identity_of(model)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "model": identity.model,
        "weights": identity.weights,
        "dtype": identity.dtype,
        "attn": job.attn,
        "threads": torch.get_num_threads(),
        "seed": job.seed,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "peak_memory_bytes": peak if sys.platform == "darwin" else peak * 1024,
    }
