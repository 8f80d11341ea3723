"""The fault table: faults injected into hand-offs over the socket channel, and what came of each.

    python -m benchmarks.faults [--n 1000] [--json FILE]

A case is one hand-off of a real packet, decoded as it arrives, with one kind of fault at a random byte or message of
it (the same one on up to three connections in a row). What can come of it:

    right   the cache has the very bits of the packet's
    error   a `KVFerryError`, within the time-out
    wrong   a cache with any other bit: must never be
    hang    any one wait was longer than the time-out and a grace
    leak    threads or open files stayed behind
    crash   any other exception, or the death of a process that nobody killed

Faults of a link are injected by a proxy between two sockets of one process; killed producers and consumers are
processes of their own. Then come peers that mean harm, beside which honest hand-offs must go on.
"""

from __future__ import annotations

import argparse
import collections
import functools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks import hostile, record
from benchmarks.fault_links import BYTES, MESSAGES, Call, MessageProxy
from benchmarks.fault_process import write_pieces
from kvferry.channel.socket import SocketReceiver, SocketSender
from kvferry.errors import KVFerryError
from kvferry.ship.encode import encode
from kvferry.ship.packet import Packet
from kvferry.ship.reader import PacketReader
from kvferry.snapshot import Snapshot
from tests.channel.proxy import Flow, Proxy
from tests.ship.builders import realistic

TIMEOUT, STALL, GRACE = 3.0, 0.5, 2.0
"""Seconds: longest wait for one thing, silence before a new connection, and what a busy machine may add."""

PACKETS = 3
KILLS = ("kill producer", "kill producer, start another", "kill consumer")
KINDS = (*BYTES, *MESSAGES, *KILLS)
_GIVE_UP = 60.0
_SETTLE = 5.0


@dataclass(frozen=True)
class Case:
    """What came of one hand-off."""

    kind: str
    seed: int
    outcome: str
    detail: str = ""
    seconds: float = 0.0
    longest_wait: float = 0.0
    reconnects: int = 0
    injected: int = 0


@dataclass
class Taken:
    """What a consumer got, or what it was told."""

    digest: bytes | None = None
    error: BaseException | None = None
    longest_wait: float = 0.0
    reconnects: int = 0


class Bench:
    """What one worker process has for all its cases: packets, their right caches, and a server that offers them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory()
        self.packets = [make_packet(seed) for seed in range(PACKETS)]
        self.files = [Path(self.folder.name) / f"{seed}" for seed in range(PACKETS)]
        self.right: list[bytes] = []
        self.sender = SocketSender()
        for seed, packet in enumerate(self.packets):
            raw = (packet.header_bytes, [bytes(frame) for frame in packet.frames])
            write_pieces(self.files[seed], [raw[0], *raw[1]])
            outgoing = self.sender.announce(f"p{seed}")
            outgoing.begin(raw[0], [len(frame) for frame in raw[1]])
            for frame in raw[1]:
                outgoing.push(frame)
            reader = PacketReader(raw[0])
            for frame in raw[1]:
                reader.add(frame)
            self.right.append(digest(reader.snapshot()))
        assert len(set(self.right)) == PACKETS
        self.totals = self._measure_totals()
        self.threads, self.files_open = settle(0, 0)

    def _measure_totals(self) -> tuple[int, int]:
        """Bytes of an undisturbed hand-off, from the producer and to it."""
        flows: dict[bool, Flow] = {}

        def watch(flow: Flow, data: bytes) -> bytes:
            flows[flow.down] = flow
            return data

        with Proxy(self.sender.address, watch) as proxy:
            taken = take(proxy.address, "p0")
        assert taken.digest == self.right[0]
        return flows[True].passed, flows[False].passed


def make_packet(seed: int) -> Packet:
    """A cache of SmolLM2's shape, fewer layers, in three tiers: about 24 frames of 20 kB."""
    snapshot = realistic(256, layers=6, seed=seed)
    return encode(snapshot, policy="sink_protect", scores="positional", nominal_budget=0.4, frame_tokens=64, seed=seed)


def digest(snapshot: Snapshot) -> bytes:
    """Of every bit that a decoded cache has."""
    state = xxhash.xxh3_128()
    for tensor in (snapshot.token_ids, snapshot.positions, snapshot.mask):
        state.update(tensor.numpy().tobytes())
    for layer in snapshot.layers:
        for side in (layer.keys, layer.values):
            if side is None:
                continue
            state.update(f"{tuple(side.shape)}{side.dtype}".encode())
            state.update(side.contiguous().view(torch.uint8).numpy().tobytes())
    return state.digest()


def take(address: str, handoff: str) -> Taken:
    """Fetch, decode as it arrives, confirm: as a consumer does. In this thread."""
    taken, last = Taken(), time.monotonic()

    def note() -> None:
        nonlocal last
        now = time.monotonic()
        taken.longest_wait, last = max(taken.longest_wait, now - last), now

    try:
        with SocketReceiver(address, timeout=TIMEOUT, stall=STALL).fetch(handoff) as incoming:
            note()
            try:
                reader = PacketReader(incoming.header)
                for arrival in incoming.frames():
                    note()
                    reader.add(arrival.data)
                snapshot = reader.snapshot()
                incoming.confirm()
            finally:
                taken.reconnects = incoming.traffic.reconnects
        note()
        taken.digest = digest(snapshot)
    except Exception as error:  # whatever it is, it is what the table is about
        note()
        taken.error = error
    return taken


def take_in_time(address: str, handoff: str) -> Taken | None:
    """`take` in a thread; ``None`` when it did not come back."""
    found: list[Taken] = []
    thread = threading.Thread(target=lambda: found.append(take(address, handoff)), daemon=True)
    thread.start()
    thread.join(_GIVE_UP)
    return found[0] if found else None


def settle(threads: int, files: int) -> tuple[int, int]:
    """Threads and open files of this process, once they are down to these numbers or time is up."""
    until = time.monotonic() + (_SETTLE if threads else 1.0)
    while True:
        now = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
        if (threads and now[0] <= threads and now[1] <= files) or time.monotonic() > until:
            return now
        time.sleep(0.02)


@functools.cache
def bench() -> Bench:
    return Bench()


def run_case(kind: str, seed: int) -> Case:
    """One case; with another seed when the hand-off was over before the fault came."""
    for attempt in range(20):
        case = _run_case(kind, seed + 1_000_000 * attempt)
        if case.injected or case.outcome not in ("right", "error"):
            return case
    raise RuntimeError(f"no fault could be injected: {kind}, seed {seed}")


def _run_case(kind: str, seed: int) -> Case:
    here = bench()
    began = time.monotonic()
    if kind in KILLS:
        taken, right, injected = _killed(here, kind, seed)
    else:
        number = seed % PACKETS
        right = here.right[number]
        if kind in BYTES:
            fault = BYTES[kind](f"{kind}/{seed}", here.totals)
            with Proxy(here.sender.address, fault) as proxy:
                taken = take_in_time(proxy.address, f"p{number}")
            injected = fault.count
        else:
            messages = len(here.packets[number].frames) + 1
            with MessageProxy(here.sender.address, kind, f"{kind}/{seed}", messages) as link:
                taken = take_in_time(link.address, f"p{number}")
            injected = link.count
    seconds = time.monotonic() - began
    outcome, detail = judge(taken, right)
    threads, files = settle(here.threads, here.files_open)
    if outcome in ("right", "error") and (threads > here.threads or files > here.files_open):
        outcome, detail = "leak", f"{threads - here.threads} threads, {files - here.files_open} files"
    wait, reconnects = (taken.longest_wait, taken.reconnects) if taken else (_GIVE_UP, 0)
    return Case(kind, seed, outcome, detail, seconds, wait, reconnects, injected)


def judge(taken: Taken | None, right: bytes) -> tuple[str, str]:
    """Outcome and detail of what a consumer got."""
    if taken is None:
        return "hang", f"not back after {_GIVE_UP:g} s"
    if taken.longest_wait > TIMEOUT + GRACE:
        return "hang", f"waited {taken.longest_wait:.1f} s"
    if taken.error is not None:
        kind = "error" if isinstance(taken.error, KVFerryError) else "crash"
        return kind, f"{type(taken.error).__name__}: {taken.error}"
    return ("right", "") if taken.digest == right else ("wrong", "other bits")


def start(*arguments: str) -> subprocess.Popen[str]:
    """A process of `benchmarks.fault_process`."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fault_process", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    """Whatever state it is in."""
    process.kill()
    process.communicate()


def _killed(here: Bench, kind: str, seed: int) -> tuple[Taken | None, bytes, int]:
    number = seed % PACKETS
    right = here.right[number]
    if kind == "kill consumer":
        taken, injected = _killed_consumer(here, seed, number)
        return taken, right, injected
    producer = start("serve", "tcp://127.0.0.1:*", str(here.files[number]))
    another: list[subprocess.Popen[str]] = []
    assert producer.stdout is not None
    address = producer.stdout.readline().strip()
    fault = Call(f"{kind}/{seed}", here.totals)
    fault.act = producer.kill
    try:
        with Proxy(address, fault) as proxy:
            if kind == "kill producer":
                taken = take_in_time(proxy.address, "p")
            else:
                found: list[Taken | None] = []
                consumer = threading.Thread(target=lambda: found.append(take_in_time(proxy.address, "p")))
                consumer.start()
                while consumer.is_alive() and producer.poll() is None:  # the fault may come too late for it
                    consumer.join(0.01)
                another.append(start("serve", address, str(here.files[number])))
                consumer.join()
                taken = found[0]
        return taken, right, fault.count
    finally:
        for process in (producer, *another):
            end(process)


def _killed_consumer(here: Bench, seed: int, number: int) -> tuple[Taken | None, int]:
    """A consumer dies at a random byte; the next one gets the whole from the same server."""
    fault = Call(f"kill consumer/{seed}", here.totals)
    with Proxy(here.sender.address, fault) as proxy:
        process = start("fetch", proxy.address, f"p{number}")  # it takes longer to start than to be told of
        fault.act = process.kill
        process.wait()
        end(process)
    return take_in_time(here.sender.address, f"p{number}"), fault.count


def run(n: int, workers: int) -> list[Case]:
    """``n`` cases, the kinds in turn, in ``workers`` processes."""
    cases: list[Case] = []
    planned = [(KINDS[number % len(KINDS)], number // len(KINDS)) for number in range(n)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: list[tuple[str, int, Future[Case]]] = [(*each, pool.submit(run_case, *each)) for each in planned]
        for kind, seed, future in waiting:
            try:
                cases.append(future.result())
            except BrokenProcessPool as error:
                cases.append(Case(kind, seed, "crash", f"the process died: {error}", injected=1))
            if len(cases) % 100 == 0:
                record.tell(f"{len(cases)} of {n} faults")
    return cases


OUTCOMES = ("right", "error", "wrong", "hang", "leak", "crash")


def table(cases: list[Case]) -> list[dict[str, Any]]:
    """A row a kind of fault."""
    rows = []
    for kind in KINDS:
        mine = [case for case in cases if case.kind == kind]
        if not mine:
            continue
        counts = collections.Counter(case.outcome for case in mine)
        errors = collections.Counter(case.detail.partition(":")[0] for case in mine if case.outcome == "error")
        rows.append(
            {
                "fault": kind,
                "n": len(mine),
                **{outcome: counts[outcome] for outcome in OUTCOMES},
                "errors": dict(errors),
                "injected": sum(case.injected for case in mine),
                "reconnects": sum(case.reconnects for case in mine),
                "median_seconds": statistics.median(case.seconds for case in mine),
                "longest_wait": max(case.longest_wait for case in mine),
            }
        )
    return rows


def main() -> int:
    """0 when no case went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=1_000)
    parser.add_argument("--workers", type=int, default=4, help="processes; they wait most of the time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cases = run(options.n, options.workers)
    rows = table(cases)
    peers = hostile.run()
    bad = [asdict(case) for case in cases if case.outcome not in ("right", "error")]
    result = {
        "n": len(cases),
        "settings": {"timeout": TIMEOUT, "stall": STALL, "grace": GRACE, "workers": options.workers, "seeds": "0…"},
        "rows": rows,
        "hostile": peers,
        "bad": bad,
    }
    record.write(options.json, "bench faults", result, seed=0, threads=1)
    return int(bool(bad) or any(not peer["good"] for peer in peers))


if __name__ == "__main__":
    raise SystemExit(main())
