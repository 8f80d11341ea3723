from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvferry.engines.lmcache.chunk import ChunkShape
from kvferry.engines.lmcache.codec import NAMES_BYTES, decode, encode, room, write
from kvferry.engines.lmcache.config import SerdeConfig
from kvferry.errors import BudgetTooSmall, CorruptPacket, IncompatibleIdentity, KVFerryError, TooLarge
from tests.engines.lmcache.builders import DIM, HEADS, QUANTIZERS, Key, by_own_verbs, config, random_chunk, same_bits

KEY = Key()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def shape_of(chunk: Tensor) -> ChunkShape:
    return ChunkShape(chunk.shape[1], chunk.shape[2], chunk.dtype)


def stored(chunk: Tensor, chosen: SerdeConfig, key: Any = KEY) -> bytearray:
    out = bytearray(b"\xff" * room(shape_of(chunk), chosen))
    write(encode(chunk, shape_of(chunk), chosen, key), memoryview(out))
    return out


def loaded(data: bytes | bytearray, like: Tensor, chosen: SerdeConfig, key: Any = KEY) -> Tensor:
    out = torch.full_like(like, 7)
    decode(memoryview(data), out, shape_of(like), chosen, key)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_chunk_comes_back_as_from_kvferrys_own_verbs(quantizer: str, dtype: torch.dtype) -> None:
    chunk, chosen = random_chunk(3, dtype=dtype), config(quantizer=quantizer)
    back = loaded(stored(chunk, chosen), chunk, chosen)
    assert same_bits(back, by_own_verbs(chunk, quantizer))
    assert same_bits(back, chunk) == (quantizer == "raw")


@settings(max_examples=150, deadline=None)
@given(
    quantizer=st.sampled_from((*QUANTIZERS, "asym3row", "chan2b7:cen5", "asym8g16", "had2g128")),
    layers=st.integers(1, 5),
    tokens=st.integers(1, 70),
    heads=st.integers(1, 4),
    dim=st.sampled_from((1, 2, 8, 33, 64, 128)),
    dtype=st.sampled_from(DTYPES),
    key=st.builds(
        Key,
        chunk_hash=st.binary(max_size=64),
        model_name=st.text(max_size=60),
        kv_rank=st.integers(0, 2**32 - 1),
        object_group_id=st.integers(0, 99),
        cache_salt=st.text(max_size=40),
    ),
    seed=st.integers(0, 2**31),
)
def test_room_is_an_upper_bound_and_close(
    quantizer: str, layers: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, key: Any, seed: int
) -> None:
    chosen = SerdeConfig.parse({"num_kv_heads": heads, "head_dim": dim, "quantizer": quantizer})
    chunk = random_chunk(seed, layers, tokens, heads, dim, dtype)
    size = encode(chunk, shape_of(chunk), chosen, key).nbytes
    assert room(shape_of(chunk), chosen) - NAMES_BYTES <= size <= room(shape_of(chunk), chosen)
    assert len(stored(chunk, chosen, key)) == room(shape_of(chunk), chosen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [0.9, 0.52, 0.3])
def test_a_budget_is_kept_in_bytes(budget: float, dtype: torch.dtype) -> None:
    chunk, chosen = random_chunk(5, tokens=128, dtype=dtype), config(budget=budget)
    data = stored(chunk, chosen)
    whole = room(shape_of(chunk), config())
    assert len(data) <= budget * whole
    error = (loaded(data, chunk, chosen).double() - chunk.double()).pow(2).mean()
    assert 0 < error < 0.02 * chunk.double().pow(2).mean()


def test_a_budget_that_cannot_be_met_says_which_can() -> None:
    chunk = random_chunk(5)
    with pytest.raises(BudgetTooSmall) as caught:
        encode(chunk, shape_of(chunk), config(budget=0.05), KEY)
    assert 0.05 < caught.value.least_budget < 0.5


def test_nan_and_infinity_go_bit_for_bit_at_raw_and_are_refused_where_they_do_not_fit() -> None:
    chunk = random_chunk(6)
    chunk[0, 1, ::2, 5] = torch.nan
    chunk[1, 2, 3, 100] = -torch.inf
    assert same_bits(loaded(stored(chunk, config()), chunk, config()), chunk)
    with pytest.raises(TooLarge, match="25 of its tokens hold NaN or infinity"):
        encode(chunk, shape_of(chunk), config(quantizer="sym8"), KEY)


def test_a_key_whose_texts_do_not_fit_is_refused() -> None:
    chunk = random_chunk(6)
    with pytest.raises(TooLarge, match="texts of its key"):
        encode(chunk, shape_of(chunk), config(), Key(model_name="m" * 2000))


def test_nothing_of_what_the_buffer_held_is_stored() -> None:
    chunk, chosen = random_chunk(6), config(quantizer="sym8")
    size = encode(chunk, shape_of(chunk), chosen, KEY).nbytes
    data = stored(chunk, chosen)  # into a buffer of 0xFF
    assert len(data) > size
    assert not any(data[size:])


@pytest.mark.parametrize("quantizer", ["raw", "chan4b128:asym4g64"])
def test_any_changed_byte_is_found_and_leaves_the_chunk_alone(quantizer: str) -> None:
    chunk, chosen = random_chunk(8, layers=2, tokens=8), config(quantizer=quantizer)
    size = encode(chunk, shape_of(chunk), chosen, KEY).nbytes
    data = stored(chunk, chosen)
    out = torch.full_like(chunk, 7)
    for place in (*range(0, 130), *range(130, size, 29), *range(size - 10, size)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(KVFerryError):
            decode(memoryview(damaged), out, shape_of(chunk), chosen, KEY)
        assert bool((out == 7).all())


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 5000))
def test_a_cut_packet_is_refused(length: int) -> None:
    chunk, chosen = random_chunk(8, layers=1, tokens=8), config(quantizer="sym8")
    size = encode(chunk, shape_of(chunk), chosen, KEY).nbytes
    with pytest.raises(CorruptPacket):
        loaded(stored(chunk, chosen)[: min(length, size - 1)], chunk, chosen)


def test_what_is_no_packet_is_refused() -> None:
    chunk = random_chunk(8)
    for data in (b"", bytes(10_000), chunk.view(torch.uint8).numpy().tobytes()):
        with pytest.raises(CorruptPacket, match="no kvferry packet"):
            loaded(data, chunk, config())


def test_a_reader_with_other_quantisers_reads_the_packet_that_it_gets() -> None:
    chunk = random_chunk(9)
    data = stored(chunk, config(quantizer="sym8"))
    assert same_bits(loaded(data, chunk, config()), by_own_verbs(chunk, "sym8"))


def test_the_key_is_checked_before_the_chunk_is_touched() -> None:
    chunk, out = random_chunk(9), torch.full((2, 4, 48, HEADS * DIM), 7, dtype=torch.bfloat16)
    data = stored(chunk, config())
    with pytest.raises(IncompatibleIdentity, match=r"model: have '\S*SmolLM2\S*', want 'llama'"):
        decode(memoryview(data), out, shape_of(chunk), config(), Key(model_name="llama"))
    assert bool((out == 7).all())


def test_threads_do_not_disturb_each_other() -> None:
    chosen = [config(quantizer=quantizer) for quantizer in QUANTIZERS]
    jobs = [(random_chunk(seed), chosen[seed % len(chosen)], Key(bytes([seed]))) for seed in range(24)]
    with ThreadPoolExecutor(6) as pool:
        packets = list(pool.map(lambda job: bytes(stored(*job)), jobs))
        backs = list(pool.map(lambda pair: loaded(pair[0], *pair[1]), zip(packets, jobs, strict=True)))
    for (chunk, _, _), back, seed in zip(jobs, backs, range(24), strict=True):
        assert same_bits(back, by_own_verbs(chunk, QUANTIZERS[seed % len(QUANTIZERS)]))
