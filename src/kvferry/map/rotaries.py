"""Rotations in a file: whatever fields a `Rotary` has, tensors as tensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket
from kvferry.map.blocks import same_rotation
from kvferry.snapshot import Identity
from kvferry.snapshot.rope import Rotary

_PLAIN = (bool, int, float, str, type(None))
_TYPES = {"bool": (bool,), "float": (float, int), "int": (int,), "int | None": (int, type(None))}
"""What JSON may hold for fields of these types."""


def pack_rotaries(prefix: str, rotaries: Sequence[Rotary]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON holds of them, and their tensors under names that begin with ``prefix``; equal ones are kept once."""
    unique: list[Rotary] = []
    of: list[int] = []
    for rotary in rotaries:
        place = next((index for index, other in enumerate(unique) if same_rotation(rotary, other)), len(unique))
        if place == len(unique):
            unique.append(rotary)
        of.append(place)
    described: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for index, rotary in enumerate(unique):
        plain: dict[str, Any] = {}
        for item in fields(rotary):
            value = getattr(rotary, item.name)
            if isinstance(value, Tensor):
                tensors[f"{prefix}.{index}.{item.name}"] = value
            else:
                plain[item.name] = value
        described.append(plain)
    return {"layers": of, "rotations": described}, tensors


def unpack_rotaries(prefix: str, data: object, tensors: dict[str, Tensor], identity: Identity) -> tuple[Rotary, ...]:
    """Inverse of `pack_rotaries`; takes its tensors out of ``tensors``. Raises `CorruptPacket` for what is none."""
    match data:
        case {"layers": list(of), "rotations": list(described), **rest} if not rest:
            pass
        case _:
            raise CorruptPacket("the rotations are not described")
    unique = [_rotary(f"{prefix}.{index}.", plain, tensors) for index, plain in enumerate(described)]
    if len(of) != len(identity.layers) or any(type(index) is not int or not 0 <= index < len(unique) for index in of):
        raise CorruptPacket(f"the rotations are not those of {len(identity.layers)} layers")
    for index, layer in zip(of, identity.layers, strict=True):
        for item in fields(unique[index]):
            value = getattr(unique[index], item.name)
            if isinstance(value, Tensor) and 2 * value.shape[-1] > layer.head_dim:
                raise CorruptPacket(f"a rotation turns {2 * value.shape[-1]} channels of {layer.head_dim}")
    return tuple(unique[index] for index in of)


def _rotary(prefix: str, plain: object, tensors: dict[str, Tensor]) -> Rotary:
    if not isinstance(plain, Mapping):
        raise CorruptPacket("a rotation is no object")
    given: dict[str, Any] = dict(plain)
    known = {item.name: item for item in fields(Rotary)}
    for name in list(tensors):
        if name.startswith(prefix):
            if name.removeprefix(prefix) in given:
                raise CorruptPacket(f"a rotation says its {name.removeprefix(prefix)} twice")
            given[name.removeprefix(prefix)] = tensors.pop(name)
    needed = {name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING}
    if not needed <= set(given) <= set(known):
        raise CorruptPacket(f"a rotation has the fields {sorted(given)[:8]}, not {sorted(known)}")
    for name, value in given.items():
        if isinstance(value, Tensor):
            if not value.is_floating_point() or value.dim() != 1 or not bool(value.isfinite().all()):
                raise CorruptPacket(f"a rotation's {name} is no list of finite numbers")
            given[name] = value.clone()
        elif type(value) not in _TYPES.get(str(known[name].type), _PLAIN):
            raise CorruptPacket(f"a rotation's {name} is a {type(value).__name__}, not {known[name].type}")
    scale = given.get("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1e-3 < scale < 1e3:
        raise CorruptPacket(f"a rotation's scale is {scale!r}")
    frequencies = given.get("inv_freq", torch.empty(0))
    if not isinstance(frequencies, Tensor):
        raise CorruptPacket("a rotation has no frequencies")
    return Rotary(**given)
