"""Resident memory of this process: now, and at its peak. Linux only.

Not ``ru_maxrss``, which a process inherits from the one that starts it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def now(pid: int | str = "self") -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Most bytes since the start or since `reset_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def reset_peak() -> int:
    """Begin anew; returns the bytes that there are now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()
