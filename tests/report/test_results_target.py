"""``make results`` says what it needs before it does anything, and keeps what the numbers were made with."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import parts, ship_results

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_without_the_texts_it_says_what_to_set(tmp_path: Path) -> None:
    ended = make("results", f"KVFERRY_DATA={tmp_path}", f"VENV={tmp_path}/none")
    assert ended.returncode == 2
    assert "set KVFERRY_DATA to a folder that holds wikitext2/test.txt" in ended.stderr
    assert str(tmp_path) in ended.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was installed first


def test_a_part_replaces_the_old_one_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = argparse.Namespace(folder=tmp_path, data=tmp_path, threads=1, windows=2)
    asked: list[tuple[str, ...]] = []

    def answers(*arguments: str) -> str:
        asked.append(arguments)
        return '{"result": 1}'

    def fails(*arguments: str) -> str:
        raise subprocess.CalledProcessError(2, arguments)

    monkeypatch.setattr(ship_results, "call", answers)
    ship_results.run("small", "some-model", Path("words.txt"), given)
    path = tmp_path / "ship-some-model-small.json"
    assert path.read_text() == '{"result": 1}'
    assert asked[0][:3] == ("ship", "sweep", "some-model")
    assert "--json" in asked[0]
    assert asked[0][asked[0].index("--text") + 1] == "words.txt"
    monkeypatch.setattr(ship_results, "call", fails)
    with pytest.raises(subprocess.CalledProcessError):
        ship_results.run("small", "some-model", Path("words.txt"), given)
    assert path.read_text() == '{"result": 1}'


def test_what_the_same_command_and_code_made_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)

    def git(*arguments: str) -> str:
        named = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *named, *arguments], cwd=root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(file: str, words: str) -> str:
        (root / file).write_text(words)
        git("add", ".")
        git("commit", "-q", "-m", words)
        return git("rev-parse", "HEAD")

    def made(revision: str | None) -> bool:
        path.write_text(json.dumps({"environment": {"arguments": asked, "git_revision": revision}}))
        return parts.is_kept(path, asked, ["src"])

    git("init", "-q")
    monkeypatch.setattr(parts, "ROOT", root)
    path, asked = tmp_path / "map-up-fit.json", ["map", "fit", "--json"]
    first = commit("src/code", "one")
    assert not parts.is_kept(path, asked, ["src"])
    assert made(first)
    assert not parts.is_kept(path, [*asked, "-v"], ["src"])
    second = commit("results", "of one")
    assert made(first)
    assert made(second)
    (root / "src/code").write_text("two")
    assert not made(second), "the checkout's own files count"
    commit("src/code", "two")
    assert not made(second)
    for unknown in (None, f"{second}+", "abc", "--"):
        assert not made(unknown)
