"""Differences between the transformers versions that kvferry runs with, in one place.

From 5.2x on, models name their cache ``cache``; before, ``past_key_values``, which the newer ones accept with a
deprecation warning. Nothing else in kvferry may know which one is installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedModel

VERSION: str = transformers.__version__


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the argument by which ``model.forward`` and ``model.generate`` take a cache."""
    return "cache" if "cache" in forward_parameters(model) else "past_key_values"


def output_cache(outputs: Any) -> Any:
    """The cache in what a forward or ``generate(return_dict_in_generate=True)`` gave back."""
    for name in ("cache", "past_key_values"):
        if name in outputs:
            return outputs[name]
    return None


def forward_parameters(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """Named parameters of ``model.forward``, looked up through its decorators."""
    return inspect.signature(model.forward).parameters
