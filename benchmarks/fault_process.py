"""Producers and consumers to be killed: they move a packet's bytes, and load neither torch nor a model.

python -m benchmarks.fault_process serve ADDRESS FILE       header and frames of FILE as the hand-off ``p``
python -m benchmarks.fault_process fetch ADDRESS HANDOFF    take all frames
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

from kvferry.channel.socket import SocketReceiver, SocketSender

_LENGTH = struct.Struct("<Q")


def write_pieces(path: Path, pieces: list[bytes]) -> None:
    """Byte strings in one file, each led by its length."""
    path.write_bytes(b"".join(_LENGTH.pack(len(piece)) + piece for piece in pieces))


def read_pieces(path: Path) -> list[bytes]:
    """What `write_pieces` wrote."""
    data, at, pieces = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + size
        pieces.append(data[at - size : at])
    return pieces


def serve(address: str, path: str) -> None:
    """Until standard input ends."""
    header, *frames = read_pieces(Path(path))
    with SocketSender(address) as sender:
        outgoing = sender.announce("p")
        outgoing.begin(header, [len(frame) for frame in frames])
        for frame in frames:
            outgoing.push(frame)
        sys.stdout.write(f"{sender.address}\n")
        sys.stdout.flush()
        sys.stdin.read()


def fetch(address: str, handoff: str) -> None:
    """Take every frame, and say so."""
    with SocketReceiver(address, timeout=5.0, stall=1.0).fetch(handoff) as incoming:
        count = sum(1 for _ in incoming.frames())
        incoming.confirm()
    sys.stdout.write(f"{count}\n")


if __name__ == "__main__":
    {"serve": serve, "fetch": fetch}[sys.argv[1]](*sys.argv[2:])
