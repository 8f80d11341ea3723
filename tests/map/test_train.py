"""What is trained on top of a linear map, or in its place, comes nearer to what the target makes of its own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.map.fit import fit_linear
from kvferry.map.mapper import Mapper, Recipe
from kvferry.map.train import VARIANTS, Trainer, TrainSettings
from tests.hf import tiny
from tests.map import builders


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A layer is missing, and what it did was no small thing."""
    source = tiny.llama(num_hidden_layers=3, max_position_embeddings=1024)
    with torch.no_grad():
        for layer in source.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.5)
    return builders.without_layer(source, 1), source


def trained(pair: tuple[Any, Any], variant: str, settings: TrainSettings, steps: int) -> tuple[Mapper, Mapper, Any]:
    calibration = builders.calibrated(*pair, Recipe(variant, top_k=1, native_prefix=2))
    linear = fit_linear(calibration, {})
    trainer = Trainer(linear, calibration, settings)
    optimizer = torch.optim.Adam(trainer.weights.values(), lr=settings.rate)
    for seed in range(steps):
        ids = tiny.prompt(1, 120, seed=seed)
        trainer.step(builders.cached(pair[0], ids), builders.cached(pair[1], ids, query_window=64))
        optimizer.step()
        optimizer.zero_grad()
    trainer.forget()
    ids = tiny.prompt(1, 200, seed=999)
    trainer.step(builders.cached(pair[0], ids), builders.cached(pair[1], ids, query_window=64), learn=False)
    return linear, trainer.finish({"steps": steps}, trainer.r2()), trainer


def errors(pair: tuple[Any, Any], mapper: Mapper) -> float:
    """Squared error of the last layer's values on tokens that nobody has seen."""
    ids = tiny.prompt(1, 200, seed=999)
    made, want = mapper.map(builders.cached(pair[0], ids)), builders.cached(pair[1], ids)
    x, y = made.layers[-1].values[:, :, 2:], want.layers[-1].values[:, :, 2:]
    return float((x - y).square().sum() / (y - y.mean(dim=2, keepdim=True)).square().sum())


def test_a_residual_begins_as_ridge_and_does_better(pair: tuple[Any, Any], tmp_path: Path) -> None:
    settings = TrainSettings(hidden=(32,), rate=3e-3, on_rows=0.1, on_attention=1.0)
    linear, same, _ = trained(pair, "ridge+residual", settings, 0)
    ids = tiny.prompt(1, 60, seed=77)
    cache = builders.cached(pair[0], ids)
    for a, b in zip(same.map(cache).layers, linear.map(cache).layers, strict=True):
        assert torch.allclose(a.keys, b.keys, atol=1e-5)
    _, better, trainer = trained(pair, "ridge+residual", settings, 80)
    held = builders.cached(pair[0], ids), builders.cached(pair[1], ids, query_window=32)
    calibration = builders.calibrated(*pair, Recipe("ridge+residual", top_k=1, native_prefix=2))
    before = Trainer(linear, calibration, settings).step(*held, learn=False)
    after = trainer.step(*held, learn=False)
    assert after["attention"] < 0.99 * before["attention"]
    assert linear.parameters < better.parameters
    assert better.made["steps"] == 80
    better.save_pretrained(tmp_path / "m")
    back = Mapper.from_pretrained(tmp_path / "m")
    assert back.digest == better.digest != linear.digest
    snapshot = builders.cached(pair[0], tiny.prompt(1, 200, seed=3))
    grown = back.extend(back.map(snapshot.crop(130)), snapshot)
    for a, b in zip(grown.layers, better.map(snapshot).layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_a_perceptron_learns_the_map(pair: tuple[Any, Any]) -> None:
    settings = TrainSettings(hidden=(64, 64), rate=3e-3, affine=False)
    _, raw, _ = trained(pair, "mlp", settings, 0)
    _, made, _ = trained(pair, "mlp", settings, 80)
    assert all(part.affine is None and len(part.hidden) == 3 for part in made.parts)
    assert errors(pair, made) < 0.6 * errors(pair, raw)
    assert errors(pair, made) < 1
    ids = tiny.prompt(1, 200, seed=999)
    x, y = made.map(builders.cached(pair[0], ids)).layers[-1].values, builders.cached(pair[1], ids).layers[-1].values
    missed, whole = (x - y)[0, :, 2:], (y - y[:, :, 2:].mean(dim=2, keepdim=True))[0, :, 2:]
    own = 1 - missed.square().sum(dim=(1, 2)) / whole.square().sum(dim=(1, 2))
    assert made.measures["r2"]["values"][-1] == pytest.approx(float(own.mean()), abs=0.02), "its own, not ridge's"
    assert raw.measures["r2"]["values"][-1] < made.measures["r2"]["values"][-1] - 0.1


def test_the_papers_perceptron() -> None:
    assert VARIANTS["mlp"] == TrainSettings(hidden=(1024, 1024), rate=1e-3, epochs=20, affine=False, stride=4)


def test_what_cannot_be_trained_on(pair: tuple[Any, Any]) -> None:
    settings = TrainSettings(hidden=(8,), on_attention=1.0)
    _, _, trainer = trained(pair, "ridge+residual", settings, 0)
    ids = tiny.prompt(2, 30)
    one = [builders.cached(model, ids[:1]) for model in pair]
    with pytest.raises(InvalidInput, match="no queries"):
        trainer.step(*one)
    with pytest.raises(InvalidInput, match="one sequence"):
        trainer.step(*(builders.cached(model, ids) for model in pair))
