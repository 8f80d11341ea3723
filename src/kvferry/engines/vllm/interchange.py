"""Between Transformers and vLLM: a cache captured by one is published for the other, and the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.engines.vllm.chain import chain
from kvferry.engines.vllm.config import LEAST_CHUNK
from kvferry.engines.vllm.lookup import longest
from kvferry.engines.vllm.segments import cut, join, require_plain
from kvferry.engines.vllm.store import Store
from kvferry.errors import InvalidInput
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.plan import FAST
from kvferry.ship.policy.tiers import N_SINK
from kvferry.snapshot import Identity, Snapshot


def publish(
    cache: Snapshot | Packet,
    store: Store,
    *,
    budget: float = 1.0,
    policy: str = FAST,
    chunk_tokens: int = LEAST_CHUNK,
    namespace: str = "",
    **options: Any,
) -> int:
    """Put a cache into a store, for a vLLM consumer of the same model to take up.

    A snapshot goes in chunk by chunk, so that prompts which share only its beginning profit, too; tokens behind the
    last whole chunk are left out. A packet goes in as it is, for prompts that begin with all of its tokens.

    Args:
        cache: one sequence from position 0 on, no token masked.
        store: the consumer's.
        budget, policy, options: of `kvferry.encode`, for a snapshot.
        chunk_tokens, namespace: as in the consumer's settings.

    Returns:
        Tokens that a consumer will find.

    Raises:
        InvalidInput: a cache shorter than a chunk, or with masked tokens; a packet whose length is no multiple of
            ``chunk_tokens`` (crop the snapshot first).
        UnsupportedCache: a sliding layer no longer holds the first tokens.
    """
    if isinstance(cache, Packet):
        ids = cache.header.token_ids[0].tolist()
        if cache.header.batch != 1 or not bool(cache.header.mask.all()) or len(ids) % chunk_tokens:
            raise InvalidInput(
                f"a packet of {cache.header.batch} sequences of {len(ids)} tokens; a consumer takes one sequence, no "
                f"token dropped, of a multiple of {chunk_tokens} tokens: crop the snapshot before it is encoded"
            )
        store.put(chain(ids, chunk_tokens, namespace)[-1], "prefix", cache)
        return len(ids)
    require_plain(cache)
    keys = chain(cache.token_ids[0].tolist(), chunk_tokens, namespace)
    if not keys:
        raise InvalidInput(f"a cache of {cache.seq_len} tokens is shorter than a chunk of {chunk_tokens}")
    for index, key in enumerate(keys):
        start = index * chunk_tokens
        segment = cut(cache, start, start + chunk_tokens, key)
        store.put(key, "segment", encode(segment, budget, policy, n_sink=0 if index else N_SINK, **options))
    return len(keys) * chunk_tokens


def fetch(
    token_ids: Sequence[int],
    store: Store,
    identity: Identity,
    *,
    chunk_tokens: int = LEAST_CHUNK,
    namespace: str = "",
    max_bytes: int | None = None,
) -> Snapshot | None:
    """The longest prefix of whole chunks that a store has of a prompt, as one snapshot; ``None`` where it has none.

    Args:
        token_ids: the prompt; leave its last token out when it is to be continued.
        store: a vLLM producer's.
        identity: of the model that is to take it up, from `kvferry.hf.identity.identity_of`.
        chunk_tokens, namespace: as in the producer's settings.
        max_bytes: see `kvferry.decode`.

    Raises:
        IncompatibleIdentity: the store has the prefix of another model; names what differs.
        CorruptPacket: a packet is damaged.
    """
    ids = list(token_ids)
    entries = longest(store, chain(ids, chunk_tokens, namespace), chunk_tokens, ids, identity)
    if not entries:
        return None
    return join([decode(store.get(entry.key, entry.kind), max_bytes=max_bytes) for entry in entries])
