from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.engines.lmcache.chunk import ChunkShape, make_identity, make_snapshot, put_snapshot, require_chunk
from kvferry.errors import IncompatibleIdentity, UnsupportedCache
from tests.engines.lmcache.builders import DIM, HEADS, Key, config, random_chunk

SHAPE = ChunkShape(4, 48, torch.bfloat16)


def test_a_snapshot_has_the_chunks_heads_and_shares_its_memory() -> None:
    chunk = random_chunk(1)
    snapshot = make_snapshot(chunk, make_identity(SHAPE, config(), Key()))
    for index, layer in enumerate(snapshot.layers):
        assert layer.keys is not None
        assert layer.values is not None
        assert layer.keys.shape == layer.values.shape == (1, HEADS, 48, DIM)
        for head in range(HEADS):
            channels = slice(head * DIM, (head + 1) * DIM)
            assert torch.equal(layer.keys[0, head], chunk[0, index, :, channels])
            assert torch.equal(layer.values[0, head], chunk[1, index, :, channels])
    chunk[1, 3, 47, 0] = 77
    last = snapshot.layers[3].values
    assert last is not None
    assert last[0, 0, 47, 0] == 77


def test_a_snapshot_is_put_back() -> None:
    chunk, out = random_chunk(1), torch.zeros(2, 4, 48, HEADS * DIM, dtype=torch.bfloat16)
    put_snapshot(make_snapshot(chunk, make_identity(SHAPE, config(), Key())), out)
    assert torch.equal(out, chunk)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        ([(2, 4, 48, 192), (2, 4, 48, 192)], [torch.bfloat16] * 2, "objects of one tensor, not of 2"),
        ([(1, 4, 48, 576)], [torch.bfloat16], "latent caches"),
        ([(4, 48, 192)], [torch.bfloat16], "latent caches"),
        ([(2, 4, 0, 192)], [torch.bfloat16], "latent caches"),
        ([(2, 4, 48, 192)], [torch.float8_e4m3fn], "not float8_e4m3fn"),
        ([(2, 4, 48, 192)], [torch.uint8], "not uint8"),
    ],
)
def test_other_layouts_are_refused(shapes: Any, dtypes: Any, message: str) -> None:
    with pytest.raises(UnsupportedCache, match=message):
        ChunkShape.of(shapes, dtypes, config())


@pytest.mark.parametrize("hidden", [128, 96, 384])
def test_the_heads_must_make_up_the_channels(hidden: int) -> None:
    with pytest.raises(IncompatibleIdentity, match="set what one worker of the model has") as caught:
        ChunkShape.of([(2, 4, 48, hidden)], [torch.bfloat16], config())
    assert caught.value.differences == {"hidden": (hidden, HEADS * DIM)}


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"model_name": "other"}, {"model": (Key().model_name, "other")}),
        ({"chunk_hash": b"\x01\x02"}, {"chunk_hash": (Key().chunk_hash.hex(), "0102")}),
        ({"kv_rank": 0x02010201}, {"kv_rank": ("0x01000100", "0x02010201")}),
        ({"object_group_id": 3}, {"object_group_id": ("0", "3")}),
        ({"cache_salt": "a=b,ü"}, {"cache_salt": ("", "a=b,ü")}),
    ],
)
def test_every_field_of_the_key_is_held_and_named(change: dict[str, Any], differences: dict[str, Any]) -> None:
    chunk = random_chunk(1)
    packet = kv.encode(make_snapshot(chunk, make_identity(SHAPE, config(), Key())))
    require_chunk(packet.header, make_identity(SHAPE, config(), Key()), 48)
    with pytest.raises(IncompatibleIdentity) as caught:
        require_chunk(packet.header, make_identity(SHAPE, config(), replace(Key(), **change)), 48)
    assert caught.value.differences == differences


@pytest.mark.parametrize(
    ("shape", "settings", "fields"),
    [
        (ChunkShape(5, 48, torch.bfloat16), {}, {"num_layers"}),
        (ChunkShape(4, 48, torch.float16), {}, {"dtype"}),
        (ChunkShape(4, 32, torch.bfloat16), {}, {"tokens"}),
        (SHAPE, {"weights": "sha256:ab"}, {"weights"}),
        (
            SHAPE,
            {"num_kv_heads": 6, "head_dim": 32},
            {f"layers[{i}].{name}" for i in range(4) for name in ("kv_heads", "head_dim", "value_head_dim")},
        ),
    ],
)
def test_what_the_receiver_expects_is_held_against_the_packet(shape: Any, settings: Any, fields: set[str]) -> None:
    packet = kv.encode(make_snapshot(random_chunk(1), make_identity(SHAPE, config(), Key())))
    with pytest.raises(IncompatibleIdentity) as caught:
        require_chunk(packet.header, make_identity(shape, config(**settings), Key()), shape.tokens)
    assert set(caught.value.differences) == fields


def test_a_packet_that_dropped_tokens_or_was_made_elsewhere_is_no_chunk() -> None:
    want = make_identity(SHAPE, config(), Key())
    snapshot = make_snapshot(random_chunk(1), want)
    with pytest.raises(IncompatibleIdentity) as caught:
        require_chunk(kv.encode(snapshot, 0.5, "sws").header, want, 48)
    assert set(caught.value.differences) == {"tokens"}
    elsewhere = replace(snapshot, identity=replace(want, construction=("prefill",)))
    with pytest.raises(IncompatibleIdentity) as caught:
        require_chunk(kv.encode(elsewhere).header, want, 48)
    assert caught.value.differences["chunk_hash"] == (None, Key().chunk_hash.hex())
