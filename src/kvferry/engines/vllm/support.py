"""What a connector has to know of an engine before it serves it, and which engines it does not serve."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from kvferry.errors import UnsupportedCache
from kvferry.snapshot import Identity


def engine_identity(vllm_config: Any) -> Identity:
    """Identity of the engine's model, by the checkpoint that it loaded."""
    return _identity(str(vllm_config.model_config.model), vllm_config.model_config.dtype)


@lru_cache(maxsize=4)  # both sides of a connector may live in one process
def _identity(model: str, dtype: torch.dtype) -> Identity:
    from kvferry.hf.checkpoint import identity_of_checkpoint

    return identity_of_checkpoint(model, dtype, attention="vllm", construction=("prefill",))


def engine_block_size(kv_cache_config: Any) -> int:
    """Tokens a page."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def require_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `UnsupportedCache` for engines whose pages do not hold the whole of what a model's cache is."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedCache(
                f"{name} = {getattr(parallel, name)}: each worker holds a part of the cache only, and kvferry does not "
                "put parts together yet; run the engine with 1"
            )
    changed = {
        "hf_overrides": getattr(model, "hf_overrides", None),
        "revision": getattr(model, "revision", None),
        "load_format dummy": getattr(getattr(vllm_config, "load_config", None), "load_format", None) == "dummy",
    }
    for name, given in changed.items():
        if given:
            raise UnsupportedCache(
                f"the engine runs with {name}, so its model is not the one that its checkpoint describes, by which "
                "caches are told apart; leave it out, or save the changed model to a folder of its own"
            )
    if model.quantization is not None:
        raise UnsupportedCache(f"the engine quantises its weights ({model.quantization}): its caches suit no other")
    if str(vllm_config.cache_config.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise UnsupportedCache(
            f"the engine keeps its cache as {vllm_config.cache_config.cache_dtype}: kvferry takes it in the model's "
            "dtype and quantises by itself; leave --kv-cache-dtype out"
        )
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise UnsupportedCache(
            f"the engine has {len(kv_cache_config.kv_cache_groups)} groups of caches; start it with "
            "--disable-hybrid-kv-cache-manager"
        )
