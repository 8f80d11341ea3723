"""The noun: layer, identity, snapshot, storage. Knows tensors; knows no model library."""

from kvferry.snapshot.identity import Identity, LayerGeometry, RopeSpec
from kvferry.snapshot.layer import FULL, LayerKind, LayerState
from kvferry.snapshot.snapshot import Snapshot, dtype_from_name, dtype_name

__all__ = [
    "FULL",
    "Identity",
    "LayerGeometry",
    "LayerKind",
    "LayerState",
    "RopeSpec",
    "Snapshot",
    "dtype_from_name",
    "dtype_name",
]
