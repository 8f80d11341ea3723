"""A real link of a stated rate: two network namespaces joined by a veth pair, shaped by the kernel's token bucket.

Needs Linux, root and iproute2. Nothing outside the two namespaces is touched. Their names carry the process that made
them, so that what a killed process left behind is found and removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from kvferry.errors import InvalidInput, TransferFailed

INTERFACE = "kvferry0"
"""Name of the interface at both ends, each in its own namespace."""

_HOSTS = ("10.213.77.1", "10.213.77.2")
_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"kvferry-(\d+)-(\d+)-\d+-[ab]")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_SLOWEST, _FASTEST = 10**5, 10**11
_LEAST_BURST = 64 << 10
_BURST_SECONDS = 0.001
_QUEUE = "50ms"
_numbers = itertools.count()


def parse_rate(text: str) -> int:
    """Bits a second of ``1gbit``, ``2.5gbit``, ``100mbit``, ``512kbit``; raises `InvalidInput` for anything else."""
    match = _RATE.fullmatch(text.lower())
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not _SLOWEST <= bits <= _FASTEST:
        raise InvalidInput(
            f"{text!r} is no rate of a link: give bits a second as in 100mbit, 1gbit or 2.5gbit, from 100kbit to "
            "100gbit"
        )
    return bits


def why_no_link() -> str:
    """What a shaped link lacks here; empty when nothing is known to be missing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found: install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    return ""


class ShapedLink:
    """Two namespaces, one for each process, and the link between them; both directions have the same rate.

    Leaving the block removes both, also after an error, Ctrl-C or SIGTERM; after SIGKILL the next link does.

    Args:
        rate: as for `parse_rate`.

    Raises:
        InvalidInput: no rate.
        TransferFailed: this machine, or this user, cannot make such a link; says what is missing.
    """

    def __init__(self, rate: str):
        self.bits = parse_rate(rate)
        self.rate = rate
        if missing := why_no_link():
            raise TransferFailed(f"no shaped link can be made: {missing}")
        stem = f"kvferry-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
        self._names = (f"{stem}-a", f"{stem}-b")
        self._open = False
        self._before: object = None

    @property
    def host(self) -> str:
        """Address of the producer's end."""
        return _HOSTS[0]

    def inside(self, end: int) -> list[str]:
        """What comes before a command so that it runs at the producer's end (0) or the consumer's (1)."""
        return ["ip", "netns", "exec", self._names[end]]

    def set_rate(self, rate: str) -> None:
        """Shape the link anew; what is under way goes on."""
        self.bits = parse_rate(rate)
        self.rate = rate
        burst = max(_LEAST_BURST, int(self.bits / 8 * _BURST_SECONDS))
        for name in self._names:
            shape = ("root", "tbf", "rate", f"{self.bits}bit", "burst", str(burst), "latency", _QUEUE)
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, *shape)

    def __enter__(self) -> Self:
        sweep()
        self._on_sigterm()
        self._open = True
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            one, other = self._names
            _run("ip", "-n", one, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", other)
            for name, host in zip(self._names, _HOSTS, strict=True):
                _run("ip", "-n", name, "address", "add", f"{host}/30", "dev", INTERFACE)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            self.set_rate(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove both namespaces, and with them the link."""
        if not self._open:
            return
        self._open = False
        for name in self._names:
            if (_NAMESPACES / name).exists():
                _run("ip", "netns", "delete", name)
        if self._before is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._before = None

    def _on_sigterm(self) -> None:
        """Clean up on SIGTERM too, where nobody else minds it: it would end the process without a word."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def clean(number: int, _frame: FrameType | None) -> None:
            self.close()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        self._before = signal.signal(signal.SIGTERM, clean)


def counted(pid: int) -> tuple[int, int]:
    """Bytes that the kernel counted out of, and into, the link's interface where process ``pid`` lives; 0 for none.

    Heads of Ethernet, IP and TCP are in; of the segments that the kernel keeps together only one has its heads counted.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == INTERFACE:
                fields = numbers.split()
                return int(fields[8]), int(fields[0])
    return 0, 0


def sweep() -> list[str]:
    """Remove the namespaces of processes that are gone; returns their names."""
    found = []
    if _NAMESPACES.is_dir():
        for path in sorted(_NAMESPACES.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is not None and _started(int(match[1])) != int(match[2]):
                with contextlib.suppress(TransferFailed):  # another one sweeps at the same time
                    _run("ip", "netns", "delete", path.name)
                    found.append(path.name)
    return found


def _started(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; -1 for none. With the pid it names the process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise TransferFailed(f"no shaped link can be made: `{' '.join(command)}` failed: {said}")
