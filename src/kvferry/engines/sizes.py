"""What a hand-off will weigh, before anything is prefilled: packets of every budget, and their times on a link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvferry.engines.handoff.clock import at_least
from kvferry.errors import BudgetTooSmall, InvalidInput
from kvferry.hf.identity import identity_of
from kvferry.hf.recompute import prefill
from kvferry.ship.stream import stand_in_for, stream_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Size:
    """A packet of one budget.

    Attributes:
        budget_asked: as given.
        budget: actual: ``nbytes / full_bytes``.
        nominal_budget: the policy's b.
        policy, quantizer: as chosen; empty where the budget cannot be met.
        nbytes: of header and frames.
        full_bytes: of the same packet with every token at 16 bit.
        wire_seconds: ``nbytes`` at the link's rate, no latency, no protocol's own bytes: simulated.
        ttft_seconds: with a prefill time: the least that a pipelined hand-off can take to the first token, the longer
            of prefill and wire and one layer's share of the shorter: simulated. Encode, decode and the first token's
            own forward pass come on top.
        reason: why the budget cannot be met.
    """

    budget_asked: float
    budget: float | None = None
    nominal_budget: float | None = None
    policy: str = ""
    quantizer: str = ""
    nbytes: int | None = None
    full_bytes: int | None = None
    wire_seconds: float | None = None
    ttft_seconds: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return {**plain, "bytes": plain.pop("nbytes")}


def packet_sizes(
    model: PreTrainedModel,
    tokens: int,
    budgets: Sequence[float],
    *,
    policy: str = "auto",
    bits_per_second: int | None = None,
    prefill_seconds: float | None = None,
) -> list[Size]:
    """Packets of a prompt's cache.

    Args:
        model: whose cache.
        tokens: of the prompt that are shipped.
        budgets: actual, one packet each.
        policy: as for `kvferry.encode`; one that needs the cache itself is refused.
        bits_per_second: of the link.
        prefill_seconds: of the producer.

    Raises:
        InvalidInput: no tokens or budgets, an unknown policy, or one that cannot be planned ahead.
    """
    if tokens < 1 or not budgets:
        raise InvalidInput(f"{tokens} tokens and {len(budgets)} budgets: at least one of each")
    identity = identity_of(model)
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    mask = torch.ones_like(ids, dtype=torch.bool)
    stand_in = stand_in_for(identity, ids, torch.arange(tokens).unsqueeze(0), mask)
    found = []
    for budget in budgets:
        try:
            planned = stream_plan(stand_in, budget, policy)
        except BudgetTooSmall as error:
            found.append(Size(budget, reason=str(error)))
            continue
        wire = None if bits_per_second is None else 8 * planned.nbytes / bits_per_second
        first = None
        if wire is not None and prefill_seconds is not None:
            first = at_least(prefill_seconds, wire, len(identity.layers))
        found.append(
            Size(
                budget,
                planned.nbytes / planned.full_bytes,
                planned.header.nominal_budget,
                planned.header.policy,
                planned.header.quantizer,
                planned.nbytes,
                planned.full_bytes,
                wire,
                first,
            )
        )
    return found


def measure_prefill(model: PreTrainedModel, tokens: int) -> float:
    """Median seconds of the model's forward pass over ``tokens`` tokens, warm."""
    identity = identity_of(model)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    prefill(model, identity, ids[:, :32])
    took = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        prefill(model, identity, ids)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
