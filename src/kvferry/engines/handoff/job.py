"""What one hand-off is to do: all that the two processes are told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields

from kvferry.channel.base import check_name, new_handoff_name
from kvferry.errors import InvalidInput
from kvferry.snapshot.files import read_text

DEFAULT_PROMPT_TOKENS = 1536
DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HandoffNames:
    """Names of the two things handed over. Who knows them can fetch them, so nobody else is told.

    Attributes:
        cache: the cache.
        reference: what the consumer is compared with afterwards.
        refinement: what brings a progressive hand-off's cache to every bit.
    """

    cache: str = field(repr=False)
    reference: str = field(repr=False)
    refinement: str = field(repr=False)

    @classmethod
    def new(cls) -> HandoffNames:
        """Names that nobody guesses."""
        return cls(new_handoff_name(), new_handoff_name(), new_handoff_name())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HandoffNames:
        """Inverse of `to_json`; raises `InvalidInput` for anything else."""
        try:
            given = json.loads(text)
            return cls(*(check_name(given[each.name]) for each in fields(cls)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInput(f"these are no names of a hand-off: {error}") from error


@dataclass(frozen=True, slots=True)
class HandoffJob:
    """One hand-off from a producer to a consumer.

    Attributes:
        producer_model: name, hub id or folder of the model that prefills.
        consumer_model: of the model that decodes; another one is refused by identity.
        budget: bytes of the packet over those of the 16-bit packet, at most; or else give ``nominal_budget``.
        nominal_budget: the policy's own b instead.
        policy: a name in `kvferry.ship.policy.POLICIES`, ``fast``, which ``auto`` is here, too, or ``klt`` where both
            processes find the same transform in their cache folders.
        scorer: importance of a token; ``None``: the policy's default.
        decay: λ of the scorer; ``None``: its own.
        frame_tokens: tokens a frame; ``None``: one frame a layer.
        text_file: what is prefilled; ``None``: the text that every Python installation has.
        max_tokens: tokens of the prompt, at most.
        max_new: tokens to decode, at most.
        dtype: of weights and cache.
        attn: attention backend.
        threads: of each process; ``None``: as many as torch takes.
        seed: for what is random.
        timeout: longest silence of the other process, in seconds; one that is at work says so, and has the time that it
            needs.
        int4_allowed: for the policy ``adaptive``: whether the model bears INT4; ``None``: what a probe found that is
            kept in the producer's cache folder.
        pipeline: encode and send each layer while the next one is being prefilled, which ranks the tokens of a layer by
            that layer alone; else everything is prefilled first, and tokens are ranked by the mean over the layers.
        plan_ahead: not pipelined, send all the same the packet that a pipelined hand-off sends, to compare the two.
        progressive: after the first token send on, until the consumer's cache is the producer's bit for bit.
        mapper: folder or hub id of a mapper from the producer's model to the consumer's, which maps what it receives.
        gate: with a mapper: whether the consumer takes a mapped cache only where `kvferry.evaluate.map_gate` opens, and
            else prefills the prompt itself.
        recompute_last: with a mapper: last shipped tokens that the consumer computes anew on top of the mapped ones.
        link: rate of a shaped link between the two processes, as in ``1gbit``; ``None``: the loopback interface.
        channel: what moves the frames: ``socket``, or, out of the producer's memory, ``nixl`` or ``mooncake``.
    """

    producer_model: str
    consumer_model: str
    budget: float | None = None
    nominal_budget: float | None = None
    policy: str = "auto"
    scorer: str | None = None
    decay: float | None = None
    frame_tokens: int | None = None
    text_file: str | None = None
    max_tokens: int = DEFAULT_PROMPT_TOKENS
    max_new: int = DEFAULT_NEW_TOKENS
    dtype: str = "bfloat16"
    attn: str = "sdpa"
    threads: int | None = None
    seed: int = 0
    timeout: float = 600.0
    int4_allowed: bool | None = None
    pipeline: bool = True
    plan_ahead: bool = False
    progressive: bool = False
    mapper: str | None = None
    gate: bool = True
    recompute_last: int = 0
    link: str | None = None
    channel: str = "socket"

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.nominal_budget is None):
            raise InvalidInput("give a budget or a nominal budget, and not both")
        for name in ("budget", "nominal_budget", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInput(f"{name} is {value}; it must be above 0")
        if not abs(self.seed) < 2**32:
            raise InvalidInput(f"seed is {self.seed}; it must have at most 32 bits")
        if self.progressive and self.policy == "klt":
            raise InvalidInput(
                "a packet of policy klt cannot be refined, as its last bits hang on the machine that decodes it: "
                "take another policy, or no progressive hand-off"
            )
        if self.mapper is None and self.recompute_last:
            raise InvalidInput("recompute_last is for a hand-off with a mapper")
        if self.mapper is not None and self.progressive:
            raise InvalidInput(
                "a refinement brings a cache to the producer's bits, and the consumer of a mapped cache has another "
                "model: no progressive hand-off with a mapper"
            )
        least = {"recompute_last": 0, "max_tokens": 2, "max_new": 1, "threads": 1, "frame_tokens": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InvalidInput(f"{name} is {value}; it must be at least {lowest}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HandoffJob:
        """Inverse of `to_json`; raises `InvalidInput` for anything else."""
        try:
            given = json.loads(text)
            known = {each.name for each in fields(cls)}
            if not isinstance(given, dict) or not given.keys() <= known:
                raise ValueError("unknown fields")
            return cls(**given)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"this is no job of a hand-off: {error}") from error

    def read_text(self) -> str:
        """The text to prefill. Raises `InvalidInput` where the file is missing, empty, or no UTF-8 text."""
        if self.text_file is None:
            from kvferry.hf.text import default_text

            return default_text()
        return read_text(self.text_file)
