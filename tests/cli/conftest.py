"""Tiny models on disk, made once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli import models
from tests.hf import tiny


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two full layers, context of 2,048 tokens, bfloat16."""
    model = tiny.llama(dtype=torch.bfloat16, max_position_embeddings=2048)
    return models.save(model, tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with one weight matrix in the middle scaled by 1.01."""
    model = tiny.llama(dtype=torch.bfloat16, max_position_embeddings=2048)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    return models.save(model, tmp_path_factory.mktemp("other-llama"))


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of three slide over eight tokens."""
    model = tiny.gemma3(dtype=torch.bfloat16, max_position_embeddings=2048)
    return models.save(model, tmp_path_factory.mktemp("tiny-gemma"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 2,000 characters of text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(models.TEXT * 18)
    return path
