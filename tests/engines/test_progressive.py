"""Progressive hand-offs: the first token from the packet, every bit at the end, and what happens when it goes wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvferry as kv
from kvferry.channel.base import Arrival
from kvferry.channel.socket import SocketReceiver, SocketSender
from kvferry.engines.handoff import HandoffJob, HandoffResult, Session, run_handoff
from kvferry.engines.handoff.progressive import _level_by_level, go_on, send_refinement
from kvferry.errors import CorruptPacket, IncompatibleIdentity, KVFerryError, TransferFailed
from kvferry.hf.decode import continue_greedy
from kvferry.ship.plan import plan
from tests.cli.models import environment
from tests.hf import tiny


@pytest.fixture(scope="module")
def source_on_path() -> None:
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]


def job(model: str, **changes: object) -> HandoffJob:
    settings = {"max_tokens": 300, "max_new": 24, "timeout": 120.0, "threads": 1, "progressive": True, **changes}
    return HandoffJob(**{"producer_model": model, "consumer_model": model, **settings})  # type: ignore[arg-type]


def assert_exact(result: HandoffResult) -> None:
    told = result.progressive
    assert told is not None
    assert told["bit_exact"]
    assert told["bytes_before_first_token"] == result.packet_bytes
    assert told["total_bytes"] == result.packet_bytes + told["refinement_bytes"]
    assert sum(told["level_bytes"]) < told["refinement_bytes"] < told["wire_bytes"]
    assert sum(told["tokens_at_level"]) == len(result.token_ids["shipped"])
    assert told["tokens_at_level"][0] >= 1
    assert result.seconds["ttft"] < told["seconds"]["level_1"] <= told["seconds"]["exact"]
    # Both fed the same tokens: the refined cache is the one that stayed.
    assert (result.kl_mean, result.fidelity["kl_max"], result.top1_agreement) == (0.0, 0.0, 1.0)
    assert result.token_ids["shipped"][0] >= 0


@pytest.mark.model
@pytest.mark.usefixtures("source_on_path")
def test_smollm2_gets_its_first_token_early_and_every_bit_in_the_end() -> None:
    result = run_handoff(job("smollm2-135m", budget=0.27, max_tokens=600, max_new=16))
    assert_exact(result)
    assert result.progressive is not None
    assert result.progressive["share_before_first_token"] <= 0.28
    assert result.progressive["total_budget"] <= 1.02


@pytest.mark.usefixtures("source_on_path")
def test_sliding_layers_split_frames_dropped_tokens(gemma_folder: str, text_file: Path) -> None:
    """The window of eight is left behind while the refinement comes in; then tokens come back that were dropped."""
    with Session() as session:
        split = {"budget": 0.6, "frame_tokens": 64, "pipeline": False}
        assert_exact(session.run(job(gemma_folder, text_file=str(text_file), **split)))
        dropping = {"nominal_budget": 0.5, "policy": "pdtrim"}
        assert_exact(session.run(job(gemma_folder, text_file=str(text_file), **dropping)))


class Setup:
    """A tiny model whose cache was handed over, up to the first token; the refinement is still to come."""

    def __init__(self, policy: str = "uniform_int4"):
        self.model = tiny.llama(dtype=torch.bfloat16)
        self.ids = torch.randint(3, tiny.VOCABULARY, (1, 41), generator=torch.Generator().manual_seed(1))
        self.exact = kv.capture(self.model, self.ids[:, :-1])
        self.planned = plan(self.exact, policy=policy, nominal_budget=0.5 if policy == "pdtrim" else None)
        self.packet = kv.Packet.of(self.planned.header_bytes, list(self.planned.frames()))
        self.near = kv.decode(self.packet)
        self.cache = self.near.to_cache(self.model)
        mask = torch.cat([self.near.mask, torch.ones(1, 1, dtype=torch.bool)], dim=1)
        first = continue_greedy(self.model, self.cache, self.ids, max_new_tokens=1, mask=mask, eos=None)
        self.begun = torch.cat([self.ids, first.token_ids], dim=1)

    def go_on(self, receiver: SocketReceiver, max_new: int = 6):
        return go_on(
            self.model,
            self.cache,
            self.near,
            self.packet.header_bytes,
            receiver,
            "refinement",
            self.begun,
            torch.arange(self.begun.shape[1]).unsqueeze(0),
            max_new=max_new,
        )


@pytest.fixture
def link() -> Iterator[tuple[SocketSender, SocketReceiver]]:
    with SocketSender() as sender:
        yield sender, SocketReceiver(sender.address, timeout=20.0)


@pytest.mark.parametrize("policy", ["uniform_int4", "pdtrim"])
def test_the_live_cache_becomes_exact(link: tuple[SocketSender, SocketReceiver], policy: str) -> None:
    sender, receiver = link
    setup = Setup(policy)
    sent: list[dict[str, object]] = []
    with sender.announce("refinement") as outgoing:
        thread = threading.Thread(
            target=lambda: sent.append(send_refinement(outgoing, setup.exact, setup.planned, 20.0)), daemon=True
        )
        thread.start()
        upgraded = setup.go_on(receiver)
        thread.join()
    assert sent[0]["digest"] == upgraded.report["digest"]
    assert upgraded.report["live_cache_equal"]
    assert upgraded.snapshot.mask.all()
    assert sum(upgraded.report["tokens_at_level"]) == len(upgraded.token_ids) + 1
    again = continue_greedy(setup.model, upgraded.snapshot, setup.ids, max_new_tokens=4, eos=None, keep_logits=True)
    want = continue_greedy(setup.model, setup.exact, setup.ids, max_new_tokens=4, eos=None, keep_logits=True)
    assert torch.equal(again.logits, want.logits)


def broken(setup: Setup, how: str) -> tuple[bytes, list[bytes]]:
    """Header and frames of a refinement that is not what it should be."""
    refinement = kv.refine(setup.exact, setup.packet)
    frames = [bytes(frame) for frame in refinement.frames]
    match how:
        case "of another packet":
            other = kv.refine(setup.exact, kv.encode(setup.exact, policy="uniform_int8"))
            return other.header_bytes, [bytes(frame) for frame in other.frames]
        case "damaged":
            frames[-1] = frames[-1][:-9] + bytes([frames[-1][-9] ^ 1]) + frames[-1][-8:]
        case "repeated":
            frames[-1] = frames[-2]
    return refinement.header_bytes, frames


@pytest.mark.parametrize(
    ("how", "error"),
    [("of another packet", IncompatibleIdentity), ("damaged", CorruptPacket), ("repeated", CorruptPacket)],
)
def test_a_wrong_refinement_ends_the_hand_off_on_both_sides(
    link: tuple[SocketSender, SocketReceiver], how: str, error: type[KVFerryError]
) -> None:
    sender, receiver = link
    setup = Setup()
    header, frames = broken(setup, how)
    with sender.announce("refinement") as outgoing:
        outgoing.begin(header, [len(frame) for frame in frames])
        for frame in frames:
            outgoing.push(frame)
        with pytest.raises(error):
            setup.go_on(receiver)
        with pytest.raises(TransferFailed, match="refused") as caught:
            outgoing.finish(20.0)
        assert isinstance(caught.value.__cause__, error)  # the producer hears why


def test_a_producer_that_gives_up_ends_it(link: tuple[SocketSender, SocketReceiver]) -> None:
    sender, receiver = link
    setup = Setup()
    refinement = kv.refine(setup.exact, setup.packet)
    outgoing = sender.announce("refinement")
    outgoing.begin(refinement.header_bytes, [len(frame) for frame in refinement.frames])
    outgoing.push(refinement.frames[0])
    outgoing.abort(TransferFailed("the producer has had enough"))
    with pytest.raises(TransferFailed, match="had enough"):
        setup.go_on(receiver)
    outgoing.close()


def test_frames_that_overtake_one_another_are_sorted_out() -> None:
    setup = Setup()
    refinement = kv.refine(setup.exact, setup.packet)
    refiner = kv.Refiner(setup.packet.header_bytes, setup.near, refinement.header_bytes)
    order = [3, 0, 2, 1]  # level 2 of both layers around level 1 of them
    arrivals = (Arrival(index, refinement.frames[index], 0, 0) for index in order)
    for frame in _level_by_level(arrivals, refiner):
        refiner.add(frame)
    refiner.verify()
