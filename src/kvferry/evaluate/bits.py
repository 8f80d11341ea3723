"""Which bits a packet spends where: layer by layer and token by token, keys and values apart."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from kvferry.ship.frame import measure_frame, open_frame
from kvferry.ship.header import packet_id
from kvferry.ship.packet import Packet
from kvferry.snapshot import dtype_from_name


@dataclass(frozen=True, slots=True, eq=False)
class BitsMap:
    """Bits of the codes an element, scales not counted; 0 where nothing is sent, NaN where a layer holds nothing.

    Attributes:
        keys: float32 ``(layers, tokens)``.
        values: the same of values.
        token_ids: of the sequence.
    """

    keys: Float[np.ndarray, "layers tokens"]
    values: Float[np.ndarray, "layers tokens"]
    token_ids: tuple[int, ...]

    def by_token(self) -> Float[np.ndarray, " tokens"]:
        """Mean over keys, values and the layers that hold the token."""
        both = np.concatenate([self.keys, self.values])
        held = ~np.isnan(both)
        total = np.where(held, both, 0.0).sum(axis=0)
        mean: Float[np.ndarray, " tokens"] = total / np.maximum(1, held.sum(axis=0))
        return mean

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.keys.shape),
            "keys": _pack(self.keys),
            "values": _pack(self.values),
            "token_ids": list(self.token_ids),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BitsMap:
        """Inverse of `to_json`."""
        layers, tokens = data["shape"]
        keys, values = (_unpack(data[side], int(layers), int(tokens)) for side in ("keys", "values"))
        return cls(keys, values, tuple(data["token_ids"]))


def bits_map(packet: Packet, row: int = 0) -> BitsMap:
    """Bits of each token of sequence ``row``. Raises `CorruptPacket` for a damaged packet."""
    header = packet.header
    layers, tokens = header.identity.layers, header.token_ids.shape[1]
    maps = np.full((2, len(layers), tokens), np.nan, dtype=np.float32)
    owner, dtype = packet_id(packet.header_bytes), dtype_from_name(header.identity.dtype)
    for view in packet.frames:
        frame = open_frame(view, owner, header.layout)
        slot = frame.slot
        geometries = layers[slot.first_layer : slot.last_layer]
        shapes = [(layer.kv_heads, layer.head_dim, layer.value_head_dim) for layer in geometries]
        measured = measure_frame(frame, header.mask, shapes, dtype)
        for place, (part, _) in enumerate(measured.sides):
            target = maps[place % 2, slot.first_layer + place // 2, slot.start : slot.stop]
            target[:] = 0
            for method, index in zip(part.quantizers, part.indices[row], strict=True):
                if index is None:
                    target[:] = method.nbits
                else:
                    target[index.numpy()] = method.nbits
    return BitsMap(maps[0], maps[1], tuple(header.token_ids[row].tolist()))


def _pack(array: Float[np.ndarray, "layers tokens"]) -> str:
    return base64.b64encode(zlib.compress(array.astype("<f4").tobytes())).decode("ascii")


def _unpack(text: str, layers: int, tokens: int) -> Float[np.ndarray, "layers tokens"]:
    data = zlib.decompress(base64.b64decode(text, validate=True))
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(layers, tokens)
