"""A prefill that hands out layers as they are done: the same cache, early, and a model that is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.hf.identity import identity_of
from kvferry.hf.stream import stream_capture
from kvferry.hf.tokens import as_mask, positions_of
from kvferry.ship.packet import Packet
from kvferry.ship.stream import stand_in_for, stream_plan
from kvferry.snapshot import LayerState, Snapshot
from tests.hf import tiny

IDS = torch.arange(3, 43).unsqueeze(0)


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def same(one: Snapshot, other: Snapshot) -> bool:
    pairs = zip(one.layers, other.layers, strict=True)
    return one.identity == other.identity and all(
        (a.keys is None and b.keys is None) or (torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values))
        for a, b in pairs
    )


@pytest.mark.parametrize("family", [tiny.llama, tiny.gemma3, tiny.gemma3n])
@pytest.mark.parametrize("window", [0, 4])
def test_layers_come_early_in_order_and_are_the_snapshots(family: Any, window: int) -> None:
    model = family()
    before = hooks_of(model)
    ran: list[int] = []
    watched = [
        module.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, module in enumerate(model.model.layers)
    ]
    got: list[tuple[int, LayerState, int]] = []
    snapshot = stream_capture(
        model, IDS, lambda index, layer: got.append((index, layer, len(ran))), query_window=window
    )
    for handle in watched:
        handle.remove()
    assert hooks_of(model) == before
    assert same(snapshot, kv.capture(model, IDS, query_window=window))
    owners = [index for index, layer in enumerate(snapshot.layers) if layer.keys is not None]
    assert [index for index, _, _ in got] == owners
    for index, layer, done in got:
        assert done == index  # its own feed-forward has not even begun
        assert torch.equal(layer.keys, snapshot.layers[index].keys)
        assert torch.equal(layer.values, snapshot.layers[index].values)
        if window:
            assert torch.equal(layer.queries, snapshot.layers[index].queries)
        else:
            assert layer.queries is None


def test_a_packet_sent_while_prefilling_is_byte_for_byte_that_of_the_whole_cache() -> None:
    for model in (tiny.llama(dtype=torch.bfloat16), tiny.gemma3(dtype=torch.bfloat16)):
        mask = as_mask(None, IDS)
        shape = stand_in_for(identity_of(model), IDS, positions_of(mask), mask)
        planned = stream_plan(shape, 0.7, "auto", "observation_window")
        frames: list[bytes] = []
        snapshot = stream_capture(
            model,
            IDS,
            lambda index, layer, planned=planned, frames=frames: frames.extend(
                map(bytes, planned.layer_frames(index, layer))
            ),
            query_window=8,
        )
        assert frames == [bytes(frame) for frame in planned.frames(kv.capture(model, IDS, query_window=8))]
        decoded = kv.decode(Packet.of(planned.header_bytes, frames))
        assert decoded.identity.require_compatible(identity_of(model)) is None
        assert torch.equal(decoded.token_ids, snapshot.token_ids)


def test_whatever_ends_the_prefill_the_model_is_left_as_it_was() -> None:
    model = tiny.llama()
    attention = model.config._attn_implementation

    def stop(index: int, layer: LayerState) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_capture(model, IDS, stop, query_window=4)
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == attention
    assert same(stream_capture(model, IDS, lambda *_: None), kv.capture(model, IDS))


def test_layers_that_no_hook_sees_come_at_the_end() -> None:
    """A model whose attention modules do not say which layer they are in, to whoever asks from outside."""
    model = tiny.llama()

    class Silent(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        @property
        def layer_idx(self) -> Any:
            return self.__dict__["own"] if self.__dict__.get("running") else None

        def forward(self, *args: Any, **named: Any) -> Any:
            self.__dict__["running"] = True
            try:
                return super().forward(*args, **named)
            finally:
                self.__dict__["running"] = False

    for layer in model.model.layers:
        layer.self_attn.__dict__["own"] = layer.self_attn.__dict__.pop("layer_idx")
        layer.self_attn.__class__ = Silent
    got: list[int] = []
    snapshot = stream_capture(model, IDS, lambda index, layer: got.append(index))
    assert got == [0, 1]
    assert same(snapshot, kv.capture(model, IDS))
