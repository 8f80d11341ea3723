"""Names of prefixes: each chunk of tokens is named by a hash of it and of everything before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvferry.errors import InvalidInput

LEAST_TAIL = 16
"""Fewer tokens behind a prompt's last whole chunk are no packet of their own: computing them costs less."""


def chain(token_ids: Sequence[int], chunk: int, namespace: str = "") -> list[str]:
    """One key for each whole chunk: the i-th stands for exactly the first ``(i + 1) * chunk`` tokens.

    Args:
        token_ids: the prompt.
        chunk: tokens a chunk.
        namespace: prompts that must not meet (tenants, adapters) get different ones.

    Returns:
        32 hexadecimal digits each; equal only where all tokens up to there, chunk size and namespace are.
    """
    return chain_and_tail(token_ids, chunk, namespace)[0]


def chain_and_tail(token_ids: Sequence[int], chunk: int, namespace: str = "") -> tuple[list[str], str | None]:
    """`chain`, and the key of the whole prompt, for what lies behind its last whole chunk; ``None``: not `LEAST_TAIL`
    tokens do. Arguments as there.
    """
    if chunk < 1:
        raise InvalidInput(f"a chunk of {chunk} tokens")
    ids = np.asarray(token_ids, dtype="<i8")
    parent = hashlib.sha256(f"kvferry chain 1\n{chunk}\n{namespace}".encode()).digest()
    whole, rest = divmod(len(ids), chunk)
    keys = []
    for index in range(whole + (rest >= LEAST_TAIL)):
        parent = hashlib.sha256(parent + ids[index * chunk : (index + 1) * chunk].tobytes()).digest()
        keys.append(parent.hex()[:32])
    return keys[:whole], keys[whole] if rest >= LEAST_TAIL else None
