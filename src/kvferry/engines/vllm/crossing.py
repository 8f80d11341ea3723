"""A consumer of another model than the producer's: its packets are mapped on their way into the pages.

The engine computes a prompt from wherever its cache ends, so it cannot prefill the first tokens by itself once the
store has them. The target's checkpoint is therefore loaded a second time, by Transformers, on the CPU: it prefills the
first tokens of a prompt, on which the gate looks at what was mapped, and which stay its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.segments import require_held
from kvferry.errors import InvalidInput, UnsupportedCache
from kvferry.evaluate.map_gate import CHECKED_TOKENS, LEAST_COMPARED, judged_transfer
from kvferry.evaluate.map_run import transfer
from kvferry.hf.models import load_model
from kvferry.map.gate import Floors, standing
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Identity, Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


JUDGED = 2 * CHECKED_TOKENS
"""Tokens that the gate's look at a prompt needs: the first ones, and as many others to tell them from."""

REMEMBERED = 1 << 16
"""First packets whose verdict is kept, the latest ones."""


def crossing_of(
    config: ConnectorConfig, engine: Identity, chunk: int, *, produces: bool, failure_policy: str
) -> Crossing | None:
    """The crossing that the settings ask for; ``None`` where there is no mapper among them.

    Args:
        config: the settings.
        engine: identity of the engine's model.
        chunk: tokens of a chunk.
        produces: whether the engine saves chunks, too.
        failure_policy: vLLM's, for loads that fail.

    Raises:
        InvalidInput: settings that do not go together, a gate that stays shut, or no such mapper.
        IncompatibleIdentity: the mapper is for another model.
        UnsupportedCache: a layer of the engine's model slides over less than a chunk.
        CorruptPacket, UnsupportedVersion, TooLarge, ModelUnavailable: as `Mapper.from_pretrained`.
    """
    if config.mapper is None:
        return None
    if produces:
        raise InvalidInput(
            "kv_connector_extra_config has a mapper: such an engine takes another model's packets, and its own would "
            "take their place in the store; use kv_role kv_consumer"
        )
    if failure_policy != "recompute":
        raise InvalidInput(
            f"kv_load_failure_policy is {failure_policy!r}: a prompt whose mapped cache the gate declines would end in "
            "an error; use 'recompute'"
        )
    mapper = _open(config.mapper)
    engine.require_compatible(mapper.target, "the engine's model is not the mapper's target")
    for index, geometry in enumerate(mapper.target.layers):
        require_held(index, geometry.kind.held(chunk), chunk)
    floors = _floors(config.floors) if config.gate else None
    if floors is not None:
        if chunk < JUDGED:
            raise InvalidInput(
                f"chunks of {chunk} tokens: the gate needs at least {JUDGED} to judge a prompt's first one by; choose "
                "more chunk_tokens on both sides"
            )
        least = CHECKED_TOKENS - LEAST_COMPARED
        if mapper.recipe.native_prefix > least:
            raise InvalidInput(
                f"the mapper leaves {mapper.recipe.native_prefix} first tokens to the target; the gate, which looks at "
                f"{CHECKED_TOKENS}, can judge mappers that leave at most {least}"
            )
        reasons = standing(mapper, mapper.target, floors)
        if reasons:
            raise InvalidInput(f"the gate before {config.mapper} stays shut: {'; '.join(reasons)}")
    return Crossing(mapper, floors)


class Declined(UnsupportedCache):
    """What the gate says of a prompt whose mapped cache it does not let pass."""


class Crossing:
    """Maps the source's segments to the engine's model.

    Args:
        mapper: from the producer's model to the engine's.
        floors: of the receiver, by which the first tokens of each prompt are judged; ``None``: without a gate.
    """

    def __init__(self, mapper: Mapper, floors: Floors | None):
        self.mapper, self._floors = mapper, floors
        self._target: PreTrainedModel | None = None
        self._verdicts: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    @property
    def source(self) -> Identity:
        """Of the model whose packets are taken."""
        return self.mapper.source

    @property
    def least_first(self) -> int:
        """Tokens that a prompt's first packet must have."""
        return 0 if self._floors is None else JUDGED

    def load_target(self, model: str, dtype: str) -> None:
        """Load the engine's model for the first tokens of prompts; not needed by the scheduler's side.

        Args:
            model: folder or hub id, as the engine has it.
            dtype: the engine's.

        Raises `ModelUnavailable` where Transformers cannot load what the engine has.
        """
        if self._floors is not None or self.mapper.recipe.native_prefix:
            self._target, _ = load_model(model, dtype=dtype)

    def unjudged(self, first: str) -> bool:
        """Whether prompts that begin with the packet of this key have yet to pass the gate."""
        return self._floors is not None and first not in self._verdicts

    def map(self, segment: Snapshot, first: str) -> Snapshot:
        """The target's keys and values of a segment's tokens.

        Args:
            segment: of the source.
            first: key of the first packet of its prompt, by which the gate judges all of it: that one comes first.

        Raises:
            Declined: the gate declines this prompt; says why.
            InvalidInput: too few tokens for the gate to judge by.
        """
        begins = int(segment.positions[0, 0]) == 0
        if self._floors is None:
            if not begins or self._target is None:
                return self.mapper.map(segment)
            return transfer(self.mapper, self._target, segment, check=False).snapshot
        if begins:
            assert self._target is not None, "a gate without the target's model"
            looked = judged_transfer(self.mapper, self._target, segment, self._floors)
            self._verdicts[first] = looked.reasons
            self._verdicts.move_to_end(first)
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
            if looked.transfer is not None:
                return looked.transfer.snapshot
        reasons = self._verdicts.get(first, ("its first tokens have not been looked at",))
        if reasons:
            raise Declined(f"the gate declines the mapped cache: {'; '.join(reasons)}")
        return self.mapper.map(segment)


@lru_cache(maxsize=2)  # both sides of a connector may live in one process
def _open(mapper: str) -> Mapper:
    return Mapper.from_pretrained(mapper)


def _floors(given: Mapping[str, Any]) -> Floors:
    try:
        return Floors(**given)
    except TypeError as error:
        raise InvalidInput(f"kv_connector_extra_config has floors = {dict(given)!r}: {error}") from error
