"""The model hub: what a repository's files are on this machine, fetched when the hub answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download

from kvferry.errors import ModelUnavailable

logger = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Seconds that the hub has to answer at all before kvferry goes on without it."""

_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_UNWANTED = ("*/*", "consolidated*")  # other formats and original checkpoints lie in folders of the repository


def cached(repo: str, revision: str | None = None) -> Path | None:
    """The repository's folder in the hub's own cache when it is whole, else ``None``; asks nobody."""
    folder = _local(repo, revision, _WANTED, _UNWANTED)
    return folder if folder is not None and _is_complete(folder) else None


def fetch(repo: str, revision: str | None = None) -> Path:
    """The repository's folder on this machine, brought up to date when the hub answers within `TIMEOUT` seconds.

    Raises:
        ModelUnavailable: it is not in the local cache and the hub is off, unreachable, or refuses; says which.
    """
    folder, reason = _asked(repo, revision, _WANTED, _UNWANTED)
    if folder is not None:
        if _is_complete(folder):
            return folder
        reason = "the repository lacks config.json, safetensors weights or a tokenizer"
    local = cached(repo, revision)
    if local is None:
        raise ModelUnavailable(
            f"{repo} is not, or not whole, in the local hub cache, and the hub gave nothing ({reason})"
        )
    logger.info("%s: the hub gave nothing (%s); the local copy is used", repo, reason)
    return local


def fetch_files(repo: str, names: Sequence[str]) -> Path:
    """A folder with some files of a repository, brought up to date when the hub answers.

    Raises:
        ModelUnavailable: one of them is not in the local cache and the hub is off, unreachable, or refuses.
    """
    patterns = (*names, "README.md")
    folder, reason = _asked(repo, None, patterns, ())
    if folder is None:
        folder = _local(repo, None, patterns, ())
    if folder is not None:
        if all((folder / name).is_file() for name in names):
            return folder
        reason = reason or f"the repository lacks one of {', '.join(names)}"
    raise ModelUnavailable(f"{repo} has no {names[0]} here, and the hub gave nothing ({reason})")


def _asked(repo: str, revision: str | None, wanted: Sequence[str], unwanted: Sequence[str]) -> tuple[Path | None, str]:
    """The folder that the hub brings up to date; ``None`` and why where it does not."""
    if constants.HF_HUB_OFFLINE:
        return None, "HF_HUB_OFFLINE is set"
    try:
        # The exceptions of the HTTP client below huggingface_hub are of another library with each major version;
        # whatever it is, the reason is kept and reported.
        HfApi().model_info(repo, revision=revision, timeout=TIMEOUT)
        folder = snapshot_download(
            repo,
            revision=revision,  # as asked, not by commit, so that it is found offline by the same name
            etag_timeout=TIMEOUT,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
        )
    except Exception as error:
        return None, f"{type(error).__name__}: {_first_line(error)}"
    return Path(folder), ""


def _local(repo: str, revision: str | None, wanted: Sequence[str], unwanted: Sequence[str]) -> Path | None:
    """The repository's folder in the hub's own cache, whole or not; asks nobody."""
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            local_files_only=True,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def name_of(folder: Path) -> tuple[str, str] | None:
    """``(repository, commit)`` when ``folder`` is a snapshot in a hub cache, else ``None``."""
    owner = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not owner.startswith("models--"):
        return None
    return owner.removeprefix("models--").replace("--", "/"), folder.name


def _is_complete(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    weights = {"model.safetensors"}
    if index.is_file():
        try:
            weights = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):  # a damaged index: not whole
            return False
    return all((folder / name).is_file() for name in ("config.json", *weights)) and any(folder.glob("tokenizer*"))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
