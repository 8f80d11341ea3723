"""Kinds of layers, and the checks of one layer's tensors."""

from dataclasses import replace

import pytest
import torch

from kvferry.errors import CorruptPacket, InvalidInput, UnsupportedCache
from kvferry.snapshot import FULL, LayerKind, LayerState


@pytest.mark.parametrize("text", ["full", "sliding(512)", "chunked(8192)", "shared(0)", "latent", "cross", "recurrent"])
def test_kind_reads_what_it_prints(text):
    assert str(LayerKind.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Full",
        "full(3)",
        "sliding",
        "sliding()",
        "sliding(1)",
        "sliding(-4)",
        "sliding(9999999999)",
        "full ",
        "flat",
    ],
)
def test_unknown_kinds_are_refused(text):
    with pytest.raises(CorruptPacket):
        LayerKind.parse(text)


@pytest.mark.parametrize(("name", "argument"), [("full", 4), ("sliding", None), ("chunked", 1), ("shared", None)])
def test_kind_and_argument_belong_together(name, argument):
    with pytest.raises(InvalidInput):
        LayerKind(name, argument)


@pytest.mark.parametrize("text", ["chunked(4)", "latent", "cross", "recurrent"])
def test_kinds_not_carried_are_refused_by_name_and_layer(text):
    with pytest.raises(UnsupportedCache, match=f"layer 7 .*{text.partition('(')[0]}"):
        LayerKind.parse(text).require_supported(7)


@pytest.mark.parametrize(
    ("text", "seen", "held"),
    [("full", 9, 9), ("sliding(4)", 2, 2), ("sliding(4)", 3, 3), ("sliding(4)", 100, 3), ("shared(0)", 9, 0)],
)
def test_tokens_held(text, seen, held):
    assert LayerKind.parse(text).held(seen) == held


def layer(tokens=6, seen=None, kind=FULL, heads=2, key_dim=4, value_dim=3, batch=1):
    return LayerState(
        kind, torch.zeros(batch, heads, tokens, key_dim), torch.zeros(batch, heads, tokens, value_dim), seen or tokens
    )


def test_counts_of_a_sliding_layer():
    state = layer(tokens=7, seen=100, kind=LayerKind("sliding", 8))
    state.check(0, 1, 100)
    assert (state.held, state.first, state.nbytes) == (7, 93, 7 * 2 * (4 + 3) * 4)
    shared = LayerState(LayerKind("shared", 0), None, None, 100)
    shared.check(1, 1, 100)
    assert (shared.held, shared.nbytes) == (0, 0)


@pytest.mark.parametrize(
    "state",
    [
        replace(layer(), keys=None),
        replace(layer(), values=None),
        replace(layer(), values=torch.zeros(1, 2, 5, 3)),
        replace(layer(), values=torch.zeros(1, 1, 6, 3)),
        replace(layer(), keys=torch.zeros(2, 6, 4)),
        replace(layer(), values=torch.zeros(1, 2, 6, 3, dtype=torch.float16)),
        layer(batch=2),
        layer(tokens=5, seen=6),
        layer(seen=7),
        layer(kind=LayerKind("sliding", 4)),
        replace(layer(), kind=LayerKind("shared", 0)),
        LayerState(LayerKind("shared", 3), None, None, 6),
        LayerState(LayerKind("shared", 1), None, None, 5),
        LayerState(LayerKind("shared", 4), None, None, 6),
    ],
)
def test_inconsistent_layers_are_refused(state):
    with pytest.raises(InvalidInput, match="layer 3"):
        state.check(3, 1, 6)


def test_new_tensors_come_without_the_old_queries():
    state = replace(layer(), queries=torch.zeros(1, 4, 2, 4))
    keys = torch.ones(1, 2, 6, 4)
    changed = state.map_tensors(keys, state.values)
    assert changed.keys is keys
    assert changed.queries is None
    assert changed.seen == state.seen
