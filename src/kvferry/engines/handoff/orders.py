"""What the parent tells a child on its standard input: one line on the link first, then one line a hand-off.

Arguments and environment of a process can be read by every user of the machine. Names and keys go this way instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvferry.channel.socket.security import ConsumerKeys, KeyPair, ProducerKeys
from kvferry.engines.handoff.job import HandoffJob, HandoffNames
from kvferry.errors import InvalidInput

LOOPBACK = "tcp://127.0.0.1:*"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a child reaches the other one.

    Attributes:
        listen: address that the producer binds.
        own: this child's key pair; ``None`` on the loopback interface, where no keys are needed.
        peer: public key of the other child.
        channel: one of `kvferry.channel.LIVE`: what moves the frames.
    """

    listen: str = LOOPBACK
    own: KeyPair | None = field(default=None, repr=False)
    peer: bytes = b""
    channel: str = "socket"

    @property
    def producer_keys(self) -> ProducerKeys | None:
        return None if self.own is None else ProducerKeys(self.own, frozenset([self.peer]))

    @property
    def consumer_keys(self) -> ConsumerKeys | None:
        return None if self.own is None else ConsumerKeys(self.own, self.peer)

    def to_json(self) -> str:
        keys = None
        if self.own is not None:
            keys = [half.decode() for half in (self.own.public, self.own.secret, self.peer)]
        return json.dumps({"listen": self.listen, "keys": keys, "channel": self.channel})

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """Inverse of `to_json`; raises `InvalidInput` for anything else."""
        try:
            given = json.loads(text)
            listen, channel = str(given["listen"]), str(given["channel"])
            if given["keys"] is None:
                return cls(listen, channel=channel)
            public, secret, peer = (str(half).encode() for half in given["keys"])
            return cls(listen, KeyPair(public, secret), peer, channel)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInput(f"this is no setting of a hand-off: {error}") from error


def both_ends(host: str) -> tuple[Setting, Setting]:
    """Settings of a producer at ``host`` and of its one consumer, with new keys."""
    producer, consumer = KeyPair.generate(), KeyPair.generate()
    listen = f"tcp://{host}:*"
    return Setting(listen, producer, consumer.public), Setting(listen, consumer, producer.public)


@dataclass(frozen=True, slots=True)
class Order:
    """One hand-off for a child to do its part of."""

    job: HandoffJob
    names: HandoffNames

    def to_json(self) -> str:
        return json.dumps({"job": self.job.to_json(), "names": self.names.to_json()})

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Inverse of `to_json`; raises `InvalidInput` for anything else."""
        try:
            given: dict[str, Any] = json.loads(text)
            return cls(HandoffJob.from_json(given["job"]), HandoffNames.from_json(given["names"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInput(f"this is no order of a hand-off: {error}") from error
