"""Watching the residual stream and attention's output of every layer, through forward hooks that are always removed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kvferry.errors import UnsupportedCache
from kvferry.hf.geometry import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Watched:
    """What the last forward pass showed, a layer each: ``(batch, tokens, hidden)``.

    Attributes:
        attention: output of the attention module, its output projection included.
        residual: the residual stream behind the layer.
    """

    attention: list[Tensor] = field(default_factory=list)
    residual: list[Tensor] = field(default_factory=list)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, first to last.

    Raises:
        UnsupportedCache: the model does not keep them in one list.
    """
    wanted = int(text_config(model).num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted and all(_attention(item) for item in module):
            return list(module)
    raise UnsupportedCache(f"the {wanted} decoder layers of {type(model).__name__} are in no list that can be watched")


def attention_of(layer: nn.Module) -> nn.Module:
    """The attention module of a decoder layer."""
    found = _attention(layer)
    assert found is not None
    return found


@contextlib.contextmanager
def watch(model: PreTrainedModel) -> Iterator[Watched]:
    """Yields a `Watched`, filled anew by each forward pass inside."""
    watched = Watched()
    handles = []
    try:
        for index, layer in enumerate(decoder_layers(model)):
            if index == 0:
                handles.append(layer.register_forward_pre_hook(_forget(watched)))
            handles.append(attention_of(layer).register_forward_hook(_keep(watched.attention)))
            handles.append(layer.register_forward_hook(_keep(watched.residual)))
        yield watched
    finally:
        for handle in handles:
            handle.remove()


def _attention(layer: nn.Module) -> nn.Module | None:
    """The one module inside of a layer that says which layer it is in: that is how caches are addressed."""
    inside = (module for module in layer.modules() if module is not layer)
    return next((module for module in inside if isinstance(getattr(module, "layer_idx", None), int)), None)


def _forget(watched: Watched) -> Callable[..., None]:
    def begin(*_: Any) -> None:
        watched.attention.clear()
        watched.residual.clear()

    return begin


def _keep(into: list[Tensor]) -> Callable[..., None]:
    def done(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        # Models with several streams side by side (Gemma 3n) give ``(streams, batch, tokens, hidden)``.
        into.append((hidden[0] if hidden.dim() == 4 else hidden).detach())

    return done
