from __future__ import annotations

import hashlib

import pytest

from kvferry.engines.vllm.chain import LEAST_TAIL, chain, chain_and_tail
from kvferry.errors import InvalidInput


def test_a_key_stands_for_everything_up_to_its_chunk() -> None:
    ids = list(range(100))
    keys = chain(ids, 32)
    assert len(keys) == 3
    assert chain(ids[:96], 32) == keys
    assert chain(ids[:95], 32) == keys[:2]
    for changed in range(96):
        other = chain([*ids[:changed], 7_777, *ids[changed + 1 :]], 32)
        same = changed // 32
        assert other[:same] == keys[:same]
        assert not set(other[same:]) & set(keys)


def test_chunk_and_namespace_tell_chains_apart() -> None:
    ids = list(range(64))
    assert not set(chain(ids, 32)) & set(chain(ids, 64))
    assert not set(chain(ids, 32)) & set(chain(ids, 32, "tenant"))


def test_keys_stay_what_they_are() -> None:
    """Producer and consumer may be of different versions."""
    start = hashlib.sha256(b"kvferry chain 1\n2\n").digest()
    raw = (5).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little")
    assert chain([5, 1 << 40], 2) == [hashlib.sha256(start + raw).hexdigest()[:32]]


def test_short_prompts_and_bad_chunks() -> None:
    assert chain([1, 2, 3], 4) == []
    assert chain([], 4) == []
    for function in (chain, chain_and_tail):
        with pytest.raises(InvalidInput, match="0 tokens"):
            function([1], 0)


def tail(ids: list[int], chunk: int, namespace: str = "") -> str | None:
    keys, last = chain_and_tail(ids, chunk, namespace)
    assert keys == chain(ids, chunk, namespace)
    return last


def test_a_tail_stands_for_the_whole_prompt() -> None:
    ids = list(range(96))
    assert [tail(ids[:length], 64) is None for length in (64, 64 + LEAST_TAIL - 1, 64 + LEAST_TAIL, 96)] == [
        True,
        True,
        False,
        False,
    ]
    named = {tail(ids, 64), tail(ids[:95], 64), tail([9, *ids[1:]], 64), tail(ids, 64, "tenant"), *chain(ids, 64)}
    assert len(named) == 5
    assert tail(ids[:40], 64) is not None, "a prompt of less than a chunk is all tail"
