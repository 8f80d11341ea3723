"""Where kvferry keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$KVFERRY_CACHE``, or ``~/.cache/kvferry``."""
    chosen = os.environ.get("KVFERRY_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "kvferry"
