"""One vLLM engine in a process of its own, for tests and measurements; needs the environment of ``make vllm-venv``.

It is forked from a server that has vLLM imported already. Importing takes ten seconds of a core, and two engines
cannot live in one process, as they would share one connector.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from kvferry.channel.faults import describe, revive

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "kvferry.engines.vllm.connector"]
TIMEOUT = 300.0


@dataclass(frozen=True)
class Job:
    """What an engine has to do.

    Attributes:
        model: folder.
        prompts: token ids.
        batches: how many prompts go in together, in order; all of them by default.
        reset: forget the engine's own prefix cache before the last batch.
        max_tokens: to generate.
        logprobs: of so many tokens a step.
        engine: further arguments of `LLM`.
        role: of the connector; ``None``: without one.
        extra: its settings.
        connector: its name; by default kvferry's.
        failure_policy: of failed loads.
        environment: variables to set before the engine starts.
        transfer: for each prompt what a connector is told of it (``kv_transfer_params``); none by default.
    """

    model: str
    prompts: list[list[int]]
    batches: list[int] = field(default_factory=list)
    reset: bool = False
    max_tokens: int = 16
    logprobs: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    role: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    connector: str = "KVFerryConnector"
    failure_policy: str = "recompute"
    environment: dict[str, str] = field(default_factory=dict)
    transfer: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Answers:
    """What came of it: for each prompt its tokens, why they ended, cached prompt tokens, and log probabilities.

    ``first_token`` are seconds from a prompt's arrival to its first token, ``seconds`` those of each batch,
    ``counters`` those of the engine's Prometheus page (of histograms the sums), ``transfer`` what a connector tells
    the next engine of each prompt, and ``error``, as data, is what stopped it.
    """

    tokens: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    transfer: list[dict[str, Any] | None] = field(default_factory=list)
    error: dict[str, Any] | None = None

    def count(self, name: str) -> float:
        """A counter of the connector."""
        return self.counters[f"vllm:kvferry_{name}"]


def run(job: Job) -> Answers:
    """Serve a job in a fresh process."""
    with served(job) as answers:
        return answers


@contextmanager
def served(job: Job) -> Iterator[Answers]:
    """Serve a job in a fresh process; the engine stays up, with what its connector offers, until the block is left."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    mine, theirs = context.Pipe()
    process = context.Process(target=_child, args=(job, theirs))
    process.start()
    theirs.close()
    try:
        answers = _told(mine, process)
        if answers.error is not None:
            raise revive(answers.error)
        yield answers
        mine.close()
        process.join(TIMEOUT)
        if process.exitcode != 0:
            raise RuntimeError(f"the engine's process did not end as it should: exit code {process.exitcode}")
    finally:
        mine.close()
        process.join(30)
        process.kill()


def _told(mine: Connection, process: BaseProcess) -> Answers:
    if not mine.poll(TIMEOUT):
        raise TimeoutError(f"the engine gave no answer in {TIMEOUT:g} s")
    try:
        answers: Answers = mine.recv()
    except EOFError as error:
        process.join(30)
        raise RuntimeError(f"the engine's process ended with exit code {process.exitcode}") from error
    return answers


def _child(job: Job, connection: Connection) -> None:
    os.environ.update(job.environment)
    engine = None
    try:
        engine, answers = _serve(job)
    except Exception as error:  # whatever stops the engine is what the test is told
        answers = Answers(error=describe(error))
    connection.send(answers)
    with suppress(EOFError):
        connection.recv()  # the other side leaves when the engine is no longer needed
    if engine is not None:
        engine.llm_engine.engine_core.shutdown()


def _serve(job: Job) -> tuple[Any, Answers]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    chosen: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "seed": 0,
        "disable_log_stats": False,
        **job.engine,
    }
    if job.role is not None:
        chosen["kv_transfer_config"] = KVTransferConfig(
            kv_connector=job.connector,
            kv_connector_module_path="kvferry.engines.vllm" if job.connector == "KVFerryConnector" else None,
            kv_role=job.role,
            kv_connector_extra_config=job.extra,
            kv_load_failure_policy=job.failure_policy,
        )
    llm = LLM(job.model, **chosen)
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=job.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=job.logprobs,
            extra_args={"kv_transfer_params": job.transfer[index]} if job.transfer else None,
        )
        for index in range(len(job.prompts))
    ]
    outputs: list[Any] = []
    seconds: list[float] = []
    batches = job.batches or [len(job.prompts)]
    for index, count in enumerate(batches):
        if job.reset and index == len(batches) - 1 and not llm.reset_prefix_cache():
            raise RuntimeError("the engine's prefix cache is in use")
        span = slice(len(outputs), len(outputs) + count)
        batch = [{"prompt_token_ids": ids} for ids in job.prompts[span]]
        begin = time.perf_counter()
        outputs += llm.generate(batch, sampling[span], use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    counters: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", getattr(metric, "sum", None))
        if value is not None:
            counters[metric.name] = counters.get(metric.name, 0) + value
    firsts = [output.outputs[0] for output in outputs]
    answers = Answers(
        tokens=[list(first.token_ids) for first in firsts],
        finish=[str(first.finish_reason) for first in firsts],
        cached=[output.num_cached_tokens or 0 for output in outputs],
        logprobs=[
            [{token: entry.logprob for token, entry in step.items()} for step in first.logprobs or []]
            for first in firsts
        ],
        first_token=[output.metrics.first_token_latency if output.metrics else 0.0 for output in outputs],
        seconds=seconds,
        counters=counters,
        transfer=[output.kv_transfer_params for output in outputs],
    )
    return llm, answers
