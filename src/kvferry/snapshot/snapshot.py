"""The noun of kvferry: a key-value cache taken out of a model, complete enough to be taken up elsewhere."""

from __future__ import annotations

import importlib
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvferry.errors import IncompatibleIdentity, InvalidInput, UnsupportedCache
from kvferry.snapshot.awaits import select_awaits, without_awaits
from kvferry.snapshot.identity import Identity
from kvferry.snapshot.layer import LayerState

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

RESTORERS = {"transformers": "kvferry.hf.restore"}
"""Library of a model -> module with ``to_cache(snapshot, model, **options)``, for `Snapshot.to_cache`."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A key-value cache with its identity, tokens, positions and mask.

    Attributes:
        identity: which model made it, and how.
        token_ids: int64 ``(batch, seq_len)``; the cache is valid only after exactly these tokens.
        positions: int64 ``(batch, seq_len)``, as given to the model.
        mask: bool ``(batch, seq_len)``; ``False`` for left padding and for dropped tokens, which attention must skip.
        layers: one `LayerState` a decoder layer.
    """

    identity: Identity
    token_ids: Int[Tensor, "batch seq_len"]
    positions: Int[Tensor, "batch seq_len"]
    mask: Bool[Tensor, "batch seq_len"]
    layers: tuple[LayerState, ...]

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if self.token_ids.dim() != 2 or self.positions.shape != shape or self.mask.shape != shape:
            raise InvalidInput(
                f"token_ids {tuple(shape)}, positions {tuple(self.positions.shape)} and mask "
                f"{tuple(self.mask.shape)} must all be (batch, seq_len)"
            )
        if self.token_ids.dtype != torch.int64 or self.positions.dtype != torch.int64 or self.mask.dtype != torch.bool:
            raise InvalidInput("token_ids and positions must be int64, mask must be bool")
        if len(self.layers) != len(self.identity.layers):
            raise InvalidInput(f"{len(self.layers)} layers, but the identity describes {len(self.identity.layers)}")
        for index, (layer, geometry) in enumerate(zip(self.layers, self.identity.layers, strict=True)):
            layer.check(index, self.batch_size, self.seq_len)
            if layer.kind != geometry.kind:
                raise InvalidInput(f"layer {index} is {layer.kind}, but the identity says {geometry.kind}")
            if layer.keys is None or layer.values is None:
                continue
            have = (
                layer.keys.shape[1],
                layer.keys.shape[3],
                layer.values.shape[3],
                dtype_name(layer.keys.dtype),
            )
            want = (geometry.kv_heads, geometry.head_dim, geometry.value_head_dim, self.identity.dtype)
            if have != want:
                raise InvalidInput(
                    f"layer {index}: (kv_heads, head_dim, value_head_dim, dtype) is {have}, the identity says {want}"
                )

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return int(self.token_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """Number of tokens a sequence, padding and dropped ones included."""
        return int(self.token_ids.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return dtype_from_name(self.identity.dtype)

    def clone(self) -> Snapshot:
        """A deep copy: no storage shared with this snapshot or with the cache it was taken from."""
        return replace(
            self,
            token_ids=self.token_ids.clone(),
            positions=self.positions.clone(),
            mask=self.mask.clone(),
            layers=tuple(
                replace(
                    layer,
                    keys=_contiguous_copy(layer.keys),
                    values=_contiguous_copy(layer.values),
                    queries=_contiguous_copy(layer.queries),
                )
                for layer in self.layers
            ),
        )

    def crop(self, seq_len: int) -> Snapshot:
        """The snapshot of the first ``seq_len`` tokens; shares storage.

        Raises:
            InvalidInput: ``seq_len`` is not within ``1 … self.seq_len``.
            UnsupportedCache: a sliding layer no longer holds the tokens that the shorter cache needs.
        """
        if not 1 <= seq_len <= self.seq_len:
            raise InvalidInput(f"cannot crop a snapshot of {self.seq_len} tokens to {seq_len}")
        layers = []
        for index, layer in enumerate(self.layers):
            start = seq_len - layer.kind.held(seq_len)
            if layer.keys is None or layer.values is None:
                layers.append(replace(layer, seen=seq_len))
                continue
            if start < layer.first:
                raise UnsupportedCache(
                    f"layer {index} ({layer.kind}) holds tokens {layer.first}…{layer.seen - 1} only; a cache of "
                    f"{seq_len} tokens needs them from {start} on: capture the shorter prompt instead"
                )
            held = slice(start - layer.first, seq_len - layer.first)
            layers.append(
                replace(
                    layer,
                    keys=layer.keys[:, :, held],
                    values=layer.values[:, :, held],
                    seen=seq_len,
                    queries=layer.queries if seq_len == self.seq_len else None,
                )
            )
        cut = slice(0, seq_len)
        identity = self.identity
        if seq_len < self.seq_len:
            identity = replace(identity, construction=without_awaits(identity.construction))
        return replace(
            self,
            identity=identity,
            token_ids=self.token_ids[:, cut],
            positions=self.positions[:, cut],
            mask=self.mask[:, cut],
            layers=tuple(layers),
        )

    def select(self, rows: Sequence[int] | slice) -> Snapshot:
        """The snapshot of some sequences of the batch, in the order given; a slice shares storage.

        Raises:
            InvalidInput: ``rows`` is no list or slice of indices, names none, or one that the batch does not have.
        """
        order = _rows(rows, self.batch_size)
        if not isinstance(rows, slice) or (rows.step or 1) < 0:
            rows = order

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return replace(
            self,
            identity=replace(
                self.identity, construction=select_awaits(self.identity.construction, order, self.batch_size)
            ),
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            mask=self.mask[rows],
            layers=tuple(
                replace(layer, keys=pick(layer.keys), values=pick(layer.values), queries=pick(layer.queries))
                for layer in self.layers
            ),
        )

    def is_prefix_of(self, token_ids: Tensor) -> bool:
        """Whether ``token_ids`` ``(batch, any length)`` begin with exactly this cache's tokens."""
        ids = _as_batch(token_ids)
        if ids.shape[0] != self.batch_size or ids.shape[1] < self.seq_len:
            return False
        return bool(torch.equal(ids[:, : self.seq_len].cpu(), self.token_ids.cpu()))

    def require_prefix_of(self, token_ids: Tensor) -> None:
        """Raise `IncompatibleIdentity`, naming the first token that differs, unless `is_prefix_of`."""
        ids = _as_batch(token_ids)
        if self.is_prefix_of(ids):
            return
        if ids.shape[0] != self.batch_size:
            raise IncompatibleIdentity(
                "this cache is of another batch size than the prompt",
                {"batch_size": (self.batch_size, ids.shape[0])},
            )
        both = min(ids.shape[1], self.seq_len)
        unequal = (ids[:, :both].cpu() != self.token_ids[:, :both].cpu()).nonzero()
        if unequal.numel() == 0:
            raise IncompatibleIdentity(
                "the prompt is shorter than this cache; crop the cache first",
                {"seq_len": (self.seq_len, int(ids.shape[1]))},
            )
        row, column = (int(index) for index in unequal[unequal[:, 1].argmin()])
        raise IncompatibleIdentity(
            "this cache was built from other tokens than the prompt's",
            {f"token_ids[{row}, {column}]": (int(self.token_ids[row, column]), int(ids[row, column]))},
        )

    def to_cache(self, model: PreTrainedModel, **options: Any) -> Cache:
        """A fresh cache for ``model``, sharing no storage with this snapshot.

        ``options`` are those of `kvferry.hf.restore.to_cache`: ``kind="dynamic" | "static"``, ``max_cache_len``,
        ``check``. Raises `IncompatibleIdentity` when the model is not the one that the cache was made for.
        """
        for base in type(model).__mro__:
            module = RESTORERS.get(base.__module__.partition(".")[0])
            if module is not None:
                cache: Cache = importlib.import_module(module).to_cache(self, model, **options)
                return cache
        raise UnsupportedCache(f"no way is known to hand a cache to a {type(model).__module__}.{type(model).__name__}")

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write a valid safetensors file, whole or not at all; returns its bytes. See `kvferry.snapshot.storage`."""
        from kvferry.snapshot import storage

        return storage.save_snapshot(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], *, max_bytes: int | None = None) -> Snapshot:
        """Read what `save` wrote. Raises `CorruptPacket`, `UnsupportedVersion` or `TooLarge`, before allocating."""
        from kvferry.snapshot import storage

        return storage.load_snapshot(path, max_bytes=max_bytes)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; raises `InvalidInput` for what is no floating dtype of a cache."""
    if name not in ("float64", "float32", "float16", "bfloat16"):
        raise InvalidInput(f"{name!r} is no dtype of a cache: float64, float32, float16 and bfloat16 are")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _rows(rows: Sequence[int] | slice, batch: int) -> list[int]:
    """The sequences that ``rows`` names, as indices that are not negative."""
    try:
        if isinstance(rows, slice):
            order = list(range(batch)[rows])
        else:
            order = [range(batch)[operator.index(row)] for row in rows]
    except (TypeError, ValueError, IndexError) as error:
        raise InvalidInput(
            f"rows {rows!r} of a batch of {batch}: give a list of indices, such as [0], or a slice"
        ) from error
    if not order:
        raise InvalidInput(f"rows {rows!r} of a batch of {batch} are none")
    return order


def _as_batch(token_ids: Tensor) -> Tensor:
    ids = torch.as_tensor(token_ids)
    return ids.unsqueeze(0) if ids.dim() == 1 else ids


def _contiguous_copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
