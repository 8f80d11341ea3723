"""An arm runs once a sequence, however many pairs it is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.audit import runs as room
from kvferry.audit.arm import CACHE_OFF, CACHE_ON, Arm
from kvferry.audit.models import ModelSet
from kvferry.audit.pair import compare
from kvferry.audit.run import run_arm
from kvferry.audit.runs import Runs
from kvferry.audit.trace import held_by, same_bits
from kvferry.hf.capture import capture
from tests.hf import tiny


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arms that ran, in order."""
    seen: list[str] = []
    real = room.run_arm

    def counted(models: ModelSet, arm: Arm, *rest: Any) -> Any:
        seen.append(str(arm))
        return real(models, arm, *rest)

    monkeypatch.setattr(room, "run_arm", counted)
    return seen


def test_pairs_share_their_runs_and_find_the_same(ran: list[str]) -> None:
    models, ids = ModelSet(tiny.llama(dtype=torch.bfloat16)), tiny.prompt(1, 24)
    shared = Runs(models, ids, 16)
    others = (CACHE_OFF, Arm("chunked(5)"), Arm("incremental"))
    together = [compare(shared, CACHE_ON, other) for other in others]
    assert ran.count(str(CACHE_ON)) == 2  # itself and its replica
    assert ran.count("prefill/step dtype=float64") == 1
    assert together == [compare(Runs(models, ids, 16), CACHE_ON, other) for other in others]


def test_the_models_own_dtype_is_one_arm_by_either_name(ran: list[str]) -> None:
    runs = Runs(ModelSet(tiny.llama(dtype=torch.bfloat16)), tiny.prompt(1, 24), 16)
    assert runs.trace(CACHE_ON) is runs.trace(Arm(dtype="bfloat16"))
    assert len(ran) == 1


def test_what_does_not_fit_runs_again(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "KEPT_BYTES", 1)
    runs = Runs(ModelSet(tiny.llama(dtype=torch.bfloat16)), tiny.prompt(1, 24), 16)
    first = runs.trace(CACHE_ON)
    runs.trace(CACHE_OFF)
    assert runs.trace(CACHE_ON).same_bits(first)
    assert len(ran) == 3


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3])
def test_no_logits_are_computed_while_a_cache_is_built(make: Any) -> None:
    """The head makes most of a small model's step; the caches are what they are with it."""
    model = make(dtype=torch.bfloat16)
    rows: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _module, args, _output: rows.append(args[0].shape[1]))
    trace = run_arm(ModelSet(model), Arm("incremental"), tiny.prompt(1, 24), 16)
    handle.remove()
    assert rows == [0] * 15 + [1] * 9
    whole = held_by(capture(model, tiny.prompt(1, 24)[:, :16], construction="incremental"))
    assert same_bits(trace.built, whole)
    longer = held_by(capture(model, tiny.prompt(1, 24), construction="incremental"))
    assert same_bits(trace.final, longer)
    assert not same_bits(trace.final, trace.built)
