"""Watching a model's queries without touching it: a wrapped attention function, through transformers' own registry."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.hf.quiet import quiet

OBSERVABLE = ("sdpa", "eager")
"""Attention backends whose queries can be observed."""

QUERY_WINDOW = 32
"""Last queries that observation-window scores look at."""


class _Recorder:
    """The last queries of each layer of one model, while it is observed."""

    def __init__(self, window: int):
        self.window = window
        self.queries: dict[int, Tensor] = {}

    def add(self, layer: int, query: Tensor, scaling: float) -> None:
        newest = query.detach()[:, :, -self.window :].float() * scaling
        before = self.queries.get(layer)
        if before is not None and newest.shape[2] < self.window:
            newest = torch.cat([before, newest], dim=2)[:, :, -self.window :].contiguous()
        self.queries[layer] = newest


_observed: weakref.WeakKeyDictionary[nn.Module, _Recorder] = weakref.WeakKeyDictionary()
"""Attention module -> recorder, for the models that are being observed right now."""


@contextlib.contextmanager
def observe_queries(
    model: PreTrainedModel, window: int
) -> Iterator[dict[int, Float[Tensor, "batch heads window head_dim"]]]:
    """Record the last ``window`` queries of each layer during the forward passes inside.

    Yields a dict, filled as the model runs: layer -> queries after RoPE times the attention scaling, in float32, so
    that ``softmax(queries @ keysᵀ)`` under the causal mask is the attention paid (before softcapping, where a model
    has it). Outputs are bit-identical to those of the unobserved model, whose attention backend is put back on the
    way out, also after an exception.

    Raises:
        InvalidInput: ``window`` is not positive, the backend is neither ``sdpa`` nor ``eager``, or the model is being
            observed already.
        UnsupportedCache: the model does not take its attention function from transformers' registry.
    """
    if window < 1:
        raise InvalidInput(f"the observation window is {window}; it must be positive")
    watched = [module for module in model.modules() if _layer_index(module) >= 0]
    if any(module in _observed for module in watched):
        raise InvalidInput("this model is being observed already")
    before = _implementations(model)
    for name in set(before.values()):
        if name not in OBSERVABLE:
            raise InvalidInput(f"queries of attention backend {name!r} cannot be observed; load with attn='sdpa'")
    recorder = _Recorder(window)
    try:
        for module in watched:
            _observed[module] = recorder
        with quiet():  # a model that cannot is told apart below
            model.set_attn_implementation({key: _watched_name(name) for key, name in before.items()})
        if _implementations(model) != {key: _watched_name(name) for key, name in before.items()}:
            raise UnsupportedCache(f"the attention of {type(model).__name__} cannot be observed from outside")
        yield recorder.queries
    finally:
        with quiet():
            model.set_attn_implementation(before)
        for module in watched:
            _observed.pop(module, None)


def _implementations(model: PreTrainedModel) -> dict[str, str]:
    """Attention backend of the model (key ``""``) and of each of its sub-configurations."""
    found = {"": model.config._attn_implementation}
    for key in model.config.sub_configs:
        part = getattr(model.config, key, None)
        if part is not None:
            found[key] = part._attn_implementation
    return found


def _layer_index(module: nn.Module) -> int:
    """The decoder layer that an attention module says it is in; -1 where it says nothing."""
    index: Any = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else -1


def _watched_name(name: str) -> str:
    return f"kvferry_observed_{name}"


def _watching(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,  # by its place from libraries that wrap registered functions, as kvpress does
        *,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        recorder = _observed.get(module)
        if recorder is not None:
            recorder.add(_layer_index(module), query, query.shape[-1] ** -0.5 if scaling is None else scaling)
        output: tuple[Tensor, Tensor | None] = _plain(module, name)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output

    return attend


def _plain(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that ``module`` would have called: eager ones are its model file's own, the rest is registered."""
    for base in type(module).__mro__:
        source = sys.modules[base.__module__]
        if name == "eager":
            function: Callable[..., Any] | None = getattr(source, "eager_attention_forward", None)
        else:
            function = getattr(source, "ALL_ATTENTION_FUNCTIONS", {}).get(name)
        if function is not None:
            return function
    raise UnsupportedCache(f"the {name} attention of a {type(module).__name__} cannot be observed from outside")


for _name in OBSERVABLE:
    AttentionInterface.register(_watched_name(_name), _watching(_name))
    AttentionMaskInterface.register(_watched_name(_name), AttentionMaskInterface()[_name])
