"""Pages of every arrangement, written by stand-ins for the engines' operations, one element at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvferry.engines.vllm.layout import PageShape, probe
from kvferry.errors import UnsupportedCache

SHAPE = PageShape(heads=3, block=32, dim=16)
BLOCKS = 5

Place = Callable[[Tensor, int, int, Tensor, Tensor], None]


def cpu(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    for head in range(SHAPE.heads):
        page = cache[block, head].view(-1)
        half = SHAPE.block * SHAPE.dim
        page[offset : half : SHAPE.block] = key[head]
        page[half + offset * SHAPE.dim : half + (offset + 1) * SHAPE.dim] = value[head]


def hnc(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    cache[block, :, offset] = torch.cat([key, value], -1)


def nhc(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    cache[block, offset] = torch.cat([key, value], -1)


def hnd(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    cache[block, 0, :, offset], cache[block, 1, :, offset] = key, value


def nhd(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    cache[block, 0, offset], cache[block, 1, offset] = key, value


def hnd_first(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    cache[0, block, :, offset], cache[1, block, :, offset] = key, value


def nhd_first(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    cache[0, block, offset], cache[1, block, offset] = key, value


def tiles(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    """As matrix units like it: pairs of key channels side by side for each token, values in pairs of tokens."""
    for head in range(SHAPE.heads):
        page = cache[block, head].view(-1)
        half = SHAPE.block * SHAPE.dim
        keys = page[:half].view(SHAPE.dim // 2, SHAPE.block, 2)
        values = page[half:].view(SHAPE.block // 2, SHAPE.dim, 2)
        keys[:, offset] = key[head].view(-1, 2)
        values[offset // 2, :, offset % 2] = value[head]


def quantised(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    hnd(cache, block, offset, key.round(), value.round() / 2)


def swapped_heads(cache: Tensor, block: int, offset: int, key: Tensor, value: Tensor) -> None:
    """Looks like `nhd`, but keys and values have changed places."""
    nhd(cache, block, offset, value, key)


HND, NHD = (2, SHAPE.heads, SHAPE.block, SHAPE.dim), (2, SHAPE.block, SHAPE.heads, SHAPE.dim)
JOINED = (SHAPE.heads, SHAPE.block, 2 * SHAPE.dim)
ENGINES: dict[str, tuple[Place, tuple[int, ...], str]] = {
    "cpu": (cpu, (BLOCKS, *JOINED), "cpu"),
    "hnc": (hnc, (BLOCKS, *JOINED), "hnc"),
    "nhc": (nhc, (BLOCKS, SHAPE.block, SHAPE.heads, 2 * SHAPE.dim), "nhc"),
    "hnd": (hnd, (BLOCKS, *HND), "hnd"),
    "nhd": (nhd, (BLOCKS, *NHD), "nhd"),
    "hnd, keys first": (hnd_first, (2, BLOCKS, *HND[1:]), "hnd, keys first"),
    "nhd, keys first": (nhd_first, (2, BLOCKS, *NHD[1:]), "nhd, keys first"),
    "tiles": (tiles, (BLOCKS, *JOINED), "permuted"),
    "values before keys": (swapped_heads, (BLOCKS, *NHD), "permuted"),
}


def writer(place: Place) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    def write(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            place(cache, slot // SHAPE.block, slot % SHAPE.block, key, value)

    return write


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ENGINES)
def test_what_the_engine_writes_is_read_and_the_other_way_round(name: str, dtype: torch.dtype) -> None:
    place, size, expected = ENGINES[name]
    cache = torch.randn(size).to(dtype)
    untouched = cache.clone()
    layout = probe(writer(place), cache, SHAPE, BLOCKS)
    assert layout.name == expected
    assert torch.equal(cache, untouched), "the probe has written to the engine's own pages"

    keys, values = torch.randn(2, 2 * SHAPE.block, SHAPE.heads, SHAPE.dim).to(dtype)
    blocks = torch.tensor([4, 1])
    slots = torch.cat([torch.arange(SHAPE.block) + block * SHAPE.block for block in blocks.tolist()])
    writer(place)(keys, values, cache, slots)
    found = layout.read(cache, blocks)
    assert torch.equal(found[0], keys.transpose(0, 1))
    assert torch.equal(found[1], values.transpose(0, 1))
    layout.write(untouched, blocks, keys.transpose(0, 1), values.transpose(0, 1))
    assert torch.equal(untouched, cache), "a page that was not to be written has changed, or one that was has not"


def test_pages_of_other_strides() -> None:
    """An engine may lay heads outside of tokens in memory and still show tokens first."""
    cache = torch.zeros(BLOCKS, *HND, dtype=torch.bfloat16).transpose(2, 3)
    layout = probe(writer(nhd), cache, SHAPE, BLOCKS)
    assert layout.name == "nhd"
    keys = torch.randn(SHAPE.heads, SHAPE.block, SHAPE.dim).bfloat16()
    layout.write(cache, torch.tensor([2]), keys, -keys)
    assert torch.equal(cache[2, 0].transpose(0, 1), keys)
    assert torch.equal(cache[2, 1].transpose(0, 1), -keys)


def test_a_cache_that_changes_values_is_refused() -> None:
    with pytest.raises(UnsupportedCache, match="arranged in no way"):
        probe(writer(quantised), torch.zeros(BLOCKS, *HND, dtype=torch.bfloat16), SHAPE, BLOCKS)


def test_a_cache_that_lacks_room_is_refused() -> None:
    def forgetful(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        room = cache.view(-1)
        room[: keys.numel()] = keys.reshape(-1)[: room.numel()]

    with pytest.raises(UnsupportedCache, match="arranged in no way"):
        probe(forgetful, torch.zeros(BLOCKS, SHAPE.block, SHAPE.dim), SHAPE, BLOCKS)
