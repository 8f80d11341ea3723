"""A model's transform: made once by calibration, kept at both ends, never on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvferry.errors import CorruptPacket
from kvferry.ship.entropy.reference import Bank
from kvferry.ship.transform.basis import Basis
from kvferry.ship.transform.groups import Group
from kvferry.ship.transform.tables import BINS, Tables
from kvferry.ship.transform.weights import Importance
from kvferry.snapshot import Identity
from kvferry.snapshot.container import StrPath, naming, read_container, write_container
from kvferry.snapshot.rope import Rotary
from kvferry.snapshot.strict_json import parse_json

KIND = "transform"

_PER_GROUP = ("forward", "back", "mean", "level", "spread", "attention", "position")
_MOST_LEVEL = 32 * 64
_PLAIN: list[bool | int | None] = [False, None, False]
"""Way of a rotation of pairs ``(i, i + n)`` at every position: what files without ``rotations`` mean."""


@dataclass(frozen=True, slots=True, eq=False)
class Transform:
    """What `klt` packets of one model are written and read with.

    Attributes:
        identity: of the model.
        bases: one a group; together they cover keys and values of every layer once.
        importance: of each group, how a token's weight is predicted.
        rotaries: of each layer.
        tables: of the entropy coder.
        made: what it was calibrated on, and how.
        digest: names it in packets: 32 hexadecimal digits over all of the above.
    """

    identity: Identity
    bases: tuple[Basis, ...]
    importance: tuple[Importance, ...]
    rotaries: tuple[Rotary, ...]
    tables: Tables
    made: Mapping[str, Any]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        state = xxhash.xxh3_128(json.dumps(self._metadata(), sort_keys=True).encode())
        for name, tensor in sorted(self._tensors().items()):
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", state.hexdigest())

    def save(self, path: StrPath) -> int:
        """Write a valid safetensors file, whole or not at all; returns its bytes."""
        return write_container(path, KIND, self._tensors(), self._metadata())

    @classmethod
    def load(cls, path: StrPath, *, max_bytes: int | None = None) -> Transform:
        """Read what `save` wrote; every byte is checked first.

        Raises:
            CorruptPacket: no transform, or a damaged one.
            TooLarge: more bytes than ``max_bytes``.
            InvalidInput: there is no such file.
        """
        container = read_container(path, kind=KIND, max_bytes=max_bytes)
        with naming(path):
            return _read(dict(container.tensors), container.metadata)

    def _metadata(self) -> dict[str, str]:
        groups = [[basis.group.keys, list(basis.group.layers), list(basis.group.sizes)] for basis in self.bases]
        scales = [rotary.scale for rotary in self.rotaries]
        plain: dict[str, Any] = {"groups": groups, "scales": scales, "made": dict(self.made)}
        ways = [_way(rotary) for rotary in self.rotaries]
        if any(way != _PLAIN for way in ways):  # else the digest stays that of files which know no other way
            plain["rotations"] = ways
        return {"identity": self.identity.to_json(), "transform": json.dumps(plain, separators=(",", ":"))}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            "tables.freq": torch.from_numpy(self.tables.bank.freq.astype(np.int32)),
            "tables.reach": torch.from_numpy(self.tables.bank.reach),
            "tables.shift": self.tables.shift,
        }
        for index, rotary in enumerate(self.rotaries):
            tensors[f"rotary.{index}"] = rotary.inv_freq
        for index, (basis, own) in enumerate(zip(self.bases, self.importance, strict=True)):
            for name in _PER_GROUP:
                tensors[f"groups.{index}.{name}"] = getattr(own if name in ("attention", "position") else basis, name)
        return tensors


def _read(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> Transform:
    plain = parse_json(metadata.get("transform", "null"), "the transform's description")
    try:
        identity = Identity.from_json(metadata["identity"])
        groups = [Group(bool(keys), tuple(layers), tuple(sizes)) for keys, layers, sizes in plain["groups"]]
        _require_cover(groups, identity)
        bases, importance = [], []
        for index, group in enumerate(groups):
            own = {name: tensors.pop(f"groups.{index}.{name}") for name in _PER_GROUP}
            _require_shapes(own, group)
            bases.append(Basis(group, *(own[name] for name in _PER_GROUP[:5])))
            importance.append(Importance(own["attention"], own["position"]))
        ways = plain.get("rotations", [_PLAIN] * len(plain["scales"]))
        rotaries = tuple(
            Rotary(_frequencies(tensors.pop(f"rotary.{index}")), float(scale), *way)
            for index, (scale, way) in enumerate(zip(plain["scales"], ways, strict=True))
        )
        for rotary, layer in zip(rotaries, identity.layers, strict=True):
            if 2 * rotary.inv_freq.numel() > layer.head_dim or not 0 < rotary.scale < 1e3:
                raise ValueError("a rotation does not fit its layer")
        if not isinstance(plain["made"], dict):
            raise ValueError("what it was made of is no object")
        shift = _finite(tensors.pop("tables.shift"), 2)
        if tuple(shift.shape) != (BINS, 2):
            raise ValueError(f"shifts of shape {tuple(shift.shape)}")
        freq, reach = tensors.pop("tables.freq").numpy(), tensors.pop("tables.reach").numpy()
        if tensors:
            raise ValueError(f"tensors too many: {', '.join(sorted(tensors)[:4])}")
        if freq.shape != (BINS, 256) or freq.dtype != np.int32 or freq.min() < 0 or freq.max() > 0xFFFF:
            raise ValueError(f"tables of shape {freq.shape}, or with what is no frequency")
        if reach.shape != (BINS,) or reach.dtype != np.uint8:
            raise ValueError(f"reaches of shape {reach.shape}, or of another type")
        tables = Tables(Bank(freq.astype(np.uint16), reach), shift)
        return Transform(identity, tuple(bases), tuple(importance), rotaries, tables, plain["made"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptPacket(f"the file is no transform that fits together: {error}") from error


def _way(rotary: Rotary) -> list[bool | int | None]:
    return [rotary.interleaved, rotary.limit, rotary.single]


def _finite(tensor: Tensor, dims: int) -> Tensor:
    if tensor.dtype != torch.float32 or tensor.dim() != dims or not bool(tensor.isfinite().all()):
        raise ValueError("a tensor of another type or shape, or with NaN")
    return tensor


def _frequencies(tensor: Tensor) -> Tensor:
    if bool((_finite(tensor, 1) < 0).any()):
        raise ValueError("a rotation has a negative frequency")
    return tensor


def _require_shapes(own: Mapping[str, Tensor], group: Group) -> None:
    width = group.width
    wanted = {
        "forward": (width, width),
        "back": (width, width),
        "mean": (width,),
        "level": (width,),
        "spread": (width,),
        "attention": (4,),
        "position": (3,),
    }
    for name, shape in wanted.items():
        tensor = own[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        if name in ("level", "spread"):
            if tensor.dtype != torch.int16 or not -_MOST_LEVEL <= int(tensor.min()) <= int(tensor.max()) <= _MOST_LEVEL:
                raise ValueError(f"{name} is out of range")
        else:
            _finite(tensor, len(shape))


def _require_cover(groups: list[Group], identity: Identity) -> None:
    """Keys and values of every layer that has any are in one group each, and a group's layers hold the same tokens."""
    seen: list[tuple[bool, int]] = []
    for group in groups:
        kinds = set()
        for layer, size in zip(group.layers, group.sizes, strict=True):
            geometry = identity.layers[layer] if 0 <= layer < len(identity.layers) else None
            if geometry is None:
                raise ValueError(f"layer {layer} of {len(identity.layers)}")
            dim = geometry.head_dim if group.keys else geometry.value_head_dim
            if size != geometry.kv_heads * dim:
                raise ValueError(f"layer {layer} has {geometry.kv_heads * dim} channels, not {size}")
            kinds.add(str(geometry.kind))
            seen.append((group.keys, layer))
        if len(kinds) != 1:
            raise ValueError("a group's layers are of several kinds")
    own = [index for index, layer in enumerate(identity.layers) if layer.kind.name != "shared"]
    if sorted(seen) != sorted((keys, index) for keys in (True, False) for index in own):
        raise ValueError("the groups do not cover keys and values of every layer once")
