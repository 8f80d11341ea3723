"""Fixtures that every test may use: real models, loaded once for all tests, and the folder of evaluation texts."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may depend on the hub
# Before torch is imported: threads that spin while they wait make a busy machine tens of times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

THREADS = int(os.environ.get("KVFERRY_TEST_THREADS", "2"))
"""Threads for real models; tiny ones are faster with one, and far faster on a machine that has other work."""

ModelFactory = Callable[..., tuple[Any, Any]]


def data_dir() -> Path:
    """The folder of evaluation texts: ``$KVFERRY_DATA``, or ``shared/data`` beside the checkout; skips without it."""
    chosen = os.environ.get("KVFERRY_DATA")
    folder = Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no evaluation texts at {folder}; KVFERRY_DATA names another folder")
    return folder


@cache
def load(name: str, dtype: str = "bfloat16", attn: str = "sdpa") -> tuple[Any, Any]:
    """A built-in model and its tokenizer, the same objects for all tests, which must leave them as they were."""
    from kvferry.hf.models import load_model

    return load_model(name, dtype=dtype, attn=attn)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder with the converted models alone: no test may hang on what was calibrated or measured before."""
    from kvferry.snapshot.folders import cache_folder

    models = (cache_folder() / "models").resolve()
    models.mkdir(parents=True, exist_ok=True)
    own = tmp_path_factory.mktemp("cache")
    (own / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(own))
        yield


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    real = request.node.get_closest_marker("model") or {"model_of", "smollm2", "gemma3"} & set(request.fixturenames)
    torch.set_num_threads(THREADS if real else 1)


@pytest.fixture(scope="session")
def model_of() -> ModelFactory:
    """Factory ``model_of(name, dtype="bfloat16", attn="sdpa") -> (model, tokenizer)``."""
    return load


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in bfloat16."""
    return load("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> tuple[Any, Any]:
    """Gemma-3-270M in bfloat16."""
    return load("gemma3-270m")
