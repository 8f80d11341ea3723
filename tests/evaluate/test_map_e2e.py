"""A map trained through its target serves it better than the ridge that it began as, and a kill costs little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import CorruptPacket, InvalidInput, UnsupportedCache
from kvferry.evaluate import map_learn
from kvferry.evaluate.map_arms import Arm
from kvferry.evaluate.map_eval import MapEvalSettings, evaluate_mapper
from kvferry.evaluate.map_fit import FitSettings, collect, fit
from kvferry.hf.text import default_text
from kvferry.map.mapper import Mapper, Recipe
from kvferry.map.train import VARIANTS, Trainer, TrainSettings
from tests.cli import models
from tests.hf import tiny
from tests.map import builders

TEXT = default_text()
SETTINGS = FitSettings(sequences=30, length=160, stride=2)
TRAINING = replace(VARIANTS["ridge+e2e"], window=96, epochs=3, rate=1e-3, held=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A layer is missing, and what it did was no small thing."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny.llama(num_hidden_layers=3, max_position_embeddings=1024)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
            layer.self_attn.v_proj.weight.mul_(4.0)
            layer.mlp.down_proj.weight.mul_(0.5)
    folders = models.save(builders.without_layer(target, 1), root / "source"), models.save(target, root / "target")
    source, tokenizer = kv.load_model(folders[0], dtype="float32")
    return source, kv.load_model(folders[1], dtype="float32")[0], tokenizer


def fitted(pair: tuple[Any, Any, Any], variant: str, **more: Any) -> Mapper:
    training = {"training": TRAINING} if variant == "ridge+e2e" else {}
    return fit(*pair[:2], TEXT[:20_000], variant=variant, top_k=1, settings=SETTINGS, **{**training, **more})


@pytest.fixture(scope="module")
def trained(pair: tuple[Any, Any, Any]) -> Mapper:
    return fitted(pair, "ridge+e2e")


def test_the_target_says_more_of_what_it_would_have_said(pair: tuple[Any, Any, Any], trained: Mapper) -> None:
    ridge = fitted(pair, "ridge")
    settings = MapEvalSettings(windows=4, prefix=96, suffix=48, arms=(Arm("mapped"),))
    before, after = (
        evaluate_mapper(mapper, *pair, TEXT[60_000:80_000], settings).row("mapped") for mapper in (ridge, trained)
    )
    assert after.fidelity.kl_mean < 0.98 * before.fidelity.kl_mean
    made = trained.made
    assert made["held_kl_error"] < 0.98 * made["held_kl_error_before"]
    assert made["judged_by"] == "loss"
    assert [look["step"] for look in made["held_errors"]] == [0, 12, 24, 36, 48, 60, 72]


def test_what_is_learnt_costs_nothing_at_use(pair: tuple[Any, Any, Any], trained: Mapper, tmp_path: Path) -> None:
    assert trained.parameters == fitted(pair, "ridge").parameters
    assert not any(part.hidden for part in trained.parts)
    trained.save_pretrained(tmp_path / "m")
    assert Mapper.from_pretrained(tmp_path / "m").digest == trained.digest


@pytest.mark.parametrize("hidden", [(8,), ()])
def test_the_mapper_is_what_was_trained(pair: tuple[Any, Any, Any], hidden: tuple[int, ...]) -> None:
    linear = fitted(pair, "ridge")
    run = collect(*pair[:2], TEXT[:20_000], Recipe(top_k=1), settings=SETTINGS)
    trainer = Trainer(linear, run.calibration, replace(TRAINING, hidden=hidden))
    with torch.no_grad():
        for weight in trainer.weights.values():
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    snapshot = kv.capture(pair[0], run.sequences[0])
    first, layers = trainer.made(snapshot)
    mapped = trainer.finish({}, {"keys": [], "values": []}).map(snapshot)
    for (keys, values), layer in zip(layers, mapped.layers, strict=True):
        assert torch.allclose(keys, layer.keys[:, :, first:], atol=1e-4)
        assert torch.allclose(values, layer.values[:, :, first:], atol=1e-4)


class Killed(Exception):
    """Stands for a signal."""


@pytest.mark.parametrize("variant", ["ridge+e2e", "mlp"])
def test_a_killed_training_ends_with_the_same_bits(
    variant: str, pair: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_learn, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(map_learn, "_RARELY", 0)
    training = replace(VARIANTS[variant], epochs=1, window=96, held=2, looks=2)
    if variant == "mlp":
        training = replace(training, hidden=(16, 16))
    whole = fitted(pair, variant, training=training)
    seen: list[int] = []

    def stop_at(step: int) -> Any:
        def on_step(done: int, _total: int, what: str) -> None:
            if what.startswith("training"):
                seen.append(done)
                if done == step:
                    raise Killed

        return on_step

    for step in (7, 13):
        with pytest.raises(Killed):
            fitted(pair, variant, training=training, resume=tmp_path, on_step=stop_at(step))
    again = fitted(pair, variant, training=training, resume=tmp_path, on_step=stop_at(0))
    assert seen == [*range(1, 8), *range(7, 14), *range(13, 25)]
    for a, b in zip(again.parts, whole.parts, strict=True):
        for one, other in zip(a.layers, b.layers, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
    assert again.made["held_errors"] == whole.made["held_errors"]
    found = next(path for path in tmp_path.glob(f"{variant}-*.safetensors") if ".best" not in path.name)
    found.write_bytes(found.read_bytes()[:-1])
    with pytest.raises(CorruptPacket):
        fitted(pair, variant, training=training, resume=tmp_path)


def test_it_ends_early_where_nothing_gets_better(pair: tuple[Any, Any, Any]) -> None:
    training = replace(TRAINING, rate=30.0, epochs=4, looks=2, patience=2, warmup=0.0)
    mapper = fitted(pair, "ridge+e2e", training=training)
    assert mapper.made["stopped_early"]
    assert (mapper.made["epoch_kept"], mapper.made["epochs_done"]) == (0, 1)
    for a, b in zip(mapper.parts, fitted(pair, "ridge").parts, strict=True):
        assert torch.equal(a.affine[0], b.affine[0])


def test_rates() -> None:
    settings = TrainSettings(rate=1.0, warmup=0.2)
    rates = [settings.rate_at(step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == [*rates[:2], *sorted(rates[2:], reverse=True)]
    assert rates[-1] == pytest.approx(0.125)


def test_wrong_settings(pair: tuple[Any, Any, Any]) -> None:
    for wrong in ({"epochs": 0}, {"sequences": 0}, {"linear": True, "affine": False}, {"window": 4}):
        with pytest.raises(InvalidInput):
            TrainSettings(**wrong)
    gemma = tiny.gemma3(sliding_window=32)
    with pytest.raises(UnsupportedCache, match="shorten windows"):
        fit(
            gemma, gemma, TEXT[:20_000], variant="ridge+e2e", top_k=1, settings=SETTINGS, tokenizer=pair[2],
            training=TRAINING,
        )  # fmt: skip
