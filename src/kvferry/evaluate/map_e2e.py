"""A map trained through its target: what the target says after a mapped prefix is to be what it says after its own.

R² does not tell what a target makes of an error; its own gradients do. The target's weights stay as they are. Between
the mapped prefix and the loss lies one forward pass of the target over the tokens that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.evaluate.map_fit import with_tokenizer
from kvferry.hf.capture import capture, snapshot_from_cache
from kvferry.hf.compat import cache_argument
from kvferry.hf.distil import head_kl, head_of, relative_distance
from kvferry.hf.prune import watched_states
from kvferry.hf.restore import empty_cache
from kvferry.map.train import Trainer
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """What the target makes of a window by itself: its cache, last states, and those before each layer."""

    cache: Any
    last: Tensor
    states: list[Tensor]


SPLITS = (0.5, 0.25, 0.75, 0.375)
"""Shares of a window that are its prefix, step by step: a map has to serve contexts of any length."""


class EndToEnd:
    """The loss of a map by what comes out of its target.

    Args:
        source, target: the models; the target's weights get no gradients.
        trainer: whose map is trained.

    Raises:
        UnsupportedCache: a sliding layer that does not keep a window's prefix.
        InvalidInput: a target whose logits are not its last states times its head.
    """

    def __init__(self, source: PreTrainedModel, target: PreTrainedModel, trainer: Trainer):
        self.source, self.target, self.trainer = source, target, trainer
        for parameter in target.parameters():
            parameter.requires_grad_(False)
        for index, layer in enumerate(trainer.mapper.target.layers):
            if layer.kind.name != "full" and (layer.kind.argument or 0) < trainer.settings.window:
                raise UnsupportedCache(f"layer {index} ({layer.kind}) does not keep a window's prefix: shorten windows")
        self._head = head_of(target)

    def descend(self, ids: Int[Tensor, "1 tokens"], step: int) -> float:
        """Leave the gradients of one window at the trainer's weights; returns the loss.

        The window lies elsewhere in the sequence each step, and its prefix is of another length.
        """
        window = min(self.trainer.settings.window, ids.shape[1])
        start = step * 7919 % (ids.shape[1] - window + 1)
        cut = ids[:, start : start + window]
        prefix = round(SPLITS[step % len(SPLITS)] * window)
        with torch.no_grad():
            source = self._captured(cut[:, :prefix])
        loss = self._loss(cut, source, self._own(cut))[0]
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @torch.no_grad()
    def measure(self, ids: Int[Tensor, "1 tokens"]) -> dict[str, float]:
        """The loss of one window, cut in the middle, and its parts; its rows count for `Trainer.r2`."""
        cut = ids[:, : self.trainer.settings.window]
        source, own = self._captured(cut), self._own(cut)
        target = with_tokenizer(snapshot_from_cache(own.cache, self.target, cut), self.trainer.mapper.target)
        loss, parts = self._loss(cut, source.crop(cut.shape[1] // 2), own)
        return {"loss": float(loss), **parts, "rows": self.trainer.step(source, target, learn=False)["rows"]}

    def _loss(self, ids: Tensor, source: Snapshot, own: _Own) -> tuple[Tensor, dict[str, float]]:
        """The loss of a window whose first tokens are those of ``source``, and its parts."""
        settings, prefix = self.trainer.settings, source.seq_len
        cache = self._mapped(source, own.cache)
        with watched_states(self.target) as states:
            said = _run(self.target, cache, ids, prefix)
            seen = list(states)
        kl = head_kl(said[0], self._head, own.last[0, prefix:], self._head)
        pairs = zip(seen[1:], own.states[1:], strict=True)
        far = torch.stack([relative_distance(state, taught[:, prefix:]) for state, taught in pairs]).mean()
        loss = settings.on_target * kl + settings.on_states * far
        return loss, {"kl": float(kl.detach()), "states": float(far.detach())}

    @torch.no_grad()
    def _own(self, ids: Tensor) -> _Own:
        """The target's own prefill of a window."""
        cache = empty_cache(self.target)
        with watched_states(self.target) as states:
            last = _run(self.target, cache, ids, 0)
            return _Own(cache, last, list(states))

    def _captured(self, ids: Tensor) -> Snapshot:
        return with_tokenizer(capture(self.source, ids), self.trainer.mapper.source)

    def _mapped(self, source: Snapshot, own: Any) -> Any:
        """A cache of the target: its own first tokens, then what the map makes."""
        first, layers = self.trainer.made(source)
        if first >= source.seq_len:
            raise InvalidInput(f"a prefix of {source.seq_len} tokens, {first} of them native, leaves none to be mapped")
        cache = empty_cache(self.target)
        for index, (keys, values) in enumerate(layers):
            mine = own.layers[index]
            made: list[Float[Tensor, "batch heads prefix dim"]] = [
                torch.cat([native[:, :, :first].detach(), mapped.to(native.dtype)], dim=2)
                for native, mapped in ((mine.keys, keys), (mine.values, values))
            ]
            cache.update(*made, index)
        return cache


def _run(model: PreTrainedModel, cache: Any, ids: Tensor, start: int) -> Float[Tensor, "1 tail hidden"]:
    """Last states of the tokens from ``start`` on, on a cache of those before."""
    positions = torch.arange(start, ids.shape[1])[None]
    named: dict[str, Any] = {cache_argument(model.base_model): cache, "use_cache": True}
    made: Tensor = model.base_model(input_ids=ids[:, start:], position_ids=positions, **named).last_hidden_state
    return made
