"""A fit from two models and a text: what it takes, what it holds, and that a kill costs it little."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.map_fit import FitSettings, collect, cut_sequences, fit, is_held
from kvferry.map.fit import r2_table
from kvferry.map.mapper import Mapper, Recipe
from kvferry.map.train import VARIANTS
from tests.cli import models
from tests.hf import tiny
from tests.map import builders

TEXT = models.TEXT * 12
SETTINGS = FitSettings(sequences=12, length=80, stride=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    source = builders.llama()
    target = builders.without_layer(source, 2)
    return models.save(source, root / "source"), models.save(target, root / "target")


@pytest.fixture(scope="module")
def loaded(folders: tuple[str, str]) -> tuple[Any, Any, Any]:
    source, tokenizer = kv.load_model(folders[0], dtype="float32")
    return source, kv.load_model(folders[1], dtype="float32")[0], tokenizer


def test_public_verbs(loaded: tuple[Any, Any, Any], tmp_path: Path) -> None:
    source, target, tokenizer = loaded
    mapper = kv.fit(source, target, [TEXT, TEXT[50:]], top_k=2, settings=SETTINGS)
    assert isinstance(mapper, kv.Mapper)
    mapper.save_pretrained(tmp_path / "m")
    mapper = kv.Mapper.from_pretrained(tmp_path / "m")
    snapshot = kv.capture(source, torch.tensor([tokenizer(TEXT[:90]).input_ids]))
    made = mapper.extend(mapper.map(snapshot.crop(50)), snapshot)
    assert made.to_cache(target).get_seq_length() == 90
    assert min(mapper.measures["r2"]["keys"][:2]) > 0.999
    made_of = mapper.made
    assert (made_of["sequences"], made_of["length"]) == (12, 80)
    assert made_of["tokens_fit"] == 10 * 38
    assert made_of["tokens_held"] == 2 * 38
    assert 0 < made_of["model_seconds"] < made_of["fit_seconds"]


def test_head_by_head(loaded: tuple[Any, Any, Any]) -> None:
    source, target, _ = loaded
    local = kv.fit(source, target, TEXT, variant="head_local", settings=SETTINGS)
    whole = kv.fit(source, target, TEXT, top_k=4, settings=SETTINGS)
    assert local.recipe.top_k == 1
    assert all(part.heads == 1 and len(part.sources) == 1 for part in local.parts)
    assert whole.parameters > 3.5 * local.parameters


def test_memory_and_moments_do_not_grow_with_the_text(loaded: tuple[Any, Any, Any]) -> None:
    source, target, _ = loaded
    sizes = []
    for sequences in (5, 25):
        run = collect(source, target, TEXT * 3, Recipe(), settings=replace(SETTINGS, sequences=sequences))
        sizes.append(run.calibration.nbytes)
        assert not any(rows.count for split in run.calibration._rows.values() for rows in split)
        assert run.calibration.tokens["fit"] == sequences * 4 // 5 * 38
    assert sizes[0] == sizes[1]


def test_sequences_of_a_text(loaded: tuple[Any, Any, Any]) -> None:
    tokenizer = loaded[2]
    sequences = cut_sequences(tokenizer, TEXT, 100, 6)
    assert len(sequences) == 6
    assert {ids.shape for ids in sequences} == {(1, 100)}
    assert sum(is_held(index) for index in range(20)) == 4
    assert len(cut_sequences(tokenizer, TEXT, 100, 10**6)) == len(TEXT) // 100
    with pytest.raises(InvalidInput, match="at least 5 sequences of 400 tokens"):
        cut_sequences(tokenizer, TEXT, 400, 10)
    with pytest.raises(InvalidInput):
        cut_sequences(tokenizer, TEXT, 4, 10)


def test_what_is_no_pair_is_refused_before_anything_runs(loaded: tuple[Any, Any, Any], tmp_path: Path) -> None:
    source, _, tokenizer = loaded
    with pytest.raises(IncompatibleIdentity) as raised:
        fit(source, tiny.llama(head_dim=8, num_key_value_heads=1), TEXT, settings=SETTINGS)
    assert {"head_dim", "kv_heads", "tokenizer"} <= raised.value.differences.keys()
    with pytest.raises(InvalidInput, match="unknown variant 'magic'"):
        fit(source, source, TEXT, variant="magic", settings=SETTINGS)
    with pytest.raises(InvalidInput, match="tokenizer of the pair"):
        fit(tiny.llama(), tiny.llama(), TEXT, settings=SETTINGS)
    mapper = fit(tiny.llama(), tiny.llama(), TEXT, tokenizer=tokenizer, settings=SETTINGS)
    assert mapper.source.tokenizer == mapper.target.tokenizer is not None


def test_more_source_layers_can_be_tried_on_the_same_moments(loaded: tuple[Any, Any, Any]) -> None:
    source, target, _ = loaded
    run = collect(source, target, TEXT * 2, Recipe(top_k=1), settings=SETTINGS)
    rows = r2_table(run.calibration, [1, None], [0.01])
    assert [row["top_k"] for row in rows] == [1, None]


RUN = """
import sys, torch
torch.set_num_threads(1)
import kvferry as kv
from kvferry.evaluate.map_fit import FitSettings, fit
source, target = (kv.load_model(path, dtype="float32")[0] for path in sys.argv[1:3])
print("ready", flush=True)
fit(source, target, open(sys.argv[3]).read(), top_k=2, resume=sys.argv[4],
    settings=FitSettings(sequences=10**6, length=80, stride=2, checkpoint_seconds=0.0))
"""


def test_a_killed_fit_goes_on_where_it_was(
    folders: tuple[str, str], loaded: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT * 2)
    kept = tmp_path / "kept"
    arguments = [sys.executable, "-c", RUN, *folders, str(text), str(kept)]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, env={**os.environ, **models.environment()})
    state = kept / "rank-0-of-1" / "state.json"
    deadline = time.monotonic() + 120
    while not state.exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    source, target, _ = loaded
    settings = FitSettings(sequences=10**6, length=80, stride=2)
    steps: list[int] = []

    def on_step(done: int, _total: int, what: str) -> None:
        if what == "sequences":
            steps.append(done)

    again = fit(source, target, text.read_text(), top_k=2, resume=kept, settings=settings, on_step=on_step)
    whole = fit(source, target, text.read_text(), top_k=2, settings=settings)
    assert 0 < steps[0] < steps[-1] == len(text.read_text()) // 80 - 1
    for a, b in zip(again.parts, whole.parts, strict=True):
        assert torch.equal(a.affine[0], b.affine[0])
        assert torch.equal(a.affine[1], b.affine[1])
    with pytest.raises(IncompatibleIdentity, match="another fit"):
        fit(source, target, TEXT, top_k=2, resume=kept, settings=settings)
    with pytest.raises(IncompatibleIdentity, match="another fit"):
        fit(source, source, text.read_text(), top_k=2, resume=kept, settings=settings)


@pytest.mark.model
def test_smollm2_is_mapped_to_itself(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    from kvferry.hf.text import default_text

    settings = FitSettings(sequences=5, length=128, stride=1, reach=0.04)
    mapper: Mapper = kv.fit(model, model, default_text()[:20_000], top_k=1, settings=settings)
    # 512 rows for 192 inputs: the layer itself is the best source of each, and explains all of it.
    assert [part.sources[0].layer for part in mapper.parts if part.target.side == "keys"] == list(range(30))
    assert min(mapper.measures["r2"]["keys"] + mapper.measures["r2"]["values"]) > 0.99
    snapshot = kv.capture(model, torch.tensor([tokenizer(default_text()[30_000:30_400]).input_ids]))
    made = mapper.map(snapshot)
    for layer, want in zip(made.layers, snapshot.layers, strict=True):
        # The first layer's values are so small that λ pulls at them.
        for x, y, most in ((layer.keys, want.keys, 0.02), (layer.values, want.values, 0.15)):
            assert float((x.float() - y.float())[:, :, 4:].norm() / y.float()[:, :, 4:].norm()) < most


@pytest.mark.parametrize("variant", ["ridge+residual", "mlp"])
def test_trained_variants(variant: str, loaded: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, tokenizer = loaded
    small = {"ridge+residual": ((8,), 2), "mlp": ((24, 24), 3)}
    hidden, epochs = small[variant]
    monkeypatch.setitem(VARIANTS, variant, replace(VARIANTS[variant], hidden=hidden, epochs=epochs))
    mapper = kv.fit(source, target, TEXT, top_k=1, variant=variant, settings=SETTINGS)
    judged = "attention" if variant == "ridge+residual" else "rows"
    made = mapper.made
    assert made[f"held_{judged}_error"] <= made[f"held_{judged}_error_before"]
    assert made["epoch_kept"] <= made["epochs"] == epochs
    if variant == "mlp":
        assert made["epoch_kept"] == epochs
        assert made["held_rows_error"] < 0.9 * made["held_rows_error_before"]
    assert all((part.affine is None) == (variant == "mlp") for part in mapper.parts)
    snapshot = kv.capture(source, torch.tensor([tokenizer(TEXT[:90]).input_ids]))
    assert mapper.map(snapshot).to_cache(target).get_seq_length() == 90
    again = kv.fit(source, target, TEXT, top_k=1, variant=variant, settings=SETTINGS)
    assert torch.equal(again.parts[0].hidden[0][0], mapper.parts[0].hidden[0][0])
