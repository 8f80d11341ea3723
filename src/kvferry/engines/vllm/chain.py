"""Names of prefixes: each chunk of tokens is named by a hash of it and of everything before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvferry.errors import InvalidInput


def chain(token_ids: Sequence[int], chunk: int, namespace: str = "") -> list[str]:
    """One key for each whole chunk: the i-th stands for exactly the first ``(i + 1) * chunk`` tokens.

    Args:
        token_ids: the prompt.
        chunk: tokens a chunk.
        namespace: prompts that must not meet (tenants, adapters) get different ones.

    Returns:
        32 hexadecimal digits each; equal only where all tokens up to there, chunk size and namespace are.
    """
    if chunk < 1:
        raise InvalidInput(f"a chunk of {chunk} tokens")
    ids = np.asarray(token_ids, dtype="<i8")
    parent = hashlib.sha256(f"kvferry chain 1\n{chunk}\n{namespace}".encode()).digest()
    keys = []
    for start in range(0, len(ids) - chunk + 1, chunk):
        parent = hashlib.sha256(parent + ids[start : start + chunk].tobytes()).digest()
        keys.append(parent.hex()[:32])
    return keys
