"""What a target can go on from: a mapped cache, and the controls beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.evaluate.head import fp32_logits
from kvferry.evaluate.map_choose import ORACLES, choose_tokens
from kvferry.evaluate.map_fit import with_tokenizer
from kvferry.evaluate.map_run import Transfer, transfer
from kvferry.evaluate.windows import Window
from kvferry.hf.capture import capture
from kvferry.hf.decode import teacher_forced_logits
from kvferry.hf.observe import QUERY_WINDOW
from kvferry.hf.restore import empty_cache
from kvferry.map.mapper import Mapper
from kvferry.snapshot import LayerState, Snapshot
from kvferry.snapshot.rope import Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTROLS = ("identity", "source", "no_prefix", "zero", "shuffled", "other_document")
"""Beside every mapped cache: the target's own cache through the whole path, the source model alone, no context at all,
a cache of zeros, the mapped cache with its tokens in another order, and the mapped cache of another text."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to transfer a cache.

    Attributes:
        name: of the row.
        native_prefix: see `transfer`.
        recompute_last: see `transfer`.
        last_share: the same as a share of all tokens, for contexts of any length; the greater of the two counts.
        chooser: how tokens to compute anew are chosen (`kvferry.evaluate.map_choose`), and what share of all.
        share: of the tokens that the chooser picks.
    """

    name: str
    native_prefix: int | None = None
    recompute_last: int = 0
    chooser: str | None = None
    share: float = 0.0
    last_share: float = 0.0

    @property
    def oracle(self) -> bool:
        """Whether it looks at the target's own cache, which a transfer is to spare."""
        return self.chooser in ORACLES

    def last_of(self, tokens: int) -> int:
        """Last tokens of a context that are computed anew."""
        return max(self.recompute_last, round(self.last_share * tokens))


def run_arm(
    mapper: Mapper,
    target: PreTrainedModel,
    source: Snapshot,
    arm: Arm,
    own: Snapshot | None,
    *,
    mapped: Snapshot | None = None,
    native: Snapshot | None = None,
) -> Transfer:
    """Transfer by an arm; what a chooser takes is among the seconds, as ``choose``.

    Args:
        mapper, target, source: see `transfer`.
        arm: how.
        own: the target's cache, for choosers that look at it.
        mapped: see `transfer`; written to.
        native: the target's own cache, whose first tokens are taken where only the result counts, and not its time.
    """
    chosen: Tensor | tuple[int, ...] = ()
    began = time.perf_counter()
    if arm.chooser is not None:
        chosen = choose_tokens(arm.chooser, arm.share, mapper, source, own)
    took = time.perf_counter() - began
    first = mapper.recipe.native_prefix if arm.native_prefix is None else arm.native_prefix
    done = transfer(
        mapper,
        target,
        source,
        native_prefix=arm.native_prefix,
        recompute_last=arm.last_of(source.seq_len),
        recompute_tokens=chosen,
        mapped=mapped,
        native=native.crop(min(first, native.seq_len)) if native is not None and first else None,
        check=False,
    )
    return done if arm.chooser is None else replace(done, seconds={**done.seconds, "choose": took})


def identity_arm(mapper: Mapper, target: PreTrainedModel, source: Snapshot, native: Snapshot | None = None) -> Snapshot:
    """The target's own cache through the whole path: transferred with every token native, written and read."""
    done = transfer(mapper, target, source, native_prefix=source.seq_len, native=native, check=False).snapshot
    return _through_a_file(done)


def zero_arm(mapped: Snapshot) -> Snapshot:
    """Zeros in place of every key and value."""

    def zeros(layer: LayerState) -> LayerState:
        assert layer.keys is not None
        assert layer.values is not None
        return layer.map_tensors(torch.zeros_like(layer.keys), torch.zeros_like(layer.values))

    return replace(mapped, layers=tuple(map(zeros, mapped.layers)))


def shuffled_arm(mapper: Mapper, mapped: Snapshot, seed: int) -> Snapshot:
    """The same keys and values in another order of tokens, the same in every layer that holds as many.

    Keys move without their rotary positions: attention does not look at the order of a cache, but at where its keys say
    that they are.
    """

    def shuffled(layer: LayerState, rotary: Rotary) -> LayerState:
        assert layer.keys is not None
        assert layer.values is not None
        order = torch.randperm(layer.held, generator=torch.Generator().manual_seed(seed)).to(layer.keys.device)
        positions = mapped.positions[:, layer.first :].to(layer.keys.device)
        keys = rotary.apply(rotary.strip(layer.keys, positions)[:, :, order], positions)
        return layer.map_tensors(keys.to(layer.keys.dtype), layer.values[:, :, order])

    layers = tuple(shuffled(*pair) for pair in zip(mapped.layers, mapper.target_rotaries, strict=True))
    return replace(mapped, layers=layers)


def other_document_arm(other: Snapshot, tokens: Tensor) -> Snapshot:
    """The mapped cache of another text, given out as that of ``tokens``."""
    return replace(other, token_ids=tokens)


def no_prefix_logits(target: PreTrainedModel, window: Window, lead: int) -> Tensor:
    """Logits before each scored token where the target sees what follows the prefix alone."""
    ids = torch.cat([window.fed_ids[:, :lead], window.fed_ids[:, window.prefix :]], dim=1)
    with fp32_logits(target):
        return teacher_forced_logits(target, empty_cache(target), ids)[0, -len(window.targets) :].float()


def source_cache(mapper: Mapper, source: PreTrainedModel, ids: Tensor) -> Snapshot:
    """The source's cache of a prompt."""
    return with_tokenizer(capture(source, ids, query_window=QUERY_WINDOW), mapper.source)


def _through_a_file(snapshot: Snapshot) -> Snapshot:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot"
        snapshot.save(path)
        return Snapshot.load(path).clone()
