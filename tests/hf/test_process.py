"""Through a file, and through another process that shares nothing but that file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kvferry as kv
from kvferry.hf.models import resolve
from tests.hf import tiny
from tests.hf.generation import bits, generate, native, real_prompt, same

ModelFactory = Callable[..., tuple[Any, Any]]


@pytest.mark.model
@pytest.mark.parametrize(("name", "length"), [("smollm2-135m", 129), ("gemma3-270m", 541)])
def test_a_snapshot_crosses_to_another_process(model_of: ModelFactory, tmp_path: Path, name: str, length: int) -> None:
    model, tokenizer = model_of(name)
    ids = real_prompt(tokenizer, length)
    path, out = tmp_path / "snapshot.safetensors", tmp_path / "out.safetensors"
    kv.capture(model, ids[:, :-1]).save(path)
    arguments = [resolve(name), path, int(ids[0, -1]), torch.get_num_threads(), out]
    command = [sys.executable, "-m", "tests.hf.resume", *arguments]
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    expected = generate(model, native(model, ids[:, :-1]), ids)
    there = load_file(out)
    assert torch.equal(there["tokens"], expected.sequences)
    assert torch.equal(there["bits"], bits(expected.logits))


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3, tiny.gemma3n])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_snapshot_crosses_a_file(make: Callable[..., Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = make(dtype=dtype), tiny.prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    snapshot = kv.capture(model, ids[:, :-1], attention_mask=mask[:, :-1], query_window=5)
    snapshot.save(tmp_path / "x")
    loaded = kv.Snapshot.load(tmp_path / "x")
    assert loaded.identity == snapshot.identity
    options = {"new": 10, "attention_mask": mask}
    cache = native(model, ids[:, :-1], mask=mask[:, :-1])
    assert same(generate(model, cache, ids, **options), generate(model, loaded.to_cache(model), ids, **options))
    for one, other in zip(snapshot.layers, loaded.layers, strict=True):
        assert one.queries is not None
        assert other.queries is not None
        assert torch.equal(one.queries, other.queries)
