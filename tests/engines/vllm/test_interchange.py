"""Transformers on one side, an engine's pages on the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvferry as kv
from kvferry.engines.vllm.interchange import fetch, publish
from kvferry.engines.vllm.store import FolderStore
from kvferry.hf.compat import cache_argument
from tests.engines.vllm.builders import CHUNK, Engine, Request, captured, pairs_of
from tests.engines.vllm.test_sides import consume, produce
from tests.hf.tiny import gemma3, prompt


def test_a_captured_cache_fills_an_engines_pages(tmp_path: Path) -> None:
    _, snapshot = captured(100)
    assert publish(snapshot, FolderStore(tmp_path), chunk_tokens=CHUNK) == 96
    consumer = Engine(tmp_path, snapshot.identity, mode="sync")
    found, blocks = consume(consumer, Request("c", [*snapshot.token_ids[0].tolist(), 1]))
    assert found == 96
    for have, want in zip(consumer.pages.read(blocks[:3]), pairs_of(snapshot, 0, 96), strict=True):
        assert torch.equal(have[0], want[0])
        assert torch.equal(have[1], want[1])


def test_a_packet_goes_in_as_it_is(tmp_path: Path) -> None:
    _, snapshot = captured(128)
    packet = kv.encode(snapshot.crop(96), 0.6, policy="greedy")
    store = FolderStore(tmp_path)
    assert publish(packet, store, chunk_tokens=CHUNK) == 96
    (file,) = tmp_path.rglob("*.safetensors")
    assert kv.Packet.load(file).to_bytes() == packet.to_bytes()
    consumer = Engine(tmp_path, snapshot.identity, mode="sync")
    found, blocks = consume(consumer, Request("c", [*snapshot.token_ids[0].tolist(), 1]), computed=32)
    assert found == 64
    want = kv.decode(packet)
    assert torch.equal(consumer.pages.read(blocks[1:3])[1][0], pairs_of(want, 32, 96)[1][0])
    other = Request("d", [*snapshot.token_ids[0, :64].tolist(), *[1] * 64])
    assert consumer.scheduler.matched(other, 0) == (0, False), "a packet serves prompts that begin with all of it"


def test_segments_follow_a_packet(tmp_path: Path) -> None:
    """A prompt that goes on behind what the packet holds is saved from there on, and found as one prefix."""
    _, snapshot = captured(128)
    publish(kv.encode(snapshot.crop(64)), FolderStore(tmp_path), chunk_tokens=CHUNK)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    for file in tmp_path.rglob("*.segment.safetensors"):
        if int(kv.Packet.load(file).header.positions[0, 0]) < 64:
            file.unlink()
    whole = fetch(snapshot.token_ids[0].tolist(), FolderStore(tmp_path), snapshot.identity, chunk_tokens=CHUNK)
    assert whole is not None
    assert whole.seq_len == 128
    for have, want in zip(pairs_of(whole, 0, 128), pairs_of(snapshot, 0, 128), strict=True):
        assert torch.equal(have[0], want[0])


def test_what_an_engine_saved_continues_in_transformers(tmp_path: Path) -> None:
    model, snapshot = captured(128)
    produce(Engine(tmp_path, snapshot.identity), snapshot)
    ids = snapshot.token_ids[0].tolist()
    fetched = fetch(ids, FolderStore(tmp_path), snapshot.identity, chunk_tokens=CHUNK)
    assert fetched is not None
    cache = fetched.to_cache(model)
    full = torch.cat([snapshot.token_ids, torch.tensor([[5]])], 1)
    name = cache_argument(model)
    have = model.generate(full, **{name: cache}, max_new_tokens=8, do_sample=False)
    want = model.generate(full, **{name: snapshot.to_cache(model)}, max_new_tokens=8, do_sample=False)
    assert torch.equal(have, want)
    first = min(
        (kv.Packet.load(file) for file in tmp_path.rglob("*.safetensors")),
        key=lambda packet: packet.header.positions[0, 0],
    )
    alone = kv.decode(first)
    assert alone.seq_len == CHUNK
    alone.to_cache(model)


def test_nothing_is_fetched_for_another_prompt_or_model(tmp_path: Path) -> None:
    _, snapshot = captured(64)
    store = FolderStore(tmp_path)
    publish(snapshot, store, chunk_tokens=CHUNK)
    ids = snapshot.token_ids[0].tolist()
    assert fetch([5, *ids], store, snapshot.identity, chunk_tokens=CHUNK) is None
    assert fetch(ids, store, snapshot.identity, chunk_tokens=CHUNK, namespace="tenant") is None
    _, other = captured(64, seed=1)
    with pytest.raises(kv.IncompatibleIdentity) as caught:
        fetch(ids, store, other.identity, chunk_tokens=CHUNK)
    assert "weights" in caught.value.differences


def test_what_pages_cannot_hold_is_refused(tmp_path: Path) -> None:
    model, snapshot = captured(64)
    store = FolderStore(tmp_path)
    with pytest.raises(kv.InvalidInput, match="shorter than a chunk"):
        publish(snapshot.crop(20), store, chunk_tokens=CHUNK)
    with pytest.raises(kv.InvalidInput, match="crop the snapshot"):
        publish(kv.encode(snapshot.crop(40)), store, chunk_tokens=CHUNK)
    with pytest.raises(kv.InvalidInput, match="crop the snapshot"):
        publish(kv.encode(snapshot, 0.5, policy="sws"), store, chunk_tokens=CHUNK)
    padded = kv.capture(model, prompt(1, 64), attention_mask=torch.tensor([[0] * 4 + [1] * 60]))
    with pytest.raises(kv.InvalidInput, match="4 tokens are padding"):
        publish(padded, store, chunk_tokens=CHUNK)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_sliding_layers(tmp_path: Path) -> None:
    """Whole while the window holds everything; after that a prefix's first tokens are gone, and it is refused."""
    model = gemma3(0, torch.bfloat16, sliding_window=80)
    short = kv.capture(model, prompt(1, 64))
    store = FolderStore(tmp_path)
    assert publish(short, store, chunk_tokens=CHUNK) == 64
    fetched = fetch(short.token_ids[0].tolist(), store, short.identity, chunk_tokens=CHUNK)
    assert fetched is not None
    assert torch.equal(fetched.layers[0].keys, short.layers[0].keys)

    long = kv.capture(model, prompt(1, 128, seed=2))
    with pytest.raises(kv.UnsupportedCache, match="holds tokens 49…127 only"):
        publish(long, store, chunk_tokens=CHUNK)
    publish(kv.encode(long), store, chunk_tokens=CHUNK)
    consumer = Engine(tmp_path, long.identity)
    assert consumer.scheduler.matched(Request("c", [*long.token_ids[0].tolist(), 1]), 0) == (0, False)


def test_segments_of_an_engine_with_sliding_layers_join_to_what_transformers_holds(tmp_path: Path) -> None:
    from kvferry.engines.vllm.chain import chain
    from kvferry.engines.vllm.segments import make_segment

    model = gemma3(0, torch.bfloat16, sliding_window=40)
    long = kv.capture(model, prompt(1, 128))
    ids = long.token_ids[0].tolist()
    full = torch.randn(3, 2, 1, 128, 16).bfloat16()  # what an engine's pages hold: every token of every layer
    for layer, pair in zip(long.layers, full, strict=True):
        pair[0, :, layer.first :], pair[1, :, layer.first :] = layer.keys[0], layer.values[0]
    store = FolderStore(tmp_path)
    for index, key in enumerate(chain(ids, CHUNK)):
        span = slice(index * CHUNK, (index + 1) * CHUNK)
        pairs = [(pair[0, :, span], pair[1, :, span]) for pair in full]
        store.put(key, "segment", kv.encode(make_segment(long.identity, ids[span], span.start, key, pairs)))
    fetched = fetch(ids, store, long.identity, chunk_tokens=CHUNK)
    assert fetched is not None
    for have, want in zip(fetched.layers, long.layers, strict=True):
        assert torch.equal(have.keys, want.keys)
        assert torch.equal(have.values, want.values)
    fetched.to_cache(model)
