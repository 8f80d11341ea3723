"""How near the shipped cache comes to the one that stayed: both fed the same tokens, their logits side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.hf.decode import teacher_forced_steps
from kvferry.snapshot import Snapshot

_FORCED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Distance between two runs over the same tokens.

    Attributes:
        n: positions compared.
        kl_mean: mean over positions of KL(unshipped ‖ shipped), in nats; ``None`` where there is no finite position.
        kl_p50: its median.
        kl_p95: its 95th percentile.
        kl_max: its largest.
        top1_agreement: share of positions with the same most likely token.
        nonfinite: positions left out of the above because logits of either run are NaN or infinite.
    """

    n: int
    kl_mean: float | None
    kl_p50: float | None
    kl_p95: float | None
    kl_max: float | None
    top1_agreement: float | None
    nonfinite: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Comparison:
    """Gathers positions one by one."""

    def __init__(self) -> None:
        self._kl: list[float] = []
        self._same: list[bool] = []
        self._nonfinite = 0

    def add(self, unshipped: Float[Tensor, " vocabulary"], shipped: Float[Tensor, " vocabulary"]) -> None:
        """Compare one position's logits."""
        divergence = kl_divergence(unshipped, shipped)
        if math.isfinite(divergence):
            self._kl.append(divergence)
            self._same.append(int(unshipped.argmax()) == int(shipped.argmax()))
        else:
            self._nonfinite += 1

    def fidelity(self) -> Fidelity:
        """The summary."""
        if not self._kl:
            return Fidelity(0, None, None, None, None, None, self._nonfinite)
        values = torch.tensor(self._kl, dtype=torch.float64)
        median, high = torch.quantile(values, torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
        return Fidelity(
            n=len(self._kl),
            kl_mean=float(values.mean()),
            kl_p50=median,
            kl_p95=high,
            kl_max=float(values.max()),
            top1_agreement=sum(self._same) / len(self._same),
            nonfinite=self._nonfinite,
        )


def forced(model: Any, snapshot: Snapshot, ids: Tensor, token_ids: list[int]) -> Iterator[Tensor]:
    """Logits that predict each of ``token_ids``, from the snapshot, float32; every run takes the same steps."""
    whole = torch.cat([ids, torch.tensor([token_ids[:-1]], dtype=torch.int64)], dim=1)
    for _, logits in teacher_forced_steps(model, snapshot, whole, step=_FORCED_AT_ONCE):
        yield from logits[0].float().cpu()


def kl_divergence(p_logits: Float[Tensor, " vocabulary"], q_logits: Float[Tensor, " vocabulary"]) -> float:
    """KL(p ‖ q) in nats of the softmaxes, in float64; NaN where a logit is NaN or +∞."""
    p = torch.log_softmax(p_logits.to(torch.float64), dim=-1)
    q = torch.log_softmax(q_logits.to(torch.float64), dim=-1)
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))  # 0 · log 0 = 0
    return max(0.0, float(terms.sum())) if not bool(terms.isnan().any()) else math.nan


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first token in which two runs differ, ``None`` when they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
