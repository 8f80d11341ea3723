"""The header message of a packet: what is to come, for whom, and how to check it. Nothing in it grows with the cache
but the token ids.

Layout, little endian::

    0   magic "KVFERRYP"          8   version u16, cut u16       12  bytes of the whole header u64
    20  batch u64                 28  seq_len u64                36  frame_tokens u64 (0: one frame for all tokens)
    44  frames u64                52  payload bytes u64          60  full bytes u64
    68  nominal budget f64        76  content digest, 16 bytes
    92  bytes of JSON u64         100 bytes of ids u64           108 bytes of positions u64    116 bytes of mask u64
    124 JSON, ids, positions, mask (see `kvferry.ship.fields`)
    …   XXH3-128 of all before: the packet's id, which every frame carries

``cut`` says how the cache is cut into frames (`kvferry.ship.layout`): 0, a frame for a layer or for some tokens of one,
whose payload kind is 0; 1, a frame for all layers or for some tokens of them, whose payload kind is 1.
``payload bytes`` bounds the frames together (fixed-rate quantisers: it is exact). ``full bytes`` must lie between what
the tokens that the mask shows take raw, and what all tokens take.
A header has at most `MAX_TOKENS` tokens and `MAX_HEADER` bytes; reading it takes `fields.TOKEN_BYTES` of memory a token
beside the message itself, in however few bytes it says them. The checksums find damage and frames that belong
elsewhere; they are no signature: authenticity is the channel's to give.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import xxhash
from jaxtyping import Bool, Int
from torch import Tensor

from kvferry.errors import CorruptPacket, TooLarge, UnsupportedCache, UnsupportedVersion
from kvferry.ship import fields
from kvferry.ship.frame import LEAST_FRAME
from kvferry.ship.layout import BY_LAYER, WHOLE, Layout
from kvferry.snapshot import Identity, dtype_from_name
from kvferry.snapshot.strict_json import parse_json

MAGIC = b"KVFERRYP"
VERSION = 1
DIGEST_BYTES = 16
LEAST_HEADER = 124 + DIGEST_BYTES
MAX_HEADER = 1 << 28
MAX_TOKENS = 1 << 26
"""Tokens of all sequences together: ids, positions and mask of so many take 1.1 GiB."""

_FIXED = struct.Struct("<8sHHQQQQQQQd16sQQQQ")
_LARGE = 2**48
_MAX_TEXT = 1 << 24
_RESERVED = 512
_LEAST_BODY, _RAW_BODY = 2, 10
"""Bytes of the two descriptions in a frame of nothing, and in one where all is raw."""


@dataclass(frozen=True, slots=True, eq=False)
class PacketHeader:
    """All of a packet but its frames.

    Attributes:
        identity: of the model, with the construction path of the cache that was encoded.
        token_ids, positions, mask: as the decoded snapshot will have them; dropped tokens are False in the mask.
        policy: name of the policy that chose the tiers.
        quantizers: spec texts of the tiers, ``{"keys": […], "values": […]}``.
        nominal_budget: b as the policy got it.
        full_bytes: bytes of the packet of this cache with every token raw.
        payload_bytes: bytes of all frames together.
        frames: number of frames.
        frame_tokens: tokens a frame, 0 for all.
        content: digest of the encoded cache (or the sender's nonce).
        report: what the encoder has to say: counts of non-finite and dropped tokens, scorer, seed…
        nbytes: bytes of the header message, once it is parsed.
        cut: how the cache is cut into frames.
        layout: which frame holds what; follows from the others.
    """

    identity: Identity
    token_ids: Int[Tensor, "batch seq"]
    positions: Int[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"]
    policy: str
    quantizers: dict[str, list[str]]
    nominal_budget: float
    full_bytes: int
    payload_bytes: int
    frames: int
    frame_tokens: int = 0
    content: bytes = bytes(DIGEST_BYTES)
    report: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    cut: int = BY_LAYER
    layout: Layout = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout.of(self.identity, self.seq_len, self.frame_tokens, self.cut))

    @property
    def batch(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def seq_len(self) -> int:
        return int(self.token_ids.shape[1])

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of the decoded snapshot."""
        return cache_bytes(self.identity, self.batch, self.seq_len)

    def sent_bytes(self, least: int = 0) -> int:
        """Those of the tokens that the mask shows, of at least so many in each layer that holds any."""
        starts = sorted({first for first in self.layout.firsts if first < self.seq_len})
        shown, tokens = {}, 0
        for start, stop in reversed(list(itertools.pairwise([*starts, self.seq_len]))):
            tokens += int(self.mask[:, start:stop].count_nonzero())  # sum would make integers of them all
            shown[start] = max(least, tokens)
        sizes = zip(self.layout.firsts, _token_bytes(self.identity), strict=True)
        return sum(shown[first] * size for first, size in sizes if first < self.seq_len)

    @property
    def quantizer(self) -> str:
        """The quantisers in use, as ``keys / values``."""
        return " / ".join("+".join(self.quantizers[side]) for side in ("keys", "values"))

    def check_quantizers(self, found: Mapping[str, Set[str]], *, complete: bool) -> None:
        """Raise `CorruptPacket` where frames hold others than the header names, or, all of them, not all of those.

        Args:
            found: specs of the frames, ``{"keys": …, "values": …}``.
            complete: whether these are all frames of the packet.
        """
        for side, specs in found.items():
            named = set(self.quantizers[side])
            if not specs <= named or (complete and specs != named):
                shown = ", ".join(spec[:20] for spec in sorted(specs ^ named)[:4])
                raise CorruptPacket(
                    f"the packet's header and its frames differ in the quantisers of the {side}: {shown}"
                )


def cache_bytes(identity: Identity, batch: int, seq_len: int) -> int:
    """Bytes of keys and values of a cache of ``seq_len`` tokens."""
    sizes = zip(identity.layers, _token_bytes(identity), strict=True)
    return sum(batch * layer.kind.held(seq_len) * size for layer, size in sizes)


def _token_bytes(identity: Identity) -> list[int]:
    """Bytes of keys and values of one token in each layer."""
    itemsize = dtype_from_name(identity.dtype).itemsize
    return [layer.kv_heads * (layer.head_dim + layer.value_head_dim) * itemsize for layer in identity.layers]


def header_length(header_sections: tuple[int, int, int, int]) -> int:
    """Bytes of a header with sections of these sizes."""
    return _FIXED.size + sum(header_sections) + DIGEST_BYTES


def render_header(header: PacketHeader) -> bytes:
    """The message, checksum included."""
    identity = description_identity(header.identity)
    text = description(identity, header.policy, header.quantizers, header.report)
    ids, positions = fields.encode_ids(header.token_ids), fields.encode_positions(header.positions)
    mask = fields.encode_mask(header.mask)
    sections = (len(text), len(ids), len(positions), len(mask))
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        header.cut,
        header_length(sections),
        header.batch,
        header.seq_len,
        header.frame_tokens,
        header.frames,
        header.payload_bytes,
        header.full_bytes,
        header.nominal_budget,
        header.content,
        *sections,
    )
    body = b"".join((fixed, text, ids, positions, mask))
    return body + xxhash.xxh3_128_digest(body)


def description_identity(identity: Identity) -> bytes:
    """The first part of a header's JSON."""
    return b'{"identity":' + _compact(identity.to_dict())


def description(
    identity_text: bytes, policy: str, quantizers: Mapping[str, list[str]], report: Mapping[str, Any]
) -> bytes:
    """The JSON of a header, from `description_identity` on.

    All but the identity is padded with spaces to a multiple of 512 bytes: a packet's size, and so its budget, does not
    hang on the length of a policy's name.
    """
    own = _compact({"policy": policy, "quantizers": quantizers, "report": report})
    text = b"," + own[1:]
    return identity_text + text + b" " * (-len(text) % _RESERVED)


def _compact(plain: object) -> bytes:
    return json.dumps(plain, separators=(",", ":"), sort_keys=True, allow_nan=False).encode("ascii")


def packet_id(header_bytes: bytes | memoryview) -> bytes:
    """The 16 bytes that bind every frame to its header."""
    return bytes(header_bytes[-DIGEST_BYTES:])


def announced_length(prefix: bytes | memoryview) -> int:
    """Bytes of the whole header, from its first 20; raises `CorruptPacket`, `UnsupportedVersion` or `TooLarge`."""
    if len(prefix) < 20 or bytes(prefix[:8]) != MAGIC:
        raise CorruptPacket("this is no kvferry packet: its header does not begin with KVFERRYP")
    version, cut, length = struct.unpack_from("<HHQ", prefix, 8)
    if version != VERSION:
        raise UnsupportedVersion(f"packet format {version}; this kvferry reads {VERSION}: upgrade kvferry to read it")
    if cut not in (BY_LAYER, WHOLE):
        raise UnsupportedVersion(f"the packet is cut into frames in a way {cut} that this kvferry does not know")
    if length < LEAST_HEADER:
        raise CorruptPacket(f"the packet's header declares {length} bytes")
    if length > MAX_HEADER:
        raise TooLarge(f"the packet's header declares {length} bytes; at most {MAX_HEADER} are read")
    return int(length)


def parse_header(data: bytes | bytearray | memoryview, *, max_bytes: int | None = None) -> PacketHeader:
    """Read and check a header message.

    Args:
        data: the message.
        max_bytes: most memory that its ids, positions and mask may take, `fields.TOKEN_BYTES` a token.

    Raises:
        CorruptPacket: damaged, or inconsistent with itself.
        UnsupportedVersion: another format version, or a layer kind that this one does not carry.
        TooLarge: a header that declares more than ``max_bytes``, or than any machine holds.
    """
    view = memoryview(data).cast("B")
    length = announced_length(view)
    if length != len(view):
        raise CorruptPacket(f"the packet's header declares {length} bytes, but has {len(view)}: cut off or extended")
    if xxhash.xxh3_128_digest(view[:-DIGEST_BYTES]) != packet_id(view):
        raise CorruptPacket("the packet's header does not match its checksum: it was damaged or edited")
    (_, _, cut, _, batch, seq_len, frame_tokens, frames, payload, full, nominal, content, *sections) = (
        _FIXED.unpack_from(view)
    )
    if max(batch, seq_len, frame_tokens, frames, payload, full, *sections) > _LARGE:
        raise TooLarge("the packet's header declares more than any machine holds")
    if header_length((sections[0], sections[1], sections[2], sections[3])) != length:
        raise CorruptPacket(f"the sections of the packet's header take {sections} bytes, not what it has")
    parts, at = [], _FIXED.size
    for size in sections:
        parts.append(view[at : at + size])
        at += size
    # A sequence has at least one byte of id a token, so that the header's own size bounds what is made from it here.
    if batch < 1 or seq_len < 1 or batch * seq_len > sections[1]:
        raise CorruptPacket(
            f"the packet declares {batch} x {seq_len} tokens, but holds {sections[1]} bytes of token ids"
        )
    check_tokens(batch * seq_len, length, max_bytes)
    if sections[0] > _MAX_TEXT:
        raise TooLarge(f"the packet's description has {sections[0]:,} bytes; at most {_MAX_TEXT:,} are read")
    if not 0 <= nominal <= 16:
        raise CorruptPacket(f"the packet declares a nominal budget of {nominal}")
    identity, policy, quantizers, report = _parse_text(parts[0])
    header = PacketHeader(
        identity,
        fields.decode_ids(parts[1], batch, seq_len),
        fields.decode_positions(parts[2], batch, seq_len),
        fields.decode_mask(parts[3], batch, seq_len),
        policy,
        quantizers,
        nominal,
        full,
        payload,
        frames,
        frame_tokens,
        content,
        report,
        length,
        cut,
    )
    if header.layout.count != frames:
        raise CorruptPacket(f"the packet declares {frames} frames, its layers and tokens make {header.layout.count}")
    least = LEAST_HEADER + sections[1] + sections[2]
    most = length + _RESERVED + (batch * seq_len + 7) // 8 + header.cache_bytes
    if cut == BY_LAYER:
        least, most = least + frames * (LEAST_FRAME + _LEAST_BODY), most + frames * (LEAST_FRAME + _RAW_BODY)
    else:  # the raw packet, in one frame a layer, has more of them
        least, most = (
            least + LEAST_FRAME + _LEAST_BODY,
            most + len(identity.layers) * frames * (LEAST_FRAME + _RAW_BODY),
        )
    shown = header.sent_bytes()
    if not least + shown <= full <= most:
        raise CorruptPacket(
            f"the packet says that it would have {full:,} bytes with every token raw; by its layers and tokens it "
            f"would have {least + shown:,} to {most:,}"
        )
    return header


def check_tokens(tokens: int, header_bytes: int, max_bytes: int | None = None) -> None:
    """Raise `TooLarge` unless so many tokens, of all sequences together, may be in a header of so many bytes."""
    if tokens > MAX_TOKENS or header_bytes > MAX_HEADER:
        raise TooLarge(
            f"{tokens:,} tokens in a header of {header_bytes:,} bytes; a packet has at most {MAX_TOKENS:,} tokens, and "
            f"a header of {MAX_HEADER:,} bytes: send fewer sequences or tokens in one packet"
        )
    if max_bytes is not None and tokens * fields.TOKEN_BYTES > max_bytes:
        raise TooLarge(
            f"ids, positions and mask of the packet's {tokens:,} tokens take {tokens * fields.TOKEN_BYTES:,} bytes; "
            f"the limit is {max_bytes:,} (max_bytes)"
        )


def _parse_text(data: memoryview) -> tuple[Identity, str, dict[str, list[str]], dict[str, Any]]:
    try:
        text = str(data, "ascii")
    except UnicodeDecodeError as error:
        raise CorruptPacket("the packet's description is not ASCII") from error
    plain = parse_json(text, "the packet's description")
    if not isinstance(plain, dict) or set(plain) != {"identity", "policy", "quantizers", "report"}:
        raise CorruptPacket("the packet's description lacks a field, or has one too many")
    identity = Identity.from_dict(plain["identity"])
    if identity.dtype not in ("float64", "float32", "float16", "bfloat16"):
        raise CorruptPacket(f"the packet declares the dtype {identity.dtype!r}, which no cache has")
    for index, layer in enumerate(identity.layers):
        try:
            layer.kind.require_supported(index)
        except UnsupportedCache as error:
            raise UnsupportedVersion(str(error)) from error
        if layer.kind.name == "shared" and not 0 <= (layer.kind.argument or 0) < index:
            raise CorruptPacket(f"layer {index} shares a layer that does not come before it")
    policy, quantizers, report = plain["policy"], plain["quantizers"], plain["report"]
    if not isinstance(policy, str) or len(policy) > 200 or not isinstance(report, dict):
        raise CorruptPacket("the packet's policy is no text, or its report is no object")
    if not (
        isinstance(quantizers, dict)
        and set(quantizers) == {"keys", "values"}
        and all(
            isinstance(specs, list) and all(isinstance(spec, str) for spec in specs) for specs in quantizers.values()
        )
    ):
        raise CorruptPacket("the packet's quantisers are no lists of texts")
    return identity, policy, quantizers, report
