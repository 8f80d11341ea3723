"""Peak memory of encode, decode and hand-off at a cache of 1 GiB, each in a fresh process; and over 100 hand-offs.

    python -m benchmarks.memory [--tokens 8192] [--handoffs 100] [--json FILE]

A peak is what the process's resident memory reaches beyond what it was before there was any cache: libraries are
loaded and everything has run once in small by then. The bounds:

    encode    source + packet + one frame
    decode    packet + target cache + one frame
    produce   as encode: the frames stay on offer until the consumer confirms
    consume   target cache + the frames in flight (those that the receiver asks for ahead, and the one at hand);
              measured with a glibc that gives freed frames back, and, beside it, as glibc is by default
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, rss
from kvferry.channel.socket import SocketReceiver, SocketSender
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.plan import plan
from kvferry.ship.reader import PacketReader
from kvferry.snapshot import Snapshot
from tests.ship.builders import realistic

ASKED: dict[str, dict[str, Any]] = {
    "uniform_int8": {"policy": "uniform_int8", "nominal_budget": 0.5},
    "sink_protect": {"policy": "sink_protect", "nominal_budget": 0.4, "scores": "positional"},
    "auto at 0.28": {"budget": 0.28},
}
"""What is encoded how: one tier, a mixture, and the quantisers of ``auto``."""

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc keeps freed blocks of up to 32 MiB for later; told so, it gives back those of 1 MiB and more."""

BY_DEFAULT = "consume, glibc's defaults"
"""The row in which freed frames that glibc keeps count as if they were in flight; not judged by the exit status."""

LAYERS, HEADS, DIM = 32, 8, 128
WINDOW = 8
TIMEOUT = 120.0
SMALL = {"seq_len": 512, "layers": 8}
"""The caches of the many hand-offs: 3 MB."""


def cache(tokens: int, seed: int = 0) -> Snapshot:
    """A cache of 128 KiB a token in bf16: 8,192 tokens are 1 GiB."""
    return realistic(tokens, layers=LAYERS, heads=HEADS, dim=DIM, seed=seed)


def quiet() -> int:
    """Run everything once in small; returns the resident memory of a process that holds no cache."""
    torch.set_num_threads(1)
    for asked in ASKED.values():
        packet = encode(realistic(256, layers=2), **asked)
        decode(packet)
        with SocketSender() as sender, sender.announce("small") as outgoing:
            outgoing.begin(packet.header_bytes, [len(frame) for frame in packet.frames])
            for frame in packet.frames:
                outgoing.push(frame)
            with SocketReceiver(sender.address).fetch("small") as incoming:
                assert sum(1 for _ in incoming.frames()) == len(packet.frames)
                incoming.confirm()
    return settled()


def settled() -> int:
    """Resident memory once what is free has been given back to the system."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return rss.now()


def measure(base: int, work: Callable[[], Any]) -> tuple[Any, int]:
    """Run ``work``; its result, and the peak beyond ``base``."""
    settled()  # what making the source took on the way is not the source
    rss.reset_peak()
    result = work()
    return result, rss.peak() - base


def judged(peak: int, **parts: int) -> dict[str, Any]:
    """A peak beside the sum of what there may be."""
    bound = sum(parts.values())
    return {"peak_bytes": peak, "bound_bytes": bound, "parts": parts, "within": peak <= bound}


def run_encode(tokens: int, name: str, path: str) -> dict[str, Any]:
    """Encode; the packet goes to ``path`` afterwards."""
    base = quiet()
    snapshot = cache(tokens)
    packet, peak = measure(base, lambda: encode(snapshot, **ASKED[name]))
    packet.save(path)
    return judged(peak, source=snapshot.nbytes, packet=len(packet), one_frame=max(map(len, packet.frames)))


def run_decode(path: str) -> dict[str, Any]:
    """Load a packet and decode it."""
    base = quiet()
    held: list[Packet] = []

    def work() -> Snapshot:
        held.append(Packet.load(path))
        return decode(held[0])

    snapshot, peak = measure(base, work)
    packet = held[0]
    return judged(peak, packet=len(packet), target=snapshot.nbytes, one_frame=max(map(len, packet.frames)))


def run_produce(tokens: int, name: str) -> dict[str, Any]:
    """Encode and offer, frame by frame; says the address first."""
    base = quiet()
    snapshot = cache(tokens)
    with SocketSender() as sender, sender.announce("big") as outgoing:
        say({"address": sender.address})

        def work() -> tuple[int, int]:
            planned = plan(snapshot, **ASKED[name])
            sizes = planned.frame_sizes
            outgoing.begin(planned.header_bytes, sizes)
            for frame in planned.frames():
                outgoing.push(frame)
            outgoing.finish(TIMEOUT)
            return planned.nbytes, max(sizes)

        (packet, frame), peak = measure(base, work)
    return judged(peak, source=snapshot.nbytes, packet=packet, one_frame=frame)


def run_consume(address: str) -> dict[str, Any]:
    """Fetch and decode as it arrives."""
    base = quiet()
    limits: list[int] = []

    def work() -> Snapshot:
        with SocketReceiver(address, timeout=TIMEOUT, window=WINDOW).fetch("big") as incoming:
            limits.extend(incoming.limits)
            reader = PacketReader(incoming.header)
            for arrival in incoming.frames():
                reader.add(arrival.data)
            incoming.confirm()
        return reader.snapshot()

    snapshot, peak = measure(base, work)
    return judged(peak, target=snapshot.nbytes, frames_in_flight=(WINDOW + 1) * max(limits))


def _state() -> tuple[int, int, int]:
    return rss.now(), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def run_many_produce(handoffs: int) -> dict[str, Any]:
    """Small caches, one after another, through one server."""
    quiet()
    snapshot = realistic(**SMALL)
    states = []
    with SocketSender() as sender:
        offers = [sender.announce(f"h{number}") for number in range(handoffs)]
        say({"address": sender.address})
        for outgoing in offers:
            with outgoing:
                planned = plan(snapshot, **ASKED["sink_protect"])
                outgoing.begin(planned.header_bytes, planned.frame_sizes)
                for frame in planned.frames():
                    outgoing.push(frame)
                outgoing.finish(TIMEOUT)
            states.append(_state())
    return flat(states, snapshot.nbytes)


def run_many_consume(address: str, handoffs: int) -> dict[str, Any]:
    """The other end; what comes is compared with what is to come."""
    quiet()
    right = decode(encode(realistic(**SMALL), **ASKED["sink_protect"]))
    states = []
    for number in range(handoffs):
        with SocketReceiver(address, timeout=TIMEOUT).fetch(f"h{number}") as incoming:
            reader = PacketReader(incoming.header)
            for arrival in incoming.frames():
                reader.add(arrival.data)
            incoming.confirm()
        snapshot = reader.snapshot()
        for got, want in zip(snapshot.layers, right.layers, strict=True):
            assert got.keys is not None
            assert want.keys is not None
            assert torch.equal(got.keys, want.keys)
        states.append(_state())
    return flat(states, right.nbytes)


def flat(states: list[tuple[int, int, int]], cache_bytes: int) -> dict[str, Any]:
    """Growth from the second tenth to the last: less than one cache, and no thread or file more.

    Of files and threads the fewest of a tenth count: the next peer may have come while one leaves.
    """
    tenth = max(1, len(states) // 10)
    early, late = states[tenth : 2 * tenth], states[-tenth:]
    growth = int(statistics.median(state[0] for state in late) - statistics.median(state[0] for state in early))
    threads, files = (min(s[i] for s in late) - min(s[i] for s in early) for i in (1, 2))
    return {
        "handoffs": len(states),
        "cache_bytes": cache_bytes,
        "growth_bytes": growth,
        "threads_more": threads,
        "files_more": files,
        "resident_bytes": [state[0] for state in states],
        "within": growth < cache_bytes and threads <= 0 and files <= 0,
    }


def say(found: dict[str, Any]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


ROLES: dict[str, Callable[..., dict[str, Any]]] = {
    "encode": lambda tokens, name, path: run_encode(int(tokens), name, path),
    "decode": run_decode,
    "produce": lambda tokens, name: run_produce(int(tokens), name),
    "consume": run_consume,
    "many-produce": lambda handoffs: run_many_produce(int(handoffs)),
    "many-consume": lambda address, handoffs: run_many_consume(address, int(handoffs)),
}


def start(role: str, *arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A fresh process for one role."""
    command = [sys.executable, "-m", "benchmarks.memory", "--role", role, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that it says."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise SystemExit(f"a process ended with status {process.wait()} before it had said anything")
    found: dict[str, Any] = json.loads(text)
    return found


def alone(role: str, *arguments: object) -> dict[str, Any]:
    """Run one role to its end."""
    with start(role, *arguments) as process:
        return line(process)


def pair(
    producer: tuple[object, ...], consumer: tuple[object, ...], environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run two roles that talk to each other; ``environment`` is the consumer's."""
    with start(*map(str, producer)) as one:
        address = line(one)["address"]
        with start(str(consumer[0]), address, *consumer[1:], environment=environment) as other:
            got = line(other)
        return line(one), got


def main() -> int:
    """0 when every peak is within its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8_192, help="128 KiB each")
    parser.add_argument("--handoffs", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        say(ROLES[options.role[0]](*options.role[1:]))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ASKED:
            record.tell(f"memory: {name}")
            path = Path(folder) / "packet"
            found = {"encode": alone("encode", options.tokens, name, path), "decode": alone("decode", path)}
            ends = (("produce", options.tokens, name), ("consume",))
            found["produce"], found["consume"] = pair(*ends, GIVES_BACK)
            _, found[BY_DEFAULT] = pair(*ends)
            rows += [{"work": work, "packet": name, **each} for work, each in found.items()]
    record.tell(f"memory: {options.handoffs} hand-offs")
    one, other = pair(("many-produce", options.handoffs), ("many-consume", options.handoffs))
    many = [{"end": "producer", **one}, {"end": "consumer", **other}]
    settings = {"tokens": options.tokens, "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "window": WINDOW}
    record.write(options.json, "bench memory", {"settings": settings, "rows": rows, "flat": many}, seed=0, threads=1)
    return int(not all(row["within"] for row in [*rows, *many] if row.get("work") != BY_DEFAULT))


if __name__ == "__main__":
    raise SystemExit(main())
