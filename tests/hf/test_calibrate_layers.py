"""Fisher information of a cache: the squared gradient of drawn targets, and a model that is left as it was."""

import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.hf.calibrate_layers import cache_fisher
from kvferry.hf.decode import teacher_forced_logits
from kvferry.snapshot import Snapshot
from tests.hf import tiny


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("family", [tiny.llama, tiny.gemma3, tiny.gemma3n])
def test_shapes_repeatable_and_the_model_unchanged(family):
    model = family()
    before = [parameter.requires_grad for parameter in model.parameters()]
    ids = tiny.prompt(1, 40)
    one, again = cache_fisher(model, ids, 24, generator()), cache_fisher(model, ids, 24, generator())
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    for layer, keys, values, same in zip(one.snapshot.layers, one.keys, one.values, again.keys, strict=True):
        if layer.keys is None:
            assert keys is None
            assert values is None
            continue
        assert keys.shape == layer.keys.shape
        assert values.shape == layer.values.shape
        assert torch.equal(keys, same)
        assert layer.queries is not None
        assert float(values.sum()) > 0
    other = cache_fisher(model, ids, 24, generator(1))
    assert not torch.equal(one.values[0], other.values[0])


def test_it_predicts_the_divergence_of_a_small_error():
    """The mean KL of small random errors is half their expected square under the Fisher information, within noise."""
    model = tiny.llama(seed=3)
    ids = tiny.prompt(1, 120, seed=4)
    draws = [cache_fisher(model, ids, 60, generator(seed)) for seed in range(30)]
    fisher = torch.stack([draw.values[1] for draw in draws]).mean(0)
    snapshot = draws[0].snapshot
    exact = torch.log_softmax(teacher_forced_logits(model, snapshot, ids)[0].double(), -1)
    measured = []
    scale = 0.02
    for seed in range(8):
        noise = scale * torch.randn(snapshot.layers[1].values.shape, generator=generator(100 + seed))
        moved = with_values(snapshot, 1, snapshot.layers[1].values + noise)
        other = torch.log_softmax(teacher_forced_logits(model, moved, ids)[0].double(), -1)
        measured.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    predicted = 0.5 * scale**2 * float(fisher.sum())
    assert sum(measured) / len(measured) == pytest.approx(predicted, rel=0.35)


def with_values(snapshot: Snapshot, index: int, values: torch.Tensor) -> Snapshot:
    from dataclasses import replace

    layers = list(snapshot.layers)
    layers[index] = replace(layers[index], values=values)
    return replace(snapshot, layers=tuple(layers))


@pytest.mark.parametrize(("batch", "length", "prefix"), [(1, 10, 10), (1, 10, 0), (2, 10, 5)])
def test_a_window_without_a_suffix(batch, length, prefix):
    with pytest.raises(InvalidInput, match="no suffix"):
        cache_fisher(tiny.llama(), tiny.prompt(batch, length), prefix, generator())
