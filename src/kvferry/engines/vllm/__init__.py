"""kvferry inside vLLM: a KV connector that stores and loads a prompt's keys and values as packets.

Nothing here imports vLLM before `KVFerryConnector` is asked for; `interchange` works without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.engines.vllm.connector import KVFerryConnector
    from kvferry.engines.vllm.interchange import fetch, publish
    from kvferry.engines.vllm.store import FolderStore

_LAZY = {
    "FolderStore": "kvferry.engines.vllm.store",
    "KVFerryConnector": "kvferry.engines.vllm.connector",
    "fetch": "kvferry.engines.vllm.interchange",
    "publish": "kvferry.engines.vllm.interchange",
}

__all__ = ["FolderStore", "KVFerryConnector", "fetch", "publish"]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
