"""Keys or values within a frame: which tiers are in use, which tokens have which, and the sections that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kvferry.errors import CorruptPacket
from kvferry.ship.quantize import (
    Quantizer,
    Section,
    decode_sections,
    encode_sections,
    packet_quantizer,
    quantizer,
)

MAX_TIERS = 15
_SAME_MAP = 0x80


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Keys or values of one layer in one frame.

    Attributes:
        quantizers: of the tiers in use, in order.
        indices: ``[row][tier]`` → tokens within the frame, ascending; ``None`` for all of them.
        counts: ``[row][tier]`` → how many.
        description: the bytes that tell a reader so.
    """

    quantizers: tuple[Quantizer, ...]
    indices: tuple[tuple[Tensor | None, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    description: bytes

    def nbytes(self, heads: int, dim: int, dtype: torch.dtype) -> int:
        """Bytes of all sections."""
        return sum(
            method.nbytes(heads, count, dim, dtype)
            for row in self.counts
            for method, count in zip(self.quantizers, row, strict=True)
        )

    def encode(self, x: Float[Tensor, "batch heads tokens dim"], out: UInt8[Tensor, " nbytes"]) -> None:
        """Write all sections into ``out``, built where ``x`` lies."""
        local = out if x.device == out.device else torch.empty_like(out, device=x.device)
        for row, sections in self._sections(x, local):
            encode_sections(x[row], sections)
        if local is not out:
            out.copy_(local)

    def decode(self, data: UInt8[Tensor, " nbytes"], out: Float[Tensor, "batch heads tokens dim"]) -> None:
        """Read all sections into their tokens of ``out``."""
        for row, sections in self._sections(out, data.to(out.device)):
            decode_sections(sections, out[row])

    def _sections(self, x: Tensor, data: Tensor) -> Iterator[tuple[int, list[Section]]]:
        at = 0
        for row, (indices, counts) in enumerate(zip(self.indices, self.counts, strict=True)):
            sections = []
            for method, index, count in zip(self.quantizers, indices, counts, strict=True):
                stop = at + method.nbytes(x.shape[1], count, x.shape[3], x.dtype)
                if count:
                    sections.append(Section(method, None if index is None else index.to(x.device), data[at:stop]))
                at = stop
            if sections:
                yield row, sections


def make_part(
    tiers: UInt8[Tensor, "batch tokens"],
    sent: Bool[Tensor, "batch tokens"],
    specs: Sequence[str],
    same: Part | None = None,
) -> Part:
    """Describe tiers; ``same`` is the part of the keys whose map the values share."""
    used = used_tiers(count_tiers(tiers, sent, len(specs)))
    methods = tuple(quantizer(specs[tier]) for tier in used)
    table = b"".join(bytes([len(method.spec)]) + method.spec.encode("ascii") for method in methods)
    if same is not None:
        return Part(methods, same.indices, same.counts, bytes([len(used) | _SAME_MAP]) + table)
    indices, counts = _index(tiers, sent, used)
    codes = b""
    if len(used) > 1:
        place = torch.zeros(len(specs), dtype=torch.uint8)
        place[used] = torch.arange(len(used), dtype=torch.uint8)
        codes = _pack(place[tiers[sent].long()], len(used))
    return Part(methods, indices, counts, bytes([len(used)]) + table + codes)


def description_nbytes(counts: list[list[int]], specs: Sequence[str], *, same: bool) -> int:
    """Bytes of the description that `make_part` gives for these counts."""
    used = used_tiers(counts)
    tokens = sum(map(sum, counts))
    return 1 + sum(1 + len(specs[tier]) for tier in used) + (0 if same else _map_bytes(len(used), tokens))


def count_tiers(tiers: Tensor, sent: Tensor, most: int) -> list[list[int]]:
    """``[row][tier]`` → sent tokens of that tier."""
    return [torch.bincount(row[here], minlength=most).tolist() for row, here in zip(tiers, sent, strict=True)]


def used_tiers(counts: list[list[int]]) -> list[int]:
    """Tiers that some token has."""
    return [tier for tier, column in enumerate(zip(*counts, strict=True)) if any(column)]


class BodyReader:
    """Reads a frame's body from front to back, never beyond its end.

    Args:
        where: the frame's name, for messages.
        body: its bytes.
        sent: which of its tokens are sent.
    """

    def __init__(self, where: object, body: memoryview, sent: Bool[Tensor, "batch tokens"]):
        self.where, self.body, self.sent, self.at = where, body, sent, 0

    def take(self, count: int, what: str) -> memoryview:
        """The next ``count`` bytes."""
        stop = self.at + count
        if stop > len(self.body):
            raise CorruptPacket(f"{self.where} ends within its {what}")
        piece = self.body[self.at : stop]
        self.at = stop
        return piece

    def end(self) -> None:
        """Raise unless all has been read."""
        if self.at != len(self.body):
            raise CorruptPacket(f"{self.where} holds {len(self.body) - self.at} bytes too many")

    def table(self, keys: int | None) -> tuple[list[Quantizer], bool]:
        """The tiers that the next description begins with, and whether it has the map of its keys.

        ``keys`` is how many tiers those have, when this is the values' description.
        """
        head = self.take(1, "description")[0]
        count, same = head & 0x7F, bool(head & _SAME_MAP)
        if count > MAX_TIERS or (same and keys != count):
            raise CorruptPacket(f"{self.where} declares {count} tiers, or a map that is not there")
        methods = []
        for _ in range(count):
            raw = bytes(self.take(self.take(1, "description")[0], "description"))
            methods.append(packet_quantizer(raw.decode("ascii", "replace")))
        return methods, same

    def skip_map(self, count: int) -> None:
        """Pass over the map of so many tiers."""
        self.take(_map_bytes(count, int(self.sent.sum())), "map")

    def part(self, keys: Part | None) -> Part:
        """The next description; ``keys`` is the one before, when this is the values'."""
        start = self.at
        methods, same = self.table(None if keys is None else len(keys.quantizers))
        count = len(methods)
        if same and keys is not None:
            indices, counts = keys.indices, keys.counts
        else:
            indices, counts = _index(self._tiers(count), self.sent, list(range(count)))
            if not all(any(row[tier] for row in counts) for tier in range(count)):
                raise CorruptPacket(f"{self.where} has a tier without tokens")
        return Part(tuple(methods), indices, counts, bytes(self.body[start : self.at]))

    def _tiers(self, count: int) -> Tensor:
        tokens = int(self.sent.sum())
        if (count == 0) != (tokens == 0):
            raise CorruptPacket(f"{self.where} has {count} tiers for {tokens} tokens")
        tiers = torch.zeros(self.sent.shape, dtype=torch.uint8)
        if count > 1:
            width = (count - 1).bit_length()
            packed = np.frombuffer(self.take(_map_bytes(count, tokens), "map"), np.uint8)
            bits = np.unpackbits(packed, bitorder="little")
            if bits[tokens * width :].any():
                raise CorruptPacket(f"{self.where} has a map with bits behind its end")
            codes = bits[: tokens * width].reshape(tokens, width) @ (1 << np.arange(width, dtype=np.uint8))
            if codes.max() >= count:
                raise CorruptPacket(f"{self.where} has a map with tier {codes.max()} of {count}")
            tiers[self.sent] = torch.from_numpy(codes.astype(np.uint8))
        return tiers


def _index(
    tiers: Tensor, sent: Tensor, used: Sequence[int]
) -> tuple[tuple[tuple[Tensor | None, ...], ...], tuple[tuple[int, ...], ...]]:
    """Tokens of each sequence and tier, ascending, and how many they are."""
    indices, counts = [], []
    for row_tiers, row_sent in zip(tiers, sent, strict=True):
        found = [((row_tiers == tier) & row_sent).nonzero().flatten() for tier in used]
        indices.append(tuple(None if tokens.numel() == row_sent.numel() else tokens for tokens in found))
        counts.append(tuple(int(tokens.numel()) for tokens in found))
    return tuple(indices), tuple(counts)


def _pack(codes: Tensor, used: int) -> bytes:
    width = (used - 1).bit_length()
    bits = (codes.numpy()[:, None] >> np.arange(width, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def _map_bytes(used: int, tokens: int) -> int:
    return (max(0, used - 1).bit_length() * tokens + 7) // 8
