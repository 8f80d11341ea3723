"""Two ranks of a real process group fit what one process fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

import kvferry as kv
from kvferry.evaluate.map_fit import FitSettings, fit
from kvferry.map.distributed import all_reduce
from kvferry.map.mapper import Mapper
from kvferry.map.moments import Moments
from tests.cli import models
from tests.map import builders
from tests.map.test_moments import LAYOUT, close, covariances, moments_of, rows

SETTINGS = FitSettings(sequences=15, length=64, stride=1)


def folders(root: Path) -> tuple[str, str]:
    source = builders.llama()
    return models.save(source, root / "source"), models.save(builders.without_layer(source, 2), root / "target")


def fitted(root: Path) -> Mapper:
    source, target = (kv.load_model(root / name, dtype="float32")[0] for name in ("source", "target"))
    return fit(source, target, models.TEXT * 10, top_k=2, settings=SETTINGS)


def ranks(rank: int, meet: str, folder: str) -> Mapper:
    """What each rank does: moments of which the other has all, of which each has some, and a fit."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    try:
        x, y = rows(1000)
        for name, spans in (("one", [(0, 0), (0, 1000)]), ("two", [(0, 400), (400, 1000)])):
            mine = slice(*spans[rank])
            moments = moments_of(x[mine], y[mine])
            all_reduce(moments)
            moments.save(Path(folder) / f"{name}-{rank}")
        mapper = fitted(Path(folder))
        mapper.save_pretrained(Path(folder) / f"mapper-{rank}")
    finally:
        distributed.destroy_process_group()
    return mapper


def test_two_ranks_are_as_one(tmp_path: Path) -> None:
    folders(tmp_path)
    context: Any = multiprocessing.get_context("spawn")
    meet = str(tmp_path / "meet")
    other = context.Process(target=ranks, args=(1, meet, str(tmp_path)))
    other.start()
    try:
        here = ranks(0, meet, str(tmp_path))
    finally:
        other.join(timeout=120)
        if other.is_alive():
            other.kill()
    assert other.exitcode == 0
    whole = covariances(moments_of(*rows(1000)))
    for name in ("one", "two"):
        both = [Moments.load(tmp_path / f"{name}-{rank}", LAYOUT)[0] for rank in range(2)]
        assert torch.equal(both[0].gram_of((0, 1, 2)), both[1].gram_of((0, 1, 2)))
        for moments in both:
            assert moments.count == 1000
            for one, want in zip(covariances(moments), whole, strict=True):
                assert close(one, want, 1e-6)
    there, alone = Mapper.from_pretrained(tmp_path / "mapper-1"), fitted(tmp_path)
    for a, b, c in zip(here.parts, there.parts, alone.parts, strict=True):
        assert a.sources == b.sources == c.sources
        assert torch.equal(a.affine[0], b.affine[0])
        assert close(a.affine[0], c.affine[0], 1e-6)
        assert close(a.affine[1], c.affine[1], 1e-6)
    assert (here.made["tokens_fit"], here.made["tokens_held"]) == (alone.made["tokens_fit"], alone.made["tokens_held"])
    assert here.made["calibration"] == alone.made["calibration"]
