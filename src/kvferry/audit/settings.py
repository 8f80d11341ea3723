"""What an audit is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.audit.pair import Controls
from kvferry.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of an audit.

    Attributes:
        controls: what is run beside the arms of a pair.
        new_tokens: decoded at most in free runs.
        samplers: names in `kvferry.audit.sample.SAMPLERS`, for `free_run`.
        explain: sequences of a free run or a transplant that get controls of their own; the others take the verdict.
        parted: `transplant` goes through the passages until so many donors and recipients have parted, and transplants
            these alone; 0: every passage is transplanted.
        ranges: transplanted sequences in which ranges of layers and of tokens are transplanted, too; ``None``: all.
        layer_step: `residual_patch` patches every so many layers.
        patch_positions: positions of the suffix patched, evenly spread.
        horizon: steps after a patched position that are looked at.
        until_split: in free runs, stop the second arm behind its first divergence: no answers are compared then.
        screen: in greedy free runs, recompute only where the choice leads by less than so many times what shapes move
            logits by; 0: every step. The first ``explain`` prompts are recomputed whole, too, and must agree.
        ignore_ends: free runs go on behind a token that ends a text, so that all have ``new_tokens``; answers are read
            from what comes before it.
        resamples: of bootstraps.
        seed: of sampling and of bootstraps.
    """

    controls: Controls = field(default_factory=Controls)
    new_tokens: int = 64
    samplers: tuple[str, ...] = ("greedy",)
    explain: int = 2
    parted: int = 0
    ranges: int | None = None
    layer_step: int = 1
    patch_positions: int = 3
    horizon: int = 3
    until_split: bool = False
    screen: float = 0.0
    ignore_ends: bool = False
    resamples: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.new_tokens, self.layer_step, self.patch_positions, self.horizon, self.resamples) < 1:
            raise InvalidInput("new_tokens, layer_step, patch_positions, horizon and resamples must be positive")
        if min(self.explain, self.parted, self.ranges or 0) < 0:
            raise InvalidInput("explain, parted and ranges must not be negative")
        if self.screen and (self.screen <= 2 or self.samplers != ("greedy",)):
            raise InvalidInput(f"screen is {self.screen}; it is for greedy runs, and more than 2")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


QUICK = Settings(new_tokens=12, explain=1, ranges=0, layer_step=6, patch_positions=1, horizon=2, resamples=2_000)
"""Under two minutes for a model of 135 million parameters on two cores."""
