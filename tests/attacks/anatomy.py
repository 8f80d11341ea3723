"""A kvferry file taken apart and put together again, written down a second time, independently of the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

START = '{"__metadata__":{"digest":"'

Entries = dict[str, Any]
Change = Callable[[Entries, "File"], object]


@dataclass(frozen=True)
class File:
    """A valid file taken apart."""

    data: bytes

    @property
    def length(self) -> int:
        return int.from_bytes(self.data[:8], "little")

    @property
    def text(self) -> str:
        return self.data[8 : 8 + self.length].decode("ascii")

    @property
    def payload(self) -> bytes:
        return self.data[8 + self.length :]

    @property
    def entries(self) -> Entries:
        return json.loads(self.text)

    @property
    def names(self) -> list[str]:
        return [name for name in self.entries if name != "__metadata__"]


def sign(text: str, payload: bytes) -> bytes:
    """A file with this header, padded and with the right digest: what an attacker who knows the format would write."""
    text += " " * (-len(text.encode()) % 8)
    header = bytearray(text.encode())
    prefix = len(header).to_bytes(8, "little")
    if text.startswith(START):
        place = slice(len(START), len(START) + 32)
        header[place] = b"0" * 32
        header[place] = xxhash.xxh3_128_hexdigest(prefix + bytes(header)).encode()
    return prefix + bytes(header) + payload


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def rebuilt(file: File, change: Change, payload: bytes | None = None) -> bytes:
    """The signed file after ``change(entries, file)``, with checksums of what lies where the offsets then say."""
    entries = file.entries
    change(entries, file)
    payload = file.payload if payload is None else payload
    sums = {
        name: xxhash.xxh3_128_hexdigest(payload[slice(*entry["data_offsets"])])
        for name, entry in entries.items()
        if name != "__metadata__" and all(type(place) is int and place >= 0 for place in entry["data_offsets"])
    }
    metadata = entries.get("__metadata__")
    if isinstance(metadata, dict) and "checksums" in metadata:
        metadata["checksums"] = compact(sums)
    return sign(compact(entries), payload)


def without(file: File, name: str) -> bytes:
    """The signed file without one tensor: entry, checksum and data gone, the others moved up."""
    begin, end = file.entries[name]["data_offsets"]

    def change(entries: Entries, _: File) -> None:
        del entries[name]
        for key, entry in entries.items():
            if key != "__metadata__" and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [place - (end - begin) for place in entry["data_offsets"]]

    return rebuilt(file, change, file.payload[:begin] + file.payload[end:])
