"""The parent: starts the two processes, gives them their orders, watches them, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvferry.channel import LIVE, faults
from kvferry.engines.handoff.child import CONSUMER, PRODUCER
from kvferry.engines.handoff.job import HandoffJob, HandoffNames
from kvferry.engines.handoff.orders import Order, Setting, both_ends
from kvferry.engines.handoff.result import HandoffResult, combine
from kvferry.engines.link import ShapedLink, counted
from kvferry.errors import InvalidInput, KVFerryError, TransferFailed

logger = logging.getLogger(__name__)

_GRACE = 2.0
"""Seconds that the other process has to say what it died of, after the first one failed."""

UNSHIPPED_RUN = "the unshipped run"
"""Stage of the producer when the consumer has confirmed: what the link carried until then was for the cache."""

OnStage = Callable[[str, str], None]


class _Child:
    """One child process and what it has reported."""

    def __init__(
        self,
        role: str,
        setting: Setting,
        events: queue.SimpleQueue[tuple[str, dict[str, Any]]],
        *rest: str,
        at: Sequence[str] = (),
    ):
        self.role = role
        self.stage = "starting"
        self.report: dict[str, Any] | None = None
        self.error: KVFerryError | None = None
        self.process = subprocess.Popen(
            [*at, sys.executable, "-P", "-m", "kvferry.cli.main", f"handoff-{role}", *rest],
            # Two processes whose idle threads spin starve each other.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the group
        )
        self._tell(setting.to_json())
        self._events = events
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, order: Order) -> None:
        """Give the child its part of a hand-off to do."""
        self._tell(order.to_json())

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: its end is an event, and says more
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put((self.role, _parse(line)))
        self._events.put((self.role, {"event": "end"}))

    def take(self, event: dict[str, Any]) -> None:
        """Note what one report says."""
        kind = event.get("event")
        if kind == "stage":
            self.stage = str(event.get("name"))
        elif kind == "done":
            self.report = event["report"]
        elif kind == "error" and self.error is None:
            self.error = faults.revive(event.get("error"))
            self.error.add_note(f"in the {self.role} process, stage: {self.stage}")
            if not event.get("typed"):
                logger.debug("the %s process failed:\n%s", self.role, event.get("traceback"))
                self.error = TransferFailed(f"the {self.role} process failed: {_untyped(event.get('error'))}")
        elif kind == "end" and self.report is None and self.error is None:
            self.error = TransferFailed(f"the {self.role} process {self._how_it_ended()}, stage: {self.stage}")

    def _how_it_ended(self) -> str:
        status = self.process.wait()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status} and no report"

    def kill(self) -> None:
        """End the process and all that it may have started, now."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Session:
    """Two processes that do one hand-off after another, with their models loaded once; leaving the block ends both.

    Args:
        link: rate of a shaped link between them, as in ``1gbit``; ``None``: the loopback interface.
        channel: what moves the frames, one of `kvferry.channel.LIVE`.
    """

    def __init__(self, link: str | None = None, channel: str = "socket"):
        if channel not in LIVE:
            raise InvalidInput(f"unknown channel {channel!r}; there are {', '.join(LIVE)}")
        if channel != "socket" and link is not None:
            raise InvalidInput(f"a shaped link is for the socket channel: {channel} goes its own way between processes")
        self.link = None if link is None else ShapedLink(link)
        self._events: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._children: dict[str, _Child] = {}
        own = Setting(channel=channel)
        self._settings = (own, own) if self.link is None else both_ends(self.link.host)

    def __enter__(self) -> Self:
        if self.link is not None:
            self.link.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for child in self._children.values():
                child.kill()
        finally:
            if self.link is not None:
                self.link.close()

    def run(self, job: HandoffJob, on_stage: OnStage | None = None) -> HandoffResult:
        """Do ``job``; ``on_stage`` is told ``(role, stage)`` as things go on. A session that failed is at its end.

        Raises: as `run_handoff`.
        """
        if job.text_file is not None:
            job.read_text()
        folder = _folder_of(job.producer_model)
        other = folder if job.consumer_model == job.producer_model else _folder_of(job.consumer_model)
        mapper = None if job.mapper is None else _place_of(job.mapper)
        order = Order(replace(job, producer_model=folder, consumer_model=other, mapper=mapper), HandoffNames.new())
        if PRODUCER not in self._children:
            self._children[PRODUCER] = self._start(PRODUCER)
        producer = self._children[PRODUCER]
        for child in self._children.values():
            child.report = None
            if child.error is not None:
                raise TransferFailed(
                    "an earlier hand-off between these two processes has failed: start two new ones"
                ) from child.error
        traffic = {"began": counted(producer.process.pid), "ended": (0, 0)}
        producer.order(order)
        while not (len(self._children) == 2 and all(child.report for child in self._children.values())):
            role, event = self._events.get()
            child = self._children[role]
            child.take(event)
            if child.error is not None:
                raise _cause(self._children, self._events)
            kind = event.get("event")
            if kind == "address":
                self._children[CONSUMER] = self._start(CONSUMER, str(event["address"]))
            elif kind == "ready":
                self._children[CONSUMER].order(order)
            elif kind == "stage":
                if child.stage == UNSHIPPED_RUN:
                    traffic["ended"] = counted(producer.process.pid)
                if on_stage is not None:
                    on_stage(role, child.stage)
        produced, consumed = producer.report, self._children[CONSUMER].report
        assert produced is not None
        assert consumed is not None
        return combine(produced, consumed, job.budget, self._link_report(traffic))

    def _start(self, role: str, *rest: str) -> _Child:
        end = int(role == CONSUMER)
        at = () if self.link is None else self.link.inside(end)
        return _Child(role, self._settings[end], self._events, *rest, at=at)

    def _link_report(self, traffic: dict[str, tuple[int, int]]) -> dict[str, Any] | None:
        if self.link is None:
            return None
        out, back = (after - before for before, after in zip(traffic["began"], traffic["ended"], strict=True))
        return {"rate": self.link.rate, "bits_per_second": self.link.bits, "bytes_out": out, "bytes_back": back}


def run_handoff(job: HandoffJob, on_stage: OnStage | None = None) -> HandoffResult:
    """Do ``job`` in two processes of their own.

    ``on_stage`` is told ``(role, stage)`` as things go on. No process is left, whatever happens here; if this process
    is killed, the two end by themselves.

    Raises:
        InvalidInput, ModelUnavailable: before anything is started, or by either process.
        BudgetTooSmall: the budget cannot be met; says the least one that can.
        IncompatibleIdentity: the consumer's model is not the producer's.
        UnsupportedCache: pipelined, a layer holds NaN or infinity that the packet has no place for.
        TransferFailed: a process died, the socket failed, or no shaped link can be made here.
    """
    with Session(job.link, job.channel) as session:
        return session.run(job, on_stage)


def _folder_of(name: str) -> str:
    """What `kvferry.hf.models.resolve` says; for the usual cases without loading the model library in this process."""
    from kvferry.hf import builtin

    if name in builtin.BUILT_IN:
        return str(builtin.locate(builtin.BUILT_IN[name]))
    if (Path(name) / "config.json").is_file():
        return str(Path(name).resolve())
    from kvferry.hf.models import resolve

    return resolve(name)


def _place_of(mapper: str) -> str:
    """A mapper's folder, or its hub id. Raises `InvalidInput` for a path where there is no folder."""
    path = Path(mapper).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if path.is_absolute() or path.exists():
        raise InvalidInput(f"{mapper} is no folder with a mapper")
    return mapper


def _cause(children: dict[str, _Child], events: queue.SimpleQueue[tuple[str, dict[str, Any]]]) -> KVFerryError:
    """What made a hand-off fail: the first error, unless it only says that the other side failed and that says why."""
    first = next(child.error for child in children.values() if child.error is not None)
    until = time.monotonic() + _GRACE
    while type(first) is TransferFailed and (left := until - time.monotonic()) > 0:
        try:
            role, event = events.get(timeout=left)
        except queue.Empty:
            break
        children[role].take(event)
        found = [child.error for child in children.values() if child.error is not None]
        if telling := [error for error in found if type(error) is not TransferFailed]:
            return telling[0]
        if len(found) == len(children):
            break
    return first


def _parse(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"event": "noise", "line": line}


def _untyped(fault: object) -> str:
    return f"{fault.get('type')}: {fault.get('message')}" if isinstance(fault, dict) else repr(fault)
