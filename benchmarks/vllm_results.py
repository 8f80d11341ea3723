"""What the vLLM connector does, on real engines: modes, budgets, failures, speed beside vLLM's own connectors.

    .venv-vllm/bin/python -m benchmarks.vllm_results MODEL --work DIR [--prompts N] [--text FILE] [--json FILE]

Every phase is an engine in a process of its own. What a phase gave is kept in DIR, so that a run that was stopped goes
on where it was. Bytes are those of the files in the store, counted outside of the engines.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import socket
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.vllm_engine import Answers, Job, run, served
from kvferry.engines.vllm.chain import chain
from kvferry.engines.vllm.store import FolderStore
from kvferry.errors import KVFerryError
from kvferry.evidence.statistics import bootstrap_mean, wilson
from kvferry.hf.models import resolve
from kvferry.hf.text import default_text

CHUNK = 128
LENGTHS = (140, 250, 260, 330, 380)  # some are about to need another page: few pages then mean preemptions
SHARED = 128
LOGPROBS = 20
ALONE = 20
NIXL_BYTES = "vllm:nixl_bytes_transferred"
BUDGETS = (0.52, 0.28)
NO_CACHE = {"enable_prefix_caching": False}
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 256}
SMALL = {**NO_CACHE, **CHUNKED, "num_gpu_blocks_override": 7, "max_model_len": 512}


@dataclass(frozen=True)
class Study:
    """What all phases share."""

    model: str
    prompts: list[list[int]]
    work: Path

    def job(self, **changes: Any) -> Job:
        """The prompts, one engine, no connector unless ``changes`` name one."""
        return replace(Job(self.model, self.prompts, logprobs=LOGPROBS), **changes)

    def store(self, name: str) -> Path:
        """A folder for packets."""
        return self.work / "stores" / name

    def phase(self, name: str, job: Job, serve: Callable[[Job], Answers] = run) -> Answers:
        """Run a job, or take what an earlier run kept of it."""
        kept = self.work / f"{name}.json"
        if kept.exists():
            return Answers(**_numbers(json.loads(kept.read_text(encoding="utf-8"))))
        record.tell(name)
        answers = serve(job)
        plain = {key: value for key, value in asdict(answers).items() if key != "error"}
        kept.write_text(json.dumps(plain), encoding="utf-8")
        return answers


def main() -> None:
    """Parse the options, run the phases, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's own reference topics")
    parser.add_argument("--other", default="gemma3-270m", help="a model whose packets are to be refused")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    folder = resolve(given.model)
    text = default_text() if given.text is None else given.text.read_text(encoding="utf-8")
    study = Study(folder, make_prompts(folder, text, given.prompts), given.work)
    reference = study.phase("aggregated", study.job())
    rows = [row("aggregated", study, reference, reference)]
    for measure in (modes, preemptions, budgets, failures, peers):
        rows += measure(study, reference)
    result = {
        "model": given.model,
        "prompts": given.prompts,
        "prompt_tokens": sum(map(len, study.prompts)),
        "rows": rows,
        "refusal": refusal(study, resolve(given.other)),
    }
    record.write(given.json, "vllm_results", result, seed=0, threads=1)


def make_prompts(folder: str, text: str, count: int) -> list[list[int]]:
    """Passages of `LENGTHS` tokens in turn; every fifth begins with the `SHARED` first tokens of the one before."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(count)]
    ids = tokenizer(text[: 12 * sum(lengths)], verbose=False).input_ids
    prompts: list[list[int]] = []
    for index, length in enumerate(lengths):
        prompt, ids = ids[:length], ids[length:]
        prompts.append([*prompts[-1][:SHARED], *prompt[SHARED:]] if index % 5 == 4 else prompt)
    return prompts


def modes(study: Study, reference: Answers) -> list[dict[str, Any]]:
    """Budget 1.0, in every way that an engine can be run."""
    store = study.store("full")
    producer = {"role": "kv_producer", "extra": {"store": str(store)}}
    rows = [row("producer, chunked", study, study.phase("producer", study.job(engine=CHUNKED, **producer)), reference)]
    rows[0]["store_bytes"] = _bytes(store)
    consumers: list[tuple[str, str, dict[str, Any]]] = [
        ("consumer, async", "async", {}),
        ("consumer, sync", "sync", {}),
        ("consumer, async, no prefix cache", "async", NO_CACHE),
        ("consumer, sync, chunked, no prefix cache", "sync", {**NO_CACHE, **CHUNKED}),
    ]
    for name, mode, engine in consumers:
        job = study.job(engine=engine, role="kv_consumer", extra={"store": str(store), "mode": mode})
        rows.append(row(name, study, study.phase(_file(name), job), reference))
    return rows


def preemptions(study: Study, reference: Answers) -> list[dict[str, Any]]:
    """Few pages, with and without a connector; and in float32, where rounding is too small to change a token.

    What a preempted request has decoded is computed anew in one pass, by the engine itself.
    """
    extra = {"store": str(study.store("full"))}
    job = study.job(engine=SMALL)
    consumer = replace(job, role="kv_consumer", extra=extra)
    rows = [
        row(name, study, study.phase(_file(name), one), reference)
        for name, one in (("aggregated, few pages", job), ("consumer, async, few pages", consumer))
    ]
    exact = {"dtype": "float32"}
    extra = {"store": str(study.store("full-float32"))}
    finer = study.phase("aggregated-float32", study.job(engine=exact))
    study.phase("producer-float32", study.job(engine=exact, role="kv_producer", extra=extra))
    for name, settings in (
        ("aggregated, few pages, float32", {}),
        ("consumer, async, few pages, float32", {"role": "kv_consumer", "extra": extra}),
    ):
        job = study.job(engine={**SMALL, **exact}, **settings)
        rows.append(row(name, study, study.phase(_file(name), job), finer))
    return rows


def budgets(study: Study, reference: Answers) -> list[dict[str, Any]]:
    """How near a consumer's answers stay when packets take fewer bytes."""
    rows = []
    for budget in BUDGETS:
        store, name = study.store(f"budget-{budget}"), f"budget {budget}"
        extra = {"store": str(store), "budget": budget}
        study.phase(_file(f"{name} producer"), study.job(role="kv_producer", extra=extra))
        job = study.job(engine=NO_CACHE, role="kv_consumer", extra=extra)
        rows.append(row(name, study, study.phase(_file(name), job), reference))
        rows[-1]["store_bytes"] = _bytes(store)
    return rows


def failures(study: Study, reference: Answers) -> list[dict[str, Any]]:
    """Every tenth prompt's first packet damaged."""
    rows = []
    for policy, mode in (("recompute", "async"), ("recompute", "sync"), ("fail", "async")):
        name = f"damaged, {policy}, {mode}"
        store = study.store(_file(name))
        if not store.exists():
            shutil.copytree(study.store("full"), store)
            for prompt in study.prompts[::10]:
                _damage(FolderStore(store).path(chain(prompt, CHUNK)[0], "segment"))
        extra = {"store": str(store), "mode": mode}
        job = study.job(role="kv_consumer", extra=extra, failure_policy=policy)
        rows.append(row(name, study, study.phase(_file(name), job), reference))
    return rows


def peers(study: Study, reference: Answers) -> list[dict[str, Any]]:
    """The same engine with no connector, kvferry's, vLLM's example connector (raw tensors in files) and its NIXL one.

    All prompts together, for the throughput; then some of them one by one, for the time to the first token.
    """
    count = len(study.prompts)
    some = study.prompts[:ALONE]
    both = {"prompts": study.prompts + some, "batches": [count] + [1] * len(some), "engine": NO_CACHE}
    rows = [row("alone: no connector", study, study.phase("alone", study.job(**both)), reference)]
    for name, store, changes in (
        ("alone: kvferry, budget 1.0", study.store("full"), {}),
        ("alone: kvferry, budget 0.28", study.store("budget-0.28"), {}),
        ("alone: ExampleConnector", study.store("example"), {"connector": "ExampleConnector"}),
    ):
        extra = {"shared_storage_path" if changes else "store": str(store)}
        if changes:
            study.phase("example-producer", study.job(role="kv_producer", engine=NO_CACHE, extra=extra, **changes))
        job = study.job(role="kv_consumer", extra=extra, **both, **changes)
        rows.append({**row(name, study, study.phase(_file(name), job), reference), "store_bytes": _bytes(store)})
    if find_spec("nixl") is None:
        record.tell("NixlConnector is left out: nixl is not installed (make vllm-nixl)")
        return rows
    name = "alone: NixlConnector"
    answers = study.phase(_file(name), study.job(**both), _over_nixl)
    return [*rows, {**row(name, study, answers, reference), "sent_bytes": answers.counters[NIXL_BYTES]}]


def _over_nixl(job: Job) -> Answers:
    """Serve a job with the prompts' caches read from another engine, which stays up meanwhile, over NIXL."""
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    ports = [{"UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())} for _ in range(2)]
    job = replace(job, connector="NixlConnector")
    producer = replace(job, role="kv_producer", max_tokens=1, environment=ports[0], transfer=[ask] * len(job.prompts))
    with served(producer) as offered:
        known = [told or {} for told in offered.transfer]
        return run(replace(job, role="kv_consumer", environment=ports[1], transfer=known))


def refusal(study: Study, other: str) -> dict[str, Any]:
    """What another model's engine says of the store's packets."""
    extra = {"store": str(study.store("full")), "identity": "raise"}
    try:
        run(Job(other, [study.prompts[0]], role="kv_consumer", extra=extra))
    except KVFerryError as error:
        return {"error": type(error).__name__, "differences": sorted(getattr(error, "differences", {}))[:8]}
    return {"error": None}


def row(name: str, study: Study, answers: Answers, reference: Answers) -> dict[str, Any]:
    """Figures of one phase, against the engine without a connector."""
    finished = [index for index in range(len(study.prompts)) if answers.finish[index] != "error"]
    equal = sum(answers.tokens[index] == reference.tokens[index] for index in finished)
    divergence = [first_token_kl(answers, reference, index) for index in finished]
    top = sum(answers.tokens[index][:1] == reference.tokens[index][:1] for index in finished)
    return {
        "phase": name,
        "n": len(study.prompts),
        "failed": len(study.prompts) - len(finished),
        "equal_answers": equal,
        "same_bits": sum(
            answers.tokens[index] == reference.tokens[index] and answers.logprobs[index] == reference.logprobs[index]
            for index in finished
        ),
        "margins_at_parting": sorted(
            round(margin_at_parting(answers, reference, index), 4)
            for index in finished
            if answers.tokens[index] != reference.tokens[index]
        ),
        "first_token_agreement": _rate(top, len(finished)),
        "kl_first_token": _interval(divergence),
        "cached_tokens": sum(answers.cached[: len(study.prompts)]),
        "preemptions": answers.counters.get("vllm:num_preemptions", 0),
        "seconds": round(answers.seconds[0], 3),
        "prompt_tokens_per_s": round(sum(map(len, study.prompts)) / answers.seconds[0], 1),
        "first_token_s": round(statistics.median(answers.first_token[: len(study.prompts)]), 4),
        "first_token_alone_s": _interval(answers.first_token[len(study.prompts) :]),
        "counters": {
            key.removeprefix("vllm:kvferry_"): round(value, 1)
            for key, value in answers.counters.items()
            if key.startswith("vllm:kvferry_") and value
        },
    }


def margin_at_parting(have: Answers, want: Answers, index: int) -> float:
    """How far the reference's first choice was ahead of its second one at the first token that differs, in nats."""
    pairs = zip(want.tokens[index], have.tokens[index], strict=False)
    step = next((step for step, (old, new) in enumerate(pairs) if old != new), None)
    if step is None:  # one of the two ends before
        return math.inf
    first, second = sorted(want.logprobs[index][step].values(), reverse=True)[:2]
    return first - second


def first_token_kl(have: Answers, want: Answers, index: int) -> float:
    """KL of the first token's distribution, over the tokens that both list and all others together, in nats."""
    old, new = want.logprobs[index][0], have.logprobs[index][0]
    both = old.keys() & new.keys()
    total = sum(math.exp(old[token]) * (old[token] - new[token]) for token in both)
    rest = [1 - sum(math.exp(side[token]) for token in both) for side in (old, new)]
    return total + (rest[0] * math.log(rest[0] / rest[1]) if min(rest) > 1e-9 else 0.0)


def _interval(values: list[float]) -> dict[str, Any] | None:
    if not values:
        return None
    interval = bootstrap_mean(values)
    return {
        "value": round(statistics.fmean(values), 6),
        "n": len(values),
        "ci": None if interval is None else [round(bound, 6) for bound in interval],
    }


def _rate(hits: int, n: int) -> dict[str, Any]:
    return {"value": round(hits / n, 4), "n": n, "ci": [round(bound, 4) for bound in wilson(hits, n)]}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _file(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def _numbers(kept: dict[str, Any]) -> dict[str, Any]:
    """JSON's keys are texts; those of log probabilities are token ids."""
    steps = [[{int(token): value for token, value in step.items()} for step in prompt] for prompt in kept["logprobs"]]
    return {**kept, "logprobs": steps}


if __name__ == "__main__":
    main()
