"""The main job, in real processes: what comes out of a shipped cache, and what happens when something is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvferry.channel.base import new_handoff_name
from kvferry.channel.socket import SocketReceiver
from kvferry.engines.handoff import HandoffJob, Session, run_handoff
from kvferry.engines.handoff.job import HandoffNames
from kvferry.errors import BudgetTooSmall, IncompatibleIdentity, InvalidInput, ModelUnavailable, TransferFailed
from tests.cli import models
from tests.cli.models import command, environment
from tests.hf import tiny

pytestmark = pytest.mark.usefixtures("source_on_path")


@pytest.fixture(scope="module")
def source_on_path() -> None:
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]


@pytest.fixture(scope="module")
def session(source_on_path: None) -> Iterator[Session]:
    """Two processes for hand-offs that succeed: to start two takes longer than most of what they do here."""
    with Session() as both:
        yield both


def job(model: str, **changes: object) -> HandoffJob:
    settings = {"budget": 1.0, "max_tokens": 300, "max_new": 16, "timeout": 120.0, "threads": 1, **changes}
    return HandoffJob(**{"producer_model": model, "consumer_model": model, **settings})  # type: ignore[arg-type]


@pytest.mark.model
@pytest.mark.parametrize(("budget", "pipeline"), [(1.0, True), (0.52, False), (0.28, True)])
def test_smollm2_is_handed_off_within_the_budget(session: Session, budget: float, pipeline: bool) -> None:
    stages: list[tuple[str, str]] = []
    result = session.run(
        job("smollm2-135m", budget=budget, max_tokens=512, max_new=24, pipeline=pipeline),
        lambda role, stage: stages.append((role, stage)),
    )
    assert result.pipelined == pipeline
    assert result.packet_bytes <= budget * result.full_bytes
    assert result.budget == result.packet_bytes / result.full_bytes
    assert result.prompt_tokens == 512
    assert result.cache_bytes == 511 * 30 * 2 * 3 * 64 * 2
    assert result.packet_bytes < result.wire_bytes < result.packet_bytes + 100_000
    if budget == 1.0:
        assert result.tokens_equal
        assert result.token_ids["shipped"] == result.token_ids["local"]
        assert (result.kl_mean, result.fidelity["kl_max"], result.top1_agreement) == (0.0, 0.0, 1.0)
        assert result.first_difference is None
    else:
        assert 0 < result.kl_mean < 0.5
        assert result.top1_agreement > 0.6
        assert result.budget > budget - 0.03
    assert result.fidelity["n"] == len(result.token_ids["local"])
    assert result.text["shipped"]
    seconds, timeline = result.seconds, result.timeline
    assert all(value > 0 for value in seconds.values())
    assert seconds["ttft"] == pytest.approx(timeline["first_token"][1])
    assert seconds["ttft"] > seconds["install"] + seconds["first_token"]
    assert min(timeline["prefill"][0], timeline["encode"][0]) == 0
    # The last frame can be at the consumer before the producer is back from sending it: encoding has no place here.
    order = [timeline[part] for part in ("wire", "decode", "install", "first_token")]
    assert [end for _, end in order] == sorted(end for _, end in order)
    if pipeline:  # the packet is planned, and its first layers are sent, while later ones are being prefilled
        assert timeline["wire"][0] < timeline["prefill"][1]
    else:
        assert timeline["encode"][0] >= timeline["prefill"][1]
        assert seconds["ttft"] > seconds["prefill"] + seconds["install"] + seconds["first_token"]
    assert timeline["wire"][0] > timeline["encode"][0]
    assert timeline["install"][0] >= timeline["decode"][1]
    assert timeline["first_token"][0] >= timeline["install"][1]
    assert timeline["decode"][0] < timeline["encode"][1]  # frames are decoded while later ones are being encoded
    assert {"prefill", "decode", "compare"} <= {stage for _, stage in stages}
    assert {role for role, _ in stages} == {"producer", "consumer"}
    json.dumps(result.to_json(), allow_nan=False)


def test_sliding_layers_and_split_frames_are_handed_off_exactly(
    session: Session, gemma_folder: str, text_file: Path
) -> None:
    result = session.run(job(gemma_folder, text_file=str(text_file), frame_tokens=64))
    assert result.tokens_equal
    assert result.kl_mean == 0.0
    assert result.traffic["frames"] > 3


def test_the_least_budget_is_named_and_works(session: Session, llama_folder: str) -> None:
    with pytest.raises(BudgetTooSmall, match="least budget") as caught:
        run_handoff(job(llama_folder, budget=0.05))
    least = caught.value.least_budget
    assert caught.value.budget == 0.05
    assert 0.05 < least < 0.6
    result = session.run(job(llama_folder, budget=least))
    assert result.packet_bytes <= least * result.full_bytes


def test_a_consumer_with_another_model_refuses_and_says_why(llama_folder: str, other_llama_folder: str) -> None:
    with pytest.raises(IncompatibleIdentity, match="weights") as caught:
        run_handoff(job(llama_folder, consumer_model=other_llama_folder))
    assert "weights" in caught.value.differences


def test_what_is_wrong_is_said_before_or_by_the_right_process(llama_folder: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for changes in ({"text_file": str(empty)}, {"text_file": str(tmp_path / "missing")}, {"text_file": str(tmp_path)}):
        with pytest.raises(InvalidInput):
            run_handoff(job(llama_folder, **changes))
    with pytest.raises(ModelUnavailable):
        run_handoff(job(str(tmp_path / "no-model")))
    with pytest.raises(InvalidInput, match="unknown policy 'nonsense'"):
        run_handoff(job(llama_folder, policy="nonsense"))


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": None},
        {"budget": 0.5, "nominal_budget": 0.5},
        {"budget": -1.0},
        {"budget": 0.0},
        {"budget": math.nan},
        {"budget": math.inf},
        {"max_tokens": 1},
        {"max_new": 0},
        {"threads": 0},
        {"timeout": 0.0},
        {"frame_tokens": 0},
        {"budget": 0.5, "seed": 2**32},
        {"budget": 0.5, "policy": "klt", "progressive": True},
    ],
)
def test_a_job_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        job("x", **changes)


def test_a_job_comes_back_and_other_text_is_refused() -> None:
    whole = job("x", budget=0.5, scorer="kv_norm", text_file="a b.txt")
    assert HandoffJob.from_json(whole.to_json()) == whole
    for text in ("", "[]", "{}", '{"unknown": 1}', "[" * 100_000, '{"producer_model": "x"}'):
        with pytest.raises(InvalidInput):
            HandoffJob.from_json(text)


# --- processes that die ---


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


@pytest.fixture
def started() -> Callable[[], list[int]]:
    """This process's children that were not there before the test: others have some that it must let alone."""
    before = set(children_of(os.getpid()))
    return lambda: [pid for pid in children_of(os.getpid()) if pid not in before]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(found)


@pytest.fixture
def running(llama_folder: str):
    """A hand-off that goes on for long, and its two children."""
    process = subprocess.Popen(
        command("handoff", llama_folder, "--budget", "1", "--max-tokens", "1500", "--max-new", "500", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert wait_until(lambda: len(children_of(process.pid)) == 2, 60)
    children = children_of(process.pid)
    yield process, children
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_no_process_outlives_the_parent(running, number: signal.Signals, status: int) -> None:
    process, children = running
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert wait_until(lambda: not any(map(alive, children)), 10)
    assert (json.loads(out)["error"]["type"] if number == signal.SIGINT else out) in ("Interrupted", "")
    assert "Traceback" not in err


def test_an_interrupt_in_the_middle_leaves_no_process(llama_folder: str, started: Callable[[], list[int]]) -> None:
    seen: list[int] = []

    def interrupt(role: str, stage: str) -> None:
        if stage == "prefill":
            seen.extend(started())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_handoff(job(llama_folder), interrupt)
    assert len(seen) == 2
    assert not any(map(alive, seen))


def test_a_producer_killed_while_the_consumer_generates_is_named(
    llama_folder: str, started: Callable[[], list[int]]
) -> None:
    seen: list[int] = []

    def kill(role: str, stage: str) -> None:
        if stage == "generate":
            seen.extend(started())
            os.kill(min(seen), signal.SIGKILL)

    with pytest.raises(TransferFailed, match="the producer process was killed by SIGKILL"):
        run_handoff(job(llama_folder, max_new=200), kill)
    assert not any(map(alive, seen))


def test_a_killed_child_is_one_typed_error_and_the_other_ends(running) -> None:
    process, children = running
    os.kill(children[1], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert not any(map(alive, children))
    error = json.loads(out)["error"]
    assert error["type"] == TransferFailed.__name__
    assert "SIGKILL" in error["message"]
    assert len(err.splitlines()) == 1


def test_generating_for_longer_than_the_timeout_is_no_failure(tmp_path: Path) -> None:
    """Both runs take longer than the time-out; whoever waits hears that the other one is at work."""
    endless = models.save(tiny.llama(dtype=torch.bfloat16, max_position_embeddings=4096, eos_token_id=None), tmp_path)
    result = run_handoff(job(endless, max_new=3000, timeout=1.5))
    assert len(result.token_ids["shipped"]) == 3000
    assert result.tokens_equal


def test_a_stranger_on_this_machine_cannot_fetch_the_prompt(
    llama_folder: str, monkeypatch: pytest.MonkeyPatch, started: Callable[[], list[int]]
) -> None:
    """The address can be seen by every local user; the names are in no argument and no environment."""
    names: list[HandoffNames] = []
    told: list[str] = []

    def noted() -> HandoffNames:
        names.append(HandoffNames(*(new_handoff_name() for _ in range(3))))
        return names[-1]

    def look(role: str, stage: str) -> None:
        if (role, stage) == ("consumer", "generate"):
            for pid in started():
                told.extend(Path(f"/proc/{pid}/{what}").read_bytes().decode() for what in ("cmdline", "environ"))
            address = re.search(r"tcp://127\.0\.0\.1:\d+", "".join(told))
            assert address is not None
            for guess in ("cache", "reference", "refinement"):
                with pytest.raises(TransferFailed, match="no such hand-off"):
                    SocketReceiver(address[0], timeout=5.0).fetch(guess)

    monkeypatch.setattr(HandoffNames, "new", noted)
    run_handoff(job(llama_folder, max_new=400), look)
    assert len(told) == 4
    assert len(names) == 1
    assert not any(name in text for name in (names[0].cache, names[0].reference) for text in told)
    assert names[0].cache not in repr(names[0])


def test_names_come_back_and_other_text_is_refused() -> None:
    names = HandoffNames.new()
    assert HandoffNames.from_json(names.to_json()) == names
    assert names != HandoffNames.new()
    for text in ("", "[]", "{}", "1", '{"cache": "a"}', '{"cache": "../x", "reference": "y"}', "[" * 100_000):
        with pytest.raises(InvalidInput):
            HandoffNames.from_json(text)
