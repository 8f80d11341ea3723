"""What the header's parser says of well-signed headers that lie, when nothing behind it would notice."""

import json

import pytest
import xxhash

from kvferry.errors import CorruptPacket, TooLarge, UnsupportedVersion
from kvferry.snapshot.header import FREE_HEADER, MAX_HEADER, header_length, parse_header
from tests.attacks.anatomy import compact, sign

PAYLOAD = bytes(range(28))


def entry(dtype="U8", shape=(4,), begin=0, end=None):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + 4 if end is None else end]}


def header_text(entries, *, checksums=None, **metadata):
    """A header by the book around ``entries``, a list of (name, entry), with the checksums of the data they name."""
    if checksums is None:
        checksums = {name: xxhash.xxh3_128_hexdigest(PAYLOAD[slice(*item["data_offsets"])]) for name, item in entries}
    own = {"digest": "0" * 32, "format": "kvferry", "kind": "thing", "version": "1", "checksums": compact(checksums)}
    parts = [f'"__metadata__":{compact({**own, **metadata})}', *(f'"{name}":{compact(item)}' for name, item in entries)]
    return "{" + ",".join(parts) + "}"


def parse(text, payload=PAYLOAD):
    data = sign(text, payload)
    length = header_length(data[:8], len(data))
    return parse_header(data[:8], data[8 : 8 + length], len(data))


FLOATS = ("a", entry("F32", (3,), 0, 12))
BYTES = ("b", entry("U8", (16,), 12, 28))
EMPTY = ("e", entry("U8", (0,), 12, 12))


def test_a_good_header():
    found = parse(header_text([FLOATS, EMPTY, BYTES], note="[]"))
    assert list(found.tensors) == ["a", "e", "b"]
    assert (found.kind, dict(found.metadata)) == ("thing", {"note": "[]"})
    assert found.nbytes == found.payload_start + len(PAYLOAD)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([FLOATS, ("b", entry("U8", (12,), 0, 12)), ("c", entry("U8", (16,), 12, 28))], "overlaps"),
        ([FLOATS, ("b", entry("U8", (20,), 8, 28))], "overlaps"),
        ([FLOATS, ("b", entry("U8", (8,), 20, 28))], "leaves a hole"),
        ([("b", entry("U8", (24,), 4, 28))], "leaves a hole"),
        ([FLOATS, ("b", entry("U8", (17,), 12, 29))], "lies outside of the 28 bytes"),
        ([FLOATS, ("b", entry("U8", (16,), 12, 4))], "lies outside"),
        ([FLOATS, ("b", entry("U8", (15,), 12, 28))], "takes 15 bytes"),
        ([FLOATS, ("b", entry("U8", (0, 16), 12, 28))], "takes 0 bytes"),
        (
            [("b", entry("U8", (2,), 0, 2)), ("c", entry("F32", (6,), 2, 26)), ("d", entry("U8", (2,), 26, 28))],
            "aligned",
        ),
        ([FLOATS, EMPTY, EMPTY, BYTES], "repeats tensor 'e'"),
        ([FLOATS, ("e", entry("U8", (0, 2**62, 2), 12, 12)), BYTES], "too large for any memory"),
        ([FLOATS, ("e", entry("U8", [0] * 9, 12, 12)), BYTES], "9 dimensions"),
        ([FLOATS], "belong to no tensor"),
        ([], "belong to no tensor"),
        ([FLOATS, ("b", entry("F8_E4M3", (16,), 12, 28))], "unknown dtype"),
        ([FLOATS, ("b c", BYTES[1])], "malformed"),
        ([FLOATS, ("b", {**BYTES[1], "more": 1})], "malformed"),
    ],
)
def test_tensors_that_cannot_be_where_they_say(entries, message):
    with pytest.raises(CorruptPacket, match=message):
        parse(header_text(entries))


GOOD = header_text([FLOATS, BYTES])


@pytest.mark.parametrize("spaces", range(8))
def test_only_spaces_up_to_eight_bytes_may_follow(spaces):
    """Whatever the length of the text, so that the padding takes every length."""
    text = header_text([FLOATS, BYTES], note="x" * spaces)
    assert parse(text).metadata["note"] == "x" * spaces
    for tail in ("}", "x", "\0", "{}", " " * 8):
        with pytest.raises(CorruptPacket, match="malformed"):
            parse(text + tail)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (header_text([FLOATS, BYTES], checksums={"a": "0" * 32}), "tensor 'b' has no checksum"),
        (header_text([FLOATS, BYTES], checksums={"a": "0" * 32, "b": "0" * 31}), "tensor 'b' has no checksum"),
        (header_text([FLOATS, BYTES], checksums={"a": "0" * 32, "b": 7}), "tensor 'b' has no checksum"),
        (header_text([FLOATS, BYTES], checksums=dict.fromkeys("abc", "0" * 32)), "3 checksums for 2 tensors"),
        (header_text([FLOATS, BYTES], checksums=[]), "no JSON object"),
        (GOOD.replace('"checksums":', '"sums":'), "no checksums"),
        (GOOD.replace('"checksums":', '"note":"","note":"","checksums":'), "repeats 'note'"),
        (GOOD.replace('"checksums":', '"kind":"thing","checksums":'), "repeats 'kind'"),
        (GOOD.replace('"checksums":', '"note":"\\u00e4","checksums":'), "no ASCII text"),
        (GOOD.replace('"checksums":', '"note":"\\u0100","checksums":'), "no ASCII text"),
        (GOOD.replace('"checksums":', '"note":"\\x","checksums":'), "no ASCII text"),
        (GOOD.replace('"checksums":', '"note":"\t","checksums":'), "no ASCII text"),
        (GOOD.replace('"checksums":', '"note":7,"checksums":'), "malformed"),
        (GOOD.replace('"format":"kvferry"', '"format":"pt"'), "no kvferry file"),
        (compact({"x": entry()}), "no kvferry file"),
        (GOOD.replace('"kind"', '"kin"'), "the header is damaged"),
    ],
)
def test_metadata_that_cannot_be(text, message):
    with pytest.raises(CorruptPacket, match=message):
        parse(text)


def test_the_version_is_looked_at_before_anything_that_may_have_changed_with_it():
    text = GOOD.replace('"version":"1"', '"version":"2","new":[1,2]')
    with pytest.raises(UnsupportedVersion, match="file format 2"):
        parse(text)


def test_the_digest_covers_the_length_too():
    data = sign(GOOD, PAYLOAD)
    length = header_length(data[:8], len(data))
    other = (length + 8).to_bytes(8, "little")
    with pytest.raises(CorruptPacket, match="digest"):
        parse_header(other, data[8 : 8 + length], len(data))


def test_control_characters_in_texts_survive():
    note = json.dumps('\x00\x1f\n\t"\\/') + "\x7f\n"
    assert parse(header_text([FLOATS, BYTES], note=note)).metadata["note"] == note


def test_lengths_are_judged_before_anything_is_read():
    def judged(length, nbytes):
        return header_length(length.to_bytes(8, "little"), nbytes)

    assert judged(800, 10_000) == 800
    assert judged(FREE_HEADER, FREE_HEADER + 8) == FREE_HEADER
    for length, nbytes in ((800, 807), (2**64 - 1, 10_000), (801, 10_000), (FREE_HEADER + 8, FREE_HEADER + 16), (0, 0)):
        with pytest.raises(CorruptPacket):
            judged(length, nbytes)
    with pytest.raises(TooLarge):
        judged(MAX_HEADER + 8, 1 << 40)
