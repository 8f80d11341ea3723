"""One decoder layer's share of a cache: what kind of attention it serves, and its keys and values."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

from jaxtyping import Float

from kvferry.errors import CorruptPacket, InvalidInput, UnsupportedCache

if TYPE_CHECKING:
    from torch import Tensor

KindName = Literal["full", "sliding", "chunked", "shared", "latent", "cross", "recurrent"]

SUPPORTED_KINDS = ("full", "sliding", "shared")
"""Kinds that kvferry carries today; the others have a name so that they can be refused by it."""

_KIND = re.compile(r"(full|sliding|chunked|shared|latent|cross|recurrent)(?:\((\d{1,9})\))?")
_WITH_ARGUMENT = ("sliding", "chunked", "shared")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How a layer attends, and therefore which tokens its cache still holds.

    Attributes:
        name: ``full``, ``sliding``, ``chunked``, ``shared``; ``latent``, ``cross`` and ``recurrent`` are named only.
        argument: the window of ``sliding`` and the size of ``chunked`` in tokens; for ``shared`` the index of the
            layer whose keys and values are used.
    """

    name: KindName
    argument: int | None = None

    def __post_init__(self) -> None:
        if (self.argument is not None) != (self.name in _WITH_ARGUMENT):
            raise InvalidInput(f"layer kind {self.name!r} with argument {self.argument!r}")
        if self.name in ("sliding", "chunked") and (self.argument or 0) < 2:
            raise InvalidInput(f"layer kind {self.name!r} needs a window of at least 2 tokens, not {self.argument}")

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}({self.argument})"

    @classmethod
    def parse(cls, text: str) -> LayerKind:
        """Read ``full``, ``sliding(512)``, ``shared(13)``…; raises `CorruptPacket` for anything else."""
        match = _KIND.fullmatch(text)
        if match is None:
            raise CorruptPacket(f"unknown layer kind {text!r}")
        name, argument = cast("KindName", match[1]), match[2]
        try:
            return cls(name, None if argument is None else int(argument))
        except InvalidInput as error:
            raise CorruptPacket(str(error)) from error

    def require_supported(self, layer: int) -> None:
        """Raise `UnsupportedCache`, naming the kind and the layer, unless kvferry can carry this kind."""
        if self.name not in SUPPORTED_KINDS:
            raise UnsupportedCache(
                f"layer {layer} has a {self} cache, which kvferry does not carry yet; supported are "
                + ", ".join(SUPPORTED_KINDS)
            )

    def held(self, seen: int) -> int:
        """Number of tokens that the layer still holds after ``seen`` tokens (a sliding window keeps window - 1)."""
        if self.name == "shared":
            return 0
        if self.name == "sliding":
            assert self.argument is not None
            return min(seen, self.argument - 1)
        return seen


FULL = LayerKind("full")


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """Keys and values of one decoder layer, as the model holds them (keys after RoPE), in the model's own dtype.

    Attributes:
        kind: see `LayerKind`.
        keys: ``(batch, kv_heads, held, head_dim)``, ``None`` for ``shared``.
        values: ``(batch, kv_heads, held, value_head_dim)``, ``None`` for ``shared``.
        seen: tokens that have gone through the layer in all; ``held`` of them, the last ones, are in the tensors.
        queries: optional ``(batch, heads, window, head_dim)``: the last queries after RoPE, multiplied by the
            attention scaling, so that ``softmax(queries @ keysᵀ)`` under the causal mask is the attention that the
            model paid. Not part of the cache; observation-window scorers read it.
    """

    kind: LayerKind
    keys: Float[Tensor, "batch kv_heads held head_dim"] | None
    values: Float[Tensor, "batch kv_heads held value_head_dim"] | None
    seen: int
    queries: Float[Tensor, "batch heads window head_dim"] | None = None

    @property
    def held(self) -> int:
        """Number of tokens in the tensors."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def first(self) -> int:
        """Index, in the whole sequence, of the first token that the tensors hold."""
        return self.seen - self.held

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.numel() * self.keys.element_size() + self.values.numel() * self.values.element_size()

    def check(self, index: int, batch: int, seq_len: int) -> None:
        """Raise `InvalidInput` unless tensors, kind and counts agree with each other and with the sequence."""
        self.kind.require_supported(index)
        where = f"layer {index} ({self.kind})"
        if self.kind.name == "shared":
            if self.keys is not None or self.values is not None:
                raise InvalidInput(f"{where} holds tensors of its own")
            if not 0 <= (self.kind.argument or 0) < index:
                raise InvalidInput(f"{where} shares a layer that does not come before it")
            if self.seen != seq_len:
                raise InvalidInput(f"{where}: has seen {self.seen} tokens, but the sequence has {seq_len}")
            return
        if self.keys is None or self.values is None:
            raise InvalidInput(f"{where} has no keys or no values")
        if self.keys.dim() != 4 or self.values.dim() != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise InvalidInput(
                f"{where}: keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} must both be "
                "(batch, kv_heads, tokens, head_dim) and agree but for head_dim"
            )
        if self.keys.dtype != self.values.dtype or self.keys.device != self.values.device:
            raise InvalidInput(f"{where}: keys and values differ in dtype or device")
        if self.keys.shape[0] != batch:
            raise InvalidInput(f"{where}: batch {self.keys.shape[0]}, but token_ids have batch {batch}")
        if self.seen != seq_len or self.held != self.kind.held(self.seen):
            raise InvalidInput(
                f"{where}: holds {self.held} of {self.seen} seen tokens, but the sequence has {seq_len}, of which "
                f"this kind holds {self.kind.held(seq_len)}"
            )

    def map_tensors(self, keys: Tensor | None, values: Tensor | None) -> LayerState:
        """The same layer with other tensors (and no queries)."""
        return replace(self, keys=keys, values=values, queries=None)
