"""The receiver: a header, then frames in any order, each installed straight into its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket, TooLarge
from kvferry.ship.frame import SPECS, Frame, install_frame, measure_frame, open_frame
from kvferry.ship.header import PacketHeader, packet_id, parse_header
from kvferry.ship.layout import WHOLE
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.body import Span, decode_body, read_raw
from kvferry.ship.transform.store import Given, for_packet
from kvferry.snapshot import Identity, LayerState, Snapshot, dtype_from_name

DEFAULT_MAX_BYTES = 16 << 30
"""Largest decoded cache unless the caller says otherwise."""

MAX_EXPANSION = 1024
"""The tokens that a packet sends may not decode to more than this many times its bytes, beyond `FREE_BYTES`; no
quantiser gives more than 32. Dropped tokens and padding cost nothing on the wire: ``max_bytes`` alone bounds them."""

FREE_BYTES = 1 << 20


class PacketReader:
    """Takes a packet's header and frames and makes a snapshot of them.

    Memory: the header's token ids, positions and mask, `kvferry.ship.fields.TOKEN_BYTES` a token, which the snapshot
    takes over; for each layer, from its first valid frame on, its keys and values.
    What the header declares for all layers together is known and checked beforehand against ``max_bytes``, and what it
    declares for the tokens that are sent against `MAX_EXPANSION` times the bytes of the packet. A frame is verified
    whole before it is looked into, and a frame that is refused leaves the reader as it was.

    Args:
        header: the header message.
        max_bytes: most bytes of keys and values of the decoded cache, and of its ids, positions and mask; default
            `DEFAULT_MAX_BYTES`.
        want: identity of the receiver's model, where it is known: a cache for another is refused before any frame.
        device: where the tensors go; default CPU.
        transform: what a packet of policy ``klt`` was written with, or its file; default: the one in the cache folder
            that the packet names.

    Raises:
        CorruptPacket, UnsupportedVersion, TooLarge, IncompatibleIdentity: about the header.
        InvalidInput: the transform that the packet names is not here.
    """

    def __init__(
        self,
        header: bytes | bytearray | memoryview,
        *,
        max_bytes: int | None = None,
        want: Identity | None = None,
        device: torch.device | str | None = None,
        transform: Given = None,
    ):
        most = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        self.header: PacketHeader = parse_header(header, max_bytes=most)
        self._id = packet_id(memoryview(header).cast("B"))
        self._layout = self.header.layout
        self._device = torch.device("cpu" if device is None else device)
        self._dtype = dtype_from_name(self.header.identity.dtype)
        check_size(self.header, most)
        if want is not None:
            self.header.identity.require_compatible(want, "this packet was not made for this model")
        self._transform: Transform | None = None
        if self.header.cut == WHOLE:
            self._transform = for_packet(self.header.report.get("transform"), transform)
            self.header.identity.require_compatible(
                self._transform.identity, "the packet's transform is not its model's"
            )
        self._tensors: list[tuple[Tensor, Tensor] | None] = [None] * len(self.header.identity.layers)
        self._received: set[int] = set()
        self._quantizers: dict[str, set[str]] = {"keys": set(), "values": set()}
        self._frame_bytes = 0

    @torch.no_grad()
    def add(self, frame: bytes | bytearray | memoryview) -> range:
        """Verify a frame and write it into its place; returns the layers that it belongs to.

        Raises:
            CorruptPacket: damaged, of another packet, inconsistent, or here already.
            UnsupportedVersion: it needs a newer kvferry.
        """
        opened = open_frame(frame, self._id, self._layout)
        slot = opened.slot
        if slot.index in self._received:
            raise CorruptPacket(f"{slot} came twice")
        size = len(memoryview(frame).cast("B"))
        if self._frame_bytes + size > self.header.payload_bytes:
            raise CorruptPacket(
                f"{slot} is more than the {self.header.payload_bytes} bytes of frames that were announced"
            )
        layers = range(slot.first_layer, slot.last_layer)
        quantizers = self._install_rows(opened) if self._transform is None else self._install_coded(opened)
        self._received.add(slot.index)
        for side, specs in quantizers.items():
            self._quantizers[side] |= specs
        self._frame_bytes += size
        return layers

    def _install_rows(self, opened: Frame) -> dict[str, set[str]]:
        slot = opened.slot
        layers = range(slot.first_layer, slot.last_layer)
        shapes = [(g.kv_heads, g.head_dim, g.value_head_dim) for g in (self.header.identity.layers[i] for i in layers)]
        measured = measure_frame(opened, self.header.mask, shapes, self._dtype)
        quantizers = measured.quantizers
        self.header.check_quantizers(quantizers, complete=False)
        targets = []
        for layer in layers:
            first = self._layout.firsts[layer]
            tokens = slice(slot.start - first, slot.stop - first)
            targets += [tensor[:, :, tokens] for tensor in self._layer(layer)]
        install_frame(measured, targets)
        return quantizers

    def _install_coded(self, opened: Frame) -> dict[str, set[str]]:
        """All pieces are decoded before the first is written: a frame that is refused leaves no trace."""
        assert self._transform is not None
        slot, header = opened.slot, self.header
        code, raw, at = read_raw(opened.body, slot.start, slot.stop, header.mask)
        span = Span(slot.start, slot.stop, self._layout.firsts, header.mask, raw)
        layers = []
        for index, geometry in enumerate(header.identity.layers):
            keys, values = (None, None) if geometry.kind.name == "shared" else self._layer(index)
            layers.append(LayerState(geometry.kind, keys, values, header.seq_len))
        pieces = list(decode_body(opened.body, self._transform, span, code, at, layers, header.positions))
        absent = (~header.mask[:, slot.start : slot.stop]).nonzero()
        for layer in layers:
            for tensor in (layer.keys, layer.values):
                for row, place in absent.tolist() if tensor is not None else ():
                    if slot.start + place >= layer.first:
                        assert tensor is not None
                        tensor[row, :, slot.start + place - layer.first] = 0
        for index, side, row, tokens, rows in pieces:
            tensor = layers[index].values if side else layers[index].keys
            assert tensor is not None
            where = (tokens - layers[index].first).to(tensor.device)
            tensor[row].index_copy_(1, where, rows.to(tensor.device))
        return {side: set(SPECS) for side in ("keys", "values")}

    @property
    def received(self) -> frozenset[int]:
        """Indices of the frames that are installed."""
        return frozenset(self._received)

    @property
    def complete(self) -> bool:
        """Whether every frame is installed."""
        return len(self._received) == self._layout.count

    def missing(self) -> list[int]:
        """Indices of the frames that are not installed yet, ascending."""
        return [index for index in range(self._layout.count) if index not in self._received]

    def snapshot(self) -> Snapshot:
        """The decoded cache; its construction path gains ``packet(policy; quantisers, bytes)``.

        It takes over the reader's tensors: two snapshots of one reader share them.

        Raises:
            CorruptPacket: frames are missing, the message says which; or the header names quantisers of none of them.
        """
        if not self.complete:
            missing = self.missing()
            shown = ", ".join(str(index) for index in missing[:8]) + (", …" if len(missing) > 8 else "")
            raise CorruptPacket(f"the packet is incomplete: frames {shown} of {self._layout.count} are missing")
        header = self.header
        header.check_quantizers(self._quantizers, complete=True)
        layers = []
        for index, geometry in enumerate(header.identity.layers):
            keys, values = (None, None) if geometry.kind.name == "shared" else self._layer(index)
            layers.append(LayerState(geometry.kind, keys, values, header.seq_len))
        nbytes = header.nbytes + self._frame_bytes
        return Snapshot(
            identity=header.identity.then(f"packet({header.policy}; {header.quantizer}, {nbytes})"),
            token_ids=header.token_ids,
            positions=header.positions,
            mask=header.mask,
            layers=tuple(layers),
        )

    def _layer(self, index: int) -> tuple[Tensor, Tensor]:
        found = self._tensors[index]
        if found is None:
            geometry = self.header.identity.layers[index]
            shape = (self.header.batch, geometry.kv_heads, self._layout.seq_len - self._layout.firsts[index])
            try:
                keys = torch.empty(*shape, geometry.head_dim, dtype=self._dtype, device=self._device)
                values = torch.empty(*shape, geometry.value_head_dim, dtype=self._dtype, device=self._device)
            except RuntimeError as error:  # torch's word for no memory
                raise TooLarge(f"no memory for the cache of layer {index}, {shape} tokens: {error}") from error
            found = self._tensors[index] = (keys, values)
        return found


def read_all(reader: PacketReader, frames: Iterable[bytes | memoryview]) -> Snapshot:
    """Add every frame and return the snapshot."""
    for frame in frames:
        reader.add(frame)
    return reader.snapshot()


def check_size(header: PacketHeader, max_bytes: int) -> None:
    """Raise `TooLarge` unless the cache that a parsed header declares may be decoded."""
    size = header.cache_bytes
    if size > max_bytes:
        raise TooLarge(f"the packet decodes to a cache of {size:,} bytes; the limit is {max_bytes:,} (max_bytes)")
    wire = header.nbytes + header.payload_bytes
    sent = header.sent_bytes(1)  # where nothing is sent, a token still says how wide the rows are
    if sent > FREE_BYTES + MAX_EXPANSION * wire:
        raise TooLarge(
            f"a packet of {wire:,} bytes declares {sent:,} bytes of tokens that it sends, more than {MAX_EXPANSION} "
            "times its size"
        )
