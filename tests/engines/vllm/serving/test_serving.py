"""A producer's and a consumer's engine, each in a process of its own, against one engine without a connector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import kvferry as kv
from benchmarks.vllm_engine import Answers, Job, run
from benchmarks.vllm_results import first_token_kl
from kvferry.engines.vllm.chain import LEAST_TAIL
from kvferry.engines.vllm.interchange import fetch, publish
from kvferry.engines.vllm.store import FolderStore
from tests.engines.vllm.serving.conftest import (
    CHUNK,
    TIE,
    check_same,
    chunks,
    divergence,
    loaded,
    next_tokens,
    prompts_of,
)

Prompts = list[list[int]]


def test_a_producer_answers_as_ever_and_saves_each_chunk_once(
    produced: tuple[Path, Answers], aggregated: Answers, prompts: Prompts
) -> None:
    store, answers = produced
    check_same(answers.tokens, aggregated)
    different = {tuple(ids[: stop + CHUNK]) for ids in prompts for stop in range(0, len(ids) - CHUNK + 1, CHUNK)}
    different |= {tuple(ids) for ids in prompts if len(ids) % CHUNK >= LEAST_TAIL}
    assert len(list(store.rglob("*.segment.safetensors"))) == len(different)
    assert answers.count("saved_packets") == len(different)
    assert answers.count("saved_bytes") == answers.count("saved_full_bytes") > 0
    assert answers.count("save_failures") == answers.count("lookups") == 0


def test_a_consumer_in_the_background_with_its_own_prefix_cache(
    produced: tuple[Path, Answers],
    aggregated: Answers,
    prompts: Prompts,
    smollm_folder: str,
    copy_of: Callable[[Path], Path],
) -> None:
    """All prompts twice: the second time its own prefix cache has them. Then one of which the store has another
    model's packets, and one that Transformers has captured.
    """
    store = copy_of(produced[0])
    foreign, captured = prompts_of(smollm_folder, [200, 300], skip=9000)
    model, _ = kv.load_model(smollm_folder)
    other = kv.capture(model, foreign)
    publish(replace(other, identity=replace(other.identity, weights="sha256:0")), FolderStore(store))
    assert publish(kv.capture(model, captured), FolderStore(store)) == 256
    answers = run(
        Job(
            smollm_folder,
            [*prompts, *prompts, foreign, captured],
            batches=[8, 8, 1, 1],
            role="kv_consumer",
            extra={"store": str(store)},
        )
    )
    check_same(answers.tokens[:8], aggregated)
    check_same(answers.tokens[8:16], aggregated)
    assert answers.cached == [*loaded(prompts) * 2, 0, 256]
    assert answers.count("refusals") == 1
    assert answers.count("load_failures") == answers.count("saved_packets") == 0
    assert (
        answers.count("loaded_bytes") > 0.99 * sum(file.stat().st_size for file in produced[0].rglob("*.segment.*")) / 2
    )
    (first,) = next_tokens(model, captured, answers.tokens[17][:1])
    assert first.max() - first[answers.tokens[17][0]] <= TIE, "two libraries' kernels differ in the last bits only"


def test_a_consumer_that_waits_with_no_prefix_cache_and_too_little_memory(
    produced: tuple[Path, Answers], aggregated: Answers, prompts: Prompts, smollm_folder: str
) -> None:
    """Three prompts of three pages, each about to need a fourth, in ten: one is preempted, and loaded anew."""
    engine = {
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 11,
        "max_num_batched_tokens": 256,
        "enable_chunked_prefill": True,
        "max_model_len": 1024,
    }
    extra = {"store": str(produced[0]), "mode": "sync"}
    chosen = (2, 3, 6)
    long = [prompts[index] for index in chosen]
    answers = run(Job(smollm_folder, long, engine=engine, role="kv_consumer", extra=extra))
    check_same(answers.tokens, aggregated, chosen)
    assert answers.counters["vllm:num_preemptions"] > 0
    assert answers.count("loaded_tokens") > sum(loaded(long)), "a preempted request is loaded again"
    assert answers.count("load_failures") == 0


@pytest.mark.parametrize(("budget", "most_kl"), [(0.52, 0.01), (0.28, 0.05)])
def test_lower_budgets_stay_near(
    aggregated: Answers,
    prompts: Prompts,
    smollm_folder: str,
    tmp_path: Path,
    budget: float,
    most_kl: float,
) -> None:
    """One engine that is both, without a prefix cache: what it saved in a first round it loads in the next."""
    long = [2, 3, 4, 6]
    count = len(long)
    answers = run(
        Job(
            smollm_folder,
            [prompts[index] for index in long] * 2,
            batches=[count, count],
            logprobs=20,
            engine={"enable_prefix_caching": False},
            role="kv_both",
            extra={"store": str(tmp_path), "budget": budget},
        )
    )
    want = replace(
        aggregated,
        tokens=[aggregated.tokens[index] for index in long],
        logprobs=[aggregated.logprobs[index] for index in long],
    )
    check_same(answers.tokens[:count], want)
    assert answers.cached == [*[0] * count, *loaded([prompts[index] for index in long])]
    assert answers.count("saved_bytes") <= budget * answers.count("saved_full_bytes")
    second = replace(answers, tokens=answers.tokens[count:], logprobs=answers.logprobs[count:])
    assert sum(first_token_kl(second, want, index) for index in range(count)) / count < most_kl
    assert sum(have[0] == ids[0] for have, ids in zip(second.tokens, want.tokens, strict=True)) >= 0.75 * count


def damaged(store: Path, prompts: Prompts, index: int, chunk: int) -> None:
    """Flip a bit of what the store holds of one prompt's chunk."""
    from kvferry.engines.vllm.chain import chain

    path = FolderStore(store).path(chain(prompts[index], CHUNK)[chunk], "segment")
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_failed_loads_are_computed_again(
    produced: tuple[Path, Answers],
    aggregated: Answers,
    prompts: Prompts,
    smollm_folder: str,
    copy_of: Callable[[Path], Path],
    mode: str,
) -> None:
    store = copy_of(produced[0])
    damaged(store, prompts, 3, 1)
    damaged(store, prompts, 4, 0)
    extra = {"store": str(store), "mode": mode}
    engine = {"block_size": 32} if mode == "sync" else {}  # a chunk and a tail are several pages then
    answers = run(Job(smollm_folder, prompts, role="kv_both", extra=extra, engine=engine))
    check_same(answers.tokens, aggregated)
    assert answers.count("load_failures") == 2
    assert len(list(store.rglob("*.damaged"))) == 2


def test_failed_loads_fail_their_own_requests_only(
    produced: tuple[Path, Answers],
    aggregated: Answers,
    prompts: Prompts,
    smollm_folder: str,
    copy_of: Callable[[Path], Path],
) -> None:
    store = copy_of(produced[0])
    damaged(store, prompts, 3, 1)
    answers = run(Job(smollm_folder, prompts, role="kv_consumer", extra={"store": str(store)}, failure_policy="fail"))
    assert answers.finish == ["length"] * 3 + ["error"] + ["length"] * 4
    others = [index for index in range(8) if index != 3]
    check_same([answers.tokens[index] for index in others], aggregated, others)


def test_gemma_with_sliding_layers_and_a_wide_head(gemma_folder: str, tmp_path: Path) -> None:
    """Each prompt three times: computed, from the engine's own prefix cache, and, that forgotten, from the store.

    The engine's own hit is the reference: beside it, computing anything differs in nothing but where pages come from.
    """
    prompts = prompts_of(gemma_folder, [300, 600])
    extra = {"store": str(tmp_path), "mode": "sync", "save": "background", "tails": False}  # else batches would differ
    job = Job(gemma_folder, prompts * 3, batches=[2, 2, 2], reset=True, logprobs=5, role="kv_both", extra=extra)
    answers = run(job)
    assert answers.cached == [0, 0, 256, 512, 256, 512]
    assert answers.count("loaded_tokens") == 768
    assert answers.tokens[4:] == answers.tokens[2:4]
    assert answers.logprobs[4:] == answers.logprobs[2:4], "bit for bit"


def test_another_models_packets_stop_an_engine_that_is_told_so(
    produced: tuple[Path, Answers], prompts: Prompts, gemma_folder: str
) -> None:
    extra = {"store": str(produced[0]), "identity": "raise"}
    with pytest.raises(kv.IncompatibleIdentity) as caught:
        run(Job(gemma_folder, [prompts[2]], role="kv_consumer", extra=extra))
    assert {"model", "weights", "num_layers"} <= caught.value.differences.keys()


def test_what_a_producer_saved_continues_in_transformers(
    produced: tuple[Path, Answers], aggregated: Answers, prompts: Prompts, smollm_folder: str
) -> None:
    from kvferry.hf.identity import identity_of

    model, _ = kv.load_model(smollm_folder)
    for index in (2, 4):
        snapshot = fetch(prompts[index][:-1], FolderStore(produced[0]), identity_of(model))
        assert snapshot is not None
        assert snapshot.seq_len == chunks(prompts)[index]
        own = next_tokens(model, prompts[index], aggregated.tokens[index])
        continued = next_tokens(model, prompts[index], aggregated.tokens[index], snapshot.to_cache(model))
        assert divergence(continued, own) < 0.01
