"""The longest prefix of a prompt that a store has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvferry.engines.vllm.segments import require_held
from kvferry.engines.vllm.store import Entry, Kind, Store, check_entry
from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput, KVFerryError, UnsupportedCache
from kvferry.snapshot import Identity

logger = logging.getLogger(__name__)


def longest(
    store: Store,
    keys: Sequence[str],
    chunk: int,
    token_ids: Sequence[int],
    want: Identity,
    tail: Entry | None = None,
) -> tuple[Entry, ...]:
    """Entries that cover as many whole chunks from the first token on as the store can, and the tail behind them.

    Each entry's header is checked against the prompt and the model; one that is damaged, or of another model behind
    some of this one, ends the prefix before it.

    Args:
        store: where to look.
        keys: the prompt's, from `kvferry.engines.vllm.chain`.
        chunk: tokens a chunk.
        token_ids: the prompt.
        want: identity of the receiver's model.
        tail: what a prompt of exactly these tokens has behind its last whole chunk.

    Raises:
        IncompatibleIdentity: the store has this prefix, of another model, and nothing of this one before it.
    """
    found = _chunks(store, keys, chunk, token_ids, want)
    reach = found[-1].stop if found else 0
    if tail is not None and tail.start == reach and store.has(tail.key, tail.kind):
        try:
            if _usable(store, tail, token_ids, want):
                return (*found, tail)
        except IncompatibleIdentity as error:
            if not found:
                raise
            logger.warning("%s %s of the store is passed over: %s", tail.kind, tail.key, error)
    return found


def _chunks(
    store: Store, keys: Sequence[str], chunk: int, token_ids: Sequence[int], want: Identity
) -> tuple[Entry, ...]:
    run = _run(store, keys, chunk, 0, token_ids, want)
    for index in range(len(keys) - 1, len(run) - 1, -1):
        entry = Entry(keys[index], "prefix", 0, (index + 1) * chunk)
        if store.has(entry.key, "prefix") and _usable(store, entry, token_ids, want):
            return (entry, *_run(store, keys, chunk, index + 1, token_ids, want))
    return run


def _run(
    store: Store, keys: Sequence[str], chunk: int, first: int, token_ids: Sequence[int], want: Identity
) -> tuple[Entry, ...]:
    """Segments one after another from chunk ``first`` on."""
    found: list[Entry] = []
    kind: Kind = "segment"
    for index in range(first, len(keys)):
        entry = Entry(keys[index], kind, index * chunk, (index + 1) * chunk)
        try:
            usable = store.has(entry.key, kind) and _usable(store, entry, token_ids, want)
        except IncompatibleIdentity as error:
            if not found:
                raise
            logger.warning("%s %s of the store is passed over: %s", kind, entry.key, error)
            usable = False
        if not usable:
            break
        found.append(entry)
    return tuple(found)


def _usable(store: Store, entry: Entry, token_ids: Sequence[int], want: Identity) -> bool:
    try:
        header = store.header(entry.key, entry.kind)
        check_entry(header, entry, token_ids, want)
        for index, geometry in enumerate(header.identity.layers):
            # Pages that lack old tokens of a sliding layer would be taken for whole by the engine's prefix cache.
            if geometry.kind.name != "shared":
                require_held(index, geometry.kind.held(entry.stop - entry.start), entry.stop - entry.start)
    except IncompatibleIdentity:
        raise
    except (CorruptPacket, InvalidInput, UnsupportedCache) as error:
        logger.warning("%s %s of the store is passed over: %s", entry.kind, entry.key, error)
        return False
    except KVFerryError as error:  # a newer format, or too large: it is there for others
        logger.info("%s %s of the store is passed over: %s", entry.kind, entry.key, error)
        return False
    return True
