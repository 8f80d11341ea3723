"""Transforms in the cache folder, found again by the digest that a packet names, or by the model."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput, KVFerryError
from kvferry.ship.transform.artifact import KIND, Transform
from kvferry.snapshot import Identity
from kvferry.snapshot.container import peek
from kvferry.snapshot.folders import cache_folder

log = logging.getLogger(__name__)

Given = Transform | str | os.PathLike[str] | None
"""A transform, its file, or ``None`` for what is in the cache folder."""


def transforms_folder() -> Path:
    """Where `keep` puts them."""
    return cache_folder() / "transforms"


def keep(transform: Transform) -> Path:
    """Put a transform where `for_model` and `for_packet` find it."""
    folder = transforms_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{transform.digest}.safetensors"
    transform.save(path)
    return path


def for_model(identity: Identity, given: Given = None) -> Transform:
    """The transform to encode caches of this model with: the one given, else the newest kept.

    Raises:
        InvalidInput: there is none.
        IncompatibleIdentity: the one given is of another model.
    """
    if given is None:
        kept = kept_for(identity)
        if kept is None:
            raise InvalidInput(
                f"policy klt needs a transform of {identity.model} in {identity.dtype}, and none is kept: make one "
                f"with `kvferry ship calibrate {identity.model} --dtype {identity.dtype}`, which takes minutes, or "
                "name the file of one where a transform can be given"
            )
        return kept
    transform = given if isinstance(given, Transform) else _load(Path(given))
    identity.require_compatible(transform.identity, "this transform is of another model than the cache")
    return transform


def kept_for(identity: Identity) -> Transform | None:
    """The newest transform of this model in the cache folder, where there is one."""
    found = _newest(identity)
    return None if found is None else _load(found)


def for_packet(digest: object, given: Given = None) -> Transform:
    """The transform that a packet names.

    Raises:
        InvalidInput: it is not in the cache folder, and none is given.
        IncompatibleIdentity: the one given is another.
    """
    if not isinstance(digest, str) or len(digest) != 32 or not digest.isalnum():
        raise CorruptPacket("the packet does not say which transform it was written with")
    if given is None:
        path = transforms_folder() / f"{digest}.safetensors"
        if not path.is_file():
            raise InvalidInput(
                f"the packet was written with transform {digest}, which is not here: copy its file into "
                f"{transforms_folder()}, or pass it (--transform)"
            )
        transform = _load(path)
    else:
        transform = given if isinstance(given, Transform) else _load(Path(given))
    if transform.digest != digest:
        raise IncompatibleIdentity(
            "the packet was written with another transform", {"transform": (digest, transform.digest)}
        )
    return transform


def _newest(identity: Identity) -> Path | None:
    newest: tuple[float, Path] | None = None
    for path in sorted(transforms_folder().glob("*.safetensors")):
        try:
            status = path.stat()
            if _made_for(str(path), status.st_mtime_ns, status.st_size).differences(identity):
                continue
        except (OSError, KeyError, KVFerryError) as error:
            log.warning("%s is left out: %s", path, error)
            continue
        if newest is None or status.st_mtime >= newest[0]:
            newest = status.st_mtime, path
    return None if newest is None else newest[1]


def _load(path: Path) -> Transform:
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidInput(f"no transform can be read from {path}: {error.strerror}") from error
    return _loaded(str(path), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _made_for(path: str, _modified: int, _size: int) -> Identity:
    """The model of a transform's file; the folder is gone through for every packet."""
    header = peek(path)
    if header.kind != KIND:
        raise CorruptPacket(f"the file holds a {header.kind}, not a {KIND}")
    return Identity.from_json(header.metadata["identity"])


@lru_cache(maxsize=2)
def _loaded(path: str, _modified: int, _size: int) -> Transform:
    """A transform takes a second to read and check, and is used for every packet of a model."""
    return Transform.load(path)
