"""The benchmarks' own tools: faults come where they say, mutants are tried, bounds are judged."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from benchmarks import faults, fuzz_targets, memory, peers
from benchmarks.fault_links import BYTES, MESSAGES, Injector
from benchmarks.fuzz import run_chunk
from kvferry.errors import TransferFailed
from kvferry.evaluate.bench_codec import CodecBenchSettings, run
from kvferry.ship import frame
from tests.channel.proxy import Flow


def stream(fault: Injector, down: bool, length: int = 60_000, block: int = 4_000) -> bytes:
    """What comes out of one direction of the first connection."""
    data = random.Random(0).randbytes(length)
    flow, out = Flow(0, down, 0), b""
    for start in range(0, length, block):
        piece = data[start : start + block]
        kept = fault(flow, piece)
        if kept is None:
            break
        flow.passed += len(piece)
        out += kept
    return out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", sorted(BYTES))
def test_a_fault_changes_the_stream_at_its_place_and_not_before(kind: str, seed: int) -> None:
    fault = BYTES[kind](seed, (50_000, 50_000))
    data = random.Random(0).randbytes(60_000)
    assert stream(fault, not fault.down) == data
    assert fault.count == 0
    out = stream(fault, fault.down)
    assert fault.count == 1
    assert out != data
    first = next((i for i, (a, b) in enumerate(zip(out, data, strict=False)) if a != b), len(out))
    before = fault.place // 4_000 * 4_000 if kind == "flip" else fault.place  # more bits of the same block may be wrong
    assert first >= before
    lengths = {"cut": len(out) <= fault.place, "stall": len(out) == fault.place, "drop bytes": len(out) < 60_000}
    assert lengths.get(kind, len(out) > 60_000 if kind == "duplicate bytes" else len(out) == 60_000)


@pytest.mark.parametrize("kind", ["flip", "cut", *MESSAGES, "kill producer, start another", "kill consumer"])
def test_a_case_of_each_kind_comes_out_right(kind: str) -> None:
    case = faults.run_case(kind, 3)
    assert (case.outcome, case.detail) == ("right", "")
    assert case.injected > 0


def test_a_killed_producer_is_a_typed_error() -> None:
    case = faults.run_case("kill producer", 3)
    assert case.outcome == "error"
    assert case.detail.startswith("TransferFailed: waited 3 s")


def test_what_is_wrong_is_called_so() -> None:
    taken = faults.Taken(digest=b"other")
    assert faults.judge(taken, b"right")[0] == "wrong"
    assert faults.judge(None, b"right")[0] == "hang"
    assert faults.judge(faults.Taken(digest=b"right", longest_wait=99), b"right")[0] == "hang"
    assert faults.judge(faults.Taken(error=TransferFailed("late")), b"right")[0] == "error"
    assert faults.judge(faults.Taken(error=KeyError("x")), b"right")[0] == "crash"


@pytest.mark.parametrize("target", sorted(fuzz_targets.TARGETS))
def test_mutants_of_each_kind_do_no_harm(target: str) -> None:
    tally = run_chunk(target, 10_000, 60)
    assert tally.faults == []
    assert tally.outcomes["refused"] > 0


class Anything(bytes):
    """Equal to every checksum."""

    __hash__ = bytes.__hash__

    def __ne__(self, other: object) -> bool:
        return False


def test_harm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksums of frames, damaged ones get in, and are told from good ones."""
    fuzz_targets.packets()
    monkeypatch.setattr(frame, "xxhash", SimpleNamespace(xxh3_64_digest=lambda data: Anything()))
    tally = run_chunk("frame, blind", 10_000, 60)
    assert tally.outcomes["fault"] == len(tally.faults) > 5
    assert all("a damaged frame was accepted" in fault for fault in tally.faults)


def test_flat_and_not() -> None:
    steady = [(10**6, 3, 9)] * 100
    assert memory.flat(steady, 10**5)["within"]
    growing = [(10**6 + 10**4 * i, 3, 9) for i in range(100)]
    assert not memory.flat(growing, 10**5)["within"]
    assert not memory.flat([(10**6, 3, 9 + i) for i in range(100)], 10**5)["within"]


def test_peers_that_are_not_installed_are_named() -> None:
    settings = CodecBenchSettings(("raw",), ("bfloat16",), (1,), (0.5,), rounds=1, packets=False)
    chosen = {name: peers.PEERS[name] for name in ("kvcodec", "lmcache_turboquant", "torch_eager")}
    result = run(settings, chosen)
    seen = {row.peer for row in result.rows} | {skipped["peer"] for skipped in result.skipped}
    assert {"kvferry", "torch eager", "kvcodec", "lmcache_turboquant"} <= seen
