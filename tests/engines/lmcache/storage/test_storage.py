"""Chunks through LMCache's storage manager: written to L1, stored to L2, dropped from L1, fetched again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.serde import SerdeConfig as LMCacheSerdeConfig
from lmcache.v1.distributed.serde import create_serde_processor, get_registered_serde_types
from torch import Tensor

import kvferry as kv
from kvferry.engines.lmcache import register
from kvferry.engines.lmcache.codec import encode, room
from kvferry.errors import BudgetTooSmall, CorruptPacket, IncompatibleIdentity, InvalidInput, TooLarge, UnsupportedCache
from tests.engines.lmcache.builders import QUANTIZERS, SETTINGS, by_own_verbs, config, random_chunk, same_bits
from tests.engines.lmcache.storage.conftest import Errors, Open, Storage, layout_of, object_key
from tests.engines.lmcache.test_codec import DTYPES, shape_of


def there_and_back(storage: Storage, chunks: dict[Any, Tensor]) -> tuple[dict[Any, Tensor], int]:
    """Every chunk by way of L2, and the bytes that were stored."""
    keys, like = list(chunks), next(iter(chunks.values()))
    storage.put(chunks)
    nbytes = storage.stored(len(keys))
    storage.forget(keys)
    return storage.get(keys, like), nbytes


def chunks_of(count: int, **more: Any) -> dict[Any, Tensor]:
    return {object_key(number): random_chunk(number, **more) for number in range(count)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_chunks_come_back_as_from_kvferrys_own_verbs(storage: Open, quantizer: str, dtype: torch.dtype) -> None:
    chunks = chunks_of(3, dtype=dtype)
    back, nbytes = there_and_back(storage(quantizer=quantizer), chunks)
    assert list(back) == list(chunks)
    for key, chunk in chunks.items():
        assert same_bits(back[key], by_own_verbs(chunk, quantizer))
        assert same_bits(back[key], chunk) == (quantizer == "raw")
    assert nbytes == 3 * room(shape_of(chunk), config(quantizer=quantizer))


@pytest.mark.parametrize("adapter", ["fs", "fs_native", "mock"])
@pytest.mark.parametrize("serde", [{}, {"quantizer": "asym4g64"}, {"budget": 0.3}], ids=["raw", "asym4g64", "budget"])
def test_every_adapter_that_needs_no_service(storage: Open, adapter: str, serde: dict[str, Any]) -> None:
    chunks = chunks_of(2, tokens=128)
    back, nbytes = there_and_back(storage(adapter, **serde), chunks)
    assert list(back) == list(chunks)
    for key, chunk in chunks.items():
        if "budget" in serde:
            error = (back[key].double() - chunk.double()).pow(2).mean() / chunk.double().pow(2).mean()
            assert 0 < error < 0.02
        else:
            assert same_bits(back[key], by_own_verbs(chunk, serde.get("quantizer", "raw")))
    whole = sum(chunk.nbytes for chunk in chunks.values())
    assert (
        nbytes
        < {"raw": 1.04, "asym4g64": 0.32, "budget": 0.31}[serde.get("quantizer", "budget" if serde else "raw")] * whole
    )


def test_a_stored_chunk_is_a_packet(storage: Open) -> None:
    opened, key, chunk = storage(quantizer="sym8"), object_key(5, cache_salt="tenant"), random_chunk(5)
    opened.put({key: chunk})
    nbytes = opened.stored(1)
    data = opened.file(key).read_bytes()
    assert len(data) == nbytes
    packet = kv.Packet.from_bytes(data[: encode(chunk, shape_of(chunk), config(quantizer="sym8"), key).nbytes])
    assert packet.identity.model == key.model_name
    assert "lmcache.cache_salt=tenant" in packet.identity.construction
    assert f"lmcache.chunk_hash={key.chunk_hash.hex()}" in packet.identity.construction


def test_another_process_life_finds_the_chunks(storage: Open) -> None:
    chunks = chunks_of(4)
    first = storage(quantizer="sym8")
    first.put(chunks)
    first.stored(4)
    second = storage(quantizer="sym8")
    assert second is not first
    back = second.get(list(chunks), random_chunk(0))
    assert list(back) == list(chunks)
    for key, chunk in chunks.items():
        assert same_bits(back[key], by_own_verbs(chunk, "sym8"))


@pytest.mark.parametrize("where", ["magic", "identity", "frame", "checksum"])
def test_a_damaged_file_is_a_miss_and_says_why(storage: Open, errors: Errors, where: str) -> None:
    opened, chunks = storage(), chunks_of(2)
    good, bad = chunks
    opened.put(chunks)
    opened.stored(2)
    opened.forget([good, bad])
    data = bytearray(opened.file(bad).read_bytes())
    end = len(bytes(data).rstrip(b"\0"))
    data[{"magic": 0, "identity": 200, "frame": end // 2, "checksum": end - 1}[where]] ^= 4
    opened.file(bad).write_bytes(data)
    assert opened.get([bad], chunks[bad]) == {}
    assert isinstance(errors.next(), CorruptPacket)
    assert opened.manager.get_l1_usage()[0] == 0
    assert same_bits(opened.get([good], chunks[good])[good], chunks[good])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_name": "meta-llama/Llama-3.2-1B"}, "model"),
        ({"kv_rank": 0x02010201}, "kv_rank"),
        ({"cache_salt": "someone"}, "cache_salt"),
        ({"chunk_hash": bytes(32)}, "chunk_hash"),
    ],
)
def test_a_file_under_anothers_name_is_refused_by_name(
    storage: Open, errors: Errors, change: dict[str, Any], field: str
) -> None:
    opened, key, chunk = storage(), object_key(1), random_chunk(1)
    other = replace(key, **change)
    opened.put({key: chunk})
    opened.stored(1)
    opened.put({other: chunk})
    opened.stored(1)
    opened.forget([key, other])
    names = {path: path.read_bytes() for path in opened.folder.iterdir()}
    assert len(names) == 2
    first, second = names
    first.write_bytes(names[second])
    second.write_bytes(names[first])
    assert opened.get([other], chunk) == {}
    error = errors.next()
    assert isinstance(error, IncompatibleIdentity)
    assert list(error.differences) == [field]
    assert opened.manager.get_l1_usage()[0] == 0


def test_another_tag_of_the_weights_is_refused(storage: Open, errors: Errors) -> None:
    key, chunk = object_key(1), random_chunk(1)
    opened = storage(weights="step-1000")
    opened.put({key: chunk})
    opened.stored(1)
    again = storage(weights="step-2000")
    assert again.get([key], chunk) == {}
    error = errors.next()
    assert isinstance(error, IncompatibleIdentity)
    assert error.differences == {"weights": ("step-1000", "step-2000")}


def test_wrong_heads_stop_both_directions_and_hold_no_memory(storage: Open, errors: Errors) -> None:
    key, chunk = object_key(1), random_chunk(1)
    opened = storage(head_dim=128)
    opened.put({key: chunk})
    stored = errors.next()
    assert isinstance(stored, IncompatibleIdentity)
    assert stored.differences == {"hidden": (192, 384)}
    assert not list(opened.folder.iterdir())
    opened = storage()
    opened.put({key: chunk})
    opened.stored(1)
    opened = storage(head_dim=128)
    assert opened.get([key], chunk) == {}
    assert isinstance(errors.next(), IncompatibleIdentity)
    assert opened.manager.get_l1_usage()[0] == 0


def test_latent_caches_are_refused(storage: Open, errors: Errors) -> None:
    opened, latent = storage(), torch.zeros(1, 4, 48, 192, dtype=torch.bfloat16)
    opened.put({object_key(1): latent})
    assert isinstance(errors.next(), UnsupportedCache)


@pytest.mark.parametrize(
    ("serde", "kind"), [({"quantizer": "sym8"}, TooLarge), ({"budget": 0.05}, BudgetTooSmall)], ids=["nan", "budget"]
)
def test_what_cannot_be_stored_fails_and_the_next_is_stored(
    storage: Open, errors: Errors, serde: dict[str, Any], kind: type[Exception]
) -> None:
    opened, chunk = storage(**serde), random_chunk(1)
    broken = chunk.clone()
    broken[0, 0, :, 0] = torch.nan
    opened.put({object_key(1): broken})
    opened.stored(0, failed=1)
    assert isinstance(errors.next(), kind)
    assert not list(opened.folder.iterdir())
    assert opened.manager.delete_l1_keys([object_key(1)]) == (1, 0)
    assert opened.manager.get_l1_usage()[0] == 0
    if kind is TooLarge:
        opened.put({object_key(2): chunk})
        opened.stored(1)
        opened.forget([object_key(2)])
        assert same_bits(opened.get([object_key(2)], chunk)[object_key(2)], by_own_verbs(chunk, "sym8"))


def test_many_threads_store_and_load_at_once(storage: Open) -> None:
    opened = storage(quantizer="asym4g64", max_workers=4)
    groups = [
        {object_key(100 * group + number): random_chunk(100 * group + number) for number in range(5)}
        for group in range(6)
    ]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(opened.put, groups))
        opened.stored(30)
        opened.forget([key for group in groups for key in group])
        backs = list(pool.map(lambda group: opened.get(list(group), random_chunk(0)), groups))
    for group, back in zip(groups, backs, strict=True):
        assert list(back) == list(group)
        for key, chunk in group.items():
            assert same_bits(back[key], by_own_verbs(chunk, "asym4g64"))


def test_register_again_is_no_harm_and_wrong_settings_say_so() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: register(), range(32)))
    assert get_registered_serde_types().count("kvferry") == 1
    with pytest.raises(InvalidInput, match="needs head_dim and num_kv_heads"):
        create_serde_processor(LMCacheSerdeConfig("kvferry"))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_size_that_lmcache_asks_for_is_the_one_that_is_stored(storage: Open, quantizer: str) -> None:
    chunk = random_chunk(1, layers=2, tokens=17)
    processor = create_serde_processor(LMCacheSerdeConfig("kvferry", {**SETTINGS, "quantizer": quantizer}))
    try:
        size = processor.estimate_serialized_size(layout_of(chunk))
    finally:
        processor.close()
    opened = storage(quantizer=quantizer)
    opened.put({object_key(1): chunk})
    assert opened.stored(1) == size == opened.file(object_key(1)).stat().st_size
