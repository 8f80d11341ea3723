"""Studies made of parts, each a command of its own whose JSON takes the old one's place when it is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = Path("build/texts")
"""What commands read, by a path that means the same on every machine."""


def place(name: str, words: str) -> Path:
    """Put a text where commands read it."""
    path = TEXTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != words:  # another part may be reading it
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(words, encoding="utf-8")
        draft.replace(path)
    return path


def call(*arguments: str, statuses: Sequence[int] = (0,)) -> str:
    """Run a command of this very kvferry; it says itself what goes wrong.

    Args:
        arguments: of the command.
        statuses: that are no failure; a check that failed (1) may be what a study is about.
    """
    print("kvferry", *arguments, flush=True)
    command = [sys.executable, "-m", "kvferry.cli.main", *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode not in statuses:
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


def is_kept(path: Path, arguments: Sequence[str], code: Sequence[str]) -> bool:
    """Whether a result of the very same command lies there, and nothing under ``code`` differs from its revision.

    Args:
        path: of the result.
        arguments: of the command.
        code: what the result hangs on, by paths from the checkout's root.
    """
    if not path.exists():
        return False
    made = json.loads(path.read_text(encoding="utf-8"))["environment"]
    return made["arguments"] == list(arguments) and unchanged_since(made["git_revision"], code)


def unchanged_since(revision: str | None, paths: Sequence[str]) -> bool:
    """Whether the files of this checkout are those of a revision; never for one that is unknown, or was not clean."""
    if revision is None or not revision.isalnum():
        return False
    command = ["git", "diff", "--quiet", revision, "--", *paths]
    return subprocess.run(command, check=False, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0


def keep(path: Path, found: str) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(found, encoding="utf-8")
    draft.replace(path)
