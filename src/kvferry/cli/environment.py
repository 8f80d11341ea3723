"""What a result was made with: versions, machine, revision. Loads none of the libraries it names."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvferry.evidence.machine import cpu_name, git_revision
from kvferry.version import __version__

if TYPE_CHECKING:
    from kvferry.cli.common import Common

__all__ = ["cpu_name", "environment", "git_revision"]


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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _threads(common: Common) -> int | None:
    torch = sys.modules.get("torch")
    return common.threads or (torch.get_num_threads() if torch is not None else None)
