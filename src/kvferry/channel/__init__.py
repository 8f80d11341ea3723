"""How bytes travel: a hand-off is offered by a `Sender` and fetched by a `Receiver`. Knows bytes only.

`kvferry.channel.file` for hand-offs at rest, `kvferry.channel.socket` for two processes, `kvferry.channel.nixl` for two
processes on a fabric; `CHANNELS` names them.
"""

from kvferry.channel.base import Arrival, Incoming, Outgoing, Receiver, Sender, Traffic

CHANNELS = {
    "file": ("kvferry.channel.file:FileSender", "kvferry.channel.file:FileReceiver"),
    "nixl": ("kvferry.channel.nixl:NixlSender", "kvferry.channel.nixl:NixlReceiver"),
    "socket": ("kvferry.channel.socket:SocketSender", "kvferry.channel.socket:SocketReceiver"),
}
"""Name -> where its sender and its receiver are; each takes an address first."""

__all__ = ["CHANNELS", "Arrival", "Incoming", "Outgoing", "Receiver", "Sender", "Traffic"]
