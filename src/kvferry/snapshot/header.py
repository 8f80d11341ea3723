"""The header of a kvferry file: a valid safetensors header in one canonical form, bound to its payload.

A file is, as safetensors defines it, ``length (8 bytes, little endian) | header (length bytes of JSON) | payload``.
kvferry allows one form of header only, so that its reader needs no general JSON parser, whose objects take many times
the space of their text, before it trusts one::

    {"__metadata__":{"digest":D,"format":"kvferry","kind":K,"version":V,"checksums":C,…},
     NAME:{"dtype":T,"shape":[…],"data_offsets":[BEGIN,END]},…}

(in ASCII, without line breaks, padded with spaces to a multiple of 8). ``C`` is a JSON object in a string: tensor name
→ XXH3-128 of the tensor's bytes. ``D`` is the XXH3-128 of the length and the header together, with the 32 digits of
``D`` itself as zeros. Tensors lie one behind the other, widest dtype first, so that every one is aligned to its own
item size.

The digests find damage, and headers and payloads that do not belong together; they are no signature against someone who
computes them anew. What stands behind them is therefore checked as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecoder
from typing import NoReturn

import torch
import xxhash

from kvferry.errors import CorruptPacket, InvalidInput, TooLarge, UnsupportedVersion
from kvferry.snapshot.strict_json import parse_json

VERSION = 1
"""Version of the file format. 1: the first."""

PREFIX_BYTES = 8
"""Bytes of the header's length, and the alignment of header and payload."""

MAX_HEADER = 64 << 20
FREE_HEADER = 1 << 20
MAX_METADATA = 1_024
MAX_RANK = 8
_MAX_COUNT = 2**62

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the dtypes that kvferry writes and reads."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RESERVED = ("digest", "format", "kind", "version", "checksums")
_ZEROS = "0" * 32
_START = '{"__metadata__":{"digest":"'
_HEX = re.compile(r"[0-9a-f]{32}")
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_KIND = r"[a-z][a-z0-9_]{0,31}"
_MARK = re.compile(
    rf'{re.escape(_START)}([0-9a-f]{{32}})","format":"kvferry","kind":"({_KIND})","version":"([1-9][0-9]{{0,8}})"'
)
_NAME = r"[A-Za-z0-9_.\-]{1,256}"
_KEY = re.compile(r',"([a-z][a-z0-9_]{0,63})":(?=")')
_ENTRY = re.compile(
    rf',"({_NAME})":\{{"dtype":"([A-Z0-9_]{{1,16}})","shape":\[((?:{_NUMBER}(?:,{_NUMBER}){{0,15}})?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)
# A text whose escapes all stand for ASCII, so that it takes no more space as a str than it does here.
_TEXT = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u00[0-7][0-9a-f])*+"')
_DECODER = JSONDecoder()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file, without its data.

    Attributes:
        dtype: of the elements.
        shape: of the tensor.
        begin: first byte, from the start of the payload.
        end: first byte behind it.
        checksum: XXH3-128 of the bytes, 32 hexadecimal digits.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str = _ZEROS


@dataclass(frozen=True, slots=True)
class Header:
    """All of a file but its payload.

    Attributes:
        kind: what the file holds: ``snapshot``, ``packet``…
        metadata: the texts that the writer gave, without those of the format itself.
        tensors: name → `TensorInfo`, in the order of the file.
        nbytes: size of the whole file.
        payload_start: first byte of the payload in the file.
    """

    kind: str
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    nbytes: int
    payload_start: int


def most_tensors(nbytes: int) -> int:
    """How many tensors a file of ``nbytes`` may name: a bound on the objects that a reader makes for it."""
    return 1_024 + nbytes // 1_024


def plan_header(
    kind: str, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> Header:
    """Lay a file out: the order of the tensors, their offsets and the sizes, all known before any data is read.

    Args:
        kind: lower-case name of what the file holds.
        tensors: name → (dtype, shape).
        metadata: ASCII texts (JSON for anything structured) under lower-case keys.

    Raises:
        InvalidInput: a name, dtype, shape or text that the format has no place for.
    """
    if not re.fullmatch(_KIND, kind):
        raise InvalidInput(f"{kind!r} is no kind of file: lower-case letters, digits and _ make one")
    if len(metadata) > MAX_METADATA:
        raise InvalidInput(f"{len(metadata)} metadata texts; at most {MAX_METADATA} fit: join them in one JSON text")
    for key, text in metadata.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", key) or key in _RESERVED:
            raise InvalidInput(f"metadata key {key!r} is reserved or not of lower-case letters, digits and _")
        if not isinstance(text, str) or not text.isascii():
            raise InvalidInput(f"metadata {key!r} must be ASCII text, as json.dumps makes it")
    infos: dict[str, TensorInfo] = {}
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        if not re.fullmatch(_NAME, name) or name == "__metadata__":
            raise InvalidInput(f"tensor name {name!r} is not of at most 256 letters, digits, '_', '.' and '-'")
        if dtype not in _DTYPE_NAMES:
            raise InvalidInput(f"tensor {name!r} has dtype {dtype}; a file holds {', '.join(map(str, _DTYPE_NAMES))}")
        if len(shape) > MAX_RANK:
            raise InvalidInput(f"tensor {name!r} has {len(shape)} dimensions, more than {MAX_RANK}")
        end = position + _nbytes(dtype, shape)
        infos[name] = TensorInfo(dtype, tuple(int(size) for size in shape), position, end)
        position = end
    ordered = {key: metadata[key] for key in sorted(metadata)}
    length = len(_render(kind, ordered, infos, _ZEROS))
    start = PREFIX_BYTES + length
    header = Header(kind, ordered, infos, start + position, start)
    if length > MAX_HEADER or length > FREE_HEADER + position or len(infos) > most_tensors(header.nbytes):
        raise InvalidInput(
            f"{len(infos)} tensors and {length} bytes of header are too many for {position} bytes of data: "
            "put fewer, larger tensors in a file"
        )
    return header


def render_header(header: Header) -> bytes:
    """Length and header as they stand in the file: what `parse_header` reads."""
    length = header.payload_start - PREFIX_BYTES
    prefix = length.to_bytes(PREFIX_BYTES, "little")
    blank = _render(header.kind, header.metadata, header.tensors, _ZEROS)
    return prefix + _render(header.kind, header.metadata, header.tensors, _digest(prefix, blank))


def header_length(prefix: bytes, nbytes: int) -> int:
    """The length that a file's first bytes declare, once it is known to be one that a file of ``nbytes`` can have.

    Raises:
        CorruptPacket: the file is too short for it, or for any header.
        TooLarge: the header is larger than this version reads.
    """
    if len(prefix) < PREFIX_BYTES or nbytes < PREFIX_BYTES + len(_START):
        raise CorruptPacket(f"a file of {nbytes} bytes is no kvferry file: it is empty or cut off")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > nbytes - PREFIX_BYTES:
        raise CorruptPacket(
            f"the header declares {length} bytes, the whole file has {nbytes}: cut off, or no kvferry file"
        )
    if length > MAX_HEADER:
        raise TooLarge(f"a header of {length} bytes; at most {MAX_HEADER} are read")
    if length > FREE_HEADER + nbytes - PREFIX_BYTES - length:
        raise CorruptPacket(f"a header of {length} bytes is out of proportion to a file of {nbytes}")
    if length % PREFIX_BYTES:
        raise CorruptPacket(
            f"the header's length {length} is not a multiple of {PREFIX_BYTES}: this is no kvferry file (it may be "
            "another safetensors file, or damaged)"
        )
    return length


def parse_header(prefix: bytes, raw: bytes, nbytes: int, *, kind: str | None = None) -> Header:
    """Read a header that `header_length` has passed, and check it against the file's size.

    Args:
        prefix: the file's first 8 bytes.
        raw: the header.
        nbytes: size of the whole file.
        kind: what the file has to hold; ``None`` for anything.

    Raises:
        CorruptPacket: no kvferry file, a damaged one, or one of another kind.
        UnsupportedVersion: a newer format.
    """
    if not raw.isascii():
        raise CorruptPacket("the header is not ASCII: damaged, or no kvferry file")
    text = raw.decode("ascii")
    mark = _MARK.match(text)
    if mark is None:
        raise CorruptPacket(
            "the header is damaged"
            if '"format":"kvferry"' in text[:256]
            else "this is no kvferry file (it may be "
            "another safetensors file, or damaged): its header lacks kvferry's mark"
        )
    digest, have_kind, version = mark.groups()
    if int(version) != VERSION:
        raise UnsupportedVersion(f"file format {version}; this kvferry reads {VERSION}: upgrade kvferry to read it")
    if kind is not None and have_kind != kind:
        raise CorruptPacket(f"the file holds a {have_kind}, not a {kind}")
    if digest != _digest(prefix, raw):
        raise CorruptPacket("the header does not match its digest: it was damaged or edited")
    metadata, position = _parse_metadata(text, mark.end())
    infos = _parse_entries(text, position, nbytes, metadata.pop("checksums", None))
    payload = nbytes - PREFIX_BYTES - len(raw)
    used = next(reversed(infos.values())).end if infos else 0
    if used != payload:
        raise CorruptPacket(f"{payload - used} bytes at the file's end belong to no tensor")
    return Header(have_kind, metadata, infos, nbytes, PREFIX_BYTES + len(raw))


def _parse_metadata(text: str, position: int) -> tuple[dict[str, str], int]:
    found: dict[str, str] = {}
    while (match := _KEY.match(text, position)) is not None:
        key = match.group(1)
        if key in found or (key in _RESERVED and key != "checksums") or len(found) > MAX_METADATA:
            raise CorruptPacket(f"the header's metadata repeats {key!r}, or has too many keys")
        end = _TEXT.match(text, match.end())
        if end is None:
            raise CorruptPacket(f"the header's metadata {key!r} is no ASCII text in JSON")
        value, position = _DECODER.raw_decode(text, match.end())
        found[key] = value
    if not text.startswith("}", position):
        _malformed(text, position)
    return found, position + 1


def _parse_entries(text: str, position: int, nbytes: int, checksums: str | None) -> dict[str, TensorInfo]:
    if checksums is None:
        raise CorruptPacket("the header has no checksums")
    # Every tensor needs one, so this bounds the tensors too.
    sums = parse_json(checksums, "the list of checksums", most=most_tensors(nbytes) + 2)
    if not isinstance(sums, dict):
        raise CorruptPacket("the checksums are no JSON object")
    infos: dict[str, TensorInfo] = {}
    at = 0
    while (match := _ENTRY.match(text, position)) is not None:
        name, dtype_name, sizes, begin, end = match.groups()
        if name in infos:
            raise CorruptPacket(f"the header repeats tensor {name!r}")
        dtype = DTYPES.get(dtype_name)
        if dtype is None:
            raise CorruptPacket(f"tensor {name!r} has the unknown dtype {dtype_name!r}")
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
        checksum = sums.get(name)
        if not (isinstance(checksum, str) and _HEX.fullmatch(checksum)):
            raise CorruptPacket(f"tensor {name!r} has no checksum")
        infos[name] = info = TensorInfo(dtype, shape, int(begin), int(end), checksum)
        _check_place(name, info, at, nbytes - PREFIX_BYTES - len(text))
        at = info.end
        position = match.end()
    padding = text[position + 1 : position + 1 + PREFIX_BYTES]
    if not text.startswith("}", position) or padding.strip(" ") or len(padding) == PREFIX_BYTES:
        _malformed(text, position)
    if len(sums) != len(infos):
        raise CorruptPacket(f"{len(sums)} checksums for {len(infos)} tensors")
    return infos


def _check_place(name: str, info: TensorInfo, at: int, payload: int) -> None:
    where = f"tensor {name!r} at bytes {info.begin}…{info.end}"
    if info.begin != at:
        raise CorruptPacket(f"{where} {'overlaps the one' if info.begin < at else 'leaves a hole'} before it")
    if not info.begin <= info.end <= payload:
        raise CorruptPacket(f"{where} lies outside of the {payload} bytes of data: cut off, or forged")
    if len(info.shape) > MAX_RANK:
        raise CorruptPacket(f"{where} has {len(info.shape)} dimensions, more than {MAX_RANK}")
    try:
        size = _nbytes(info.dtype, info.shape)
    except InvalidInput as error:
        raise CorruptPacket(f"{where}: {error}") from error
    if size != info.end - info.begin:
        raise CorruptPacket(f"{where}: shape {info.shape} of {info.dtype} takes {size} bytes")
    if info.begin % info.dtype.itemsize:
        raise CorruptPacket(f"{where} is not aligned to its dtype {info.dtype}")


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    count, extent = dtype.itemsize, 1
    for size in shape:
        count *= size
        extent *= max(size, 1)
        if extent > _MAX_COUNT:
            raise InvalidInput(f"shape {tuple(shape)} is too large for any memory")
    return count


def _malformed(text: str, position: int) -> NoReturn:
    raise CorruptPacket(f"the header is malformed at its byte {position}: {text[position : position + 40]!r}")


def _digest(prefix: bytes, header: bytes) -> str:
    start = len(_START)
    state = xxhash.xxh3_128(prefix)
    view = memoryview(header)
    state.update(view[:start])
    state.update(_ZEROS.encode("ascii"))
    state.update(view[start + len(_ZEROS) :])
    return str(state.hexdigest())


def _render(kind: str, metadata: Mapping[str, str], infos: Mapping[str, TensorInfo], digest: str) -> bytes:
    sums = _compact({name: info.checksum for name, info in infos.items()})
    own = {"digest": digest, "format": "kvferry", "kind": kind, "version": str(VERSION), "checksums": sums}
    entries: dict[str, object] = {"__metadata__": {**own, **metadata}}
    for name, info in infos.items():
        entries[name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [info.begin, info.end],
        }
    text = _compact(entries)
    return (text + " " * (-len(text) % PREFIX_BYTES)).encode("ascii")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
