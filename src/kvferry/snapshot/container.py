"""Files of kvferry on disk: tensors and texts in one safetensors file, whole or not at all, checked before use."""

from __future__ import annotations

import logging
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput, TooLarge, UnsupportedVersion
from kvferry.snapshot.files import BAD_PATH, replacing
from kvferry.snapshot.header import PREFIX_BYTES, Header, header_length, parse_header, plan_header, render_header

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]

_CHUNK = 4 << 20
"""Bytes hashed and written at a time: within the last-level cache, so that memory is read once."""


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """What a file holds.

    Attributes:
        kind: ``snapshot``, ``packet``…
        metadata: the texts that the writer gave.
        tensors: name → tensor, in the order of the file.
        nbytes: size of the file.
    """

    kind: str
    metadata: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    nbytes: int


def write_container(
    path: StrPath,
    kind: str,
    tensors: Mapping[str, Tensor | bytes | bytearray | memoryview],
    metadata: Mapping[str, str],
) -> int:
    """Write a file that `read_container` and any safetensors reader can open.

    The data goes to a temporary file in the same folder, is flushed to the disk and takes the place of ``path`` in one
    step: whoever is killed while writing leaves the old file whole, and who has the old one open keeps it. One tensor
    at a time is copied, and only where it is strided or on another device.

    Args:
        path: where to; a file that exists is replaced.
        kind: what the file holds, such as ``snapshot``.
        tensors: name → dense tensor of any shape and device, or bytes, which become one-dimensional uint8.
        metadata: ASCII texts under lower-case keys.

    Returns:
        Size of the file in bytes.

    Raises:
        InvalidInput: something that has no place in a file, or a path that cannot be written.
        OSError: the disk is full or failing.
    """
    sources = {name: _source(name, value) for name, value in tensors.items()}
    header = plan_header(kind, {name: _layout(source) for name, source in sources.items()}, metadata)
    with replacing(path) as file:
        file.seek(header.payload_start)
        infos = {}
        for name, info in header.tensors.items():
            infos[name] = replace(info, checksum=_write_source(file, sources[name]))
        file.seek(0)
        _write_all(file, memoryview(render_header(replace(header, tensors=infos))))
    log.debug("wrote %s: %s of %d tensors, %d bytes", path, kind, len(sources), header.nbytes)
    return header.nbytes


def read_container(
    path: StrPath, *, kind: str | None = None, max_bytes: int | None = None, mapped: bool = True
) -> Container:
    """Read a file that `write_container` made; every byte of it is checked before anything is returned.

    Args:
        path: the file.
        kind: what it has to hold; ``None`` for anything.
        max_bytes: the largest file to read.
        mapped: let the tensors share a private mapping of the file (no copy; what is written to them stays in memory).
            The file must then not be cut or edited in place while they live; kvferry itself only ever replaces files.
            ``False`` reads it into memory, once, for folders where others do that.

    Raises:
        CorruptPacket: no kvferry file, a damaged one, or one of another kind.
        UnsupportedVersion: written in a newer format.
        TooLarge: more bytes than ``max_bytes``, or than can be had.
        InvalidInput: there is no such file, or it cannot be opened.
    """
    with _opened(path, max_bytes) as (file, before):
        header = _read_header(file, before.st_size, kind)
        buffer = _map(file) if mapped else _read_all(file, header.nbytes)
        tensors = _tensors(header, buffer)
        after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise CorruptPacket("the file was changed while it was read: write to another file and rename it instead")
    return Container(header.kind, header.metadata, tensors, header.nbytes)


def peek(path: StrPath, *, max_bytes: int | None = None) -> Header:
    """Header of a kvferry file of any kind, checked against its digest; the data is neither read nor checked.

    Raises what `read_container` raises.
    """
    with _opened(path, max_bytes) as (file, status):
        return _read_header(file, status.st_size, None)


def _read_header(file: FileIO, nbytes: int, kind: str | None) -> Header:
    prefix = file.read(PREFIX_BYTES)
    length = header_length(prefix, nbytes)
    raw = file.read(length)
    if len(raw) != length:
        raise CorruptPacket("the file was cut while it was read")
    return parse_header(prefix, raw, nbytes, kind=kind)


def _map(file: FileIO) -> memoryview:
    try:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        raise TooLarge(f"the file cannot be mapped into memory: {error}") from error


def _read_all(file: FileIO, nbytes: int) -> memoryview:
    # An array of numpy's is not cleared before it is filled; a bytearray would be.
    try:
        buffer = np.empty(nbytes, np.uint8).data
    except MemoryError as error:
        raise TooLarge(f"no memory for the {nbytes} bytes of the file") from error
    file.seek(0)
    position = 0
    while position < nbytes:
        count = file.readinto(buffer[position : position + _CHUNK])
        if not count:
            raise CorruptPacket("the file was cut while it was read")
        position += count
    return buffer


def _tensors(header: Header, buffer: memoryview) -> dict[str, Tensor]:
    if len(buffer) != header.nbytes:
        raise CorruptPacket("the file was changed while it was read")
    found: dict[str, Tensor] = {}
    for name, info in header.tensors.items():
        begin, end = header.payload_start + info.begin, header.payload_start + info.end
        data = buffer[begin:end]
        if xxhash.xxh3_128_hexdigest(data) != info.checksum:
            raise CorruptPacket(f"tensor {name!r} does not match its checksum: the data was damaged or exchanged")
        if begin == end:
            found[name] = torch.empty(info.shape, dtype=info.dtype)
            continue
        if info.dtype == torch.bool and np.frombuffer(data, np.uint8).max() > 1:
            raise CorruptPacket(f"tensor {name!r} of booleans holds other bytes than 0 and 1")
        count = (end - begin) // info.dtype.itemsize
        found[name] = torch.frombuffer(buffer, dtype=info.dtype, count=count, offset=begin).view(info.shape)
    return found


def _source(name: str, value: Tensor | bytes | bytearray | memoryview) -> Tensor | memoryview:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise InvalidInput(f"tensor {name!r} has no dense data to write ({value.layout}, {value.device})")
        return value.detach()
    try:
        return memoryview(value).cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name!r} is neither a tensor nor contiguous bytes: {error}") from error


def _layout(source: Tensor | memoryview) -> tuple[torch.dtype, tuple[int, ...]]:
    if isinstance(source, Tensor):
        return source.dtype, tuple(source.shape)
    return torch.uint8, (source.nbytes,)


def _write_source(file: FileIO, source: Tensor | memoryview) -> str:
    if isinstance(source, Tensor):
        dense = source.cpu().contiguous()
        # Not reshape(-1): a dimension of one element may keep any stride, and view(uint8) needs 1.
        source = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
    return _write_all(file, source)


def _write_all(file: FileIO, data: memoryview) -> str:
    """Write all of ``data`` and return its checksum."""
    state = xxhash.xxh3_128()
    for start in range(0, len(data), _CHUNK):
        chunk = data[start : start + _CHUNK]
        state.update(chunk)
        while len(chunk):
            chunk = chunk[file.write(chunk) :]
    return str(state.hexdigest())


@contextmanager
def _opened(path: StrPath, max_bytes: int | None) -> Iterator[tuple[FileIO, os.stat_result]]:
    """A regular file opened for reading, and its status; errors from inside get the path in front."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in BAD_PATH:
            raise
        name = os.fspath(path) or "a file without a name"
        raise InvalidInput(f"cannot read {name}: {getattr(error, 'strerror', error)}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"{path} is no regular file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise TooLarge(f"{path} has {status.st_size} bytes, more than the limit of {max_bytes}")
        with naming(path):
            yield FileIO(descriptor, "rb", closefd=False), status
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: StrPath) -> Iterator[None]:
    """Put ``path`` in front of the message of a kvferry error that leaves the block."""
    try:
        yield
    except (CorruptPacket, UnsupportedVersion, TooLarge) as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from error
