"""Prompts, and what the engine makes of them without a connector: the reference of every test here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.vllm_engine import Answers, Job, run
from kvferry.engines.vllm.chain import LEAST_TAIL
from kvferry.hf.compat import cache_argument
from kvferry.hf.models import resolve
from kvferry.hf.text import default_text

CHUNK = 128
TIE = 0.3
"""Nats between two tokens of which either may come: two steps of a 16-bit logit."""


@pytest.fixture(scope="session")
def smollm_folder() -> str:
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def gemma_folder() -> str:
    return resolve("gemma3-270m")


def prompts_of(folder: str, lengths: list[int], skip: int = 0) -> list[list[int]]:
    """Passages of English, one behind the other."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(default_text()[: 8 * (sum(lengths) + skip)], verbose=False).input_ids[skip:]
    found = []
    for length in lengths:
        found.append(ids[:length])
        ids = ids[length:]
    assert [len(prompt) for prompt in found] == lengths
    return found


@pytest.fixture(scope="session")
def prompts(smollm_folder: str) -> list[list[int]]:
    """Eight prompts: short of a chunk, a chunk exactly, longer ones, and three that begin with the same 256 tokens."""
    alone = prompts_of(smollm_folder, [100, 128, 380, 381, 513])
    shared = prompts_of(smollm_folder, [256, 60, 126, 7], skip=4000)
    return [*alone, *([*shared[0], *end] for end in shared[1:])]


@pytest.fixture(scope="session")
def aggregated(smollm_folder: str, prompts: list[list[int]]) -> Answers:
    """The prompts served by one engine with no connector."""
    return run(Job(smollm_folder, prompts, logprobs=20))


@pytest.fixture(scope="session")
def produced(
    smollm_folder: str, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Answers]:
    """The store that a producer fills at budget 1.0, prefills cut into pieces of 200 tokens; and what it answered."""
    store = tmp_path_factory.mktemp("store")
    engine = {"max_num_batched_tokens": 200, "enable_chunked_prefill": True}
    answers = run(
        Job(smollm_folder, prompts, logprobs=20, engine=engine, role="kv_producer", extra={"store": str(store)})
    )
    return store, answers


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a store that a test may damage or add to."""

    def copy(store: Path) -> Path:
        return Path(shutil.copytree(store, tmp_path / "copy"))

    return copy


def check_same(have: list[list[int]], want: Answers, indices: Sequence[int] | None = None) -> None:
    """Answers are the reference's to prompts ``indices``, token by token, up to a tie in the reference.

    Batches of other sizes go through other kernels, whose last bits differ; logits of 16 bits lie an eighth apart.
    """
    chosen = range(len(want.tokens)) if indices is None else indices
    for answer, index in zip(have, chosen, strict=True):
        for step, (new, old) in enumerate(zip(answer, want.tokens[index], strict=True)):
            if new != old:
                listed = want.logprobs[index][step]
                assert listed[old] - listed.get(new, float("-inf")) <= TIE, f"prompt {index}, token {step}"
                break


def next_tokens(model: Any, prompt: list[int], answer: list[int], cache: Any = None) -> torch.Tensor:
    """Log probabilities at each token of ``answer``, ``(tokens, vocabulary)``, by Transformers; from ``cache`` on."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    held = {} if cache is None else {cache_argument(model): cache}
    with torch.no_grad():
        logits = model(ids[:, 0 if cache is None else cache.get_seq_length() :], **held).logits
    return torch.log_softmax(logits[0, -len(answer) :].float(), -1)


def divergence(have: torch.Tensor, want: torch.Tensor) -> float:
    """Mean KL in nats."""
    return float((want.exp() * (want - have)).sum(-1).mean())


def stored(prompts: list[list[int]]) -> list[int]:
    """Tokens of each prompt that a producer saves: whole chunks, and a tail that is worth it."""
    return [len(ids) if len(ids) % CHUNK >= LEAST_TAIL else len(ids) // CHUNK * CHUNK for ids in prompts]


def loaded(prompts: list[list[int]]) -> list[int]:
    """Tokens of each prompt that a consumer loads: it computes the last one itself."""
    return [min(held, len(ids) - 1) for held, ids in zip(stored(prompts), prompts, strict=True)]


def chunks(prompts: list[list[int]]) -> list[int]:
    """Tokens of each prompt in whole chunks with at least one token behind them: what a prefix cache has of it."""
    return [(len(ids) - 1) // CHUNK * CHUNK for ids in prompts]
