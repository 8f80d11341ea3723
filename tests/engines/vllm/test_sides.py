"""Scheduler's and worker's side together, over pages of a tiny model: what is saved, found, filled, refused."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvferry as kv
from kvferry.engines.vllm.chain import chain
from kvferry.engines.vllm.jobs import StepJobs
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.store import FolderStore
from tests.engines.vllm.builders import BLOCK, CHUNK, Engine, Request, captured, consume, pairs_of


def produce(engine: Engine, snapshot: kv.Snapshot, name: str = "p", steps: list[int] | None = None) -> StepJobs:
    """Let an engine compute a prompt, whose pages are filled from ``snapshot``, in ``steps`` of so many tokens."""
    request = Request(name, snapshot.token_ids[0].tolist())
    engine.scheduler.admit(request)
    blocks = list(range(1, 1 + snapshot.seq_len // BLOCK + 1))
    done, jobs = 0, StepJobs()
    for count in steps or [snapshot.seq_len]:
        jobs = engine.scheduler.step([(name, done, count)], lambda _: blocks)
        engine.worker.start(jobs)
        done += count
        engine.pages.write(blocks[: -(-done // BLOCK)], pairs_of(snapshot, 0, done))
        engine.worker.finish(jobs)
    engine.scheduler.finished(request)
    return jobs


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("steps", [[128], [50, 50, 28], [16] * 8], ids=["whole", "chunked", "small steps"])
def test_what_was_computed_is_found_bit_for_bit(tmp_path: Path, mode: str, steps: list[int]) -> None:
    _, snapshot = captured(128)
    produce(Engine(tmp_path, snapshot.identity, load=False), snapshot, steps=steps)
    consumer = Engine(tmp_path, snapshot.identity, save=False, mode=mode)
    request = Request("c", [*snapshot.token_ids[0].tolist(), 9, 9])
    found, blocks = consume(consumer, request)
    assert found == 128
    for have, want in zip(consumer.pages.read(blocks[:4]), pairs_of(snapshot, 0, 128), strict=True):
        assert torch.equal(have[0], want[0])
        assert torch.equal(have[1], want[1])
    assert consumer.worker.take_bad_blocks() == set()
    assert consumer.worker.take_arrived() == ({"c"} if mode == "async" else set())
    assert consumer.worker.counts.take()["loaded_tokens"] == 128


def test_one_token_is_left_and_local_pages_are_not_touched(tmp_path: Path) -> None:
    _, snapshot = captured(128)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    consumer = Engine(tmp_path, snapshot.identity, mode="sync")
    found, blocks = consume(consumer, Request("c", snapshot.token_ids[0].tolist()), computed=BLOCK)
    assert found == 127 - BLOCK, "the last token has to be computed"
    filled = consumer.pages.read(blocks)
    assert not filled[0][0][:, :BLOCK].any(), "a page that the engine had already was written"
    assert torch.equal(filled[0][0][:, BLOCK:127], pairs_of(snapshot, BLOCK, 127)[0][0])
    assert not filled[0][0][:, 127:].any()


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("steps", [None, [50, 50, 20], [119, 1]], ids=["whole", "chunked", "one token last"])
@pytest.mark.parametrize("chunk", [CHUNK, 2 * CHUNK, 4 * CHUNK])
def test_a_tail_serves_the_same_prompt_and_no_other(
    tmp_path: Path, mode: str, steps: list[int] | None, chunk: int
) -> None:
    """Of 120 tokens, 96 or 64 or none in whole chunks of one page or more; the engine computes the last one again."""
    _, snapshot = captured(120)
    whole = 120 // chunk * chunk
    ids = snapshot.token_ids[0].tolist()
    producer = Engine(tmp_path, snapshot.identity, load=False, chunk_tokens=chunk)
    request = Request("p", ids)
    producer.scheduler.admit(request)
    producer.pages.write([1, 2, 3, 4], pairs_of(snapshot, 0, 120))
    done = 0
    for count in steps or [120]:
        jobs = producer.scheduler.step([("p", done, count)], lambda _: [1, 2, 3, 4])
        producer.worker.finish(jobs)
        done += count
    assert producer.scheduler.step([("p", 120, 1)], lambda _: [1, 2, 3, 4]).saves == []
    assert producer.worker.counts.take()["saved_tokens"] == 120
    consumer = Engine(tmp_path, snapshot.identity, save=False, mode=mode, chunk_tokens=chunk)
    found, blocks = consume(consumer, Request("c", ids), computed=BLOCK)
    assert found == 119 - BLOCK
    for have, want in zip(consumer.pages.read(blocks[1:4]), pairs_of(snapshot, BLOCK, 119), strict=True):
        for side in (0, 1):
            assert torch.equal(have[side][:, : 119 - BLOCK], want[side])
            assert not have[side][:, 119 - BLOCK :].any()
    assert consumer.worker.counts.take()["loaded_tokens"] == 119 - BLOCK
    for other in ([*ids, 1], ids[:-1], [*ids[:-1], 1]):
        assert consumer.scheduler.matched(Request("d", other), 0)[0] == whole
        consumer.scheduler.finished(Request("d", other))
    grown = Request("e", ids, output=[5, 5])
    assert consumer.scheduler.matched(grown, 0)[0] == 120, "a preempted request wants its prompt again, all of it"
    none = Engine(tmp_path, snapshot.identity, tails=False, chunk_tokens=chunk)
    assert none.scheduler.matched(Request("f", ids), 0)[0] == whole
    assert consumer.scheduler.matched(Request("g", ids), 96)[0] == 23
    assert consumer.scheduler.matched(Request("h", ids), 105) == (0, False), "so few are computed sooner"


@pytest.mark.parametrize("chunk", [CHUNK, 2 * CHUNK])
def test_a_damaged_tail_names_its_pages(tmp_path: Path, chunk: int) -> None:
    _, snapshot = captured(120)
    whole = 120 // chunk * chunk
    produce(Engine(tmp_path, snapshot.identity, chunk_tokens=chunk), snapshot)
    consumer = Engine(tmp_path, snapshot.identity, mode="sync", chunk_tokens=chunk)
    damage(consumer.store, whole)
    found, blocks = consume(consumer, Request("c", snapshot.token_ids[0].tolist()))
    assert found == 119
    assert consumer.worker.take_bad_blocks() == set(blocks[whole // BLOCK : 4])
    assert torch.equal(consumer.pages.read(blocks[: whole // BLOCK])[0][0], pairs_of(snapshot, 0, whole)[0][0])


def test_a_packet_whose_layers_no_longer_hold_all_of_it_fills_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what is mapped to a model with a smaller window than the packet's: its tokens would move up by one."""
    from kvferry.engines.vllm import worker

    _, snapshot = captured(64)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    consumer = Engine(tmp_path, snapshot.identity, mode="sync")
    monkeypatch.setattr(worker, "decode", lambda packet, **given: kv.decode(packet, **given).crop(CHUNK - 1))
    _, blocks = consume(consumer, Request("c", [*snapshot.token_ids[0].tolist(), 1]))
    assert consumer.worker.take_bad_blocks() == set(blocks[:2])
    assert not consumer.pages.read(blocks)[0][0].any()


def test_an_idle_engine_waits_for_the_thread_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, snapshot = captured(64)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    consumer = Engine(tmp_path, snapshot.identity)
    go = threading.Event()
    get = consumer.store.get
    monkeypatch.setattr(consumer.store, "get", lambda *where: go.wait(60) and get(*where))
    monkeypatch.setattr("kvferry.engines.vllm.worker.IDLE_WAIT", 60.0)
    request = Request("c", [*snapshot.token_ids[0].tolist(), 1])
    consumer.scheduler.admit(request)
    found, _ = consumer.scheduler.matched(request, 0)
    consumer.scheduler.allocated(request, [5, 6, 7], found)
    jobs = consumer.scheduler.step([], lambda _: None)
    assert jobs.idle
    consumer.worker.start(jobs)
    begin = time.monotonic()
    assert consumer.worker.take_arrived() == set(), "a busy engine does not wait"
    threading.Timer(0.05, go.set).start()
    assert consumer.worker.take_arrived(idle=True) == {"c"}
    assert consumer.worker.take_arrived(idle=True) == set(), "nothing is under way: nothing to wait for"
    assert time.monotonic() - begin < 30, "one of them waited as long as it could"


def test_a_step_is_idle_where_nothing_is_under_way_either(tmp_path: Path) -> None:
    """An empty step may run before the one before it has been read; and engines in step wait for one another."""
    _, snapshot = captured(64)
    engine = Engine(tmp_path, snapshot.identity)
    steps = ([], [("a", 0, 1)], [], [])
    assert [engine.scheduler.step(step, lambda _: None).idle for step in steps] == [True, False, False, True]
    many = SchedulerSide(engine.config, engine.store, snapshot.identity, BLOCK, load=True, save=True, alone=False)
    assert not many.step([], lambda _: None).idle


def test_a_shared_prefix_is_saved_once_and_found_by_both(tmp_path: Path) -> None:
    _, snapshot = captured(128)
    engine = Engine(tmp_path, snapshot.identity)
    first = Request("a", snapshot.token_ids[0].tolist())
    second = Request("b", [*snapshot.token_ids[0, :64].tolist(), *[3] * 64])
    for request in (first, second):
        engine.scheduler.admit(request)
    jobs = engine.scheduler.step(
        [("a", 0, 128), ("b", 0, 128)], lambda name: [1, 2, 3, 4] if name == "a" else [1, 2, 5, 6]
    )
    assert [(job.request, job.entry.start) for job in jobs.saves] == [
        ("a", 0),
        ("a", 32),
        ("a", 64),
        ("a", 96),
        ("b", 64),
        ("b", 96),
    ]
    engine.worker.finish(jobs)
    again = engine.scheduler.step([("a", 0, 128), ("b", 0, 128)], lambda _: [1, 2, 3, 4])
    assert again.saves == []
    other = Request("c", [*snapshot.token_ids[0, :64].tolist(), *[4] * 64])
    assert engine.scheduler.matched(other, 0) == (64, True)


def test_a_decoding_step_saves_nothing(tmp_path: Path) -> None:
    _, snapshot = captured(40)
    engine = Engine(tmp_path, snapshot.identity)
    request = Request("a", snapshot.token_ids[0].tolist(), output=[1] * 60)
    engine.scheduler.admit(request)
    assert len(engine.scheduler.step([("a", 0, 40)], lambda _: [1, 2]).saves) == 1
    assert engine.scheduler.step([("a", 95, 1)], lambda _: [1, 2, 3]).saves == []


def test_pages_that_are_gone_are_not_saved(tmp_path: Path) -> None:
    _, snapshot = captured(64)
    engine = Engine(tmp_path, snapshot.identity)
    engine.scheduler.admit(Request("a", snapshot.token_ids[0].tolist()))
    saves = engine.scheduler.step([("a", 0, 64)], lambda _: [0, 3]).saves
    assert [job.entry.start for job in saves] == [32]


@pytest.mark.parametrize(
    "change", [{"lora_request": object()}, {"mm_features": (1,)}, {"cache_salt": "s"}, {"prompt_embeds": object()}]
)
def test_requests_that_are_more_than_tokens_pass_by(tmp_path: Path, change: dict[str, object]) -> None:
    _, snapshot = captured(64)
    engine = Engine(tmp_path, snapshot.identity)
    produce(engine, snapshot)
    request = Request("a", [*snapshot.token_ids[0].tolist(), 1], **change)  # type: ignore[arg-type]
    assert engine.scheduler.matched(request, 0) == (0, False)
    engine.scheduler.admit(request)
    assert engine.scheduler.step([("a", 0, 65)], lambda _: [1, 2, 3]).saves == []


def damage(store: FolderStore, start: int) -> None:
    """Flip one bit in the frames of the packet that begins at ``start``."""
    for path in store.folder.rglob("*.segment.safetensors"):
        if int(kv.Packet.load(path).header.positions[0, 0]) == start:
            data = bytearray(path.read_bytes())
            data[-100] ^= 1
            path.write_bytes(data)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_damaged_packet_names_its_pages_and_goes_out_of_the_way(tmp_path: Path, mode: str) -> None:
    _, snapshot = captured(128)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    consumer = Engine(tmp_path, snapshot.identity, mode=mode)
    damage(consumer.store, 64)
    request = Request("c", [*snapshot.token_ids[0].tolist(), 1])
    found, blocks = consume(consumer, request)
    assert found == 128
    assert consumer.worker.take_bad_blocks() == set(blocks[2:4])
    assert consumer.worker.take_failed() == {"c"}
    assert consumer.worker.take_arrived() == ({"c"} if mode == "async" else set())
    assert torch.equal(consumer.pages.read(blocks[:2])[0][0], pairs_of(snapshot, 0, 64)[0][0])
    assert len(list(tmp_path.rglob("*.damaged"))) == 1
    consumer.scheduler.failed({"c"})
    assert consumer.scheduler.matched(request, 0) == (0, False), "a request that failed once would fail for ever"
    assert consumer.scheduler.matched(Request("d", request.prompt_token_ids), 0)[0] == 64


def test_a_step_whose_load_failed_saves_nothing(tmp_path: Path) -> None:
    """What it computed stands on pages that were not filled."""
    _, snapshot = captured(64)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    both = Engine(tmp_path, snapshot.identity, mode="sync")
    damage(both.store, 32)
    request = Request("c", [*snapshot.token_ids[0].tolist(), *[5] * 40])
    both.scheduler.admit(request)
    found, _ = both.scheduler.matched(request, 0)
    both.scheduler.allocated(request, [1, 2, 3, 4], found)
    jobs = both.scheduler.step([("c", 64, 40)], lambda _: [1, 2, 3, 4])
    assert [job.entry.start for job in jobs.saves] == [64]
    both.worker.start(jobs)
    before = set(tmp_path.rglob("*.segment.safetensors"))
    both.worker.finish(jobs)
    assert set(tmp_path.rglob("*.segment.safetensors")) == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_key_value_heads": 4}, {"rope_theta": 5000.0}], ids=str)
def test_another_models_packet_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    _, snapshot = captured(64)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    seed = int(change.pop("seed", 0))  # type: ignore[call-overload]
    from kvferry.hf.identity import identity_of
    from tests.hf.tiny import llama

    other = identity_of(llama(seed, torch.bfloat16, **change))
    request = Request("c", [*snapshot.token_ids[0].tolist(), 1])
    quiet = Engine(tmp_path, other)
    assert quiet.scheduler.matched(request, 0) == (0, False)
    assert quiet.scheduler.matched(request, 0) == (0, False)
    assert quiet.scheduler.counts.take() == {"lookups": 1, "refusals": 1}
    loud = Engine(tmp_path, other, identity="raise")
    with pytest.raises(kv.IncompatibleIdentity) as caught:
        loud.scheduler.matched(request, 0)
    assert caught.value.differences


def test_a_packet_under_another_prefixs_name_is_passed_over(tmp_path: Path) -> None:
    """The same tokens behind other ones are another cache."""
    _, snapshot = captured(64)
    engine = Engine(tmp_path, snapshot.identity)
    produce(engine, snapshot)
    tail = snapshot.token_ids[0, 32:].tolist()
    stolen = Request("c", [*[7] * 32, *tail, 1])
    own, other = (chain(ids, CHUNK) for ids in (snapshot.token_ids[0].tolist(), stolen.prompt_token_ids))
    store = engine.store
    first = store.get(own[0], "segment")
    for key, source in zip(other, own, strict=True):
        store.put(key, "segment", store.get(source, "segment"))
    assert first.header.token_ids[0].tolist() != stolen.prompt_token_ids[:32]
    with pytest.raises(kv.IncompatibleIdentity, match="other tokens"):
        Engine(tmp_path, snapshot.identity, identity="raise").scheduler.matched(stolen, 0)


def test_saves_in_the_background_end_before_the_engine_does(tmp_path: Path) -> None:
    """Also when more of them wait than have room."""
    _, snapshot = captured(128)
    engine = Engine(tmp_path, snapshot.identity, in_background=True)
    engine.worker._room = threading.BoundedSemaphore(1)
    produce(engine, snapshot)
    engine.worker.close()
    assert engine.worker.counts.take()["saved_packets"] == 4
    assert len(list(tmp_path.rglob("*.segment.safetensors"))) == 4


def test_a_folder_that_cannot_be_written_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, snapshot = captured(64)
    engine = Engine(tmp_path, snapshot.identity)
    (tmp_path / chain(snapshot.token_ids[0].tolist(), CHUNK)[0][:2]).write_text("in the way")
    produce(engine, snapshot)
    counts = engine.worker.counts.take()
    assert counts["save_failures"] >= 1
    assert "were not saved" in caplog.text


@pytest.mark.parametrize("budget", [0.52, 0.28])
def test_a_lower_budget_takes_fewer_bytes_and_stays_near(tmp_path: Path, budget: float) -> None:
    _, snapshot = captured(128, num_hidden_layers=4, head_dim=64, hidden_size=256)
    produce(Engine(tmp_path, snapshot.identity, budget=budget, chunk_tokens=128), snapshot)
    consumer = Engine(tmp_path, snapshot.identity, mode="sync", chunk_tokens=128)
    _, blocks = consume(consumer, Request("c", [*snapshot.token_ids[0].tolist(), 1]))
    keys = consumer.pages.read(blocks[:4])[0][0].float()
    want = pairs_of(snapshot, 0, 128)[0][0].float()
    assert (keys - want).norm() / want.norm() < (0.01 if budget > 0.5 else 0.15)
    counts = consumer.worker.counts.take()
    assert counts["loaded_bytes"] <= budget * counts["loaded_full_bytes"]


def test_a_chunk_that_cannot_be_had_for_so_little_takes_what_it_needs(tmp_path: Path) -> None:
    """Four of its 32 tokens are sinks, at 16 bit: more than a tenth of everything."""
    _, snapshot = captured(128)
    engine = Engine(tmp_path, snapshot.identity, budget=0.05, policy="greedy")
    produce(engine, snapshot)
    counts = engine.worker.counts.take()
    assert counts["saved_packets"] == 4
    assert 0.05 < counts["saved_bytes"] / counts["saved_full_bytes"] < 0.8


def test_a_chunk_of_another_model_leaves_the_good_ones_before_it(tmp_path: Path) -> None:
    """As where two models write to one store, each the chunks that the other has not."""
    _, snapshot = captured(128)
    _, other = captured(128, seed=1)
    other = replace(other, token_ids=snapshot.token_ids)
    produce(Engine(tmp_path, other.identity), other)
    engine = Engine(tmp_path, snapshot.identity, identity="raise")
    keys = chain(snapshot.token_ids[0].tolist(), CHUNK)
    for key in keys[:2]:
        engine.store.path(key, "segment").unlink()
    produce(engine, snapshot)
    request = Request("c", [*snapshot.token_ids[0].tolist(), 1])
    assert engine.scheduler.matched(request, 0) == (64, True)
    third = Engine(tmp_path, captured(128, seed=2)[1].identity, identity="raise")
    with pytest.raises(kv.IncompatibleIdentity):
        third.scheduler.matched(request, 0)
