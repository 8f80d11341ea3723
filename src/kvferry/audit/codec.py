"""A packet's own codec, to be done to the receiver's cache: what it loses there, it may have lost here."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.errors import KVFerryError
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.policy import POLICIES
from kvferry.snapshot import Snapshot

ROOM = 1.02
"""A cache of other bits may need a few more bytes for the same choices."""


def codec_of(packet: Packet) -> Callable[[Snapshot], Snapshot] | None:
    """A function that sends a cache through a packet of the same policy, budget and quantisers; ``None`` where the
    policy is not known here."""
    policy = POLICIES.get(packet.policy)
    if policy is None:
        return None
    budget = None if policy.least == policy.most else min(1.0, packet.budget * ROOM)
    seed = packet.report.get("seed")

    def through(own: Snapshot) -> Snapshot:
        return decode(encode(own, budget, packet.policy, _scores(packet), seed=seed if isinstance(seed, int) else 0))

    return through


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
