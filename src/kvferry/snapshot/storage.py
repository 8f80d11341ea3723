"""A `Snapshot` on disk: a safetensors file of kind ``snapshot``.

Tensors: ``token_ids``, ``positions``, ``mask`` and, for every layer that has its own, ``layers.{i}.keys``,
``layers.{i}.values`` and perhaps ``layers.{i}.queries``. Metadata: ``identity``, and ``layers``, a JSON list of
``[kind, seen]``. The form of the file is that of `kvferry.snapshot.header`.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput, UnsupportedCache, UnsupportedVersion
from kvferry.snapshot.container import Container, StrPath, naming, read_container, write_container
from kvferry.snapshot.identity import Identity
from kvferry.snapshot.layer import LayerKind, LayerState
from kvferry.snapshot.snapshot import Snapshot
from kvferry.snapshot.strict_json import parse_json

KIND = "snapshot"

_SEQUENCE = ("token_ids", "positions", "mask")
_METADATA = {"identity", "layers"}
_MOST_SEEN = 2**53


def save_snapshot(snapshot: Snapshot, path: StrPath) -> int:
    """Write ``snapshot`` to ``path``, whole or not at all; one tensor at most is copied on the way.

    Returns:
        Size of the file in bytes.

    Raises:
        InvalidInput: queries that do not fit their layer, or a path that cannot be written.
        OSError: the disk is full or failing.
    """
    tensors: dict[str, Tensor] = {name: getattr(snapshot, name) for name in _SEQUENCE}
    for index, layer in enumerate(snapshot.layers):
        _check_queries(index, layer, snapshot)
        for part in ("keys", "values", "queries"):
            tensor = getattr(layer, part)
            if tensor is not None:
                tensors[f"layers.{index}.{part}"] = tensor
    layers = [[str(layer.kind), layer.seen] for layer in snapshot.layers]
    metadata = {"identity": snapshot.identity.to_json(), "layers": json.dumps(layers, separators=(",", ":"))}
    return write_container(path, KIND, tensors, metadata)


def load_snapshot(path: StrPath, *, max_bytes: int | None = None, mapped: bool = True) -> Snapshot:
    """Read what `save_snapshot` wrote. Every byte is checked first; the tensors share a private mapping of the file.

    Args:
        path: the file.
        max_bytes: the largest file to read.
        mapped: see `kvferry.snapshot.container.read_container`.

    Raises:
        CorruptPacket: no snapshot, a damaged one, or one whose tensors do not fit its identity.
        UnsupportedVersion: written in a newer format, or with a kind of layer that this version does not carry.
        TooLarge: more bytes than ``max_bytes``, or than can be had.
        InvalidInput: there is no such file, or it cannot be opened.
    """
    container = read_container(path, kind=KIND, max_bytes=max_bytes, mapped=mapped)
    with naming(path):
        try:
            return _assemble(container)
        except InvalidInput as error:
            raise CorruptPacket(f"the snapshot contradicts itself: {error}") from error
        except UnsupportedCache as error:
            raise UnsupportedVersion(str(error)) from error


def _assemble(container: Container) -> Snapshot:
    if set(container.metadata) != _METADATA:
        raise CorruptPacket(f"a snapshot has the metadata {sorted(_METADATA)}, not {sorted(container.metadata)[:8]}")
    identity = Identity.from_json(container.metadata["identity"])
    described = _parse_layers(container.metadata["layers"], len(identity.layers))
    tensors = dict(container.tensors)

    def take(name: str, *, optional: bool = False) -> Tensor | None:
        tensor = tensors.pop(name, None)
        if tensor is None and not optional:
            raise CorruptPacket(f"the snapshot has no tensor {name!r}")
        return tensor

    sequence = {name: take(name) for name in _SEQUENCE}
    layers = []
    for index, (kind, seen) in enumerate(described):
        own = kind.name != "shared"
        layer = LayerState(
            kind=kind,
            keys=take(f"layers.{index}.keys") if own else None,
            values=take(f"layers.{index}.values") if own else None,
            seen=seen,
            queries=take(f"layers.{index}.queries", optional=True),
        )
        layers.append(layer)
    if tensors:
        raise CorruptPacket(f"the snapshot has tensors that belong to no layer: {', '.join(sorted(tensors)[:8])}")
    snapshot = Snapshot(identity=identity, layers=tuple(layers), **sequence)  # type: ignore[arg-type]
    _ = snapshot.dtype  # a dtype that no layer has shown to be one
    for index, layer in enumerate(layers):
        _check_queries(index, layer, snapshot)
    return snapshot


def _parse_layers(text: str, count: int) -> list[tuple[LayerKind, int]]:
    items = parse_json(text, "the list of layers")
    if not isinstance(items, list) or len(items) != count:
        raise CorruptPacket(f"the list of layers is not one of {count} layers, which the identity describes")
    found = []
    for index, item in enumerate(items):
        match item:
            case [str(kind), int(seen)] if type(seen) is int and 0 <= seen <= _MOST_SEEN:
                found.append((LayerKind.parse(kind), seen))
            case _:
                raise CorruptPacket(
                    f"layer {index} is described by {item!r}, not by its kind and the tokens it has seen"
                )
    return found


def _check_queries(index: int, layer: LayerState, snapshot: Snapshot) -> None:
    queries, geometry = layer.queries, snapshot.identity.layers[index]
    if queries is None:
        return
    shape = tuple(queries.shape)
    if (
        queries.dtype not in (torch.float32, snapshot.dtype)
        or len(shape) != 4
        or (shape[0], shape[3]) != (snapshot.batch_size, geometry.head_dim)
        or shape[1] == 0
        or shape[1] % geometry.kv_heads
    ):
        raise InvalidInput(
            f"layer {index}: queries {shape} of {queries.dtype} must be (batch {snapshot.batch_size}, a multiple of "
            f"{geometry.kv_heads} heads, window, head_dim {geometry.head_dim}) of float32 or {snapshot.dtype}"
        )
