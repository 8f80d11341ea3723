"""Folders of tiny models with a tokenizer of one token a character, and ways to call the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.hf import tiny

SOURCE = Path(__file__).resolve().parents[2] / "src"
TEXT = "A key-value cache leaves one model and enters another, in fewer bytes, and it goes on as if nothing had been. "


def save(model: Any, folder: Path) -> str:
    """Write a model and its tokenizer to ``folder``; returns the path."""
    letters = {chr(code): code for code in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(folder)
    return str(folder)


def environment() -> dict[str, str]:
    """What a child process needs to find this source tree, whether it is installed or not."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}


def command(*arguments: object) -> list[str]:
    """The command line of the installed program."""
    return [sys.executable, "-m", "kvferry.cli.main", *map(str, arguments)]


def kvferry(*arguments: object, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment(), check=False
    )


def result_of(ended: subprocess.CompletedProcess[str], status: int = 0) -> dict[str, Any]:
    """The one JSON object on standard output of a run with ``--json``; checks the exit status."""
    assert ended.returncode == status, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 1, ended.stdout
    content: dict[str, Any] = json.loads(lines[0])
    return content
