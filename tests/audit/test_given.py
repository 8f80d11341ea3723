"""Caches that come from elsewhere, held against the receiver's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.audit import faults
from kvferry.audit.arm import Arm, Change
from kvferry.audit.codec import asks_queries, audit_packet, codec_of, works
from kvferry.audit.generate import build_cache
from kvferry.audit.given import audit_cache, expected_flips
from kvferry.audit.models import ModelSet
from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.hf.capture import capture
from kvferry.hf.text import default_text
from kvferry.ship.encode import decode, encode
from kvferry.snapshot import Snapshot
from tests.hf import tiny

NEW = 6


@pytest.fixture(scope="module")
def models() -> ModelSet:
    return ModelSet(tiny.llama(dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return tiny.prompt(1, 24, seed=8)


def cache(
    models: ModelSet, prompt: torch.Tensor, construction: str = "prefill", change: Change | None = None
) -> Snapshot:
    return build_cache(models, Arm(construction, change=change), prompt)


def test_its_own_cache_is_identical(models: ModelSet, prompt: torch.Tensor) -> None:
    found = audit_cache(models, cache(models, prompt), new_tokens=NEW)
    assert (found.verdict, found.layer, found.replicas) == ("identical", None, 1)
    assert found.measures["cache_l2"].value == 0
    assert [line["stage"] for line in found.detail["stages"]][-3] == "given"


def test_its_own_cache_built_otherwise_is_a_matter_of_shapes(models: ModelSet, prompt: torch.Tensor) -> None:
    found = audit_cache(models, cache(models, prompt, "incremental"), new_tokens=NEW)
    assert found.verdict == "kernel-shape"
    assert any("incremental" in why for why in found.reasons)
    other = audit_cache(models, cache(models, prompt, "chunked(5)"), new_tokens=NEW)
    assert other.verdict in ("rounding", "kernel-shape")


@pytest.mark.parametrize(
    ("change", "name", "layer", "tensor"),
    [
        (faults.shifted_positions(), "positions", 0, "keys"),
        (faults.swapped_head(1), "keys and values swapped", 1, "keys+values"),
        (faults.stale_layer(1), "stale layer", 1, "keys+values"),
        (faults.quantised_layer(0), "quantised", 0, "keys+values"),
    ],
)
def test_faults_are_found_in_a_cache_alone(
    models: ModelSet, prompt: torch.Tensor, change: Change, name: str, layer: int, tensor: str
) -> None:
    found = audit_cache(models, cache(models, prompt, change=change), new_tokens=NEW)
    assert (found.verdict, found.layer, found.tensor) == ("semantic", layer, tensor)
    assert found.diagnosis is not None
    assert found.diagnosis["name"] == name
    assert found.detail["layers"][0]["layer"] == layer or name == "positions"


@pytest.mark.parametrize(("policy", "budget"), [("uniform_int4", None), ("uniform_int8", None), ("sink_protect", 0.7)])
def test_a_packet_is_as_lossy_as_it_says(models: ModelSet, prompt: torch.Tensor, policy: str, budget: Any) -> None:
    packet = encode(cache(models, prompt), budget, policy)
    found = audit_cache(models, decode(packet), codec=codec_of(packet), new_tokens=NEW)
    assert found.verdict in ("codec", "rounding"), found.reasons
    assert found.verdict == "codec" or policy == "uniform_int8"
    assert any(line["stage"].startswith("codec") for line in found.detail["stages"])


def test_a_codec_that_asks_queries_has_the_receivers_own(models: ModelSet, prompt: torch.Tensor) -> None:
    seen = capture(models.own, prompt, query_window=8)
    packet = encode(seen, 0.6, "fast")
    assert asks_queries(packet)
    arrived = decode(packet)
    assert not works(codec_of(packet), arrived), "what arrived has no queries to rank its tokens by"
    codec = codec_of(packet, seen)
    assert works(codec, arrived)
    found = audit_cache(models, arrived, codec=codec, new_tokens=NEW)
    assert found.verdict == "codec", found.reasons
    assert found.detail["codec_checked"]
    assert "no larger" in found.reasons[0]
    coded, given = (
        next(one for one in found.detail["stages"] if one["stage"].startswith(name)) for name in ("codec", "given")
    )
    assert coded["cache_l2"] == pytest.approx(given["cache_l2"], rel=0.5)
    unchecked = audit_cache(models, arrived, new_tokens=NEW)
    assert unchecked.verdict == "codec"
    assert "was not checked" in unchecked.reasons[0]


def test_a_fault_behind_a_codec_is_no_codec(models: ModelSet, prompt: torch.Tensor) -> None:
    wrong = cache(models, prompt, change=faults.swapped_head(1))
    packet = encode(wrong, None, "uniform_int8")
    found = audit_cache(models, decode(packet), codec=codec_of(packet), new_tokens=NEW)
    assert (found.verdict, found.layer, found.tensor) == ("semantic", 1, "keys+values")


def test_infinity_is_overflow(models: ModelSet, prompt: torch.Tensor) -> None:
    good = cache(models, prompt)
    layers = list(good.layers)
    assert layers[1].values is not None
    values = layers[1].values.clone()
    values[0, 0, 3, 0] = torch.inf
    layers[1] = layers[1].map_tensors(layers[1].keys, values)
    found = audit_cache(models, replace(good, layers=tuple(layers)), new_tokens=NEW)
    assert (found.verdict, found.layer, found.tensor) == ("overflow", 1, "values")


def test_what_is_refused(models: ModelSet, prompt: torch.Tensor) -> None:
    other = ModelSet(tiny.llama(seed=1, dtype=torch.bfloat16))
    with pytest.raises(IncompatibleIdentity):
        audit_cache(models, cache(other, prompt), new_tokens=NEW)
    twice = tiny.prompt(2, 12)
    with pytest.raises(InvalidInput):
        audit_cache(models, capture(models.own, twice), new_tokens=NEW)
    with pytest.raises(InvalidInput):
        audit_packet(models, encode(capture(models.own, twice), None, "uniform_int8"), new_tokens=NEW)
    with pytest.raises(IncompatibleIdentity):
        audit_packet(other, encode(cache(models, prompt), None, "uniform_int8"), new_tokens=NEW)


def test_margins_predict_flips() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 2, generator=generator)
    noise = 0.5 * torch.randn(400, 2, generator=generator)
    observed = int((logits.argmax(-1) != (logits + noise).argmax(-1)).sum())
    expected = expected_flips(logits, logits + noise)
    assert expected is not None
    assert abs(expected - observed) < 40
    assert expected_flips(logits, logits) == 0


@pytest.mark.parametrize("budget", [0.28, 0.52])
def test_an_honest_packet_of_a_real_cache_is_no_fault(smollm2: Any, budget: float) -> None:
    """Whichever layers and tokens the allocator spares this time: of 2% more bytes it makes other choices."""
    model, tokenizer = smollm2
    ids = tokenizer(default_text()[:1500], return_tensors="pt").input_ids[:, :256]
    seen = capture(model, ids, query_window=32)
    packet = encode(seen, budget, "fast")
    found = audit_packet(ModelSet(model), packet, new_tokens=NEW)
    assert found.verdict == "codec", found.reasons
    assert found.detail["codec_checked"]


SHIPPED = [
    (None, None, None),
    (faults.shifted_positions(), "positions", (0, "keys")),
    (faults.swapped_head(15, 1), "keys and values swapped", (15, "keys+values")),
    (faults.stale_layer(15), "stale layer", (15, "keys+values")),
]


@pytest.mark.parametrize(("policy", "budget"), [("uniform_int4", None), ("sink_protect", 0.6)])
@pytest.mark.parametrize(("change", "name", "place"), SHIPPED, ids=lambda value: getattr(value, "name", None))
def test_a_packet_of_a_wrong_cache_is_found_out_with_no_codec_to_hold_it_against(
    smollm2: Any, change: Change | None, name: str | None, place: tuple[int, str] | None, policy: str, budget: Any
) -> None:
    model, tokenizer = smollm2
    ids = torch.tensor(
        [tokenizer("The river rises in the hills to the north and runs past three old mills.").input_ids]
    )
    models = ModelSet(model)
    packet = encode(build_cache(models, Arm(change=change), ids), budget, policy)
    found = audit_cache(models, decode(packet), new_tokens=2)
    if name is None:
        assert found.verdict == "codec", found.reasons
        assert any("no fault shows under it" in why for why in found.reasons)
    else:
        assert (found.verdict, found.layer, found.tensor) == ("semantic", *(place or ())), found.reasons
        assert found.diagnosis is not None
        assert found.diagnosis["name"] == name
