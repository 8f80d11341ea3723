"""Hand-offs over TCP by ØMQ: authenticated and encrypted with keys, on the loopback interface alone without."""

from kvferry.channel.socket.offer import SocketOutgoing
from kvferry.channel.socket.receiver import SocketIncoming, SocketReceiver
from kvferry.channel.socket.security import ConsumerKeys, KeyPair, ProducerKeys, consumer_keys, producer_keys
from kvferry.channel.socket.sender import SocketSender

__all__ = [
    "ConsumerKeys",
    "KeyPair",
    "ProducerKeys",
    "SocketIncoming",
    "SocketOutgoing",
    "SocketReceiver",
    "SocketSender",
    "consumer_keys",
    "producer_keys",
]
