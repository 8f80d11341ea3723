"""The format, pinned: a small packet's bytes. Whoever changes them breaks every packet in flight and on disk.

The cache is made of integers, so that its bits do not hang on any library. If the format has to change, its version
does too; then print `build().to_bytes().hex()` and put it here.
"""

import hashlib

import torch

import kvferry as kv
from kvferry.snapshot import FULL, Identity, LayerGeometry, LayerKind, LayerState, RopeSpec, Snapshot

SLIDING = LayerKind("sliding", 5)

HEADER_SHA256 = "77bf1474423db54e79feab0d087ee08e3a29e88170c2eca6e1ff99fb4e8fbfc0"
FRAMES = (
    "4b56465201000000af0000000000000037efebdba72d65b6a46aa0933addce5b000000000000000001000000000000000000"
    "00000600000000000000020473796d380473796d3406820473796d380473796d347b795b798379f74aae0165c91c80c40774"
    "e12592ff42aa0163c51b7ddf36ae7dc97d5eb4197f5ca3f86e8b782a78a37876ff8d1ba432bc4a9801b720d63ff55ee97eff"
    "9428aa3ec0c97cd27cfc963ea864eb85fd3b8db9212cb85c5f",
    "4b564652010000009b0000000000000037efebdba72d65b6a46aa0933addce5b010000000100000002000000020000000000"
    "00000600000000000000020473796d380473796d3403820473796d380473796d347b799379e4379bff52b6096dcc2a88e643"
    "a1ff5cc97dae7d81d64b927fc52b8193789b78d162e878ff8f1fa638bc4ed265e97bff6e7cc07c41da63fca74fb952f59cd4"
    "3dc4af088d",
)
EVERY_QUANTISER_SHA256 = "72498e9e5704051fd4f6b13373cd3d0a1cee9f48d5c077575dc0c43cf134d051"


def snapshot(seq_len: int = 6, dim: int = 8) -> Snapshot:
    geometries = tuple(LayerGeometry(kind, 1, dim, dim, RopeSpec("default", 10000.0)) for kind in (FULL, SLIDING))
    layers = []
    for kind in (FULL, SLIDING):
        held = kind.held(seq_len)
        grid = torch.arange(held * dim).view(1, 1, held, dim)
        keys, values = ((grid * 37 % 101) - 50) / 16, ((grid * 53 % 97) - 40) / 32
        layers.append(LayerState(kind, keys.to(torch.bfloat16), values.to(torch.bfloat16), seq_len))
    mask = torch.ones(1, seq_len, dtype=torch.bool)
    mask[0, 0] = False
    return Snapshot(
        identity=Identity("golden", "0123456789abcdef", geometries, "bfloat16", construction=("prefill",)),
        token_ids=torch.arange(300, 300 + seq_len).unsqueeze(0),
        positions=(torch.arange(seq_len) - 1).clamp_min(0).unsqueeze(0),
        mask=mask,
        layers=tuple(layers),
    )


def build() -> kv.Packet:
    return kv.encode(snapshot(), policy="greedy", scores="positional", nominal_budget=0.4, n_sink=1)


def test_header():
    assert hashlib.sha256(build().header_bytes).hexdigest() == HEADER_SHA256


def test_frames():
    assert tuple(frame.hex() for frame in build().frames) == FRAMES


def test_every_quantiser():
    """All families and widths, with a partial group, a partial block, and rows that are not finite."""
    from kvferry.ship.quantize import quantizer

    grid = torch.arange(2 * 9 * 12).view(2, 9, 12)
    x = (((grid * 7919) % 2003 - 1000) / 64).to(torch.bfloat16)
    x[0, 3] = 0.0
    x[1, 5, 2] = float("nan")
    digest = hashlib.sha256()
    for nbits in (8, 6, 5, 4, 3, 2):
        for spec in (f"sym{nbits}", f"asym{nbits}g5", f"asym{nbits}row", f"chan{nbits}b4"):
            method = quantizer(spec)
            out = torch.empty(method.nbytes(2, 9, 12, x.dtype), dtype=torch.uint8)
            method.encode(x, None, out)
            digest.update(out.numpy().tobytes())
            back = torch.empty_like(x)
            method.decode(out, None, back)
            digest.update(back.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == EVERY_QUANTISER_SHA256


def test_decoded_values():
    decoded = kv.decode(build())
    assert decoded.layers[1].values[0, 0, 3].tolist() == [
        -0.90234375,
        0.75390625,
        -0.62890625,
        1.03125,
        -0.337890625,
        1.3203125,
        -0.0625,
        1.59375,
    ]
