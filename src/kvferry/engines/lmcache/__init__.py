"""kvferry inside LMCache: a serde that keeps chunks of keys and values as packets in LMCache's second tier.

Nothing here imports LMCache or torch before `register` is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.engines.lmcache.serde import register

_LAZY = {"register": "kvferry.engines.lmcache.serde"}

__all__ = ["register"]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
