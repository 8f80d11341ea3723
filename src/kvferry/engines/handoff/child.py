"""A child process of the hand-off: tells its parent what happens, and ends when the parent does.

Reports go as JSON lines to what was standard output; anything that prints goes to standard error instead. Standard
input is a pipe that the parent writes to, one line on the link and then one a hand-off (`kvferry.engines.handoff.
orders`), and holds open: when it closes, the parent is gone, however it died, and so is the child. A child stays for
further hand-offs, with its model loaded, until the parent ends it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any

from kvferry.channel import ends, faults
from kvferry.engines.handoff.orders import Order, Setting
from kvferry.errors import KVFerryError

PRODUCER, CONSUMER = "producer", "consumer"


class _Reports:
    """What the child says to its parent."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def say(self, event: str, **content: Any) -> None:
        self._file.write(json.dumps({"event": event, **content}) + "\n")
        self._file.flush()

    def stage(self, name: str) -> None:
        self.say("stage", name=name)


def run_child(role: str, address: str | None = None) -> int:
    """Do one role for every order that comes; returns the exit status of a failure.

    The producer's address is its first report; ``address`` tells it to the consumer.
    """
    reports = _Reports()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    try:
        setting = Setting.from_json(lines.get())
        if role == PRODUCER:
            _produce(setting, lines, reports)
        else:
            assert address is not None
            _consume(setting, address, lines, reports)
    except KVFerryError as error:
        reports.say("error", error=faults.describe(error), typed=True)
    except Exception as error:
        reports.say("error", error=faults.describe(error), typed=False, traceback=traceback.format_exc())
    return 1


def _produce(setting: Setting, lines: queue.SimpleQueue[str], reports: _Reports) -> None:
    models: Any = None
    # The socket and what may be asked for there are ready before the model library is, and before anyone asks.
    with ends(setting.channel)[0](setting.listen, keys=setting.producer_keys) as sender:
        reports.say("address", address=sender.address)
        while True:
            order = Order.from_json(lines.get())
            with (
                sender.announce(order.names.reference) as reference,
                sender.announce(order.names.refinement) as refinement,
                sender.announce(order.names.cache) as outgoing,
            ):
                reports.say("ready")
                from kvferry.engines.handoff.roles import Models, produce

                models = models or Models()
                report = produce(models, order.job, outgoing, refinement, reference, reports.stage)
            reports.say("done", report=report)


def _consume(setting: Setting, address: str, lines: queue.SimpleQueue[str], reports: _Reports) -> None:
    models: Any = None
    while True:
        order = Order.from_json(lines.get())
        from kvferry.engines.handoff.roles import Models, consume

        models = models or Models()
        patience = order.job.timeout
        keys, stall = setting.consumer_keys, min(10.0, patience)
        receiver = ends(setting.channel)[1](address, keys=keys, timeout=patience, stall=stall)
        reports.say("done", report=consume(models, order.job, order.names, receiver, reports.stage))


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Pass on the lines of standard input; end the process when it closes."""
    rest = b""
    while got := os.read(0, 65536):
        *whole, rest = (rest + got).split(b"\n")
        for line in whole:
            lines.put(line.decode("utf-8", "replace"))
    os._exit(1)
