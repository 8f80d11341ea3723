"""Faults planted in tiny models are caught, named and located; what is clean never counts as a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.audit import faults
from kvferry.audit.arm import CACHE_OFF, CACHE_ON, Arm, Change
from kvferry.audit.models import ModelSet
from kvferry.audit.pair import Controls, Record
from kvferry.audit.pair import compare as compare_runs
from kvferry.audit.runs import Runs
from tests.hf import tiny

START, LENGTH = 20, 30
FAST = Controls(replicas=False, shapes=False)


@pytest.fixture(scope="module")
def models() -> dict[str, ModelSet]:
    made: dict[str, Any] = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma3n": tiny.gemma3n}
    return {name: ModelSet(make(dtype=torch.bfloat16)) for name, make in made.items()}


def compare(
    models: ModelSet, reference: Arm, other: Arm, ids: torch.Tensor, start: int, controls: Controls | None = None
) -> Record:
    return compare_runs(Runs(models, ids, start), reference, other, controls)


def planted(models: ModelSet, change: Change, reference: Arm = CACHE_OFF, **settings: Any) -> Record:
    other = replace(CACHE_ON, change=change, **settings)
    return compare(models, reference, other, tiny.prompt(1, LENGTH), START, FAST)


FAULTS = [
    ("llama", faults.shifted_positions(), "positions", 0, "keys", {}),
    ("llama", faults.shifted_positions(-1), "positions", 0, "keys", {}),
    ("llama", faults.swapped_head(1, 1), "keys and values swapped", 1, "keys+values", {}),
    ("llama", faults.stale_layer(1), "stale layer", 1, "keys+values", {}),
    ("llama", faults.perturbed_model(1), "other weights", 1, "values", {}),
    ("llama", faults.perturbed_model(0, 1.0078125), "other weights", 0, "values", {}),
    ("llama", faults.unmasked_padding(), "padding attended", 0, "attention", {"left_padding": 3}),
    ("llama", faults.quantised_layer(1), "quantised", 1, "keys+values", {}),
    ("gemma3", faults.shifted_positions(), "positions", 0, "keys", {}),
    ("gemma3", faults.swapped_head(2), "keys and values swapped", 2, "keys+values", {}),
    ("gemma3", faults.short_window(), "sliding window", 0, "attention", {}),
    ("gemma3", faults.stale_layer(0), "stale layer", 0, "keys+values", {}),
    ("gemma3", faults.perturbed_model(1), "other weights", 1, "values", {}),
    ("gemma3", faults.unmasked_padding(), "padding attended", 0, "attention", {"left_padding": 3}),
    ("gemma3", faults.quantised_layer(2), "quantised", 2, "keys+values", {}),
    ("gemma3n", faults.swapped_head(3, 1), "keys and values swapped", 3, "keys+values", {}),
    ("gemma3n", faults.short_window(), "sliding window", 0, "attention", {}),
]


@pytest.mark.parametrize(("model", "change", "name", "layer", "tensor", "settings"), FAULTS)
def test_a_fault_is_caught_named_and_located(
    models: dict[str, ModelSet],
    model: str,
    change: Change,
    name: str,
    layer: int,
    tensor: str,
    settings: dict[str, Any],
) -> None:
    found = planted(models[model], change, **settings)
    assert found["verdict"] == "semantic", found["reasons"]
    assert (found["location"]["layer"], found["location"]["tensor"]) == (layer, tensor)
    assert found["diagnosis"]["name"] == name, found["reasons"]


def test_the_head_and_the_window_are_told(models: dict[str, ModelSet]) -> None:
    assert planted(models["llama"], faults.swapped_head(1, 1))["location"]["heads"] == [1]
    found = planted(models["gemma3"], faults.short_window())
    assert found["location"]["first"] == 7  # the window is 8: the eighth token is the first to miss one
    assert "1 short" in found["diagnosis"]["why"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3])
def test_clean_arms_are_never_semantic(make: Any, dtype: torch.dtype) -> None:
    models = ModelSet(make(seed=3, dtype=dtype))
    arms = [
        CACHE_OFF,
        Arm("chunked(5)"),
        Arm("decoded(7)"),
        Arm(batch=3, neighbours="others"),
        Arm(left_padding=4),
        Arm(attn="eager"),
        Arm(decode="one_shot"),
    ]
    for arm in arms:
        found = compare(models, CACHE_ON, arm, tiny.prompt(1, LENGTH, seed=5), START)
        assert found["verdict"] in ("identical", "kernel-shape", "rounding"), (str(arm), found["reasons"])
        assert found["replicas"]
        assert not found.get("unexplained_flips")


def test_backends_differ_by_rounding_and_stages_by_shape() -> None:
    models = ModelSet(tiny.llama(dtype=torch.bfloat16))
    ids = tiny.prompt(1, LENGTH)
    assert compare(models, CACHE_ON, Arm(attn="eager"), ids, START)["verdict"] == "rounding"
    assert compare(models, CACHE_ON, Arm("incremental"), ids, START)["verdict"] == "kernel-shape"
    assert compare(models, CACHE_ON, CACHE_ON, ids, START)["verdict"] == "identical"


def test_overflow_is_called_by_its_name_and_place() -> None:
    model = tiny.llama(dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(3e4)
    found = compare(ModelSet(model), CACHE_OFF, CACHE_ON, tiny.prompt(1, LENGTH), START)
    assert found["verdict"] == "overflow"
    assert (found["location"]["layer"], found["location"]["tensor"]) == (1, "residual")


def test_a_model_that_rolls_dice_gets_no_finer_claim() -> None:
    model = tiny.llama(dtype=torch.float32)

    def noise(_module: Any, _args: Any, output: Any) -> Any:
        return output + 1e-4 * torch.rand_like(output)

    handle = model.model.layers[0].mlp.register_forward_hook(noise)
    found = compare(ModelSet(model), CACHE_ON, CACHE_ON, tiny.prompt(1, LENGTH), START, Controls(precision=False))
    handle.remove()
    assert not found["replicas"]
    assert "no finer" in found["reasons"][1] or "nothing finer" in found["reasons"][1]


def test_everything_is_put_back() -> None:
    model = tiny.gemma3(dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    models = ModelSet(model)
    for change in (faults.short_window(), faults.perturbed_model(1)):
        planted(models, change)
    assert model.config.sliding_window == 8
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "change", [faults.shifted_positions(), faults.perturbed_model(1, 1.001), faults.stale_layer(1)]
)
def test_a_fault_is_caught_in_float64_as_well(change: Change) -> None:
    """Nothing finer is there to run: what is larger than float64's rounding is no rounding."""
    exact = ModelSet(tiny.llama(dtype=torch.float64))
    clean = compare(exact, CACHE_OFF, CACHE_ON, tiny.prompt(1, LENGTH), START, FAST)
    assert clean["verdict"] in ("identical", "rounding", "kernel-shape")
    found = planted(exact, change)
    assert found["verdict"] == "semantic"
    assert "larger than rounding of float64" in found["reasons"][0]
    assert found["diagnosis"] is not None
