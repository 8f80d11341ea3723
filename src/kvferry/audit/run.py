"""Running an arm over one sequence, teacher-forced, and keeping all that it shows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.audit.arm import Arm
from kvferry.audit.exact import Float64Mode
from kvferry.audit.models import ModelSet
from kvferry.audit.trace import Trace, held_by
from kvferry.audit.watch import Watched, watch
from kvferry.errors import InvalidInput
from kvferry.hf.capture import snapshot_from_cache
from kvferry.hf.compat import cache_argument, forward_parameters
from kvferry.hf.restore import empty_cache, to_cache
from kvferry.hf.tokens import as_ids, positions_of, require_within_context
from kvferry.snapshot import Identity, Snapshot

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


def run_arm(models: ModelSet, arm: Arm, token_ids: Int[Tensor, "1 length"], start: int) -> Trace:
    """Run ``arm`` over one sequence, all of whose tokens are given.

    Args:
        models: what to run on.
        arm: how.
        token_ids: the sequence.
        start: tokens of the prefix; the logits of those after it are kept.

    Raises:
        InvalidInput: more than one sequence, or no token before or after ``start``.
    """
    ids = as_ids(models.own, token_ids)
    length = ids.shape[1]
    if ids.shape[0] != 1 or not 1 <= start < length:
        raise InvalidInput(
            f"token ids {tuple(ids.shape)} with a prefix of {start}: one sequence, longer than its prefix"
        )
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(models.use(arm))
        run = Run(model, arm, ids, stack.enter_context(watch(model)), models.identity(model))
        return run.trace(start)


class Run:
    """One sequence on its way through a model, in a batch and with padding as its arm says."""

    def __init__(
        self,
        model: PreTrainedModel,
        arm: Arm,
        ids: Int[Tensor, "1 length"],
        watched: Watched,
        identity: Identity | None = None,
    ):
        self.model, self.arm, self.watched, self.identity = model, arm, watched, identity
        self.padding = arm.left_padding
        self.ids, self.mask = batch_of(model, arm, ids)
        self.positions = positions_of(self.mask)
        require_within_context(model, self.positions)
        self.last: Tensor | None = None
        """Logits of the last token that went through, ``(batch, 1, vocabulary)``."""
        self._attention: list[Tensor] = []
        self._residual: list[Tensor] = []

    def trace(self, start: int) -> Trace:
        """Run everything."""
        arm, whole = self.arm, self.arm.change is not None and self.arm.change.whole_run
        with self._changed(whole):
            if arm.cached:
                with self._changed(not whole):
                    cache = self.build(start)
                # A growing cache writes to nothing that it has handed out: the snapshot stays as it is.
                kept = self.snapshot_of(cache, start)
                if arm.change is not None and arm.change.cache is not None:
                    kept = arm.change.cache(kept, self.model)
                    cache = to_cache(kept, self.model, check=False)
                    self.mask[:, : kept.seq_len] = kept.mask.to(self.mask.device)  # tokens that a codec has dropped
                logits, final = self._on(cache, start)
            else:
                logits, final = self._off(start)
                kept = self._recomputed(start)
        return Trace(
            arm=arm,
            start=start,
            length=self.ids.shape[1] - self.padding,
            logits=logits,
            built=held_by(kept, padding=self.padding),
            final=held_by(final, padding=self.padding),
            attention=torch.cat(self._attention, dim=1),
            residual=torch.cat(self._residual, dim=1),
        )

    def build(self, start: int) -> Cache:
        """The cache of the first ``start`` tokens."""
        cache = empty_cache(self.model)
        shift = 0 if self.arm.change is None else self.arm.change.position_shift
        for begin, end in self.arm.spans(start):
            # Padding goes in with the first tokens, as a batch of prompts of unequal lengths does.
            keep = 1 if end == start else 0
            self.forward(cache, 0 if begin == 0 else begin + self.padding, end + self.padding, keep=keep, shift=shift)
            self._take(begin, end)
        return cache

    def forward(self, cache: Cache, begin: int, end: int, *, keep: int, shift: int = 0) -> Tensor:
        """One forward pass over columns ``begin … end - 1``; logits of the last ``keep`` of them.

        With none to keep the output head is left out, where the model can: in small models it is most of a step.
        """
        model, device = self.model, self.model.device
        named: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
        if "logits_to_keep" in forward_parameters(model):
            named["logits_to_keep"] = keep or torch.empty(0, dtype=torch.int64, device=device)
        unmasked = self.arm.change is not None and self.arm.change.unmasked
        mask = None if unmasked or bool(self.mask.all()) else self.mask[:, :end].to(device, torch.int64)
        # Around the model alone: codecs and transplants have float32 of their own to do.
        exact = Float64Mode() if model.dtype == torch.float64 else contextlib.nullcontext()
        with torch.no_grad(), exact:
            output = model(
                input_ids=self.ids[:, begin:end].to(device),
                attention_mask=mask,
                position_ids=(self.positions[:, begin:end] + shift).to(device),
                **named,
            )
        logits: Tensor = output.logits[:, output.logits.shape[1] - keep :]
        if keep:
            self.last = logits[:, -1:]
        return logits

    def append(self, token: int) -> None:
        """Make the sequence one token longer, in every row."""
        more = torch.full_like(self.ids[:, :1], token)
        self.ids = torch.cat([self.ids, more], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(more, dtype=torch.bool)], dim=1)
        self.positions = torch.cat([self.positions, self.positions[:, -1:] + 1], dim=1)

    def _on(self, cache: Cache, start: int) -> tuple[Tensor, Snapshot]:
        length = self.ids.shape[1] - self.padding
        step = 1 if self.arm.decode == "step" else length - start
        rows = []
        for begin in range(start, length, step):
            end = min(begin + step, length)
            rows.append(self.forward(cache, begin + self.padding, end + self.padding, keep=end - begin)[0])
            self._take(begin, end)
        return torch.cat(rows), self.snapshot_of(cache, length)

    def _off(self, start: int) -> tuple[Tensor, Snapshot]:
        length = self.ids.shape[1] - self.padding
        rows = []
        cache = empty_cache(self.model)
        first = start if self.arm.decode == "recompute" else length - 1
        for end in range(first + 1, length + 1):
            cache = empty_cache(self.model)
            keep = 1 if self.arm.decode == "recompute" else length - start
            rows.append(self.forward(cache, 0, end + self.padding, keep=keep)[0])
            self._take(0 if end == first + 1 else end - 1, end)
        return torch.cat(rows), self.snapshot_of(cache, length)

    def _recomputed(self, start: int) -> Snapshot:
        """The cache that recomputation of the prefix gives, to hold others against: sliding layers forget it later."""
        cache = empty_cache(self.model)
        self.forward(cache, 0, start + self.padding, keep=0)
        return self.snapshot_of(cache, start)

    def _take(self, begin: int, end: int) -> None:
        """Keep what the last forward pass showed of tokens ``begin … end - 1``, which are its last ones."""
        if not self.watched.residual:
            return  # nobody watches
        count = end - begin
        self._attention.append(torch.stack([layer[0, -count:] for layer in self.watched.attention]))
        self._residual.append(torch.stack([layer[0, -count:] for layer in self.watched.residual]))

    def snapshot_of(self, cache: Cache, length: int) -> Snapshot:
        """The cache after ``length`` tokens of the sequence."""
        end = length + self.padding
        return snapshot_from_cache(
            cache,
            self.model,
            self.ids[:, :end],
            attention_mask=self.mask[:, :end],
            positions=self.positions[:, :end],
            construction=self.arm.construction,
            identity=None if self.arm.change is not None and self.arm.change.model is not None else self.identity,
        )

    def _changed(self, now: bool) -> contextlib.AbstractContextManager[None]:
        change = self.arm.change
        if not now or change is None or change.model is None:
            return contextlib.nullcontext()
        return change.model(self.model)


def batch_of(model: PreTrainedModel, arm: Arm, ids: Int[Tensor, "1 length"]) -> tuple[Tensor, Tensor]:
    """Token ids and mask ``(batch, padding + length)``: the sequence in row 0, its neighbours in the others."""
    pad = getattr(model.generation_config, "pad_token_id", None) or 0
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    rows = [ids]
    for number in range(1, arm.batch):
        # Other tokens, the same ones in every run: the sequence rotated and moved along the vocabulary.
        other = (ids.roll(number, dims=1) + 7919 * number) % vocabulary
        rows.append(ids if arm.neighbours == "copies" else other)
    body = torch.cat(rows)
    padding = torch.full((arm.batch, arm.left_padding), int(pad), dtype=torch.int64)
    mask = torch.cat([torch.zeros_like(padding, dtype=torch.bool), torch.ones_like(body, dtype=torch.bool)], dim=1)
    return torch.cat([padding, body], dim=1), mask
