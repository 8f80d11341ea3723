"""What two runs differ by in their predictions: logits, KL, flips and the margins at them. One number a position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Row = Float[np.ndarray, " positions"]

FIELDS = ("max_abs", "mean_abs", "relative_l2", "kl", "kl_reverse", "flip", "margin")


@dataclass(frozen=True, slots=True, eq=False)
class LogitDrift:
    """By position, float64.

    Attributes:
        max_abs, mean_abs: of the difference of the logits.
        relative_l2: ``‖a − b‖ / max(‖a‖, ‖b‖)`` of the logits.
        kl: KL(reference ‖ other), nats.
        kl_reverse: KL(other ‖ reference), nats.
        flip: 1 where the most likely token differs.
        margin: of the reference: its largest logit less its second.
    """

    max_abs: Row
    mean_abs: Row
    relative_l2: Row
    kl: Row
    kl_reverse: Row
    flip: Row
    margin: Row

    def to_json(self) -> dict[str, list[float]]:
        return {name: [float(value) for value in getattr(self, name)] for name in FIELDS}


def logit_drift(
    reference: Float[Tensor, "positions vocabulary"], other: Float[Tensor, "positions vocabulary"]
) -> LogitDrift:
    """Compare the logits of two runs on identical prefixes; computed in float64, a position at a time."""
    rows = [_row(a.to(torch.float64), b.to(torch.float64)) for a, b in zip(reference, other, strict=True)]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(FIELDS))
    return LogitDrift(*(table[:, column] for column in range(len(FIELDS))))


def _row(a: Float[Tensor, " vocabulary"], b: Float[Tensor, " vocabulary"]) -> list[float]:
    difference = (a - b).abs()
    scale = max(float(a.norm()), float(b.norm()))
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    top = a.topk(2).values
    return [
        float(difference.max()),
        float(difference.mean()),
        float((a - b).norm()) / scale if scale else 0.0,
        # Rounding makes a KL of nearly nothing negative.
        max(0.0, float((log_a.exp() * (log_a - log_b)).sum())),
        max(0.0, float((log_b.exp() * (log_b - log_a)).sum())),
        float(int(a.argmax()) != int(b.argmax())),
        float(top[0] - top[1]),
    ]
