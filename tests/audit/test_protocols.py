"""Every protocol over a tiny model: what it must find there, and that it goes on where it was stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.audit import protocols
from kvferry.audit.protocols import PROTOCOLS
from kvferry.audit.settings import Settings
from kvferry.errors import InvalidInput
from kvferry.evidence.log import ResultLog
from tests.hf import tiny

SMALL = Settings(new_tokens=4, explain=1, patch_positions=1, horizon=1, resamples=200, layer_step=2)


@pytest.fixture(scope="module")
def model() -> object:
    return tiny.llama(dtype=torch.bfloat16)


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "self_check"])
def test_a_protocol_runs_and_says_what_decided(model: object, protocol: str) -> None:
    steps: list[tuple[int, int]] = []
    result = kv.audit(
        model,
        tiny.prompt(2, 18),
        protocols=[protocol],
        start=14,
        settings=SMALL,
        on_progress=lambda done, total, _what: steps.append((done, total)),
    )
    assert steps[-1][0] == steps[-1][1] == len(steps)
    assert len(result) >= 1
    assert result.sound
    assert result.replica_floor["deterministic"]
    for finding in result:
        assert finding.protocol == protocol
        assert finding.verdict in ("identical", "kernel-shape", "rounding")
        assert finding.reasons
        assert finding.n == 2
        assert all(measure.n > 0 or not measure.value for measure in finding.measures.values())
        rates = [m for m in finding.measures.values() if m.ci is not None and m.value is not None]
        assert all(
            m.ci is not None and m.ci[0] <= m.value + 1e-12 and m.value <= m.ci[1] + 1e-12 for m in rates if m.value
        )
    json.dumps(result.to_json(), allow_nan=False)


def test_free_runs_go_on_behind_an_end_where_asked(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny.prompt(3, 18)
    first = kv.audit(model, ids, protocols=["free_run"], start=14, settings=SMALL)[0]
    log = ResultLog(None)
    monkeypatch.setattr(model.generation_config, "eos_token_id", list(range(tiny.VOCABULARY)))
    short = kv.audit(model, ids, protocols=["free_run"], start=14, settings=SMALL, log=log)[0]
    whole = replace(SMALL, ignore_ends=True)
    longer = kv.audit(model, ids, protocols=["free_run"], start=14, settings=whole, log=log)[0]
    ended, parted = (short.measures[name].value for name in ("prompts_ended_together", "prompts_diverging"))
    assert ended is not None
    assert parted is not None
    assert ended + parted == 1
    assert longer.measures["prompts_ended_together"].value == 0
    assert longer.measures["divergence_per_token_at_risk"] == first.measures["divergence_per_token_at_risk"]


def test_a_patch_is_told_by_layer_and_position(model: object) -> None:
    settings = replace(SMALL, patch_positions=2, layer_step=1)
    finding = kv.audit(model, tiny.prompt(2, 18), protocols=["residual_patch"], start=14, settings=settings)[0]
    rows = finding.detail["matrix"]
    assert all(len(row["by_position"]) == 2 for row in rows)
    last = [value for value in rows[-1]["by_position"] if value is not None]
    assert last
    assert last == pytest.approx([1.0] * len(last), abs=1e-6)


def test_the_positive_control_is_caught() -> None:
    gemma = tiny.gemma3(dtype=torch.bfloat16)
    result = kv.audit(gemma, tiny.prompt(1, 20), protocols=["self_check"], start=16, settings=SMALL)
    assert [finding.measures["caught"].value for finding in result] == [1.0] * 7
    assert result.sound
    assert {finding.verdict for finding in result} == {"semantic"}


@pytest.mark.parametrize("protocol", ["free_run", "stage_replay", "transplant", "residual_patch"])
def test_overflow_is_reported_by_every_protocol(protocol: str) -> None:
    broken = tiny.llama(dtype=torch.float16)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight.fill_(3e4)
    result = kv.audit(broken, tiny.prompt(1, 16), protocols=[protocol], start=12, settings=SMALL)
    assert not result.sound
    assert {(finding.verdict, finding.layer, finding.tensor) for finding in result} == {("overflow", 1, "residual")}
    json.dumps(result.to_json(), allow_nan=False)


def test_the_same_again_is_the_same_json(model: object) -> None:
    def run() -> str:
        settings = replace(SMALL, samplers=("greedy", "top_p", "temperature"), seed=3)
        found = kv.audit(model, tiny.prompt(1, 20), protocols=["fixed_prefix", "free_run"], settings=settings)
        return json.dumps(found.to_json(), sort_keys=True)

    first = run()
    assert first == run()
    assert '"name": "temperature"' in first


def test_what_is_in_the_log_is_not_run_again(model: object, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with ResultLog(path) as log:
        first = kv.audit(model, tiny.prompt(2, 20), settings=SMALL, log=log)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3  # the environment, then a record a passage, which name it
    header, *records = (json.loads(line) for line in lines)
    assert set(header["value"]["environment"]) >= {
        "torch",
        "threads",
        "dtype",
        "attn",
        "cpu",
        "git_revision",
        "weights",
    }
    assert {record["value"]["made_with"] for record in records} == {header["key"]}
    path.write_bytes(lines[0] + lines[1] + lines[2][:40])  # killed while the second was written
    with ResultLog(path) as log:
        assert len(log) == 2
        again = kv.audit(model, tiny.prompt(2, 20), settings=SMALL, log=log)
    assert again.to_json() == first.to_json()
    assert path.read_bytes() == b"".join(lines)


def test_another_environment_takes_up_nothing(model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    for processor, records in (("one", 1), ("one", 1), ("another", 2)):
        monkeypatch.setattr(protocols, "cpu_name", lambda name=processor: name)
        with ResultLog(path) as log:
            kv.audit(model, tiny.prompt(1, 20), settings=SMALL, log=log)
        lines = [json.loads(line)["value"] for line in path.read_bytes().splitlines()]
        assert sum("environment" in line for line in lines) == sum("made_with" in line for line in lines) == records


def test_transplants_carry_the_whole_and_controls_hold(model: object) -> None:
    for finding in kv.audit(model, tiny.prompt(2, 30), protocols=["transplant"], settings=SMALL):
        matrix = finding.detail["matrix"]
        for name in ("whole", "control: own cache", "control: built again", "control: donor built again"):
            assert matrix[name]["exact"] == matrix[name]["n_exact"] == 2, name
        assert "carrier" in finding.reasons[0]


def test_a_patch_behind_the_last_layer_restores_its_own_step_only(model: object) -> None:
    found = kv.audit(model, tiny.prompt(2, 30), protocols=["residual_patch"], settings=SMALL)
    into_on = found[0]
    assert into_on.detail["direction"] == "off_into_on"
    restored = into_on.detail["matrix"][-1]["restored"]
    if restored[0] is not None:
        assert restored[0] > 0.5
        assert restored[1] is None or restored[1] < 0.5


def test_what_is_refused(model: object) -> None:
    for settings in ({"protocols": ["nothing"]}, {"protocols": []}):
        with pytest.raises(InvalidInput):
            kv.audit(model, tiny.prompt(1, 20), **settings)
    with pytest.raises(InvalidInput):
        kv.audit(model)
    with pytest.raises(InvalidInput):
        kv.audit(model, tiny.prompt(1, 2))
