"""What a refinement looks like on the wire: a header message and frames.

Header, little endian::

    0   magic "KVFERRYR"          8   version u16, levels u16    12  bytes of the whole header u64
    20  id of the base packet, 16 bytes                          36  digest of the exact cache, 16 bytes
    52  batch u64                 60  seq_len u64                68  frame_tokens u64 (0: one frame for all tokens)
    76  frames of each level u64  84  bytes of mask u64
    92  mask of the exact cache (see `kvferry.ship.fields`), nothing where it is the base packet's
    …   XXH3-128 of all before: the refinement's id, which every frame carries

The cache is cut as a packet's is (`kvferry.ship.layout`), with a ``frame_tokens`` of the refinement's own. There are as
many frames at each level, of the same layers and tokens.

Frame::

    0   magic "KVFU"              4   version u16                6   level u8, 0 u8
    8   bytes of the whole frame u64                             16  refinement id, 16 bytes
    32  index u32                 36  first layer u32            40  layer behind the last u32
    44  first token u64           52  token behind the last u64
    60  XXH3-128 of the keys, then the values, that the frame leaves behind, dense, in the cache's dtype
    76  body
    …   XXH3-64 of all before

Body at level 1: for keys and for values the bytes of a mask u32, the mask of the tokens that have a residual, and a
part's description (`kvferry.ship.parts`); then the sections of both, as of rows in fp32. Level 2: what
`kvferry.ship.refine.lossless` writes. A frame of level 2 is relative to what level 1
of the same tokens left behind. Tokens outside of the exact cache's mask are zeros throughout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvferry.errors import CorruptPacket, TooLarge, UnsupportedVersion
from kvferry.ship.layout import FrameSlot

MAGIC, FRAME_MAGIC = b"KVFERRYR", b"KVFU"
VERSION = 1
LEVELS = 2
DIGEST_BYTES = 16
MAX_HEADER = 1 << 24

_FIXED = struct.Struct("<8sHHQ16s16sQQQQQ")
_FRAME = struct.Struct("<4sHBBQ16sIIIQQ16s")
_SUM_BYTES = 8
_LARGE = 2**48
LEAST_HEADER = _FIXED.size + DIGEST_BYTES
LEAST_FRAME = _FRAME.size + _SUM_BYTES


@dataclass(frozen=True, slots=True)
class RefinementHeader:
    """All of a refinement but its frames.

    Attributes:
        base: id of the packet that it refines.
        digest: of the exact cache; see `digest_tensors`.
        batch, seq_len: of the cache.
        frame_tokens: tokens a frame, 0 for all.
        frames: frames of each level.
        mask: of the exact cache, encoded; empty where it is the base packet's.
        own: the refinement's id.
        nbytes: bytes of the message.
    """

    base: bytes
    digest: bytes
    batch: int
    seq_len: int
    frame_tokens: int
    frames: int
    mask: bytes
    own: bytes = b""
    nbytes: int = 0


def render_header(header: RefinementHeader) -> bytes:
    """The message, checksum included; ``own`` and ``nbytes`` are not looked at."""
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        LEVELS,
        LEAST_HEADER + len(header.mask),
        header.base,
        header.digest,
        header.batch,
        header.seq_len,
        header.frame_tokens,
        header.frames,
        len(header.mask),
    )
    message = fixed + header.mask
    return message + xxhash.xxh3_128_digest(message)


def parse_header(data: bytes | bytearray | memoryview) -> RefinementHeader:
    """Read and check a header message; how it fits its base is for the caller to check.

    Raises:
        CorruptPacket: damaged, cut off, extended, or inconsistent with itself.
        UnsupportedVersion: another format version or number of levels.
        TooLarge: more than any machine holds.
    """
    view = memoryview(data).cast("B")
    if len(view) < 20 or view[:8] != MAGIC:
        raise CorruptPacket("this is no kvferry refinement: its header does not begin with KVFERRYR")
    version, levels, length = struct.unpack_from("<HHQ", view, 8)
    if version != VERSION or levels != LEVELS:
        raise UnsupportedVersion(
            f"refinement format {version} of {levels} levels; this kvferry reads {VERSION} of {LEVELS}: upgrade kvferry"
        )
    if length != len(view) or length < LEAST_HEADER:
        raise CorruptPacket(
            f"the refinement's header declares {length} bytes, but has {len(view)}: cut off or extended"
        )
    if length > MAX_HEADER:
        raise TooLarge(f"the refinement's header has {length:,} bytes; at most {MAX_HEADER:,} are read")
    own = bytes(view[-DIGEST_BYTES:])
    if xxhash.xxh3_128_digest(view[:-DIGEST_BYTES]) != own:
        raise CorruptPacket("the refinement's header does not match its checksum: it was damaged or edited")
    _, _, _, _, base, digest, *counts, mask = _FIXED.unpack_from(view)
    if max(counts) > _LARGE:
        raise TooLarge("the refinement's header declares more than any machine holds")
    if LEAST_HEADER + mask != length:
        raise CorruptPacket(f"the mask of the refinement's header takes {mask} bytes, not what it has")
    batch, seq_len, frame_tokens, frames = counts
    text = bytes(view[_FIXED.size : _FIXED.size + mask])
    return RefinementHeader(base, digest, batch, seq_len, frame_tokens, frames, text, own, length)


@dataclass(frozen=True, slots=True, eq=False)
class RefinementFrame:
    """A frame whose checksum and refinement are right; its place and body are not looked at yet.

    Attributes:
        level: 1 or 2.
        index: within its level.
        place: ``(first layer, layer behind the last, first token, token behind the last)``.
        digest: of what it leaves behind.
        body: the rest.
    """

    level: int
    index: int
    place: tuple[int, int, int, int]
    digest: bytes
    body: memoryview

    def __str__(self) -> str:
        return f"frame {self.index} of level {self.level}"


def render_frame(
    own: bytes, level: int, slot: FrameSlot, digest: bytes, body: Sequence[bytes | memoryview]
) -> memoryview:
    """One frame, in one buffer."""
    total = LEAST_FRAME + sum(map(len, body))
    out = bytearray(total)
    place = (slot.index, slot.first_layer, slot.last_layer, slot.start, slot.stop)
    _FRAME.pack_into(out, 0, FRAME_MAGIC, VERSION, level, 0, total, own, *place, digest)
    at = _FRAME.size
    for piece in body:
        out[at : at + len(piece)] = piece
        at += len(piece)
    out[at:] = xxhash.xxh3_64_digest(memoryview(out)[:at])
    return memoryview(out).toreadonly()


def announced_frame_length(prefix: bytes | memoryview) -> int:
    """Bytes of the whole frame, from its first 16; raises `CorruptPacket` or `UnsupportedVersion`."""
    if len(prefix) < 16 or prefix[:4] != FRAME_MAGIC:
        raise CorruptPacket("this is no frame of a kvferry refinement: it does not begin with KVFU")
    version, level, reserved, length = struct.unpack_from("<HBBQ", prefix, 4)
    if version != VERSION or reserved or not 1 <= level <= LEVELS:
        raise UnsupportedVersion(
            f"refinement frame format {version}, level {level}; this kvferry reads {VERSION}, levels 1 to {LEVELS}"
        )
    return int(length)


def open_frame(data: bytes | bytearray | memoryview, header: RefinementHeader) -> RefinementFrame:
    """Check a frame from the wire.

    Raises:
        CorruptPacket: damaged, cut, extended, or of another refinement.
        UnsupportedVersion: another version or level.
    """
    view = memoryview(data).cast("B")
    length = announced_frame_length(view)
    if length != len(view) or length < LEAST_FRAME:
        raise CorruptPacket(f"a refinement frame declares {length} bytes, but has {len(view)}: cut off or extended")
    if xxhash.xxh3_64_digest(view[:-_SUM_BYTES]) != view[-_SUM_BYTES:]:
        raise CorruptPacket("a refinement frame does not match its checksum: it was damaged on the way")
    _, _, level, _, _, owner, index, *place, digest = _FRAME.unpack_from(view)
    if owner != header.own:
        raise CorruptPacket("a refinement frame belongs to another refinement than this header's")
    if index >= header.frames:
        raise CorruptPacket(f"a refinement frame has index {index}, but a level has {header.frames} frames")
    first, last, start, stop = place
    return RefinementFrame(level, index, (first, last, start, stop), digest, view[_FRAME.size : -_SUM_BYTES])


def digest_tensors(tensors: Iterable[Tensor]) -> bytes:
    """XXH3-128 of the tensors' elements, dense, one tensor behind the other."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        dense = tensor.detach().cpu().contiguous()
        raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
        state.update(np.ascontiguousarray(raw).data)
    return state.digest()
