"""Gradients of what follows by the cache: they are the loss's own, and predict what an error costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.decode import teacher_forced_logits
from kvferry.hf.gradients import cache_gradients
from kvferry.snapshot import Snapshot
from tests.hf import tiny


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("family", [tiny.llama, tiny.gemma3])
def test_shapes_and_the_model_left_as_it_was(family) -> None:
    model = family()
    ids = tiny.prompt(1, 50)
    one, again = (cache_gradients(model, ids, 30, generator()) for _ in range(2))
    assert all(parameter.grad is None for parameter in model.parameters())
    for layer, keys, values, same in zip(one.snapshot.layers, one.keys, one.values, again.keys, strict=True):
        assert keys.shape == layer.keys.shape
        assert values.shape == layer.values.shape
        assert torch.equal(keys, same)
        assert layer.queries is not None
        assert float(values.abs().sum()) > 0
    assert not torch.equal(one.values[0], cache_gradients(model, ids, 30, generator(1)).values[0])


def moved(snapshot: Snapshot, keys: list[torch.Tensor], values: list[torch.Tensor], by: float) -> Snapshot:
    layers = tuple(
        replace(layer, keys=layer.keys + by * k, values=layer.values + by * v)
        for layer, k, v in zip(snapshot.layers, keys, values, strict=True)
    )
    return replace(snapshot, layers=layers)


@pytest.mark.parametrize("family", [tiny.llama, tiny.gemma3])
def test_the_mean_square_of_the_slopes_is_twice_the_divergence(family) -> None:
    """For an error e, KL is half the mean of (gradient · e) squared over drawn labels, to second order."""
    model = family()
    ids = tiny.prompt(1, 60)
    first = cache_gradients(model, ids, 40, generator())
    shapes = [layer.keys.shape for layer in first.snapshot.layers]
    keys, values = ([torch.randn(shape, generator=generator(2 + side)) for shape in shapes] for side in (0, 1))
    size = 1e-2
    shifted = moved(first.snapshot, keys, values, size)
    before, after = (
        torch.log_softmax(teacher_forced_logits(model, snapshot, ids)[0].float(), dim=-1)[-20:]
        for snapshot in (first.snapshot, shifted)
    )
    divergence = float((before.exp() * (before - after)).sum())
    slopes = []
    for seed in range(250):
        felt = cache_gradients(model, ids, 40, generator(seed))
        found = sum((g * e).sum() for g, e in zip((*felt.keys, *felt.values), (*keys, *values), strict=True))
        slopes.append(float(found) * size)
    assert sum(slope**2 for slope in slopes) / len(slopes) / 2 == pytest.approx(divergence, rel=0.35)


def test_a_model_that_predicts_nothing_finite_says_so() -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.lm_head.weight[5, 3] = float("inf")
    with pytest.raises(InvalidInput, match="float32"):
        cache_gradients(model, tiny.prompt(1, 30), 20, generator())


def test_layers_that_share_a_cache_are_refused() -> None:
    with pytest.raises(UnsupportedCache, match="no keys and values of its own"):
        cache_gradients(tiny.gemma3n(), tiny.prompt(1, 30), 20, generator())
