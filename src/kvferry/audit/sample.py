"""Choosing tokens with common random numbers: two runs that see the same logits draw the same token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next token is chosen.

    Sampling is Gumbel-max: noise that hangs on the seed, the sequence and the step alone is added to the logits, and
    the largest sum wins. The draw is exactly the softmax's, and two runs share every bit of its randomness, so their
    tokens differ only where their logits do.

    Attributes:
        name: what reports call it.
        temperature: 0: greedy.
        top_k: keep so many tokens; 0: all.
        top_p: keep the likeliest tokens that together have this probability.
        seed: of the noise.
    """

    name: str = "greedy"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InvalidInput(
                f"a sampler of temperature {self.temperature}, top_k {self.top_k} and top_p {self.top_p}"
            )

    def choose(self, logits: Float[Tensor, " vocabulary"], sequence: int, step: int) -> tuple[int, float]:
        """The token, and by how much its score led the second's."""
        scores = logits.to(torch.float64)
        if self.temperature > 0:
            scores = self._kept(scores / self.temperature) + self._noise(len(scores), sequence, step)
        top = scores.topk(2)
        return int(top.indices[0]), float(top.values[0] - top.values[1])

    def keeps(self, logits: Float[Tensor, " vocabulary"], token: int) -> bool:
        """Whether ``token`` is among those that are drawn from."""
        if self.temperature <= 0:
            return True
        return bool(self._kept(logits.to(torch.float64) / self.temperature)[token] > -torch.inf)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def _kept(self, scores: Tensor) -> Tensor:
        if self.top_k:
            least = scores.topk(min(self.top_k, len(scores))).values[-1]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ordered, index = scores.sort(descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            scores = scores.masked_fill(
                torch.zeros_like(scores, dtype=torch.bool).scatter(0, index, before >= self.top_p), -torch.inf
            )
        return scores

    def _noise(self, count: int, sequence: int, step: int) -> Tensor:
        # One 63-bit seed for each draw; odd constants keep neighbours apart, and torch mixes the rest.
        mixed = (self.seed * 0x9E3779B97F4A7C15 + sequence * 0xC2B2AE3D27D4EB4F + step * 0x165667B19E3779F9 + 1) % (
            1 << 63
        )
        generator = torch.Generator().manual_seed(mixed)
        uniform = torch.rand(count, generator=generator, dtype=torch.float64).clamp_min(1e-300)
        return -(-uniform.log()).log()


GREEDY = Sampler()
SAMPLERS = {
    "greedy": GREEDY,
    "top_k": Sampler("top_k", temperature=1.0, top_k=50),
    "top_p": Sampler("top_p", temperature=1.0, top_p=0.9),
    "temperature": Sampler("temperature", temperature=0.7),
}
"""Name -> sampler."""
