"""``kvferry ship sweep`` and ``ship probe``: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import run
from kvferry.evaluate.kept import Int4Answer, kept_answer
from kvferry.evaluate.probe import FOUR_BITS, LADDER
from kvferry.hf.identity import identity_of
from kvferry.hf.models import load_model


def call(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status = run([*map(str, arguments), "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    content = json.loads(out)
    assert (content["environment"]["dtype"], content["environment"]["attn"]) == ("bfloat16", "sdpa")
    result: dict[str, Any] = content["result"]
    return result


def small(folder: str, text: Path, *more: object) -> tuple[object, ...]:
    sizes = ("--windows", 2, "--prefix", 64, "--suffix", 24)
    return ("ship", "sweep", folder, "--text", text, *sizes, *more)


@pytest.mark.parametrize("which", ["llama_folder", "gemma_folder"])
def test_sweep(
    which: str,
    request: pytest.FixtureRequest,
    text_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    folder = request.getfixturevalue(which)
    arguments = small(
        folder, text_file, "--policies", "auto,sws", "--budgets", "0.9,0.001", "--csv", tmp_path / "x.csv"
    )
    result = call(capfd, *arguments)
    rows = {(row["policy"], row["asked"]["budget"]): row for row in result["rows"]}
    assert {policy for policy, _ in rows} == {
        "full", "zero_cache", "no_prefix", "uniform_int8", "uniform_int4", "auto", "sws", "random_tier",
    }  # fmt: skip
    full, auto, refused = rows["full", None], rows["auto", 0.9], rows["auto", 0.001]
    assert (full["budget"], full["ppl_delta_pct"], full["kl_mean"]) == (1.0, 0.0, 0.0)
    assert auto["budget"] <= 0.9
    assert auto["ppl_full"] == full["ppl"]
    assert refused["ppl"] is None
    assert "0.001" in refused["reason"]
    assert result["resumed"] == 0
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 1 + len(rows)
    again = call(capfd, *arguments)
    assert again["resumed"] == again["steps"]
    assert again["rows"] == result["rows"]
    assert call(capfd, *arguments, "--fresh")["resumed"] == 0


def test_sweep_shows_a_table(llama_folder: str, text_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = small(llama_folder, text_file, "--policies", "uniform_int8", "--no-baselines", "--fresh")
    assert run([*map(str, arguments)]) == 0
    out = capfd.readouterr().out
    assert "uniform_int8" in out
    assert "sym8 / sym8" in out


@pytest.mark.parametrize(
    "more",
    [
        ("--policies", "gready"),
        ("--budgets", "lots"),
        ("--policies", "greedy", "--budgets", ""),
        ("--quantizers", "sym9", "--budgets", "0.6"),
        ("--windows", 0),
        ("--windows", 1000),
        ("--log", "x.jsonl", "--fresh"),
    ],
)
def test_wrong_uses_end_with_status_2(
    more: tuple[object, ...], llama_folder: str, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        small(llama_folder, text_file, "--no-baselines", "--fresh")
        if "--log" not in more
        else small(llama_folder, text_file)
    )
    assert run([*map(str, (*arguments, *more))]) == 2
    assert "kvferry:" in capfd.readouterr().err


@pytest.mark.model
def test_probe(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, llama_folder: str
) -> None:
    """What real models bear is in `tests.evaluate.test_probe`."""
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    arguments = ("ship", "probe", llama_folder, "--prefix", 128, "--suffix", 64, "--prompts", 6)
    result = call(capfd, *arguments)
    assert result.keys() >= {"int4_allowed", "quantizer", "trials", "kl", "error_rates"}
    assert result["int4_allowed"] == (LADDER.index(result["quantizer"]) < FOUR_BITS)
    assert result["rungs"][-1]["passed"]
    assert result["error_rates"]["alpha"] == 0.05
    assert len(list((tmp_path / "cache" / "probes").iterdir())) == 1
    assert call(capfd, *arguments) == result
    identity = identity_of(load_model(llama_folder)[0])
    allowed = result["int4_allowed"]
    assert kept_answer(identity) == Int4Answer(allowed, result["quantizer"] if allowed else None)
