"""Perplexity through the cached decode path: a prefix's cache is shipped and restored, then the suffix is scored.

Every method scores the same tokens of the same windows in one forward pass from its own cache, with positions kept and
dropped tokens masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import BudgetTooSmall
from kvferry.evaluate.attention import AttentionCosine, attention_cosine
from kvferry.evaluate.head import fp32_logits
from kvferry.evaluate.method import Method, Shipped, ship
from kvferry.evaluate.scores import TokenScores, compare
from kvferry.evaluate.windows import Window
from kvferry.hf.capture import capture
from kvferry.hf.decode import teacher_forced_steps
from kvferry.hf.observe import QUERY_WINDOW
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class WindowResult:
    """One method on one window.

    Attributes:
        method: the method.
        scores: token by token; ``None`` where the policy could not meet the budget.
        nbytes: bytes on the wire.
        full_bytes: those of the 16-bit packet.
        nominal_budget: the policy's own mean cost of a token.
        quantizer: names of the quantisers in use.
        attention: cosines of attention outputs by layer, where asked for.
        reason: why there are no scores.
        shipped: what came out; ``None`` where nothing did.
    """

    method: Method
    scores: TokenScores | None
    nbytes: int = 0
    full_bytes: int = 0
    nominal_budget: float | None = None
    quantizer: str = ""
    attention: AttentionCosine | None = None
    reason: str | None = None
    shipped: Shipped | None = None


class PreparedWindow:
    """A window whose prefix is prefilled once, and scored once from the 16-bit cache; methods are judged against it.

    Args:
        model: the model.
        window: from `cut_windows`.
        step: tokens a forward pass; by default all at once.
    """

    def __init__(self, model: PreTrainedModel, window: Window, *, step: int | None = None):
        self.model, self.window, self.step = model, window, step
        self.snapshot = capture(model, window.prefix_ids, query_window=QUERY_WINDOW)
        self.reference = suffix_logits(model, self.snapshot, window, step=step)
        self.full = compare(self.reference, self.reference, window.targets)
        self._scored: dict[bytes, TokenScores] = {}

    def judge(self, method: Method, *, attention: bool = False) -> WindowResult:
        """Ship the prefix's cache by ``method`` and score the suffix from what arrives."""
        try:
            shipped = ship(self.snapshot, method)
        except BudgetTooSmall as error:
            return WindowResult(method, None, reason=str(error))
        return WindowResult(
            method,
            self._score_once(shipped),
            shipped.nbytes,
            shipped.full_bytes,
            shipped.nominal_budget,
            shipped.quantizer,
            attention_cosine(self.snapshot, shipped.snapshot) if attention else None,
            shipped=shipped,
        )

    def _score_once(self, shipped: Shipped) -> TokenScores:
        """`score`, but for packets that are the same to the byte: several names may stand for one policy."""
        if shipped.packet is None:
            return self.score(shipped.snapshot)
        key = xxhash.xxh3_128_digest(shipped.packet.to_bytes())
        if key not in self._scored:
            self._scored[key] = self.score(shipped.snapshot)
        return self._scored[key]

    def score(self, snapshot: Snapshot) -> TokenScores:
        """Score the suffix from any cache of the prefix."""
        logits = suffix_logits(self.model, snapshot, self.window, step=self.step)
        return compare(self.reference, logits, self.window.targets)


def suffix_logits(
    model: PreTrainedModel, snapshot: Snapshot, window: Window, *, step: int | None = None
) -> Float[Tensor, "suffix vocabulary"]:
    """Logits before each scored token, in float32, from a cache of the window's prefix.

    The forward pass takes up the cache through `to_cache`, as a receiver does; `step=1` decodes token by token.
    """
    with fp32_logits(model):
        steps = teacher_forced_steps(model, snapshot, window.fed_ids, step=step)
        pieces = [logits[0].float() for _, logits in steps]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def judge_windows(
    model: PreTrainedModel, windows: Iterable[Window], methods: Iterable[Method], *, step: int | None = None
) -> Iterator[tuple[PreparedWindow, list[WindowResult]]]:
    """Every method on every window, one prefill a window."""
    chosen = list(methods)
    for window in windows:
        prepared = PreparedWindow(model, window, step=step)
        yield prepared, [prepared.judge(method) for method in chosen]
