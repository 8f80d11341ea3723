"""Audits of packets: a packet's codec, done to the receiver's own cache, shows what may have been lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvferry.audit.finding import Finding
from kvferry.audit.given import audit_cache, require_auditable
from kvferry.audit.models import ModelSet
from kvferry.audit.study import OnProgress
from kvferry.errors import KVFerryError
from kvferry.hf.capture import capture
from kvferry.hf.observe import QUERY_WINDOW
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.policy import POLICIES
from kvferry.snapshot import Snapshot

ROOM = 1.02
"""A cache of other bits may need a few more bytes for the same choices."""


def audit_packet(
    models: ModelSet, packet: Packet, *, new_tokens: int = 32, on_progress: OnProgress | None = None
) -> Finding:
    """Hold what a packet decodes to against the receiver's own cache of the same tokens, and against that cache behind
    the packet's codec, where it can be done to it. Arguments and errors as of `audit_cache`."""
    snapshot = decode(packet)
    require_auditable(models, snapshot)
    observed = capture(models.own, snapshot.token_ids, query_window=QUERY_WINDOW) if asks_queries(packet) else None
    codec = codec_of(packet, observed)
    if codec is not None and not works(codec, snapshot):
        codec = None
    return audit_cache(models, snapshot, codec=codec, new_tokens=new_tokens, on_progress=on_progress)


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
    return str(packet.report.get("scorer")).startswith("observation_window")


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
