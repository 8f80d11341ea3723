"""Compatibility names every field that differs; the JSON form says exactly what the identity says."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import CorruptPacket, IncompatibleIdentity
from kvferry.snapshot import FULL, Identity, LayerGeometry, LayerKind, RopeSpec
from tests.snapshot.builders import SLIDING, make_identity

BASE = make_identity((FULL, SLIDING, FULL), tokenizer="t1", full_weights="f1", attention="sdpa", revision="abc")


def with_layer(identity, index, **changes):
    layers = list(identity.layers)
    layers[index] = replace(layers[index], **changes)
    return replace(identity, layers=tuple(layers))


def with_rope(identity, index, **changes):
    return with_layer(identity, index, rope=replace(identity.layers[index].rope, **changes))


DIFFERENT = {
    "weights": (replace(BASE, weights="other"), {"weights"}),
    "dtype": (replace(BASE, dtype="bfloat16"), {"dtype"}),
    "tokenizer": (replace(BASE, tokenizer="t2"), {"tokenizer"}),
    "full_weights": (replace(BASE, full_weights="f2"), {"full_weights"}),
    "num_layers": (replace(BASE, layers=BASE.layers[:2]), {"num_layers"}),
    "kind": (with_layer(BASE, 1, kind=FULL), {"layers[1].kind"}),
    "window": (with_layer(BASE, 1, kind=LayerKind("sliding", 9)), {"layers[1].kind"}),
    "shape": (
        with_layer(BASE, 2, kv_heads=1, head_dim=8, value_head_dim=16),
        {"layers[2].kv_heads", "layers[2].head_dim", "layers[2].value_head_dim"},
    ),
    "theta": (with_rope(BASE, 0, theta=1e6), {"layers[0].rope.theta"}),
    "rope type and partial": (
        with_rope(BASE, 0, type="yarn", partial=0.5),
        {"layers[0].rope.type", "layers[0].rope.partial"},
    ),
    "scaling": (with_rope(BASE, 2, scaling=(("factor", 8.0),)), {"layers[2].rope.factor"}),
    "no rope": (with_layer(BASE, 0, rope=None), {"layers[0].rope"}),
    "several": (
        replace(with_rope(BASE, 0, theta=5.0), weights="other", dtype="float16", model="someone"),
        {"model", "weights", "dtype", "layers[0].rope.theta"},
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_every_differing_field_is_named_both_ways(case):
    other, fields = DIFFERENT[case]
    there, back = BASE.differences(other), other.differences(BASE)
    assert set(there) == set(back) == fields
    assert {name: (want, have) for name, (have, want) in there.items()} == back
    with pytest.raises(IncompatibleIdentity) as caught:
        BASE.require_compatible(other, "no")
    assert caught.value.differences == there
    for name, (have, want) in there.items():
        assert f"{name}: have {have!r}, want {want!r}" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "another name"},
        {"revision": None},
        {"attention": "eager"},
        {"transformers": "9", "kvferry": "9"},
        {"construction": ("chunked(4)",)},
        {"tokenizer": None},
        {"full_weights": None},
    ],
)
def test_what_a_model_is_called_or_how_it_ran_does_not_matter(changes):
    other = replace(BASE, **changes)
    assert BASE.differences(other) == other.differences(BASE) == {}
    BASE.require_compatible(other)


def test_long_lists_of_differences_are_shortened_in_the_message_only():
    many = make_identity([FULL] * 12)
    other = replace(many, layers=tuple(replace(layer, kv_heads=7) for layer in many.layers))
    with pytest.raises(IncompatibleIdentity, match="and 4 more") as caught:
        many.require_compatible(other)
    assert len(caught.value.differences) == 12


def test_stages_of_construction_are_appended():
    assert BASE.then("packet(greedy, 12)").construction == ("prefill", "packet(greedy, 12)")


ROPES = st.builds(
    RopeSpec,
    type=st.sampled_from(["default", "yarn", "llama3"]),
    theta=st.floats(1.0, 1e9),
    partial=st.floats(0.1, 1.0),
    scaling=st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(-1000, 1000)
        | st.text(max_size=5)
        | st.tuples(st.floats(0, 1), st.floats(0, 1)),
        max_size=3,
    ).map(lambda found: tuple(sorted(found.items()))),
)
GEOMETRIES = st.builds(
    LayerGeometry,
    kind=st.sampled_from([FULL, SLIDING, LayerKind("shared", 0), LayerKind("latent")]),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 512),
    value_head_dim=st.integers(1, 512),
    rope=st.none() | ROPES,
)
IDENTITIES = st.builds(
    Identity,
    model=st.text(),
    weights=st.text(),
    layers=st.lists(GEOMETRIES, max_size=4).map(lambda found: tuple(found * 2)),
    dtype=st.text(),
    revision=st.none() | st.text(),
    tokenizer=st.none() | st.text(),
    construction=st.lists(st.text(), max_size=3).map(tuple),
)


@given(IDENTITIES)
def test_json_round_trip(identity):
    text = identity.to_json()
    assert text.isascii()
    again = Identity.from_json(text)
    assert again == identity
    assert again.differences(identity) == {}
    assert again.to_json() == text


def test_equal_layers_are_written_once():
    deep = json.loads(make_identity([FULL] * 60).to_json())
    assert len(deep["geometries"]) == 1
    assert deep["layers"] == [0] * 60


def edited(**changes):
    data = json.loads(BASE.to_json())
    data.update(changes)
    return json.dumps({name: value for name, value in data.items() if value is not ...})


def edited_geometry(**changes):
    data = json.loads(BASE.to_json())
    data["geometries"][0].update(changes)
    return json.dumps(data)


ROPE = {"type": "default", "theta": 1.0, "partial": 1.0, "scaling": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 50_000,
        edited(model=...),
        edited(model=None),
        edited(weights=3),
        edited(dtype=["float32"]),
        edited(tokenizer=1.5),
        edited(layers=...),
        edited(layers="0"),
        edited(layers=[0, 9]),
        edited(layers=[-1]),
        edited(layers=[True]),
        edited(layers=[0] * 10_001),
        edited(geometries={}),
        edited(geometries=[1]),
        edited(construction="prefill"),
        edited(construction=[1]),
        edited(surprise=1),
        edited_geometry(kv_heads=0),
        edited_geometry(kv_heads=-1),
        edited_geometry(head_dim=2**40),
        edited_geometry(value_head_dim="4"),
        edited_geometry(head_dim=True),
        edited_geometry(kind="full(3)"),
        edited_geometry(kind=None),
        edited_geometry(rope=[]),
        edited_geometry(rope={}),
        edited_geometry(rope={**ROPE, "theta": "x"}),
        edited_geometry(rope={**ROPE, "theta": 10**400}),
        edited_geometry(rope={**ROPE, "theta": float("nan")}),
        edited_geometry(rope={**ROPE, "scaling": {"a": {"b": 1}}}),
        edited_geometry(rope={**ROPE, "scaling": {"a": [[1]]}}),
        BASE.to_json().replace('"model":', '"model":"x","model":'),
    ],
    ids=lambda text: text[:24],
)
def test_anything_else_is_refused(text):
    with pytest.raises(CorruptPacket):
        Identity.from_json(text)
