"""What is measured at each scored token, and its summary."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.errors import InvalidInput

_AT_ONCE = 1 << 19
"""Logits compared at once: 2 MiB, which stay in a core's own cache; larger pieces are several times slower."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """One method on one window, token by token; all arrays float32 ``(scored tokens,)``.

    Attributes:
        nll: negative log likelihood of each target, in nats.
        kl: KL(16-bit cache ‖ this one) of the distribution before each target, in nats.
        flip_margin: where the most likely token is another than the 16-bit cache's, by how many nats the 16-bit cache
            preferred its own to that other one; NaN where both agree.
    """

    nll: Float[np.ndarray, " tokens"]
    kl: Float[np.ndarray, " tokens"]
    flip_margin: Float[np.ndarray, " tokens"]

    @property
    def flips(self) -> int:
        """Tokens whose most likely token changed."""
        return int((~np.isnan(self.flip_margin)).sum())

    def to_json(self) -> dict[str, str]:
        """Base64 of the little-endian float32 values."""
        return {
            name: base64.b64encode(getattr(self, name).astype("<f4").tobytes()).decode("ascii")
            for name in ("nll", "kl", "flip_margin")
        }

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> TokenScores:
        """Inverse of `to_json`."""
        return cls(
            **{
                name: np.frombuffer(base64.b64decode(data[name], validate=True), "<f4").astype(np.float32)
                for name in ("nll", "kl", "flip_margin")
            }
        )


def compare(
    reference: Float[Tensor, "tokens vocabulary"],
    logits: Float[Tensor, "tokens vocabulary"],
    targets: Int[Tensor, " tokens"],
) -> TokenScores:
    """Score ``logits`` against those of the 16-bit cache, row i being before ``targets[i]``; in float32.

    A row with NaN or infinite logits has NaN as its KL and, if the targets' are touched, as its NLL.
    """
    pieces: list[tuple[Tensor, Tensor, Tensor]] = []
    chunk = max(1, _AT_ONCE // reference.shape[1])
    for start in range(0, len(targets), chunk):
        rows = slice(start, start + chunk)
        p = torch.log_softmax(reference[rows].float(), dim=-1)
        q = p if reference is logits else torch.log_softmax(logits[rows].float(), dim=-1)
        nll = -q.gather(1, targets[rows].to(q.device).unsqueeze(1)).squeeze(1)
        kl = _divergence(p, q)
        best, other = p.argmax(dim=1, keepdim=True), q.argmax(dim=1, keepdim=True)
        margin = (p.gather(1, best) - p.gather(1, other)).squeeze(1)
        margin = torch.where((best == other).squeeze(1), torch.nan, margin)
        pieces.append((nll, kl.clamp_min(0.0), margin))
    return TokenScores(*(torch.cat([piece[place] for piece in pieces]).float().cpu().numpy() for place in range(3)))


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of each row of log-probabilities; what has no probability in ``p`` adds nothing."""
    if p is q:
        return torch.where(p.isnan().any(dim=1), torch.nan, torch.zeros(len(p), dtype=torch.float64, device=p.device))
    if bool(torch.isneginf(p.amin())):
        return torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(dim=1, dtype=torch.float64)
    # One pass over a vocabulary of hundreds of thousands, in place of four.
    return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(dim=1, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How far a method is from the 16-bit cache over all scored tokens.

    Attributes:
        n: tokens scored.
        nonfinite: of these, those with NaN or infinite logits, left out of all that follows.
        kl_mean, kl_p50, kl_p95, kl_max: KL(16 bit ‖ method) in nats.
        top1_agreement: share of tokens with the same most likely token.
        flip_margin_p50, flip_margin_max: of the flips, how far apart the 16-bit cache had the two tokens, in nats.
    """

    n: int
    nonfinite: int
    kl_mean: float | None
    kl_p50: float | None
    kl_p95: float | None
    kl_max: float | None
    top1_agreement: float | None
    flip_margin_p50: float | None
    flip_margin_max: float | None


def fidelity(scores: Sequence[TokenScores]) -> Fidelity:
    """Pool the tokens of several windows."""
    kl = np.concatenate([score.kl for score in scores]).astype(np.float64)
    margin = np.concatenate([score.flip_margin for score in scores]).astype(np.float64)
    finite = np.isfinite(kl)
    n = int(finite.sum())
    if not n:
        return Fidelity(len(kl), len(kl), None, None, None, None, None, None, None)
    values, flipped = kl[finite], margin[finite & ~np.isnan(margin)]
    return Fidelity(
        n=len(kl),
        nonfinite=len(kl) - n,
        kl_mean=float(values.mean()),
        kl_p50=float(np.quantile(values, 0.5)),
        kl_p95=float(np.quantile(values, 0.95)),
        kl_max=float(values.max()),
        top1_agreement=1 - len(flipped) / n,
        flip_margin_p50=float(np.quantile(flipped, 0.5)) if len(flipped) else None,
        flip_margin_max=float(flipped.max()) if len(flipped) else None,
    )


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of a method beside the 16-bit cache's, over the same tokens.

    Attributes:
        windows: how many.
        ppl: of the method; ``None`` where a token's likelihood is not finite.
        ppl_full: of the 16-bit cache.
        delta_pct: ``100 (ppl / ppl_full - 1)``.
        delta_ci: its 95% interval: windows drawn anew with replacement (paired); ``None`` for a single window.
        delta_se: standard error, from the windows' differences; ``None`` for a single window.
    """

    windows: int
    ppl: float | None
    ppl_full: float
    delta_pct: float | None
    delta_ci: tuple[float, float] | None
    delta_se: float | None


def perplexity(method: Sequence[TokenScores], full: Sequence[TokenScores], *, seed: int = 0) -> Perplexity:
    """Perplexities and their paired difference; window i of both must be of the same tokens.

    Raises:
        InvalidInput: no windows, or not the same ones.
    """
    from kvferry.evidence.statistics import bootstrap_mean, standard_error

    if not full or [len(score.nll) for score in method] != [len(score.nll) for score in full]:
        raise InvalidInput("a perplexity needs the same windows, at least one, of the method and of the 16-bit cache")
    every = [np.concatenate([score.nll for score in side]).astype(np.float64) for side in (method, full)]
    ppl_full = math.exp(every[1].mean()) if np.isfinite(every[1]).all() else math.nan
    difference = every[0] - every[1]
    if not np.isfinite(difference).all():
        return Perplexity(len(full), None, ppl_full, None, None, None)
    by_window = np.repeat(np.arange(len(full)), [len(score.nll) for score in full])
    interval = bootstrap_mean(difference.tolist(), by_window.tolist(), seed=seed)
    means = [float((a.nll.astype(np.float64) - b.nll).mean()) for a, b in zip(method, full, strict=True)]
    error = standard_error(means)
    delta = float(difference.mean())
    return Perplexity(
        windows=len(full),
        ppl=math.exp(every[0].mean()),
        ppl_full=ppl_full,
        delta_pct=100 * math.expm1(delta),
        delta_ci=None if interval is None else (100 * math.expm1(interval[0]), 100 * math.expm1(interval[1])),
        delta_se=None if error is None else 100 * math.exp(delta) * error,
    )
