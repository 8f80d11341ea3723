"""Engines whose model is not the one that their checkpoint describes are not served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.engines.vllm.support import require_supported
from kvferry.errors import UnsupportedCache

GROUPS = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))])


def settings(load_format: str = "auto", cache_dtype: str = "auto", **model: Any) -> Any:
    """What of an engine's configuration is looked at."""
    plain = {"quantization": None, "dtype": torch.bfloat16, "hf_overrides": {}, "revision": None}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(**{**plain, **model}),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        load_config=SimpleNamespace(load_format=load_format),
    )


def test_a_plain_engine_is_served() -> None:
    require_supported(settings(), GROUPS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hf_overrides": {"rope_theta": 1e6}}, "hf_overrides"),
        ({"revision": "main"}, "revision"),
        ({"load_format": "dummy"}, "load_format dummy"),
        ({"quantization": "fp8"}, "quantises its weights"),
        ({"cache_dtype": "fp8"}, "keeps its cache as fp8"),
    ],
)
def test_another_model_than_the_checkpoints_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedCache, match=words):
        require_supported(settings(**changes), GROUPS)
