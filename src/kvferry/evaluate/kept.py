"""Answers of `kvferry.evaluate.probe` in the cache folder, found again by the identity of a model or of its cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.snapshot import Identity
from kvferry.snapshot.folders import cache_folder
from kvferry.snapshot.strict_json import parse_json

log = logging.getLogger(__name__)

_BOUND_TO = ("weights", "dtype", "attention")


@dataclass(frozen=True, slots=True)
class Int4Answer:
    """What the policy ``adaptive`` needs to know.

    Attributes:
        allowed: whether INT4 may be sent.
        quantizers: what a probe found to be good enough for it, as `kvferry.ship.allocate.TierSpecs` reads it;
            ``None``: the paper's.
    """

    allowed: bool
    quantizers: str | None = None


def probes_folder() -> Path:
    """Where answers are kept, one JSON file each."""
    return cache_folder() / "probes"


def kept_answer(identity: Identity, folder: Path | None = None) -> Int4Answer | None:
    """The newest kept answer for these weights, in this dtype and attention backend; ``None`` where there is none."""
    newest: tuple[float, Int4Answer] | None = None
    for path in sorted((folder or probes_folder()).glob("*.json")):
        try:
            found = _read(path, identity)
            made = path.stat().st_mtime
        except (OSError, ValueError, CorruptPacket) as error:
            log.warning("%s is left out: %s", path, error)
            continue
        if found is not None and (newest is None or made >= newest[0]):
            newest = made, found
    return None if newest is None else newest[1]


def int4_answer(identity: Identity, given: bool | None) -> Int4Answer:
    """``given`` where the caller knows, else the kept answer.

    Raises:
        InvalidInput: there is neither.
    """
    if given is not None:
        return Int4Answer(given)
    found = kept_answer(identity)
    if found is None:
        raise InvalidInput(
            f"policy adaptive must know whether {identity.model} ({identity.dtype}, {identity.attention}) bears INT4, "
            f"and no probe of it is kept: run `kvferry ship probe {identity.model}`, or give --int4-allowed or "
            "--no-int4-allowed"
        )
    return found


def _read(path: Path, identity: Identity) -> Int4Answer | None:
    data: Any = parse_json(path.read_text(encoding="utf-8"), "a kept probe")
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or any(model.get(name) != getattr(identity, name) for name in _BOUND_TO):
        return None
    allowed, quantizer = data.get("int4_allowed"), data.get("quantizer")
    if not isinstance(allowed, bool) or not isinstance(quantizer, str):
        raise CorruptPacket("it holds no answer")
    return Int4Answer(allowed, quantizer if allowed else None)
