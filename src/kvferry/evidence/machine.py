"""The checkout and the processor that results come from."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path


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


def peak_memory() -> int | None:
    """Most resident bytes of this process since it began; ``None`` where the system does not tell (it is no Linux).

    Not ``ru_maxrss``, which a process inherits from the one that starts it.
    """
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


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
