"""A packet's own codec, to be done to the receiver's cache: what it loses there, it may have lost here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvferry.errors import KVFerryError
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.policy import POLICIES
from kvferry.snapshot import Snapshot

OBSERVATION = "observation_window"

ROOM = 1.02
"""A cache of other bits may need a few more bytes for the same choices."""


def codec_of(packet: Packet, observed: Snapshot | None = None) -> Callable[[Snapshot], Snapshot] | None:
    """A function that sends a cache through a packet of the same policy, budget and quantisers; ``None`` where the
    policy is not known here.

    Args:
        packet: whose codec.
        observed: the receiver's own cache of the same tokens with its last queries, for scorers that ask them
            (`asks_queries`): a cache that is audited has none.
    """
    policy = POLICIES.get(packet.policy)
    if policy is None:
        return None
    budget = None if policy.least == policy.most else min(1.0, packet.budget * ROOM)
    seed = packet.report.get("seed")

    def through(own: Snapshot) -> Snapshot:
        asked = own if observed is None else _with_queries(own, observed)
        return decode(encode(asked, budget, packet.policy, _scores(packet), seed=seed if isinstance(seed, int) else 0))

    return through


def asks_queries(packet: Packet) -> bool:
    """Whether the tokens of a packet were ranked by queries."""
    return str(packet.report.get("scorer")).startswith(OBSERVATION)


def _with_queries(own: Snapshot, observed: Snapshot) -> Snapshot:
    layers = (
        layer if layer.keys is None else replace(layer, queries=seen.queries)
        for layer, seen in zip(own.layers, observed.layers, strict=True)
    )
    return replace(own, layers=tuple(layers))


def works(codec: Callable[[Snapshot], Snapshot], snapshot: Snapshot) -> bool:
    """Whether the codec can be done to a cache of this kind at all."""
    try:
        codec(snapshot)
    except KVFerryError:
        return False
    return True


def _scores(packet: Packet) -> str | None:
    """The scorer that the packet names, where it can score again: a caller's own numbers are not in the packet."""
    from kvferry.ship.importance import SCORERS

    name = packet.report.get("scorer")
    return name if isinstance(name, str) and name in SCORERS else None
