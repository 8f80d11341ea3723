"""Which two models a cache can be mapped between: a matched-KV pair."""

from __future__ import annotations

from typing import Any

from kvferry.errors import IncompatibleIdentity
from kvferry.map.blocks import owns_cache
from kvferry.snapshot import Identity

_MAPPED = ("full", "sliding")


def pair_differences(source: Identity, target: Identity) -> dict[str, tuple[Any, Any]]:
    """Every reason why the two are no matched-KV pair, as ``field -> (source's, target's)``; empty for a pair.

    A pair has the same kv heads and head sizes in all layers, the same tokenizer, and attention over single tokens
    (full or sliding); depth, width and rotary embedding may differ.
    """
    found: dict[str, tuple[Any, Any]] = {}
    if source.tokenizer is None or target.tokenizer is None or source.tokenizer != target.tokenizer:
        found["tokenizer"] = (source.tokenizer or "unknown", target.tokenizer or "unknown")
    for name in ("kv_heads", "head_dim", "value_head_dim"):
        have, want = (sorted({getattr(layer, name) for layer in side.layers}) for side in (source, target))
        if have != want or len(have) != 1:
            found[name] = (have, want)
    for name, side in (("source", source), ("target", target)):
        other = [
            f"layer {index}: {layer.kind}"
            for index, layer in enumerate(side.layers)
            if layer.kind.name not in _MAPPED or not owns_cache(layer)
        ]
        if other:
            found[f"{name} attention"] = (", ".join(other), "full or sliding")
    return found


def require_pair(source: Identity, target: Identity) -> None:
    """Raise `IncompatibleIdentity` with every reason unless the two are a matched-KV pair."""
    found = pair_differences(source, target)
    if found:
        raise IncompatibleIdentity(f"{source.model} and {target.model} are no matched-KV pair", found)
