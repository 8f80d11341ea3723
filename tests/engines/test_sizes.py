"""Packets weighed ahead are the packets that go out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvferry as kv
from kvferry.cli.main import run
from kvferry.engines.handoff import HandoffJob, Session
from kvferry.engines.sizes import measure_prefill, packet_sizes
from kvferry.errors import InvalidInput

BUDGETS = (1.0, 0.52, 0.3)


def test_they_weigh_what_hand_offs_send(llama_folder: str, text_file: Path) -> None:
    model, _ = kv.load_model(llama_folder)
    sizes = packet_sizes(model, 299, BUDGETS)
    with Session() as session:
        for size in sizes:
            job = HandoffJob(
                llama_folder, llama_folder, size.budget_asked, text_file=str(text_file), max_tokens=300, max_new=1,
                threads=1,
            )  # fmt: skip
            sent = session.run(job)
            assert sent.prompt_tokens == 300
            assert (size.policy, size.quantizer) == (sent.policy, sent.quantizer)
            assert size.nominal_budget == pytest.approx(sent.nominal_budget, abs=5e-3)
            # Token ids are the packet's own, so its header may be a few bytes longer or shorter.
            assert abs(size.nbytes - sent.packet_bytes) <= 600
            assert size.budget == pytest.approx(sent.budget, abs=2e-3)


def test_times_are_those_of_the_link(llama_folder: str) -> None:
    model, _ = kv.load_model(llama_folder)
    (size,) = packet_sizes(model, 200, [1.0], bits_per_second=8_000_000, prefill_seconds=0.1)
    assert size.wire_seconds == size.nbytes / 1e6
    slow, quick = max(size.wire_seconds, 0.1), min(size.wire_seconds, 0.1)
    assert size.ttft_seconds == pytest.approx(slow + quick / 2)
    (alone,) = packet_sizes(model, 200, [1.0], prefill_seconds=0.1)
    assert (alone.wire_seconds, alone.ttft_seconds) == (None, None)
    assert measure_prefill(model, 64) > 0


def test_a_budget_that_cannot_be_met_says_so(llama_folder: str) -> None:
    model, _ = kv.load_model(llama_folder)
    good, bad = packet_sizes(model, 64, [1.0, 0.01])
    assert good.reason is None
    assert "least budget" in bad.reason
    assert bad.nbytes is None
    for tokens, budgets in ((0, [1.0]), (10, [])):
        with pytest.raises(InvalidInput):
            packet_sizes(model, tokens, budgets)
    with pytest.raises(InvalidInput, match="klt"):
        packet_sizes(model, 64, [0.5], policy="klt")


def test_the_command(llama_folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["plan", llama_folder, "--tokens", "128", "--budgets", "1,0.5", "--link", "100mbit", "--measure"]
    assert run(given) == 0
    assert "wire, simulated" in capfd.readouterr().out
    assert run([*given, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)["result"]
    assert [row["budget_asked"] for row in result["rows"]] == [1.0, 0.5]
    assert result["rows"][1]["bytes"] <= 0.5 * result["rows"][1]["full_bytes"]
    assert result["prefill_seconds"] > 0
    assert run(["plan", llama_folder, "--tokens", "64", "--budgets", "0.001"]) == 1
    assert run([*given, "--prefill-seconds", "1"]) == 2
    assert run(["plan", llama_folder, "--link", "fast"]) == 2
    assert run(["plan", llama_folder, "--policy", "klt"]) == 2
    assert "nor planned before the cache is there" in capfd.readouterr().err
    assert run(["plan", llama_folder, "--tokens", "64", "--budgets", "1"]) == 0
    assert "wire" not in capfd.readouterr().out
    assert run(["plan", llama_folder, "--tokens", "64", "--budgets", "1", "--link", "1gbit"]) == 0
    told = capfd.readouterr().out
    assert "wire" in told
    assert "first token" not in told
