"""``kvferry pair make``: what it prints, where it puts things, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.cli.main import run
from tests.cli import models
from tests.hf import tiny

SMALL = ("--tokens", 512, "--window", 32, "--batch", 2, "--dtype", "float32")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save(tiny.llama(num_hidden_layers=8), tmp_path_factory.mktemp("parent"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))


def call(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status = run([*map(str, arguments), "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    content: dict[str, Any] = json.loads(out)
    assert content["command"] == "pair make"
    result: dict[str, Any] = content["result"]
    return result


def refused(capfd: pytest.CaptureFixture[str], status: int, *arguments: object) -> tuple[str, str]:
    assert run([*map(str, arguments), "--json"]) == status
    out, _ = capfd.readouterr()
    error = json.loads(out)["error"]
    return error["type"], error["message"]


def test_a_child_is_made_once_and_fits_its_parent(
    parent: str, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make = ("pair", "make", parent, "--text", text_file, "--text", text_file, *SMALL)
    made = call(capfd, *make)
    assert made.keys() == {"path", "kept", "made", "found", "seconds"}
    assert Path(made["path"]).parent == tmp_path / "cache" / "pairs"
    assert (made["found"], len(made["kept"])) == (False, 5)  # two thirds of eight
    assert made["made"]["progress"]["tokens"] == 512
    assert made["made"]["windows"][0] + made["made"]["held_out_windows"][0] == 2 * (len(text_file.read_text()) // 32)
    again = call(capfd, *make)
    assert again["found"]
    assert again["kept"] == made["kept"]
    both = [kv.load_model(folder, dtype="float32")[0] for folder in (parent, made["path"])]
    ids = tiny.prompt(1, 20)
    large, small = (kv.capture(model, ids) for model in both)
    assert (len(large.layers), len(small.layers)) == (8, 5)
    assert large.layers[0].keys.shape == small.layers[0].keys.shape
    assert torch.isfinite(small.layers[4].values).all()


def test_a_table_for_people(parent: str, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make = ["pair", "make", parent, "--text", text_file, *SMALL, "--layers", 6, "-o", tmp_path / "child"]
    assert run([str(word) for word in make]) == 0
    out, _ = capfd.readouterr()
    for words in (str(tmp_path / "child"), "512 tokens", "layers kept", "held-out nll, child", "already there"):
        assert words in out


def test_what_makes_no_sense(parent: str, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make = ("pair", "make", parent, "--text", text_file, *SMALL, "-o", tmp_path / "child")
    assert "--tiny" in refused(capfd, 2, "pair", "make")[1]
    assert "--tiny" in refused(capfd, 2, "pair", "make", parent, "--tiny")[1]
    assert "its own text" in refused(capfd, 2, "pair", "make", "--tiny", "--text", text_file)[1]
    assert "float32" in refused(capfd, 2, "pair", "make", "--tiny", "--dtype", "bfloat16")[1]
    assert "not 8" in refused(capfd, 2, *make, "--layers", 8)[1]
    assert "window" in refused(capfd, 2, *make, "--window", 5000)[1]
    assert refused(capfd, 2, *make[:4], tmp_path / "nothing", *make[5:])[0] == "InvalidInput"
    assert refused(capfd, 1, "pair", "make", "no-such-model", *make[3:])[0] == "ModelUnavailable"
    (tmp_path / "child").mkdir()
    assert "give another folder" in refused(capfd, 2, *make)[1]
    assert not list(tmp_path.glob(".*"))
