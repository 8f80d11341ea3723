"""What the issue promises, on caches of real models: first token, all bytes, every bit."""

from dataclasses import replace

import pytest
import torch

import kvferry as kv
from kvferry.hf.text import default_text
from tests.ship.test_packet import assert_same_cache
from tests.ship.test_real_models import continued

pytestmark = pytest.mark.model

TOKENS = 513


def prompt(tokenizer):
    """Prose that does not repeat: a cache of repetitions would be too easy."""
    ids = tokenizer(default_text()[:8000], return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS
    return ids


def assert_promises(snapshot):
    packet = kv.encode(snapshot, budget=0.27)
    refinement = kv.refine(snapshot, packet)
    full = packet.full_bytes
    first = (len(packet) + refinement.header.nbytes) / full
    total = (len(packet) + len(refinement)) / full
    assert first <= 0.28
    assert total <= 1.0, f"{total:.4f} of the 16-bit packet"
    assert (len(packet) + refinement.header.nbytes + refinement.level_bytes[0]) / full < 0.56
    exact = refinement.apply(packet)
    assert_same_cache(exact, snapshot)
    return packet, refinement, exact


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("smollm2-135m", "bfloat16"),
        ("smollm2-135m", "float32"),
        ("gemma3-270m", "bfloat16"),
        pytest.param("gemma3-270m", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_real_cache_is_refined_to_the_bit(model_of, name, dtype, tmp_path):
    model, tokenizer = model_of(name, dtype)
    ids = prompt(tokenizer)
    snapshot = kv.capture(model, ids[:, :-1])
    packet, refinement, exact = assert_promises(snapshot)
    refinement.save(tmp_path / "refinement")
    packet.save(tmp_path / "packet")
    loaded = kv.Refinement.load(tmp_path / "refinement").apply(kv.Packet.load(tmp_path / "packet"))
    assert_same_cache(loaded, snapshot)
    if dtype == "bfloat16":
        assert torch.equal(continued(model, exact, ids, 4), continued(model, snapshot, ids, 4))


def test_in_fp16(model_of):
    """The same cache in the dtype whose mantissa leaves the least to gain (Gemma overflows in it)."""
    model, tokenizer = model_of("smollm2-135m", "float32")
    wide = kv.capture(model, prompt(tokenizer))
    layers = tuple(replace(each, keys=each.keys.half(), values=each.values.half()) for each in wide.layers)
    assert_promises(replace(wide, identity=replace(wide.identity, dtype="float16"), layers=layers))
