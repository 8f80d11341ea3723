"""A child of a model: the same with fewer layers."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvferry.errors import InvalidInput
from kvferry.hf.geometry import text_config
from kvferry.hf.quiet import quiet

FIRST, LAST = 3, 2
"""Layers at either end that always stay: the first ones turn tokens into states, the last ones states into tokens."""

_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Fields of a configuration that say something of each layer."""

_NUMBERED = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder.

    Raises:
        InvalidInput: the model has no plain list of layers, or layers that lean on one another's caches.
    """
    layers = getattr(model.base_model, "layers", None)
    config = text_config(model)
    if (
        not isinstance(layers, nn.ModuleList)
        or len(layers) != config.num_hidden_layers
        or getattr(config, "num_kv_shared_layers", None)
    ):
        raise InvalidInput(f"a {type(model).__name__} has no plain list of layers, of which some could be dropped")
    return layers


@contextmanager
def watched_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that each forward pass inside fills anew: the states before each layer, then those after the last."""
    states: list[Tensor] = []
    layers = decoder_layers(model)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def start(_module: nn.Module, _args: tuple[Any, ...]) -> None:
        states.clear()

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        states.append(_first(output))

    hooks = [
        model.base_model.register_forward_pre_hook(start),
        *(layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers),
        layers[-1].register_forward_hook(after),
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def block_influence(states: Sequence[Float[Tensor, "tokens hidden"]]) -> tuple[float, ...]:
    """How much each layer turns its tokens' states: 1 minus the mean cosine of what goes in and what comes out.

    Source: 'ShortGPT: Layers in Large Language Models are More Redundant Than You Expect' (2403.03853), section 3.2.
    """
    return tuple(
        1.0 - float(nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).mean())
        for before, after in pairwise(states)
    )


@contextmanager
def without_layers(model: PreTrainedModel, dropped: Collection[int]) -> Iterator[None]:
    """Inside, these layers hand on what they are given; the model has them back on the way out."""
    layers = decoder_layers(model)
    for index in dropped:
        # Not a hook, which would run beside the layer: a `forward` of the instance hides that of its class.
        vars(layers[index])["forward"] = lambda hidden_states, *_args, **_kwargs: hidden_states
    try:
        yield
    finally:
        for index in dropped:
            del vars(layers[index])["forward"]


def restore_layers(
    dropped: Collection[int], count: int, cost_of: Callable[[tuple[int, ...]], float]
) -> tuple[tuple[int, ...], float]:
    """Take back, one after the other, the layer that lowers the cost the most, until only ``count`` are dropped.

    Influence looks at one layer at a time; what several cost together hangs on which ones: of two layers of equal
    influence, one may be what the layers after a gap lean on.

    Args:
        dropped: layers to begin with, at least ``count``.
        count: how many stay dropped.
        cost_of: what it costs to drop these layers.

    Returns:
        The layers that stay dropped, in order, and their cost.
    """
    left = tuple(sorted(dropped))
    cost = math.inf
    while len(left) > count:
        tried = [tuple(other for other in left if other != index) for index in left]
        cost, left = min((cost_of(trial), trial) for trial in tried)
    return left, cost


def choose_layers(influence: Sequence[float], keep: int) -> tuple[int, ...]:
    """The layers that stay: `FIRST` and `LAST`, and of the others those of most influence.

    Raises:
        InvalidInput: ``keep`` is none of ``FIRST + LAST`` to one less than there are.
    """
    count = len(influence)
    if count <= FIRST + LAST:
        raise InvalidInput(f"a parent of {count} layers is too shallow: a child has {FIRST + LAST} of them at least")
    if not FIRST + LAST <= keep < count:
        raise InvalidInput(
            f"a child of {count} layers can have {FIRST + LAST} to {count - 1} of them, not {keep}: give --layers"
        )
    ends = {*range(FIRST), *range(count - LAST, count)}
    inner = sorted((index for index in range(count) if index not in ends), key=lambda index: -influence[index])
    return tuple(sorted(ends | set(inner[: keep - len(ends)])))


def child_of(parent: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model of its own with copies of the ``kept`` layers and all else of ``parent``."""
    config = copy.deepcopy(parent.config)
    own = config.get_text_config(decoder=True)
    count = own.num_hidden_layers
    for name in _PER_LAYER:
        listed = getattr(own, name, None)
        if isinstance(listed, list | tuple) and len(listed) == count:
            setattr(own, name, [listed[index] for index in kept])
    own.num_hidden_layers = len(kept)
    with quiet(), torch.random.fork_rng(devices=[]):
        child: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=parent.config._attn_implementation, dtype=parent.dtype
        )
    renamed = {str(index): str(place) for place, index in enumerate(kept)}
    weights = {}
    for name, tensor in parent.state_dict().items():
        found = _NUMBERED.search(name)
        if found is None or found.group() in renamed:
            weights[_NUMBERED.sub(lambda match: renamed[match.group()], name)] = tensor
    child.load_state_dict(weights, strict=True)
    if parent.generation_config is not None:
        child.generation_config = copy.deepcopy(parent.generation_config)
    return child.to(parent.device).eval()


def _first(output: Any) -> Tensor:
    """A layer's states, which some models wrap in a tuple."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states
