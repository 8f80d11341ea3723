"""Two models that take turns on one context: each turn's tokens are computed by one and mapped for the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.evaluate.head import fp32_logits
from kvferry.evaluate.map_fit import with_tokenizer
from kvferry.evaluate.map_run import transfer
from kvferry.evaluate.scores import TokenScores, compare
from kvferry.hf.capture import capture, snapshot_from_cache
from kvferry.hf.decode import teacher_forced_logits
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn.

    Attributes:
        number: from 1 on.
        model: 0: the first model, 1: the second.
        context: tokens before it; ``native`` of them were computed by the model itself.
        scores: of its tokens, against the model's own prefill of everything.
    """

    number: int
    model: int
    context: int
    native: int
    scores: TokenScores

    def to_json(self) -> dict[str, Any]:
        kl = self.scores.kl
        return {
            "turn": self.number,
            "model": self.model,
            "context": self.context,
            "native": self.native,
            "n": len(kl),
            "kl_mean": float(kl.mean()),
            "kl_max": float(kl.max()),
            "top1_agreement": 1 - self.scores.flips / len(kl),
            "nll": float(self.scores.nll.mean()),
        }


def take_turns(
    models: tuple[PreTrainedModel, PreTrainedModel],
    mappers: tuple[Mapper, Mapper],
    token_ids: Int[Tensor, "1 seq_len"],
    *,
    first: int,
    turn: int,
) -> list[Turn]:
    """A → B → A → B … over a text: A prefills its first tokens, then the two go on in turns, B first.

    Only what is new is mapped (`Mapper.extend`); a model keeps what it has computed itself.

    Args:
        models: A and B.
        mappers: of A's caches to B, and of B's to A.
        token_ids: the text; what is left after whole turns is not used.
        first: tokens that A prefills.
        turn: tokens a turn.

    Raises:
        InvalidInput: no room for a turn.
        IncompatibleIdentity: mappers of other models.
    """
    count = (token_ids.shape[1] - first) // turn if turn > 0 else 0
    if first < 1 or count < 1:
        raise InvalidInput(f"{first} tokens and turns of {turn} do not fit into {token_ids.shape[1]}")
    references = [_reference(model, token_ids) for model in models]
    own = with_tokenizer(capture(models[0], token_ids[:, :first]), mappers[0].source)
    caches: list[Snapshot] = [own, transfer(mappers[0], models[1], own).snapshot]
    native = [first, mappers[0].recipe.native_prefix]
    turns = []
    for number in range(1, count + 1):
        active = number % 2
        before = first + (number - 1) * turn
        fed = token_ids[:, : before + turn]
        cache = caches[active].to_cache(models[active])
        with fp32_logits(models[active]):
            logits = teacher_forced_logits(models[active], cache, fed)[0].float()
        # The last token's logits speak of a token of the next turn, which is not there after the last one.
        targets = token_ids[0, before + 1 : before + turn + 1]
        reference = references[active][before : before + len(targets)]
        turns.append(Turn(number, active, before, native[active], compare(reference, logits[: len(targets)], targets)))
        stages = (*caches[active].identity.construction, f"decoded({turn})")
        grown = snapshot_from_cache(cache, models[active], fed, construction=stages)
        caches[active] = with_tokenizer(grown, mappers[active].source)
        native[active] += turn
        caches[1 - active] = mappers[active].extend(caches[1 - active], caches[active])
    return turns


def _reference(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Logits of the model's own prefill of everything but the first token."""
    from kvferry.hf.restore import empty_cache

    with fp32_logits(model):
        return teacher_forced_logits(model, empty_cache(model), token_ids)[0].float()
