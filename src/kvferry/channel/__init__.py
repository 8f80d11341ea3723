"""How bytes travel: a hand-off is offered by a `Sender` and fetched by a `Receiver`. Knows bytes only.

`kvferry.channel.file` for hand-offs at rest, `kvferry.channel.socket` for two processes, `kvferry.channel.nixl` and
`kvferry.channel.mooncake` for two processes on a fabric; `CHANNELS` names them.
"""

import importlib
from typing import Any

from kvferry.channel.base import Arrival, Incoming, Outgoing, Receiver, Sender, Traffic

CHANNELS = {
    "file": ("kvferry.channel.file:FileSender", "kvferry.channel.file:FileReceiver"),
    "mooncake": ("kvferry.channel.mooncake:MooncakeSender", "kvferry.channel.mooncake:MooncakeReceiver"),
    "nixl": ("kvferry.channel.nixl:NixlSender", "kvferry.channel.nixl:NixlReceiver"),
    "socket": ("kvferry.channel.socket:SocketSender", "kvferry.channel.socket:SocketReceiver"),
}
"""Name -> where its sender and its receiver are; each takes an address first."""
LIVE = tuple(sorted(CHANNELS.keys() - {"file"}))
"""Those between two processes that run at the same time."""


def ends(channel: str) -> tuple[Any, Any]:
    """Classes of a channel's sender and receiver."""
    sender, receiver = (_load(place) for place in CHANNELS[channel])
    return sender, receiver


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


__all__ = ["CHANNELS", "LIVE", "Arrival", "Incoming", "Outgoing", "Receiver", "Sender", "Traffic", "ends"]
