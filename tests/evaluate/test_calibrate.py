"""A transform made of a model's own caches: it fits that model, and ships what it was made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.evaluate.calibrate import calibrate
from kvferry.hf.capture import capture
from kvferry.hf.decode import teacher_forced_logits
from kvferry.ship.transform.artifact import Transform
from tests.cli import models
from tests.hf import tiny
from tests.ship.transform.builders import error

SHORT = {"windows": 8, "gradient_windows": 6, "prefix": 80, "suffix": 30}
TEXT = models.TEXT * 9
LAYERS = {"llama": tiny.llama, "gemma3": tiny.gemma3}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token a character."""
    return kv.load_model(models.save(tiny.llama(), tmp_path_factory.mktemp("tiny")), dtype="float32")[1]


def build(family: str, **settings: Any) -> Any:
    """A model whose caches hang together as real ones do: tokens share most of their directions."""
    model = LAYERS[family](**settings)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[:, 8:] *= 0.05
    return model


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def made(request: pytest.FixtureRequest, tokenizer: Any) -> tuple[Any, Transform]:
    model = build(request.param)
    return model, calibrate(model, tokenizer, TEXT, **SHORT)


def test_the_models_own_caches_go_through_it(made: tuple[Any, Transform], tokenizer: Any) -> None:
    model, transform = made
    ids = torch.tensor([tokenizer(TEXT[37:237]).input_ids, tokenizer(TEXT[101:301]).input_ids])
    snapshot = capture(model, ids[:, :150], query_window=16)
    last = None
    for budget in (0.25, 0.35, 0.5):
        packet = kv.encode(snapshot, budget, "klt", transform=transform)
        assert 0.85 * budget < packet.budget <= budget
        decoded = kv.decode(packet, transform=transform)
        found = error(decoded, snapshot)
        assert last is None or found < last
        last = found
        assert decoded.to_cache(model).get_seq_length() == 150
    exact = teacher_forced_logits(model, snapshot, ids).float()
    near = teacher_forced_logits(model, decoded, ids).float()
    near, exact = (torch.log_softmax(x, dim=-1) for x in (near, exact))
    assert float((exact.exp() * (exact - near)).sum(dim=-1).mean()) < 0.01


def test_it_says_what_it_was_made_of_and_is_the_same_again(made: tuple[Any, Transform], tokenizer: Any) -> None:
    model, transform = made
    assert transform.made == {**SHORT, "gradient_windows": 5, "seed": 0, "tokens": 640}
    seen: list[tuple[int, int]] = []
    again = calibrate(model, tokenizer, TEXT, **SHORT, on_window=lambda done, total: seen.append((done, total)))
    assert again.digest == transform.digest
    assert seen == [(done, 8) for done in range(9)]
    assert calibrate(model, tokenizer, TEXT, **SHORT, seed=1).digest != transform.digest
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_basis_knows_what_the_model_feels(tokenizer: Any) -> None:
    """Values of a head that nothing reads cost nothing: their directions come last, at any budget."""
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 32:] = 0  # the queries of the second kv head
    transform = calibrate(model, tokenizer, TEXT, **SHORT)
    ids = torch.tensor([tokenizer(TEXT[37:237]).input_ids])
    snapshot = capture(model, ids)
    decoded = kv.decode(kv.encode(snapshot, 0.3, "klt", transform=transform, n_sink=0), transform=transform)
    for layer, want in zip(decoded.layers, snapshot.layers, strict=True):
        wrong = (layer.values - want.values).square().sum(dim=(0, 2, 3)) / want.values.square().sum(dim=(0, 2, 3))
        assert wrong[1] > 20 * wrong[0]


def test_kinds_of_models_that_no_transform_takes(tokenizer: Any) -> None:
    with pytest.raises(UnsupportedCache):
        calibrate(tiny.gemma3n(), tokenizer, TEXT, **SHORT)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    short = tiny.llama(rope_parameters=dynamic, max_position_embeddings=64)
    with pytest.raises(UnsupportedCache, match="beyond the 64"):
        calibrate(short, tokenizer, TEXT, **SHORT)


def test_a_text_that_is_too_short(tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match="at least 440 tokens; this one has 439"):
        calibrate(tiny.llama(), tokenizer, TEXT[:439], **SHORT)
    assert calibrate(tiny.llama(), tokenizer, TEXT[:440], **SHORT).made["windows"] == 4
