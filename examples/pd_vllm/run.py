"""A prefill server, a decode server and a proxy between them: first-token times and bytes, with kvferry and without.

    .venv-vllm/bin/python examples/pd_vllm/run.py [--model NAME] [--budget B] [--requests N]

Both servers are vLLM's OpenAI server with kvferry's connector; they share a folder of packets and nothing else. Half of
the prompts go through the proxy, the other half straight to the decode server, which then computes them itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxy import send, serve

from kvferry.hf.models import resolve
from kvferry.hf.text import default_text

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
START_SECONDS = 600.0


def main() -> None:
    """Start everything, ask, print one JSON object, end everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--budget", type=float, default=0.28)
    parser.add_argument("--requests", type=int, default=4, help="each way")
    parser.add_argument("--characters", type=int, default=3000, help="of a prompt")
    parser.add_argument("--ports", type=int, nargs=2, default=(8100, 8200), metavar=("PREFILL", "DECODE"))
    given = parser.parse_args()
    model = resolve(given.model)
    text = default_text()
    prompts = [text[start : start + given.characters] for start in range(0, 2 * given.requests * 3000, 3000)]
    with tempfile.TemporaryDirectory() as store:
        extra = {"store": store, "budget": given.budget}
        with (
            server(model, given.ports[0], "kv_producer", extra) as prefill,
            server(model, given.ports[1], "kv_consumer", extra) as decode,
        ):
            producer, consumer = wait(*prefill), wait(*decode)
            proxy = serve(0, producer, consumer)
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            through = f"http://127.0.0.1:{proxy.server_port}"
            for address in (consumer, producer):  # the first request of a server warms it up
                first_token(address, model, "Warm")
            shipped = [first_token(through, model, prompt) for prompt in prompts[: given.requests]]
            alone = [first_token(consumer, model, prompt) for prompt in prompts[given.requests :]]
            loaded = counters(consumer)
            proxy.shutdown()
        files = sum(file.stat().st_size for file in Path(store).rglob("*.safetensors"))
    report = {
        "model": given.model,
        "requests": given.requests,
        "first_token_s": {
            "prefill server, packets, decode server": round(statistics.median(shipped), 4),
            "decode server alone": round(statistics.median(alone), 4),
        },
        "store_bytes": files,
        "loaded_bytes": loaded["loaded_bytes"],
        "loaded_bytes_at_16_bit": loaded["loaded_full_bytes"],
        "loaded_tokens": loaded["loaded_tokens"],
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


@contextmanager
def server(model: str, port: int, role: str, extra: dict[str, Any]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A vLLM server with the connector; its address and process. Ended when the block is left."""
    transfer = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    options = ["--model", model, "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *(*options, "--enforce-eager", "--kv-transfer-config", json.dumps(transfer)),
        ],
        env={**os.environ, **ENVIRONMENT},
        stdout=sys.stderr,
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait(address: str, process: subprocess.Popen[bytes]) -> str:
    """The address of a server, once it answers."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return address
        except (urllib.error.URLError, OSError) as error:
            if process.poll() is not None:
                raise RuntimeError(f"the server for {address} ended with exit code {process.returncode}") from error
            if time.monotonic() > until:
                raise TimeoutError(f"{address} did not start within {START_SECONDS:g} s") from error
            time.sleep(0.5)


def first_token(address: str, model: str, prompt: str) -> float:
    """Seconds until the first token of a streamed completion; the rest is read, too."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    begin = time.perf_counter()
    seconds = None
    with send(address, "/v1/completions", body) as response:
        if response.status != 200:
            raise RuntimeError(f"{address} answered {response.status}: {response.read(500)!r}")
        for line in response:
            if seconds is None and line.startswith(b"data: {"):
                seconds = time.perf_counter() - begin
    if seconds is None:
        raise RuntimeError(f"{address} sent no token")
    return seconds


def counters(address: str) -> dict[str, float]:
    """The connector's counters of a server's Prometheus page."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
        for line in page.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name.startswith("vllm:kvferry_") and name.endswith("_total"):
                found[name.removeprefix("vllm:kvferry_").removesuffix("_total")] = float(value)
    return found


if __name__ == "__main__":
    main()
