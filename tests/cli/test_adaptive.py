"""Policy ``adaptive`` does what the probe said, or what was typed, and nothing where neither has spoken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import kvferry as kv
from kvferry.cli.main import run
from tests.hf import tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "probes"


@pytest.fixture(scope="module")
def snapshot(llama_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    model, _ = kv.load_model(llama_folder)
    path = tmp_path_factory.mktemp("adaptive") / "snapshot"
    kv.capture(model, tiny.prompt(1, 200), query_window=8).save(path)
    return str(path)


def keep(folder: Path, name: str, snapshot: str, *, age: int, allowed: bool, quantizer: str, **facts: Any) -> None:
    """An answer as `kvferry.evaluate.probe` keeps it, as far as it is read."""
    identity = kv.Snapshot.load(snapshot).identity
    model = {"weights": identity.weights, "dtype": identity.dtype, "attention": identity.attention, **facts}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"int4_allowed": allowed, "quantizer": quantizer, "model": model}))
    os.utime(path, (1_000_000 - age, 1_000_000 - age))


def encode(capfd: pytest.CaptureFixture[str], snapshot: str, *more: str, status: int = 0) -> dict[str, Any]:
    out = f"{snapshot}.packet"
    given = ["ship", "encode", snapshot, "-o", out, "--nominal-budget", "0.4", "--policy", "adaptive", *more, "--json"]
    assert run(given) == status
    content: dict[str, Any] = json.loads(capfd.readouterr().out)
    return content["result"] if status == 0 else content["error"]


def test_without_an_answer_it_is_refused(
    cache: Path, snapshot: str, llama_folder: str, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keep(cache, "other", snapshot, age=0, allowed=True, quantizer="sym8/sym4", weights="of another model")
    keep(cache, "eager", snapshot, age=0, allowed=True, quantizer="sym8/sym4", attention="eager")
    (cache / "damaged.json").write_text("{")
    fault = encode(capfd, snapshot, status=2)
    assert fault["type"] == "InvalidInput"
    assert "kvferry ship probe" in fault["message"]
    small = ["--text", str(text_file), "--policies", "adaptive", "--windows", "1", "--prefix", "64", "--suffix", "8"]
    for words in (
        ["handoff", llama_folder, "--budget", "0.6", "--policy", "adaptive", "--text", str(text_file)],
        ["ship", "sweep", llama_folder, "--no-baselines", "--fresh", "--budgets", "0.6", *small],
    ):
        assert run(words) == 2
        assert "kvferry ship probe" in capfd.readouterr().err


def test_the_newest_kept_answer_is_taken(cache: Path, snapshot: str, capfd: pytest.CaptureFixture[str]) -> None:
    keep(cache, "new", snapshot, age=1, allowed=True, quantizer="sym8/asym4g64")
    keep(cache, "old", snapshot, age=9, allowed=False, quantizer="sym8/sym8")
    result = encode(capfd, snapshot)
    assert result["report"]["int4_allowed"] is True
    assert "asym4g64" in result["quantizer"]
    keep(cache, "newest", snapshot, age=0, allowed=False, quantizer="sym8/sym8")
    result = encode(capfd, snapshot)
    assert result["report"]["int4_allowed"] is False
    assert "4" not in result["quantizer"]


def test_what_is_typed_goes_before_what_is_kept(cache: Path, snapshot: str, capfd: pytest.CaptureFixture[str]) -> None:
    keep(cache, "kept", snapshot, age=0, allowed=False, quantizer="sym8/sym8")
    assert "sym4" in encode(capfd, snapshot, "--int4-allowed")["quantizer"]
    assert "sym4" not in encode(capfd, snapshot, "--no-int4-allowed")["quantizer"]
    assert run(["ship", "encode", snapshot, "-o", f"{snapshot}.x", "--budget", "0.6", "--int4-allowed"]) == 2
    assert "adaptive alone" in capfd.readouterr().err


def test_a_sweep_takes_the_answer(
    cache: Path, snapshot: str, llama_folder: str, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keep(cache, "kept", snapshot, age=0, allowed=True, quantizer="sym8/asym4g64")
    words = ["ship", "sweep", llama_folder, "--text", str(text_file), "--policies", "adaptive", "--budgets", ""]
    small = ["--nominal-budgets", "0.3", "--windows", "1", "--prefix", "64", "--suffix", "8", "--no-baselines"]
    assert run([*words, *small, "--fresh", "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["result"]["rows"]
    assert "asym4g64" in row["quantizer"]
    assert run([*words, *small, "--fresh", "--json", "--no-int4-allowed"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["result"]["rows"]
    assert "4" not in row["quantizer"]
