"""kvferry: audit, ship and map the key-value caches of language models.

Importing this module loads neither torch nor transformers; each name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvferry.errors import (
    BudgetTooSmall,
    CorruptPacket,
    IncompatibleIdentity,
    InvalidInput,
    KVFerryError,
    ModelUnavailable,
    TooLarge,
    TransferFailed,
    UnsupportedCache,
    UnsupportedVersion,
)
from kvferry.version import __version__

if TYPE_CHECKING:
    from kvferry.audit import audit
    from kvferry.evaluate.calibrate import calibrate
    from kvferry.evaluate.map_fit import fit
    from kvferry.hf.capture import capture
    from kvferry.hf.models import load_model
    from kvferry.map.mapper import Mapper
    from kvferry.ship.encode import decode, encode
    from kvferry.ship.packet import Packet
    from kvferry.ship.refine import Refinement, Refiner, refine
    from kvferry.ship.transform.artifact import Transform
    from kvferry.snapshot import Identity, Snapshot

_LAZY = {
    "Identity": "kvferry.snapshot",
    "Mapper": "kvferry.map.mapper",
    "Packet": "kvferry.ship.packet",
    "Refinement": "kvferry.ship.refine",
    "Refiner": "kvferry.ship.refine",
    "Snapshot": "kvferry.snapshot",
    "Transform": "kvferry.ship.transform.artifact",
    "calibrate": "kvferry.evaluate.calibrate",
    "audit": "kvferry.audit",
    "capture": "kvferry.hf.capture",
    "decode": "kvferry.ship.encode",
    "encode": "kvferry.ship.encode",
    "fit": "kvferry.evaluate.map_fit",
    "load_model": "kvferry.hf.models",
    "refine": "kvferry.ship.refine",
}

__all__ = [
    "BudgetTooSmall",
    "CorruptPacket",
    "Identity",
    "IncompatibleIdentity",
    "InvalidInput",
    "KVFerryError",
    "Mapper",
    "ModelUnavailable",
    "Packet",
    "Refinement",
    "Refiner",
    "Snapshot",
    "TooLarge",
    "TransferFailed",
    "Transform",
    "UnsupportedCache",
    "UnsupportedVersion",
    "__version__",
    "audit",
    "calibrate",
    "capture",
    "decode",
    "encode",
    "fit",
    "load_model",
    "refine",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
