"""Settings of the connector, as vLLM hands them over in ``kv_connector_extra_config``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvferry.errors import InvalidInput
from kvferry.ship.plan import COMPOSED
from kvferry.ship.policy.table import policy as find_policy
from kvferry.ship.transform.plan import POLICY as TRANSFORM_POLICY

LEAST_CHUNK = 128
"""Tokens of a chunk by default, or the next multiple of the engine's block size: a packet's header takes 2 to 3 KB."""

_CHOICES = {
    "mode": ("async", "sync"),
    "save": ("sync", "background"),
    "identity": ("refuse", "raise"),
}
_DROPPING = ("pdtrim", "sws")


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What a deployment chooses.

    Attributes:
        store: folder of the packets.
        budget: actual bytes over 16-bit bytes; at 1.0 packets are bit-exact.
        policy: of `kvferry.encode`; one that drops tokens has no place in an engine's pages. ``auto`` is ``fast`` here:
            a consumer's transforms are not known.
        mode: ``async``: a request waits apart while its packets are read, and others go on; ``sync``: the step waits.
        save: ``sync``: a step ends when its packets are in the store, and so does a request; ``background``: packets
            are encoded and written by a thread while the engine goes on.
        identity: what a packet of another model does: ``refuse``: it is logged, counted, and the prompt computed;
            ``raise``: the engine stops with `IncompatibleIdentity`.
        chunk_tokens: tokens a packet, a multiple of the engine's block size; ``None``: see `LEAST_CHUNK`.
        tails: whether what a prompt has behind its last whole chunk is a packet, too, for prompts that are exactly the
            same, as a decode engine's are.
        namespace: prompts of different namespaces never meet.
        max_bytes: most bytes of keys and values that one packet may decode to.
        mapper: folder or hub id of a `kvferry.Mapper`, for a consumer that serves another model than the producer:
            packets of the mapper's source are taken, and mapped. ``None``: packets of the engine's own model are.
        gate: with a mapper: whether it serves only where a kept record of ``kvferry map gate`` allows it, and a prompt
            only where a look at its first tokens does.
        floors: of the gate, by the names of `kvferry.map.gate.Floors`, where they are not the default ones.
    """

    store: str
    budget: float = 1.0
    policy: str = "auto"
    mode: str = "async"
    save: str = "sync"
    identity: str = "refuse"
    chunk_tokens: int | None = None
    tails: bool = True
    namespace: str = ""
    max_bytes: int = 4 << 30
    mapper: str | None = None
    gate: bool = True
    floors: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> ConnectorConfig:
        """Read ``kv_connector_extra_config``.

        Raises:
            InvalidInput: a setting that is missing, unknown, or out of its range; says which are there.
        """
        given = dict(extra or {})
        known = {item.name for item in fields(cls)}
        unknown = sorted(given.keys() - known)
        if unknown:
            raise _wrong(f"has no setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        if not isinstance(given.get("store"), str) or not given["store"]:
            raise _wrong("needs the folder of the packets: {'store': '/path'}")
        for name, allowed in _CHOICES.items():
            if given.get(name, allowed[0]) not in allowed:
                raise _wrong(f"has {name} = {given[name]!r}; {' and '.join(allowed)} are possible")
        budget, policy = given.get("budget", 1.0), given.get("policy", "auto")
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < math.inf:
            raise _wrong(f"has budget = {budget!r}: it is a fraction of the 16-bit bytes, above 0")
        if policy not in (*COMPOSED, TRANSFORM_POLICY):
            find_policy(policy)
        if policy in _DROPPING:
            raise _wrong(f"has policy {policy!r}, which drops tokens: an engine's pages hold every token")
        for name in ("chunk_tokens", "max_bytes"):
            number = given.get(name)
            if number is not None and (type(number) is not int or number < 1):
                raise _wrong(f"has {name} = {number!r}: a positive integer is possible")
        if not isinstance(given.get("namespace", ""), str):
            raise _wrong("has a namespace that is no text")
        mapper = given.get("mapper")
        if mapper is not None and (not isinstance(mapper, str) or not mapper):
            raise _wrong(f"has mapper = {mapper!r}: a folder or a hub id is possible")
        for name in ("gate", "tails"):
            if not isinstance(given.get(name, True), bool):
                raise _wrong(f"has {name} = {given[name]!r}: true and false are possible")
        if not isinstance(given.get("floors", {}), Mapping):
            raise _wrong("has floors that are no object: {'kl': 0.3}")
        if given.get("gate") is False and given.get("floors"):
            raise _wrong("has floors but no gate to hold them")
        if mapper is None and ("gate" in given or "floors" in given):
            raise _wrong("has a gate but no mapper: packets of the engine's own model pass none")
        return cls(**{**given, "budget": float(budget)})

    def chunk(self, block_size: int) -> int:
        """Tokens a chunk, for an engine with blocks of ``block_size``."""
        if self.chunk_tokens is None:
            return -(-LEAST_CHUNK // block_size) * block_size
        if self.chunk_tokens % block_size:
            raise _wrong(
                f"has chunk_tokens = {self.chunk_tokens}, no multiple of the engine's blocks of {block_size} tokens"
            )
        return self.chunk_tokens


def _wrong(what: str) -> InvalidInput:
    return InvalidInput(f"kv_connector_extra_config {what}")
