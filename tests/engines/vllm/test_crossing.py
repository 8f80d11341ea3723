"""Packets of one model in the pages of another: what arrives is the map of what was sent, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.engines.vllm.chain import chain_and_tail
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.crossing import Crossing, crossing_of
from kvferry.engines.vllm.interchange import publish
from kvferry.engines.vllm.segments import cut
from kvferry.engines.vllm.store import FolderStore
from kvferry.errors import IncompatibleIdentity, InvalidInput, UnsupportedCache
from kvferry.evaluate.map_run import transfer
from kvferry.hf.text import default_text
from kvferry.map.gate import Acceptance, Floors
from kvferry.map.mapper import Mapper
from kvferry.snapshot import LayerKind
from tests.engines.vllm.builders import BLOCK, CHUNK, Engine, Request, consume
from tests.map import builders

LONG = 64  # the gate needs twice its 24 tokens
FLOORS = Floors(context_gain=None)
Pair = tuple[Path, Any, Any, Mapper, Acceptance]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A source, a target, a mapper, and the record of a gate that lets it pass, the one record that there is."""
    folder = tmp_path_factory.mktemp("crossing")
    source, target, mapper, record = builders.judged_pair(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(folder / "cache"))
        record.save()
        yield folder, source, target, mapper, record


def prompt(tokens: int, at: int = 0) -> torch.Tensor:
    return torch.tensor([[ord(letter) % 128 for letter in default_text()[at : at + tokens]]])


def crossing(pair: Pair, **settings: Any) -> Crossing:
    folder, _, _, mapper, _ = pair
    config = ConnectorConfig.parse({"store": str(folder / "store"), "mapper": str(folder / "mapper"), **settings})
    made = crossing_of(config, mapper.target, LONG, produces=False, failure_policy="recompute")
    assert made is not None
    made.load_target(str(folder / "target"), "float32")
    return made


def engine(pair: Pair, folder: Path, made: Crossing, **settings: Any) -> Engine:
    return Engine(folder, pair[3].target, save=False, mode="sync", chunk_tokens=LONG, crossing=made, **settings)


@pytest.mark.parametrize("gate", [True, False])
def test_what_arrives_is_the_map_with_the_targets_own_first_tokens(pair: Pair, tmp_path: Path, gate: bool) -> None:
    _, source, target, mapper, _ = pair
    ids = prompt(3 * LONG + 5)
    sent = kv.capture(source, ids[:, : 3 * LONG])
    publish(sent, FolderStore(tmp_path), chunk_tokens=LONG)
    consumer = engine(pair, tmp_path, crossing(pair, gate=gate))
    found, blocks = consume(consumer, Request("c", ids[0].tolist()))
    assert found == 3 * LONG
    assert consumer.worker.take_bad_blocks() == set()
    counts = consumer.worker.counts.take()
    assert counts["mapped_tokens"] == counts["loaded_tokens"] == 3 * LONG
    assert counts["map_ms"] > 0
    native = 24 if gate else mapper.recipe.native_prefix
    want = transfer(mapper, target, sent, native_prefix=native).snapshot
    own = kv.capture(target, ids[:, : 3 * LONG])
    # Chunks of this size are no whole tiles of the mapper, and products of other rows differ in their last bits.
    pages = consumer.pages.read(blocks[: 3 * LONG // BLOCK])
    for page, layer, unmapped in zip(pages, want.layers, own.layers, strict=True):
        sides = (layer.keys, layer.values), (unmapped.keys, unmapped.values)
        for have, mapped, prefilled in zip(page, *sides, strict=True):
            assert mapped is not None
            assert prefilled is not None
            assert torch.allclose(have, mapped[0], atol=1e-5)
            assert torch.allclose(have[:, :native], prefilled[0, :, :native], atol=1e-5)
    assert own.layers[-1].keys is not None
    assert not torch.allclose(pages[-1][0][:, native:], own.layers[-1].keys[0, :, native:], atol=1e-3)


def test_a_mapped_cache_that_the_gate_declines_is_left_to_the_engine(pair: Pair, tmp_path: Path) -> None:
    """The record is of the mapper, but the cache is not what it says: another text's tokens."""
    _, source, _, _, _ = pair
    ids = prompt(2 * LONG + 1)
    lying = replace(kv.capture(source, prompt(2 * LONG, 5000)), token_ids=ids[:, : 2 * LONG])
    publish(lying, FolderStore(tmp_path), chunk_tokens=LONG)
    consumer = engine(pair, tmp_path, crossing(pair))
    found, blocks = consume(consumer, Request("c", ids[0].tolist()))
    assert found == 2 * LONG
    assert consumer.worker.take_bad_blocks() == set(blocks[:4])
    counts = consumer.worker.counts.take()
    assert (counts["declined"], "load_failures" in counts) == (1, False)
    assert not consumer.pages.read(blocks)[0][0].any()


@pytest.mark.parametrize("known", [True, False], ids=["declined before", "never looked at"])
def test_an_engine_that_has_the_first_tokens_by_itself_opens_no_gate(pair: Pair, tmp_path: Path, known: bool) -> None:
    """As after a prompt that was declined and computed: its prefix cache has the first chunk, the store the rest."""
    _, source, _, _, _ = pair
    ids = prompt(2 * LONG + 1)
    lying = replace(kv.capture(source, prompt(2 * LONG, 5000)), token_ids=ids[:, : 2 * LONG])
    publish(lying, FolderStore(tmp_path), chunk_tokens=LONG)
    consumer = engine(pair, tmp_path, crossing(pair))
    if known:
        consume(consumer, Request("c", ids[0].tolist()))
        consumer.worker.take_bad_blocks()
        consumer.worker.counts.take()
    found, blocks = consume(consumer, Request("d", ids[0].tolist()), computed=LONG)
    assert found == LONG
    assert consumer.worker.take_bad_blocks() == set(blocks[2:4])
    assert consumer.worker.counts.take()["declined"] == 1
    assert not consumer.pages.read(blocks)[0][0].any()


def test_what_passed_the_gate_once_serves_behind_the_engines_own_first_tokens(pair: Pair, tmp_path: Path) -> None:
    _, source, _, mapper, _ = pair
    ids = prompt(2 * LONG + 1)
    sent = kv.capture(source, ids[:, : 2 * LONG])
    publish(sent, FolderStore(tmp_path), chunk_tokens=LONG)
    consumer = engine(pair, tmp_path, crossing(pair))
    found, blocks = consume(consumer, Request("c", ids[0].tolist()), computed=LONG)
    assert found == LONG
    assert consumer.worker.take_bad_blocks() == set()
    want = mapper.map(sent).layers[0].values
    assert want is not None
    assert torch.allclose(consumer.pages.read(blocks[2:4])[0][1], want[0, :, LONG:], atol=1e-5)


def test_a_prompt_too_short_for_the_gate_is_left_to_the_engine(pair: Pair, tmp_path: Path) -> None:
    _, source, _, _, _ = pair
    ids = prompt(40)
    _, key = chain_and_tail(ids[0].tolist(), LONG)
    assert key is not None
    sent = kv.capture(source, ids)
    FolderStore(tmp_path).put(key, "segment", kv.encode(cut(sent, 0, 40, key)))
    free = engine(pair, tmp_path, crossing(pair, gate=False))
    assert consume(free, Request("c", ids[0].tolist()))[0] == 39
    assert free.worker.take_bad_blocks() == set()
    assert consume(engine(pair, tmp_path, crossing(pair)), Request("c", ids[0].tolist()))[0] == 0


def test_packets_of_another_model_than_the_source_are_refused(pair: Pair, tmp_path: Path) -> None:
    _, _, target, _, _ = pair
    ids = prompt(LONG + 1)
    publish(kv.capture(target, ids[:, :LONG]), FolderStore(tmp_path), chunk_tokens=LONG)
    consumer = engine(pair, tmp_path, crossing(pair))
    assert consume(consumer, Request("c", ids[0].tolist()))[0] == 0
    assert consumer.scheduler.counts.take()["refusals"] == 1
    strict = engine(pair, tmp_path, crossing(pair), identity="raise")
    with pytest.raises(IncompatibleIdentity) as caught:
        consume(strict, Request("c", ids[0].tolist()))
    assert "num_layers" in caught.value.differences


def test_settings_that_do_not_go_together_stop_the_engine(pair: Pair, tmp_path: Path) -> None:
    folder, _, _, mapper, _ = pair
    config = ConnectorConfig.parse({"store": str(tmp_path), "mapper": str(folder / "mapper")})
    with pytest.raises(InvalidInput, match="use kv_role kv_consumer"):
        crossing_of(config, mapper.target, LONG, produces=True, failure_policy="recompute")
    with pytest.raises(InvalidInput, match="use 'recompute'"):
        crossing_of(config, mapper.target, LONG, produces=False, failure_policy="fail")
    with pytest.raises(IncompatibleIdentity, match="not the mapper's target"):
        crossing_of(config, mapper.source, LONG, produces=False, failure_policy="recompute")
    nowhere = replace(config, mapper=str(tmp_path / "none"))
    with pytest.raises(InvalidInput, match="none"):
        crossing_of(nowhere, mapper.target, LONG, produces=False, failure_policy="recompute")
    assert crossing_of(replace(config, mapper=None), mapper.target, CHUNK, produces=True, failure_policy="fail") is None


def test_a_gate_that_stays_shut_stops_the_engine(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"stays shut: KL 0\.010, above 0\.001"):
        crossing(pair, floors={"kl": 0.001})
    with pytest.raises(InvalidInput, match=r"floors = .*'klt'"):
        crossing(pair, floors={"klt": 0.001})
    for wrong in (float("inf"), None, True, "low"):
        with pytest.raises(InvalidInput, match=r"the floor attention_cosine is .*, not a finite number"):
            crossing(pair, floors={"attention_cosine": wrong})
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match="run 'kvferry map gate'"):
        crossing(pair)
    crossing(pair, gate=False)


def test_a_mapper_that_leaves_too_much_to_the_target_for_the_gate_to_see_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.engines.vllm import crossing as module

    mapper = pair[3]
    lazy = replace(mapper, recipe=replace(mapper.recipe, native_prefix=17))
    monkeypatch.setattr(module, "_open", lambda _: lazy)
    with pytest.raises(InvalidInput, match="leave at most 16"):
        crossing(pair, floors={"native_prefix": 24})


def test_chunks_too_short_for_the_gate_are_refused(pair: Pair) -> None:
    folder, _, _, mapper, _ = pair
    config = ConnectorConfig.parse({"store": str(folder / "store"), "mapper": str(folder / "mapper")})
    with pytest.raises(InvalidInput, match="at least 48"):
        crossing_of(config, mapper.target, CHUNK, produces=False, failure_policy="recompute")


def test_a_target_that_slides_over_less_than_a_chunk_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engines.vllm import crossing as module

    folder, _, _, mapper, _ = pair
    first, *others = mapper.target.layers
    narrow = replace(first, kind=LayerKind("sliding", LONG))
    slides = replace(mapper.target, layers=(narrow, *others))

    class Sliding:
        source, target = mapper.source, slides

    monkeypatch.setattr(module, "_open", lambda _: Sliding())
    config = ConnectorConfig.parse({"store": str(folder / "store"), "mapper": str(folder / "mapper")})
    with pytest.raises(UnsupportedCache, match=f"slides over {LONG} tokens"):
        crossing_of(config, slides, LONG, produces=False, failure_policy="recompute")
