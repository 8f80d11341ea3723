"""Who may talk to whom: CURVE keys, or the loopback interface alone.

With keys every byte is encrypted and both ends are authenticated: the producer lists the consumers' public keys, the
consumer names the producer's. Without keys nothing leaves the machine: any other address is refused.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.certs import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from kvferry.errors import InvalidInput

_DOMAIN = "kvferry"
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5}|\*)")
_Z85_KEY_BYTES = 40


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_key(self.public, "a public key")
        _check_key(self.secret, "a secret key")
        if zmq.curve_public(self.secret) != self.public:
            raise InvalidInput("the public key does not belong to the secret key")

    @classmethod
    def generate(cls) -> KeyPair:
        """A new pair."""
        return cls(*zmq.curve_keypair())

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``path.key``, to hand out, and ``path.key_secret``, for the owner alone, in pyzmq's format."""
        public, secret = Path(f"{os.fspath(path)}.key"), Path(f"{os.fspath(path)}.key_secret")
        public_line = f'curve\n    public-key = "{self.public.decode()}"\n'
        public.write_text(public_line)
        handle = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f'{public_line}    secret-key = "{self.secret.decode()}"\n')
        return public, secret

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KeyPair:
        """Read a ``.key_secret`` file, as `save` or pyzmq's ``create_certificates`` wrote it."""
        public, secret = _read_certificate(path)
        if secret is None:
            raise InvalidInput(f"{os.fspath(path)} holds no secret key; a .key_secret file does")
        return cls(public, secret)


@dataclass(frozen=True, slots=True)
class ProducerKeys:
    """The producer's own pair and the public keys of the consumers that it serves (none: nobody)."""

    own: KeyPair
    consumers: frozenset[bytes]

    def __post_init__(self) -> None:
        for key in self.consumers:
            _check_key(key, "a consumer's public key")


@dataclass(frozen=True, slots=True)
class ConsumerKeys:
    """The consumer's own pair and the public key of the producer that it trusts."""

    own: KeyPair
    producer: bytes

    def __post_init__(self) -> None:
        _check_key(self.producer, "the producer's public key")


def load_public_key(path: str | os.PathLike[str]) -> bytes:
    """The public key in a ``.key`` file."""
    return _read_certificate(path)[0]


def check_address(address: str, *, keys: bool) -> str:
    """``address``, or `InvalidInput` where it is none, or leaves this machine and there are no ``keys``."""
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return address
    match = _TCP.fullmatch(address)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise InvalidInput(f"{address!r} is no address; tcp://HOST:PORT and ipc://PATH are")
    if not keys and not _is_loopback(match[1]):
        raise InvalidInput(
            f"{address} is not on the loopback interface: without keys a hand-off stays on this machine. Give keys on "
            "both sides, or use tcp://127.0.0.1:PORT"
        )
    return address


class Gatekeeper:
    """Lets only the consumers in ``keys`` into the sockets of one context."""

    def __init__(self, context: zmq.Context[Any], keys: ProducerKeys):
        self._keys = keys
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """What pyzmq asks for each connection."""
        return domain == _DOMAIN and key in self._keys.consumers

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Make ``socket`` a CURVE server; call before bind."""
        socket.curve_secretkey = self._keys.own.secret
        socket.curve_publickey = self._keys.own.public
        socket.curve_server = True
        socket.zap_domain = _DOMAIN.encode()

    def close(self) -> None:
        self._authenticator.stop()


def use_keys(socket: zmq.Socket[Any], keys: ConsumerKeys) -> None:
    """Make ``socket`` a CURVE client; call before connect."""
    socket.curve_secretkey = keys.own.secret
    socket.curve_publickey = keys.own.public
    socket.curve_serverkey = keys.producer


def producer_keys(own: str | os.PathLike[str], consumers: Iterable[str | os.PathLike[str]]) -> ProducerKeys:
    """`ProducerKeys` from a ``.key_secret`` file and the consumers' ``.key`` files."""
    return ProducerKeys(KeyPair.load(own), frozenset(load_public_key(path) for path in consumers))


def consumer_keys(own: str | os.PathLike[str], producer: str | os.PathLike[str]) -> ConsumerKeys:
    """`ConsumerKeys` from a ``.key_secret`` file and the producer's ``.key`` file."""
    return ConsumerKeys(KeyPair.load(own), load_public_key(producer))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _read_certificate(path: str | os.PathLike[str]) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{os.fspath(path)} is no key file: {error}") from error
    _check_key(public, f"the public key in {os.fspath(path)}")
    return public, secret


def _check_key(key: bytes, what: str) -> None:
    if len(key) != _Z85_KEY_BYTES:
        raise InvalidInput(f"{what} has {len(key)} characters; a CURVE key has {_Z85_KEY_BYTES}")
