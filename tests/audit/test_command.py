"""``kvferry audit`` on tiny models, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.audit import faults
from kvferry.audit.arm import Arm
from kvferry.audit.generate import build_cache
from kvferry.audit.models import ModelSet
from kvferry.cli.main import run
from kvferry.hf.models import load_model
from kvferry.ship.encode import encode
from tests.cli.models import TEXT, save
from tests.hf import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny.llama(dtype=torch.bfloat16, max_position_embeddings=2048), tmp_path_factory.mktemp("tiny"))


def audit(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    assert run(["audit", *map(str, arguments), "--json"]) == status, capsys.readouterr().err
    (line,) = capsys.readouterr().out.splitlines()
    content: dict[str, Any] = json.loads(line)
    return content


def test_protocols_figures_and_log(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    given = (folder, "--protocol", "fixed_prefix,residual_patch", "--protocol", "transplant", "--text", text)
    sizes = ("--n", 2, "--prefix", 16, "--suffix", 6, "--new", 4, "--layer-step", 6, "--log", tmp_path / "log.jsonl")
    content = audit(capsys, *given, *sizes, "--plots", tmp_path / "plots")
    result = content["result"]
    assert content["command"] == "audit"
    assert [finding["protocol"] for finding in result["findings"]] == [
        "fixed_prefix",
        *["residual_patch"] * 2,
        *["transplant"] * 2,
    ]
    first = result["findings"][0]
    assert set(first) >= {"protocol", "arms", "verdict", "layer", "tensor", "n", "measures"}
    assert first["measures"]["flip_rate"]["n"] == 12
    assert first["arms"][0]["dtype"] == "bfloat16"
    assert result["replica_floor"]["deterministic"]
    assert all(Path(path).read_text().startswith("<?xml") for path in result["files"])
    assert {Path(path).stem.split("-")[-1] for path in result["files"]} >= {"drift", "margins", "matrix"}
    lines = (tmp_path / "log.jsonl").read_bytes()
    again = audit(capsys, *given, *sizes)
    assert again["result"]["findings"] == result["findings"]
    assert (tmp_path / "log.jsonl").read_bytes() == lines


def test_a_packet_and_a_wrong_cache(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = load_model(folder)
    models = ModelSet(model)
    ids = tiny.prompt(1, 24)
    encode(build_cache(models, Arm(), ids), None, "uniform_int4").save(tmp_path / "packet")
    found = audit(capsys, folder, "--packet", tmp_path / "packet", "--new", 5)["result"]["findings"][0]
    assert (found["protocol"], found["verdict"]) == ("given_cache", "codec")
    wrong = build_cache(models, Arm(change=faults.swapped_head(1)), ids)
    wrong.save(tmp_path / "wrong")
    found = audit(capsys, folder, "--cache", tmp_path / "wrong", "--new", 5, status=1)["result"]["findings"][0]
    assert (found["verdict"], found["layer"], found["tensor"]) == ("semantic", 1, "keys+values")
    assert run(["audit", folder, "--cache", str(tmp_path / "wrong"), "--new", "5"]) == 1
    assert "semantic" in capsys.readouterr().out


def test_what_is_used_wrongly(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--protocol", "nothing"), ("--packet", "a", "--cache", "b"), ("--dtypes", "int3")):
        audit(capsys, folder, *arguments, status=2)
