"""Tiny matched pairs: models of the same residual stream, one with a layer less, and their caches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvferry.evaluate.map_fit import FitSettings, fit
from kvferry.evaluate.map_gate import accept
from kvferry.hf.capture import capture
from kvferry.hf.identity import identity_of
from kvferry.hf.models import load_model
from kvferry.hf.rotary import rotaries_of
from kvferry.hf.text import default_text
from kvferry.map.calibration import Calibration
from kvferry.map.fit import fit_linear
from kvferry.map.gate import Acceptance, Measured
from kvferry.map.mapper import Mapper, Recipe
from kvferry.snapshot import Identity, Snapshot
from tests.cli import models
from tests.hf import tiny

TOKENIZER = "sha256:tiny"


def calm(model: Any) -> Any:
    """Weights so small that a layer changes the stream by a little, as in a trained model."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.05)
    return model


def llama(layers: int = 4, **changes: Any) -> Any:
    return calm(tiny.llama(num_hidden_layers=layers, max_position_embeddings=1024, **changes))


def without_layer(model: Any, dropped: int, **changes: Any) -> Any:
    """The same weights but for one layer."""
    layers = model.config.num_hidden_layers - 1
    child = tiny.llama(num_hidden_layers=layers, max_position_embeddings=1024, **changes)
    kept = [index for index in range(layers + 1) if index != dropped]
    state = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    for new, old in enumerate(kept):
        for name, tensor in model.model.layers[old].state_dict().items():
            state[f"model.layers.{new}.{name}"] = tensor
    child.load_state_dict(state)
    return child


def saved_pair(folder: Path, **changes: Any) -> tuple[Any, Any, Any]:
    """A source, the same without its third layer as the target, and their tokenizer, loaded as a user loads them."""
    source = llama(**changes)
    child = without_layer(source, 2, **changes)
    paths = models.save(source, folder / "source"), models.save(child, folder / "target")
    loaded, tokenizer = load_model(paths[0], dtype="float32")
    return loaded, load_model(paths[1], dtype="float32")[0], tokenizer


def judged_pair(folder: Path, **changes: Any) -> tuple[Any, Any, Mapper, Acceptance]:
    """`saved_pair`, and a mapper in ``folder / "mapper"`` with a record that lets it pass, which is yet to be saved."""
    source, target, tokenizer = saved_pair(folder, **changes)
    settings = FitSettings(sequences=25, length=200, stride=1)
    text = default_text()[:20_000]
    mapper = fit(source, target, text, top_k=2, settings=settings)
    mapper.save_pretrained(folder / "mapper")
    judged = accept(mapper, source, target, tokenizer, text, windows=2)
    good = Measured(100, True, 0.99, 0.01, 0.99, 0.9, 0.8, 5.0)  # the pair is too small to make much of a context
    return source, target, mapper, replace(judged, measured=good, reasons=())


def identity(model: Any) -> Identity:
    return replace(identity_of(model, construction=()), tokenizer=TOKENIZER)


def cached(model: Any, ids: torch.Tensor, **settings: Any) -> Snapshot:
    """A model's cache, with a tokenizer in its identity."""
    snapshot = capture(model, ids, **settings)
    return replace(snapshot, identity=replace(snapshot.identity, tokenizer=TOKENIZER))


def calibrated(
    source: Any, target: Any, recipe: Recipe | None = None, *, sequences: int = 40, length: int = 120, **settings: Any
) -> Calibration:
    identities = identity(source), identity(target)
    rotaries = tuple(
        rotaries_of(model, len(own.layers)) for model, own in zip((source, target), identities, strict=True)
    )
    made = Calibration(*identities, rotaries, recipe or Recipe(top_k=2, native_prefix=2), stride=1, **settings)
    for index in range(sequences):
        ids = tiny.prompt(1, length, seed=index)
        made.add(cached(source, ids), cached(target, ids), held=index % 5 == 4, offset=index)
    return made


@cache
def pair() -> tuple[Any, Any, Mapper]:
    """Four layers, three of them in the target, which rotates by another base; a mapper from one to the other."""
    source = llama()
    target = without_layer(source, 2, rope_parameters={"rope_type": "default", "rope_theta": 9000.0})
    return source, target, fit_linear(calibrated(source, target), {"text": "random"})


def tampered(mapper: Mapper, **changes: Any) -> Mapper:
    return replace(mapper, **changes)
