"""Sensitivities of a model, found on a short text and kept by its identity."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import InvalidInput
from kvferry.evaluate.windows import cut_windows
from kvferry.hf.calibrate_layers import cache_fisher
from kvferry.hf.identity import identity_of
from kvferry.hf.text import default_text
from kvferry.ship import sensitivity as ship

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

WINDOWS, PREFIX, SUFFIX = 3, 1024, 512


def calibrate_sensitivity(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    text: str | None = None,
    windows: int = WINDOWS,
    prefix: int = PREFIX,
    suffix: int = SUFFIX,
    seed: int = 0,
    cache: bool | Path = True,
    on_progress: Callable[[str], None] | None = None,
) -> ship.Sensitivity:
    """How much a model feels errors in its cache; from then on the policy ``optimal`` uses it for this model.

    Takes a forward and a backward pass over each window: on two cores about half a minute for a model of 135 million
    parameters.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        text: what windows are cut from; Python's own reference topics by default.
        windows, prefix, suffix: how many, and tokens cached and tokens that feel the cache in each.
        seed: of the targets.
        cache: give and keep the answer in kvferry's cache folder, or another one; an answer is bound to the weights.
        on_progress: told which window is being worked on.

    Raises:
        InvalidInput: the text is too short, or numbers are not positive.
    """
    identity = identity_of(model)
    folder = cache if isinstance(cache, Path) else None
    if cache is not False and text is None:
        known = ship.kept(identity, folder)
        if known is not None:
            return known
    words = default_text() if text is None else text
    tell = on_progress or log.debug
    generator = torch.Generator().manual_seed(seed)
    total = ship.Gathered()
    for window in cut_windows(tokenizer, words, windows=windows, prefix=prefix, suffix=suffix):
        tell(f"window {window.index + 1} of {windows}")
        fisher = cache_fisher(model, window.fed_ids, prefix, generator)
        total.add(fisher.snapshot, fisher.keys, fisher.values)
    found = total.sensitivity()
    if cache is not False:
        try:
            ship.keep(found, identity, folder)
        except (OSError, InvalidInput) as error:
            log.warning("the sensitivities cannot be kept (%s); KVFERRY_CACHE names another folder", error)
    return found
