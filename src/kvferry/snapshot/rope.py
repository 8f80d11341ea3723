"""Rotary positions taken off keys and put back on: keys before RoPE do not hang on where a token stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.errors import InvalidInput, UnsupportedCache


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotation of one layer's keys: of pairs within the first ``2 n`` channels.

    Attributes:
        inv_freq: float32 ``(n,)``, radians a position; empty: the layer does not rotate.
        scale: factor that the rotation carries (YaRN's attention factor), else 1.
        interleaved: pairs are ``(2 i, 2 i + 1)`` (GPT-J, Cohere, GLM), not ``(i, i + n)`` (Llama, GPT-NeoX).
        limit: positions that these frequencies are of, from 0 on; ``None``: all. Dynamic and long scaling turn what
            comes after by other ones.
        single: angles are rounded to float32 on the way, as transformers does it: to a float32 cache this is the exact
            inverse. Without, they are those that were meant; the difference is 1e-4 radians at position 2,000.
    """

    inv_freq: Float[Tensor, " n"]
    scale: float = 1.0
    interleaved: bool = False
    limit: int | None = None
    single: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise InvalidInput(f"a rotation's limit is {self.limit!r}; it must be a positive number of positions")
        if type(self.interleaved) is not bool or type(self.single) is not bool:
            raise InvalidInput(
                f"a rotation's interleaved and single are yes or no, not {self.interleaved!r}, {self.single!r}"
            )

    def strip(
        self, keys: Float[Tensor, "batch heads tokens dim"], positions: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch heads tokens dim"]:
        """Keys before RoPE, float32.

        Raises:
            UnsupportedCache: a position at or beyond `limit`: the cache is turned by several sets of frequencies.
        """
        return self._turn(keys, positions, -1.0, 1.0 / self.scale)

    def apply(
        self, keys: Float[Tensor, "batch heads tokens dim"], positions: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch heads tokens dim"]:
        """Inverse of `strip`, float32. Raises what that raises."""
        return self._turn(keys, positions, 1.0, self.scale)

    def _turn(self, keys: Tensor, positions: Tensor, sign: float, scale: float) -> Tensor:
        pairs = self.inv_freq.numel()
        if self.limit is not None and positions.numel() and int(positions.max()) >= self.limit:
            raise UnsupportedCache(
                f"position {int(positions.max())} lies beyond the {self.limit} whose keys are turned by one set of "
                "frequencies: this cache mixes several, or is of another length than its rotation was asked for"
            )
        x = keys.to(torch.float32)
        if pairs == 0:
            return x if scale == 1 else x * scale
        # Angles in float64: at position 100,000 a float32 product is off by more than a key's 16-bit rounding.
        precision = torch.float32 if self.single else torch.float64
        angles = positions.to(precision).unsqueeze(-1) * self.inv_freq.to(keys.device, precision)
        cos = (angles.cos() * scale).to(torch.float32).unsqueeze(1)
        sin = (angles.sin() * (sign * scale)).to(torch.float32).unsqueeze(1)
        turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.interleaved:
            first, second = turning[..., ::2], turning[..., 1::2]
            both = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
            return torch.cat([both, rest], dim=-1) if rest.shape[-1] else both
        first, second = turning[..., :pairs], turning[..., pairs:]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*turned, rest], dim=-1) if rest.shape[-1] else torch.cat(turned, dim=-1)
