"""A prefill engine of one model, a decode engine of another: what the second answers follows from the mapped cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvferry as kv
from benchmarks.vllm_engine import Job, run
from kvferry.engines.vllm.chain import chain
from kvferry.engines.vllm.store import FolderStore
from kvferry.evaluate.map_gate import CHECKED_TOKENS
from kvferry.evaluate.map_run import transfer
from kvferry.hf.text import default_text
from kvferry.map.gate import record_path
from tests.engines.vllm.serving.conftest import CHUNK, next_tokens
from tests.map import builders

ENGINE = {"dtype": "float32", "max_model_len": 512}


def test_a_decode_engine_of_another_model_goes_on_from_the_mapped_cache(tmp_path: Path) -> None:
    """Three prompts: two that the source's engine has saved, the second damaged by a bit, and one that it has not."""
    source, target, mapper, record = builders.judged_pair(tmp_path, head_dim=32)
    record.save(tmp_path / "cache" / "gates" / record_path(record.mapper, record.target[0]).name)
    letters = [ord(letter) % 128 for letter in default_text()]
    prompts = [letters[:300], letters[5000:5290], letters[9000:9200]]
    extra = {"store": str(tmp_path / "store")}
    run(Job(str(tmp_path / "source"), prompts[:2], role="kv_producer", engine=ENGINE, extra=extra))
    damaged = FolderStore(tmp_path / "store").path(chain(prompts[1], CHUNK)[1], "segment")
    data = bytearray(damaged.read_bytes())
    data[-1000] ^= 1
    damaged.write_bytes(data)
    answers = run(
        Job(
            str(tmp_path / "target"),
            prompts,
            logprobs=20,
            role="kv_consumer",
            engine=ENGINE,
            extra={**extra, "mapper": str(tmp_path / "mapper"), "floors": {"context_gain": None}},
            environment={"KVFERRY_CACHE": str(tmp_path / "cache")},
        )
    )
    assert answers.count("loaded_tokens") == answers.count("mapped_tokens") == 299 + CHUNK
    assert answers.count("map_ms") > 0
    assert answers.count("load_failures") == 1
    for index, held in enumerate((299, CHUNK, 0)):
        cache = None
        if held:
            sent = kv.capture(source, torch.tensor([prompts[index][:held]]))
            cache = transfer(mapper, target, sent, native_prefix=CHECKED_TOKENS).snapshot.to_cache(target)
        expected = next_tokens(target, prompts[index], answers.tokens[index], cache)
        for step, listed in enumerate(answers.logprobs[index]):
            for token, value in listed.items():
                assert value == pytest.approx(float(expected[step, token]), abs=5e-4), (index, step, token)
    own = next_tokens(target, prompts[0], answers.tokens[0])
    assert max(abs(value - float(own[0, token])) for token, value in answers.logprobs[0][0].items()) > 5e-3


def test_without_a_record_of_the_gate_the_engine_does_not_start(tmp_path: Path) -> None:
    builders.judged_pair(tmp_path, head_dim=32)
    job = Job(
        str(tmp_path / "target"),
        [[1] * 200],
        role="kv_consumer",
        engine=ENGINE,
        extra={"store": str(tmp_path / "store"), "mapper": str(tmp_path / "mapper")},
        environment={"KVFERRY_CACHE": str(tmp_path / "cache")},
    )
    with pytest.raises(kv.InvalidInput, match="run 'kvferry map gate'"):
        run(job)
