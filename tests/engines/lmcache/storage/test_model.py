"""A real model's cache through LMCache's storage manager, and back into the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvferry as kv
from kvferry.hf.text import default_text
from kvferry.snapshot import LayerState, Snapshot
from tests.engines.lmcache.builders import by_own_verbs, same_bits
from tests.engines.lmcache.storage.conftest import Open, object_key

CHUNK, CHUNKS = 128, 2
TOKENS = CHUNK * CHUNKS


@pytest.fixture(scope="module")
def captured(model_of: Any) -> tuple[Any, Tensor, Snapshot]:
    """SmolLM2-135M, a prompt of whole chunks and 9 tokens more, and the cache of the chunks."""
    model, tokenizer = model_of("smollm2-135m")
    ids = tokenizer(default_text()[:4000], return_tensors="pt").input_ids[:, : TOKENS + 9]
    return model, ids, kv.capture(model, ids[:, :TOKENS])


def chunks_of(snapshot: Snapshot) -> dict[Any, Tensor]:
    """Cut as LMCache does: ``(2, layers, tokens, hidden)``."""
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in snapshot.layers]
    whole = torch.stack(layers, 1).transpose(2, 3).flatten(3)
    return {object_key(number): part.contiguous() for number, part in enumerate(whole.split(CHUNK, 2))}


def snapshot_of(chunks: list[Tensor], like: Snapshot) -> Snapshot:
    """Inverse of `chunks_of`."""
    layers = tuple(
        LayerState(layer.kind, torch.empty_like(layer.keys), torch.empty_like(layer.values), layer.seen)
        for layer in like.layers
    )
    whole = torch.cat(chunks, 2)
    for index, layer in enumerate(layers):
        pair = whole[:, index].unflatten(2, (layer.keys.shape[1], -1)).transpose(1, 2)
        layer.keys[0], layer.values[0] = pair
    return replace(like, layers=layers)


@pytest.mark.model
@pytest.mark.parametrize(
    ("quantizer", "ratio"), [("raw", 1.01), ("sym8", 0.53), ("chan8b128:asym8g64", 0.53), ("cen5g64:asym5g64", 0.36)]
)
def test_a_models_cache_goes_through_lmcache_and_the_model_goes_on(
    storage: Open, captured: tuple[Any, Tensor, Snapshot], quantizer: str, ratio: float
) -> None:
    model, ids, snapshot = captured
    chunks = chunks_of(snapshot)
    keys = list(chunks)
    assert [chunk.shape for chunk in chunks.values()] == [(2, 30, CHUNK, 192)] * CHUNKS
    opened = storage(quantizer=quantizer)
    opened.put(chunks)
    nbytes = opened.stored(CHUNKS)
    opened.forget(keys)
    back = opened.get(keys, chunks[keys[0]])
    assert list(back) == keys
    for key in keys:
        assert same_bits(back[key], by_own_verbs(chunks[key], quantizer))
    assert nbytes < ratio * sum(chunk.nbytes for chunk in chunks.values())

    rest = ids[:, TOKENS:]
    with torch.no_grad():
        own = model(rest, past_key_values=snapshot.to_cache(model)).logits.float()
        shipped = model(rest, past_key_values=snapshot_of(list(back.values()), snapshot).to_cache(model)).logits.float()
    if quantizer == "raw":
        assert torch.equal(shipped, own)
    else:
        kl = torch.nn.functional.kl_div(
            shipped.log_softmax(-1), own.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        assert 0 < float(kl.mean()) < 0.05
