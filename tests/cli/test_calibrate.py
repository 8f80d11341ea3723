"""``kvferry ship calibrate``, and policy klt wherever a policy can be named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.cli.main import run
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.store import transforms_folder
from tests.cli.models import TEXT
from tests.snapshot.builders import assert_same_snapshot

SMALL = ("--windows", 8, "--gradient-windows", 6, "--prefix", 80, "--suffix", 30)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))


def call(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status = run([*map(str, arguments), "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    result: dict[str, Any] = json.loads(out)["result"]
    return result


def refused(capfd: pytest.CaptureFixture[str], status: int, *arguments: object) -> tuple[str, str]:
    """Type and message of the error of a command that fails in one line."""
    assert run([*map(str, arguments), "--json"]) == status
    out, err = capfd.readouterr()
    assert len(err.strip().splitlines()) == 1, err
    content = json.loads(out)
    assert content["result"] is None
    return content["error"]["type"], content["error"]["message"]


@pytest.mark.parametrize("which", ["llama_folder", "gemma_folder"])
def test_a_transform_is_made_kept_and_used(
    which: str, request: pytest.FixtureRequest, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, own = request.getfixturevalue(which), tmp_path / "own"
    made = call(capfd, "ship", "calibrate", folder, "--text", text_file, "-o", own, *SMALL)
    assert made.keys() == {"path", "kept", "digest", "bytes", "seconds", "windows", "tokens", "made"}
    assert (made["path"], made["windows"], made["tokens"]) == (str(own), 8, 640)
    assert made["bytes"] == own.stat().st_size
    assert Path(made["kept"]) == transforms_folder() / f"{made['digest']}.safetensors"
    assert Transform.load(own).digest == Transform.load(made["kept"]).digest == made["digest"]

    seen = call(capfd, "inspect", own)
    assert (seen["kind"], seen["digest"], seen["checksums_ok"]) == ("transform", made["digest"], True)
    assert seen["identity"]["dtype"] == "bfloat16"
    assert seen["layers"] == (2 if which == "llama_folder" else 3)
    assert {group["side"] for group in seen["groups"]} == {"keys", "values"}

    snapshot, packet, back = (tmp_path / name for name in ("snapshot", "packet", "back"))
    call(capfd, "capture", folder, "--text", text_file, "--max-tokens", 400, "-o", snapshot)
    sent = call(capfd, "ship", "encode", snapshot, "-o", packet, "--budget", 0.3, "--policy", "klt")
    assert (sent["policy"], sent["quantizer"]) == ("klt", "klt+raw / klt+raw")
    assert sent["report"]["transform"] == made["digest"]
    assert 0.25 < sent["budget"] <= 0.3
    assert sent["file_bytes"] <= 0.3 * sent["full_bytes"]
    told = call(capfd, "inspect", packet)
    assert (told["policy"], told["layers_share_frames"]) == ("klt", True)
    assert run(["inspect", str(packet)]) == 0
    assert capfd.readouterr().out.count(" klt ") < 5  # the layers' shares are not known: one row for all
    came = call(capfd, "ship", "decode", packet, "-o", back)
    assert came["bytes"] == sent["bytes"]
    assert len(call(capfd, "generate", folder, "--from-cache", packet, "--max-new", 4)["token_ids"]) == 4

    (found,) = call(capfd, "audit", folder, "--packet", packet)["findings"]
    assert found["verdict"] == "codec", "a declared loss, of a codec that cannot be done to another cache"

    # At the other end, with an empty cache folder, the file itself is needed, and enough.
    Path(made["kept"]).unlink()
    problem = refused(capfd, 2, "ship", "decode", packet, "-o", tmp_path / "other")
    assert problem[0] == "InvalidInput"
    assert made["digest"] in problem[1]
    assert "--transform" in problem[1]
    assert not (tmp_path / "other").exists()
    call(capfd, "ship", "decode", packet, "-o", tmp_path / "other", "--transform", own)
    assert_same_snapshot(kv.Snapshot.load(tmp_path / "other"), kv.Snapshot.load(back))
    again = call(
        capfd, "ship", "encode", snapshot, "-o", packet, "--budget", 0.3, "--policy", "klt", "--transform", own
    )
    assert again["bytes"] == sent["bytes"]


def test_what_is_missing_or_of_another_model_is_said_in_one_line(
    llama_folder: str, other_llama_folder: str, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    snapshot, packet = tmp_path / "snapshot", tmp_path / "packet"
    call(capfd, "capture", llama_folder, "--prompt", TEXT, "-o", snapshot)
    encode = ("ship", "encode", snapshot, "-o", packet, "--budget", 0.5, "--policy", "klt")
    kind, message = refused(capfd, 2, *encode)
    assert kind == "InvalidInput"
    name = kv.Snapshot.load(snapshot).identity.model
    assert f"kvferry ship calibrate {name} --dtype bfloat16" in message
    kind, message = refused(capfd, 2, *encode, "--transform", tmp_path / "nothing")
    assert (kind, "nothing" in message) == ("InvalidInput", True)
    call(capfd, "ship", "calibrate", other_llama_folder, "--text", text_file, "-o", tmp_path / "t", *SMALL)
    assert refused(capfd, 2, *encode)[0] == "InvalidInput"
    assert refused(capfd, 1, *encode, "--transform", tmp_path / "t")[0] == "IncompatibleIdentity"
    assert refused(capfd, 2, *encode, "--transform", snapshot)[0] == "InvalidInput"
    assert refused(capfd, 2, *encode[:-1], "greedy", "--transform", tmp_path / "t")[0] == "InvalidInput"
    assert refused(capfd, 2, *encode, "--scorer", "kv_norm", "--transform", tmp_path / "t")[0] == "InvalidInput"
    sweep = ("ship", "sweep", llama_folder, "--text", text_file, "--windows", 1, "--prefix", 64, "--suffix", 8)
    assert "ship calibrate" in refused(capfd, 2, *sweep, "--policies", "klt")[1]
    assert not packet.exists()
    call(capfd, "ship", "encode", snapshot, "-o", packet, "--budget", 0.9, "--policy", "greedy")
    kind, message = refused(capfd, 2, "ship", "decode", packet, "-o", tmp_path / "x", "--transform", tmp_path / "t")
    assert (kind, "--transform out" in message) == ("InvalidInput", True)
    assert not (tmp_path / "x").exists()


def test_calibrations_that_make_no_sense(
    llama_folder: str, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calibrate = ("ship", "calibrate", llama_folder, "--text", text_file, "--suffix", 30)
    assert "--output" in refused(capfd, 2, *calibrate, "--no-keep")[1]
    assert "no folder" in refused(capfd, 2, *calibrate, "-o", tmp_path / "no" / "t")[1]
    kind, message = refused(capfd, 2, *calibrate, "--prefix", 1000)
    assert kind == "InvalidInput"
    assert "4120 tokens" in message
    assert not transforms_folder().exists()


def test_a_file_alone_and_tables_for_people(
    llama_folder: str, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    arguments = ("ship", "calibrate", llama_folder, "--text", text_file, "-o", own, "--no-keep", *SMALL)
    assert run([*map(str, arguments)]) == 0
    assert run(["inspect", str(own)]) == 0
    out, _ = capfd.readouterr()
    for words in ("digest", "8 windows, 640 tokens", "transform", "all match", "gradient_windows 5", "channels"):
        assert words in out
    assert not transforms_folder().exists()
    raw = bytearray(own.read_bytes())
    raw[-5] ^= 1
    own.write_bytes(raw)
    assert run(["inspect", str(own)]) == 1
    out, _ = capfd.readouterr()
    assert "checksums" in out


def test_a_sweep_goes_on_only_with_the_same_transform(
    llama_folder: str, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(capfd, "ship", "calibrate", llama_folder, "--text", text_file, *SMALL)
    sweep = (
        "ship", "sweep", llama_folder, "--text", text_file, "--windows", 2, "--prefix", 200, "--suffix", 24,
        "--policies", "klt", "--budgets", "0.5,0.01", "--no-baselines",
    )  # fmt: skip
    first = call(capfd, *sweep)
    row, none = first["rows"]
    assert (row["policy"], row["quantizer"]) == ("klt", "klt+raw / klt+raw")
    assert row["budget"] <= 0.5
    assert row["ppl"] > 0
    assert "least budget" in none["reason"]
    assert call(capfd, *sweep)["resumed"] > first["resumed"] == 0
    call(capfd, "ship", "calibrate", llama_folder, "--text", text_file, "--seed", 1, *SMALL)
    assert call(capfd, *sweep)["rows"][0]["kl_mean"] != row["kl_mean"]


def test_a_sweep_goes_on_only_with_the_same_sensitivities(
    llama_folder: str, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = (
        "ship", "sweep", llama_folder, "--text", text_file, "--windows", 2, "--prefix", 200, "--suffix", 24,
        "--policies", "auto", "--budgets", "0.5", "--no-baselines", "--no-attention",
    )  # fmt: skip
    flat = call(capfd, *sweep)
    assert call(capfd, *sweep)["resumed"] > flat["resumed"] == 0
    call(capfd, "ship", "calibrate", llama_folder, "--text", text_file, *SMALL)
    calibrated = call(capfd, *sweep)
    assert calibrated["resumed"] == 0
    assert calibrated["rows"][0]["kl_mean"] != flat["rows"][0]["kl_mean"]


def test_public_verbs(llama_folder: str) -> None:
    model, tokenizer = kv.load_model(llama_folder)
    sizes = {"windows": 4, "gradient_windows": 4, "prefix": 64, "suffix": 16}
    transform = kv.calibrate(model, tokenizer, TEXT * 4, **sizes)
    assert isinstance(transform, kv.Transform)
    snapshot = kv.capture(model, torch.tensor([tokenizer(TEXT * 2).input_ids]))
    packet = kv.encode(snapshot, 0.6, "klt", transform=transform)
    assert kv.decode(packet, transform=transform).seq_len == 2 * len(TEXT)
