"""JSON of hostile files has one meaning or is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import CorruptPacket
from kvferry.snapshot.strict_json import parse_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_it_reads_what_json_writes(value):
    assert parse_json(json.dumps(value), "it") == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1,]",
        '{"a":1,"a":2}',
        '{"b":{"a":1,"a":1}}',
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e999",
        "1" * 25,
        "-" + "1" * 5000,
        "[" * 20_000,
        "[" * 20_000 + "]" * 20_000,
        '"\x01"',
        "1 2",
        "nul",
    ],
    ids=lambda text: text[:12],
)
def test_it_refuses(text):
    with pytest.raises(CorruptPacket, match=r"^the thing"):
        parse_json(text, "the thing")


def test_it_counts_values_before_it_makes_them():
    assert parse_json("[1,2,3]", "it", most=4) == [1, 2, 3]
    with pytest.raises(CorruptPacket, match="JSON values"):
        parse_json("[1,2,3,4]", "it", most=4)
