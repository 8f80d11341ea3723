"""LMCache's own server with the serde, and LMCache's own client, in processes of their own: what one server's life
stored, the next one's finds."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.lmcache.storage.conftest import PATIENCE

ENVIRONMENT = {**os.environ, "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1", "OMP_NUM_THREADS": "1"}
LAYERS, HEADS, DIM, TOKENS = 8, 3, 64, 512
CHUNK_BYTES = 2 * LAYERS * 256 * HEADS * DIM * 2


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def server(store: Path, log: Path, quantizer: str) -> Iterator[tuple[int, int]]:
    """LMCache's server over a folder; yields its two ports once it says that it is up."""
    port, http = free_port(), free_port()
    serde = {"type": "kvferry", "num_kv_heads": HEADS, "head_dim": DIM, "quantizer": quantizer}
    adapter = json.dumps({"type": "fs", "base_path": str(store), "serde": serde})
    arguments = f"""server --supported-transfer-mode engine_driven --host 127.0.0.1 --port {port}
        --http-host 127.0.0.1 --http-port {http} --l1-size-gb 0.25 --no-l1-use-lazy --eviction-policy LRU"""
    command = [sys.executable, "-m", "kvferry.engines.lmcache", *arguments.split(), "--l2-adapter", adapter]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    up = threading.Event()

    def follow() -> None:
        with log.open("w") as out:
            for line in process.stdout or ():
                out.write(line)
                if "Uvicorn running" in line:
                    up.set()
        up.set()  # it has ended

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        assert up.wait(PATIENCE)
        assert process.poll() is None, log.read_text()
        yield port, http
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        follower.join()


def wait_for_files(store: Path, count: int) -> list[int]:
    """Sizes of the chunks' files, once all are there: each appears whole, some time after its chunk is in L1."""
    deadline = time.monotonic() + PATIENCE
    while len(files := list(store.glob("*.data"))) < count:
        assert time.monotonic() < deadline, f"{len(files)} of {count} chunks were stored"
        time.sleep(0.05)
    return [file.stat().st_size for file in files]


def client(port: int, http: int) -> str:
    """Three requests of two chunks each: looked up, stored where they are missing, retrieved."""
    shape = f"(2,128,16,{HEADS},{DIM}):bfloat16:{LAYERS}"
    arguments = f"""bench server --mode cpu --rpc-url tcp://127.0.0.1:{port} --url http://127.0.0.1:{http} --end 3
        --num-tokens {TOKENS} --interval 0 --num-blocks 128 --kvcache-shape-spec {shape}"""
    command = [sys.executable, "-m", "lmcache.cli.main", *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def checksums(text: str, when: str) -> dict[str, str]:
    """LMCache's checksum of each request's chunks."""
    return dict(re.findall(rf"\[seq (\d)/{when}\] CHECKSUM: (\w+) \(2 chunks\)", text))


@pytest.mark.slow
@pytest.mark.parametrize(("quantizer", "ratio"), [("raw", 1.01), ("sym8", 0.53)])
def test_a_server_finds_what_the_one_before_it_stored(tmp_path: Path, quantizer: str, ratio: float) -> None:
    store, logs = tmp_path / "store", [tmp_path / "first.log", tmp_path / "second.log"]
    with server(store, logs[0], quantizer) as ports:
        first = client(*ports)
        sizes = wait_for_files(store, 6)
    with server(store, logs[1], quantizer) as ports:
        second = client(*ports)
    stored, found = checksums(first, "cold"), checksums(second, "warm")
    assert len(stored) == len(found) == 3
    assert (stored == found) == (quantizer == "raw")
    assert re.findall(r"\[seq (\d)/cold\] LOOKUP: 2/2 chunks hit", second) == ["0", "1", "2"]
    loads = re.findall(r"2/2 retained keys \((\d) L1, (\d) L2\).*req-\d-cold", logs[1].read_text())
    assert loads == [("0", "2")] * 3
    assert len(sizes) == len(list(store.iterdir())) == 6
    assert max(sizes) < ratio * CHUNK_BYTES
    for log in logs:
        assert "Traceback" not in log.read_text()
