"""Moments are the sums that they say, for any order and split of the tokens, and in the memory of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput
from kvferry.map.blocks import Block
from kvferry.map.layout import Layout, plan_layout
from kvferry.map.moments import Moments
from tests.map import builders

LAYOUT = Layout(
    sources=tuple(Block(index, "keys") for index in range(3)),
    source_widths=(4, 6, 2),
    targets=(Block(0, "keys"), Block(1, "keys")),
    target_widths=(3, 5),
    target_heads=(1, 1),
    candidates=((0, 1, 2), (1, 2)),
)


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with means a hundred times their spread in some channels, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    y = x @ torch.randn(12, 8, generator=generator) + torch.randn(count, 8, generator=generator)
    return x + 100 * (torch.arange(12) % 3 == 0), y - 50


def moments_of(x: torch.Tensor, y: torch.Tensor, chunks: int = 1) -> Moments:
    made = Moments.empty(LAYOUT)
    for a, b in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        made.add(a, b)
    return made


def covariances(moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    every = tuple(range(3))
    at = moments.about(moments.mean_x(), moments.mean_y())
    return at.gram_of(every), torch.cat([at.cross_of((1, 2), 0), at.cross_of((1, 2), 1)], dim=1)


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def test_they_are_the_sums_of_the_rows() -> None:
    x, y = rows(3000)
    moments = moments_of(x, y, chunks=7)
    exact_x, exact_y = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    gram, cross = covariances(moments)
    assert moments.count == 3000
    assert close(moments.mean_x(), x.double().mean(0), 1e-8)
    assert close(gram, exact_x.T @ exact_x, 2e-6)
    assert torch.equal(gram, gram.T)
    assert close(cross, exact_x[:, 4:].T @ exact_y, 2e-6)
    energy = moments.about(moments.mean_x(), moments.mean_y()).energy
    assert close(energy, exact_y.square().sum(0), 1e-6)


def test_shards_add_up() -> None:
    x, y = rows(1000)
    whole = moments_of(x, y)
    parts = [moments_of(a, b) for a, b in zip(x.split([10, 700, 290]), y.split([10, 700, 290]), strict=True)]
    merged = Moments.empty(LAYOUT)
    for part in parts:
        merged.merge(part)
    merged.merge(Moments.empty(LAYOUT))
    assert merged.count == 1000
    for one, other in zip(covariances(merged), covariances(whole), strict=True):
        assert close(one, other, 1e-6)


def test_memory_does_not_hang_on_the_tokens() -> None:
    few, many = moments_of(*rows(10)), moments_of(*rows(50_000), chunks=20)
    assert few.nbytes == many.nbytes == Moments.empty(LAYOUT).nbytes


def test_a_band_keeps_only_what_it_needs() -> None:
    source, target = (builders.identity(builders.llama(layers)) for layers in (8, 6))
    wide, narrow = (
        Moments.empty(plan_layout(source, target, ("keys",), ("keys",), reach=reach)) for reach in (1.0, 0.15)
    )
    assert narrow.nbytes < 0.5 * wide.nbytes
    assert all(own for own in narrow.layout.candidates)
    with pytest.raises(InvalidInput, match=r"within a reach of 0\.01"):
        plan_layout(source, target, ("keys",), ("keys",), reach=0.01)
    with pytest.raises(InvalidInput):
        plan_layout(source, target, ("keys",), ("keys",), reach=0)


def test_they_come_back_from_disk(tmp_path: Path) -> None:
    moments = moments_of(*rows(500))
    moments.save(tmp_path / "m", json.dumps({"done": 3}))
    back, note = Moments.load(tmp_path / "m", LAYOUT)
    assert note == {"done": 3}
    assert back.count == 500
    for one, other in zip(covariances(back), covariances(moments), strict=True):
        assert torch.equal(one, other)
    x, y = rows(100, seed=1)
    back.add(x, y)
    moments.add(x, y)
    assert torch.equal(back.gram_of((0, 1, 2)), moments.gram_of((0, 1, 2)))
    Moments.empty(LAYOUT).save(tmp_path / "none")
    assert Moments.load(tmp_path / "none", LAYOUT)[0].count == 0


def test_files_of_other_fits_and_damaged_ones(tmp_path: Path) -> None:
    moments_of(*rows(500)).save(tmp_path / "m")
    other = plan_layout(*(builders.identity(builders.llama(2)) for _ in range(2)), ("keys",), ("keys",))
    with pytest.raises(IncompatibleIdentity):
        Moments.load(tmp_path / "m", other)
    with pytest.raises(IncompatibleIdentity):
        Moments.empty(other).merge(moments_of(*rows(500)))
    raw = bytearray((tmp_path / "m").read_bytes())
    raw[-9] ^= 1
    (tmp_path / "m").write_bytes(raw)
    with pytest.raises(CorruptPacket):
        Moments.load(tmp_path / "m", LAYOUT)
    with pytest.raises(InvalidInput):
        Moments.load(tmp_path / "nothing", LAYOUT)


@pytest.mark.parametrize("bad", ["width", "length", "nan"])
def test_rows_that_do_not_fit(bad: str) -> None:
    x, y = rows(20)
    if bad == "width":
        x = x[:, 1:]
    elif bad == "length":
        y = y[1:]
    else:
        x[3, 3] = torch.nan
    moments = Moments.empty(LAYOUT)
    with pytest.raises(InvalidInput):
        moments.add(x, y)
    assert moments.count == 0
