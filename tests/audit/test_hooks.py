"""Hooks are gone whatever happens inside."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from kvferry.audit.arm import CACHE_OFF, CACHE_ON, Arm
from kvferry.audit.models import ModelSet
from kvferry.audit.residual_patch import patched
from kvferry.audit.run import run_arm
from kvferry.audit.watch import decoder_layers, watch
from tests.hf import tiny


class Broken(Exception):
    """What a forward pass raises."""


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture
def model() -> Any:
    return tiny.llama(dtype=torch.float32)


def broken(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Broken

    monkeypatch.setattr(decoder_layers(model)[1], "forward", fail)


@pytest.mark.parametrize("arm", [CACHE_ON, CACHE_OFF, Arm("incremental", attn="eager")])
def test_a_forward_pass_that_raises_leaves_no_hook(model: Any, monkeypatch: pytest.MonkeyPatch, arm: Arm) -> None:
    broken(model, monkeypatch)
    with pytest.raises(Broken):
        run_arm(ModelSet(model), arm, tiny.prompt(1, 12), 8)
    assert hooks(model) == 0
    assert model.config._attn_implementation == "sdpa"


def test_watching_and_patching_end_with_what_raises(model: Any) -> None:
    layer = decoder_layers(model)[0]

    def fail(inside: contextlib.AbstractContextManager[Any]) -> None:
        with inside:
            assert hooks(model) > 0
            raise Broken

    for inside in (watch(model), patched(layer, 0, torch.zeros(model.config.hidden_size))):
        with pytest.raises(Broken):
            fail(inside)
        assert hooks(model) == 0


def test_a_patch_of_a_failing_forward_pass_is_gone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(model, monkeypatch)
    layer = decoder_layers(model)[1]
    with pytest.raises(Broken), patched(layer, 0, torch.zeros(model.config.hidden_size)):
        model(tiny.prompt(1, 6))
    assert hooks(model) == 0
    monkeypatch.undo()
    with torch.no_grad():
        assert model(tiny.prompt(1, 6)).logits.isfinite().all()


def test_a_layer_list_that_is_not_watchable_leaves_none(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Broken

    monkeypatch.setattr(decoder_layers(model)[1], "register_forward_hook", fail)
    with pytest.raises(Broken), watch(model):
        pass
    assert hooks(model) == 0
