"""Ship and map composed, in real processes: what each stage cost, and a target that is never given a wrong cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.cli.main import run
from kvferry.engines.handoff import HandoffJob, HandoffResult, Session, run_handoff
from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.map_gate import CHECKED_TOKENS
from kvferry.map.gate import record_path
from tests.cli.models import environment
from tests.map import builders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models of a family and a mapper from one to the other, on disk; a cache folder with nothing in it."""
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    folder = tmp_path_factory.mktemp("mapped")
    *_, record = builders.judged_pair(folder)
    record.save(folder / "cache" / "gates" / record_path(record.mapper, record.target[0]).name)
    return {name: str(folder / name) for name in ("source", "target", "mapper", "cache")}


@pytest.fixture(scope="module")
def session(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two processes that load their models once, and know of no gate's record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(tmp_path_factory.mktemp("empty")))
        with Session() as both:
            yield both


def hand_off(folders: dict[str, str], session: Session | None = None, **changes: Any) -> HandoffResult:
    given = {"budget": 1.0, "max_tokens": 200, "max_new": 12, "timeout": 120.0, "threads": 1, "dtype": "float32"}
    models = {"producer_model": folders["source"], "consumer_model": folders["target"], "mapper": folders["mapper"]}
    job = HandoffJob(**{**models, **given, **changes})
    return run_handoff(job) if session is None else session.run(job)


def stage(result: HandoffResult, name: str) -> dict[str, Any]:
    assert result.stages is not None
    return next(each for each in result.stages if each["stage"] == name)


def test_each_stage_says_what_it_cost(folders: dict[str, str], session: Session) -> None:
    exact = hand_off(folders, session, gate=False)
    assert [each["stage"] for each in exact.stages or []] == ["prefill", "ship", "map", "all"]
    assert stage(exact, "ship")["fidelity"]["kl_mean"] == 0.0  # at 16 bit and more nothing is lost on the way
    assert stage(exact, "map")["fidelity"] == stage(exact, "all")["fidelity"] == exact.fidelity
    assert 0 < exact.kl_mean < 5
    assert (stage(exact, "map")["mapped"], stage(exact, "map")["share"]) == (True, pytest.approx(4 / 199))
    assert stage(exact, "ship")["bytes"] == exact.packet_bytes
    assert exact.fidelity["n"] == 12
    assert set(exact.seconds) == {"prefill", "encode", "wire", "decode", "map", "install", "first_token", "ttft"}
    assert exact.timeline["decode"][1] <= exact.timeline["map"][0] < exact.timeline["install"][0]
    assert exact.local_seconds["ttft"] > exact.local_seconds["first_token"] > 0
    assert set(exact.text) == {"shipped", "local", "source", "prompt_end"}
    lossy = hand_off(folders, session, gate=False, budget=0.2)
    assert stage(lossy, "ship")["fidelity"]["kl_mean"] > 0
    assert stage(lossy, "map")["fidelity"] == stage(exact, "map")["fidelity"]
    assert lossy.packet_bytes < 0.2 * lossy.full_bytes
    json.dumps(lossy.to_json(), allow_nan=False)


def test_all_tokens_computed_anew_are_the_targets_own(folders: dict[str, str], session: Session) -> None:
    result = hand_off(folders, session, gate=False, recompute_last=500)
    assert result.tokens_equal
    assert result.kl_mean < 1e-9
    assert stage(result, "map")["share"] == 1.0


def test_a_mapper_that_nobody_judged_is_not_used(folders: dict[str, str], session: Session) -> None:
    result = hand_off(folders, session)
    assert not stage(result, "map")["mapped"]
    assert "map gate" in stage(result, "map")["reasons"][0]
    assert result.tokens_equal
    assert result.kl_mean == 0.0
    assert stage(result, "map")["fidelity"] is None


def test_an_accepted_mapper_is_used_as_far_as_the_floors_go(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", folders["cache"])
    done = stage(hand_off(folders), "map")
    assert done["reasons"] == []
    assert done["mapped"]
    assert done["share"] == pytest.approx(CHECKED_TOKENS / 199)
    assert done["fidelity"]["kl_mean"] > 0


def test_the_wrong_models_are_refused_by_name(folders: dict[str, str]) -> None:
    with pytest.raises(IncompatibleIdentity, match="not the mapper's target"):
        hand_off(folders, consumer_model=folders["source"])
    with pytest.raises(IncompatibleIdentity, match="weights"):
        hand_off(folders, producer_model=folders["target"])


@pytest.mark.parametrize(
    "changes", [{"mapper": None, "recompute_last": 3}, {"progressive": True}, {"recompute_last": -1}]
)
def test_a_job_that_makes_no_sense_is_refused(folders: dict[str, str], changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        hand_off(folders, **changes)


def test_the_command_shows_the_stages(folders: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    models = ["--prefill", folders["source"], "--decode", folders["target"]]
    given = ["--budget", "0.5", "--max-tokens", "120", "--max-new", "4", "--dtype", "float32", "--threads", "1"]
    assert run(["handoff", *models, *given, "--mapper", folders["mapper"], "--no-gate"]) == 0
    out = capfd.readouterr().out
    assert "KL, mean (nats)" in out
    assert "its own prefill" in out
    assert "the model that prefilled" in out
