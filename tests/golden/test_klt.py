"""The body of a klt frame, pinned. Whoever changes it breaks every packet in flight and on disk.

The transform is the identity, its steps are powers of two and the cache is made of sixteenths: all arithmetic is exact,
so that the bytes hang on no library. If the format has to change, its version does too; then print what is built here.
"""

import hashlib
import math

import numpy as np
import torch

from kvferry.ship.entropy.reference import Bank
from kvferry.ship.layout import WHOLE, Layout
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.basis import Basis
from kvferry.ship.transform.block import Components
from kvferry.ship.transform.body import Span, decode_body, encode_body, group_rows, read_raw
from kvferry.ship.transform.groups import Group, layer_groups
from kvferry.ship.transform.tables import BINS, Tables
from kvferry.ship.transform.weights import Importance, token_octaves
from kvferry.snapshot import Snapshot
from kvferry.snapshot.rope import Rotary
from tests.golden.test_packet import snapshot as make_snapshot

CODE = -64
"""A quarter."""

TRANSFORM_DIGEST = "b0dd021cd9a1de252bb41ba6ba691c34"
BODY_SHA256 = "df8621333dc3d297cd4f0ccddea56a9ecede3e5b7f8c8634bc2e00ddac53a08f"
BODY_START = "c0ff01000000010000003040a0bf883f3cc020bfd83f14c0000000bec43f203e9cbfe03e70bf383f28bf"
DECODED = [2.3125, -1.71875, 0.625, 2.84375, -1.0625, 1.25, -2.65625, -0.4375]


def make_tables() -> Tables:
    freq, reach = np.zeros((BINS, 256), np.uint16), np.array([2 + 5 * b for b in range(BINS)], np.uint8)
    for row, far in zip(freq, reach.tolist(), strict=True):
        symbols = 2 * far + 2
        row[:symbols] = 4096 // symbols
        row[far] += 4096 % symbols
    shift = torch.tensor([[-0.125, -0.25]]).repeat(BINS, 1)
    return Tables(Bank(freq, reach), shift)


def make_basis(group: Group) -> Basis:
    eye = torch.eye(group.width)
    falling = (-12 * torch.arange(group.width)).to(torch.int16)
    return Basis(group, eye, eye.clone(), torch.full((group.width,), 0.5), 64 + falling, 32 + falling)


def make_transform(snapshot: Snapshot) -> Transform:
    groups = layer_groups(snapshot.identity, 16)
    weigh = Importance(torch.zeros(4), torch.tensor([2 * math.log(2), 0.0, 0.0]))
    return Transform(
        snapshot.identity,
        tuple(make_basis(group) for group in groups),
        (weigh,) * len(groups),
        (Rotary(torch.empty(0)),) * len(snapshot.layers),
        make_tables(),
        {"windows": 4},
    )


def build() -> tuple[Snapshot, Transform, Span, bytes]:
    """Ten tokens: the first is not sent, the next is raw, eight are coded, of which the second layer holds four."""
    snapshot = make_snapshot(seq_len=10)
    transform = make_transform(snapshot)
    raw = torch.arange(10)[None] == 1
    layout = Layout.of(snapshot.identity, 10, 0, WHOLE)
    span = Span(0, 10, layout.firsts, snapshot.mask, raw)
    blocks = {}
    for place, (basis, weigh) in enumerate(zip(transform.bases, transform.importance, strict=True)):
        tokens = span.tokens(0, basis.group.layers[0], raw=False)
        octaves = token_octaves(weigh, basis.group, tokens, 10, None)
        rows = group_rows(snapshot, transform.rotaries, basis.group, 0, tokens)
        blocks[0, place] = Components.of(basis, rows, octaves)
    return snapshot, transform, span, encode_body(snapshot, transform, span, blocks, CODE)


def test_the_transforms_digest() -> None:
    assert build()[1].digest == TRANSFORM_DIGEST


def test_the_body() -> None:
    body = build()[3]
    assert body[:42].hex() == BODY_START
    assert hashlib.sha256(body).hexdigest() == BODY_SHA256


def test_decoded_values() -> None:
    snapshot, transform, span, body = build()
    view = memoryview(body)
    code, raw, at = read_raw(view, 0, 10, span.sent)
    assert (code, raw.nonzero().tolist()) == (CODE, [[0, 1]])
    pieces = list(decode_body(view, transform, span, code, at, snapshot.layers, snapshot.positions))
    assert [(layer, side, tokens.tolist()) for layer, side, _, tokens, _ in pieces] == [
        (0, 0, [1]),
        (0, 1, [1]),
        (0, 0, [*range(2, 10)]),
        (1, 0, [*range(6, 10)]),
        (0, 1, [*range(2, 10)]),
        (1, 1, [*range(6, 10)]),
    ]
    assert torch.equal(pieces[0][4], snapshot.layers[0].keys[0, :, 1:2])
    assert pieces[3][4][0, 2].tolist() == DECODED
    for layer, side, _, tokens, rows in pieces:
        state = snapshot.layers[layer]
        want = (state.values if side else state.keys)[0].index_select(1, tokens - state.first)
        assert float((rows.float() - want.float()).abs().max()) < 0.1
