"""What a result was made with: versions, machine, revision. Loads none of the libraries it names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.version import __version__

if TYPE_CHECKING:
    from kvferry.cli.common import Common


def environment(common: Common) -> dict[str, Any]:
    """``environment`` of a command's JSON object."""
    return {
        "kvferry": __version__,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": _threads(common),
        "dtype": common.dtype,
        "attn": common.attn,
        "seed": common.seed,
        "arguments": sys.argv[1:],
    }


def git_revision() -> str | None:
    """The commit of the checkout that this package runs from, ``+`` where files differ from it; else ``None``.

    Results are not what they were made with: those of one study do not make the next one's code another.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "src" / "kvferry").is_dir():
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + (
        "+" if _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs/results") else ""
    )


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _threads(common: Common) -> int | None:
    torch = sys.modules.get("torch")
    return common.threads or (torch.get_num_threads() if torch is not None else None)
