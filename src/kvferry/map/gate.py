"""Whether a receiver takes a mapper's caches: its own floors, held against what it measured itself.

Nothing here is read from the mapper but its digest and the models that it is for: an artifact cannot lower the bar that
it has to pass.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Identity
from kvferry.snapshot.files import write_text
from kvferry.snapshot.folders import cache_folder
from kvferry.snapshot.strict_json import parse_json
from kvferry.version import __version__


@dataclass(frozen=True, slots=True)
class Floors:
    """The receiver's bar. A number that is not finite passes nowhere.

    Attributes:
        attention_cosine: least mean cosine between attention outputs on the mapped cache and on the target's own.
        kl: most mean KL of the target's predictions, in nats.
        agreement: least share of tokens with the same most likely token.
        context_gain: least share of what the context is worth that comes through, by the lower end of its interval;
            ``None``: not asked for, where a model makes nothing of a context.
        control_margin: how much worse another text's mapped cache must score: its KL at least so many times the mapped
            one's.
        native_prefix: most first tokens that a mapper may leave to the target: what the target prefills itself says
            nothing for the map.
    """

    attention_cosine: float = 0.8
    kl: float = 0.5
    agreement: float = 0.65
    context_gain: float | None = 0.1
    control_margin: float = 1.5
    native_prefix: float = 16

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            if item.name == "context_gain" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidInput(f"the floor {item.name} is {value!r}, not a finite number")
        if self.control_margin < 1:
            raise InvalidInput(f"the floor control_margin is {self.control_margin:g}; it is at least 1")

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a receiver found on texts of its own; ``None`` where something could not be measured.

    Attributes:
        n: tokens scored.
        identity_exact: whether the target's own cache scored exactly as it does by itself.
        attention_cosine, kl, agreement: of the mapped cache, see `Floors`.
        context_gain, context_gain_low: share that comes through, and the lower end of its interval.
        control_kl: of another text's mapped cache.
    """

    n: int
    identity_exact: bool
    attention_cosine: float | None
    kl: float | None
    agreement: float | None
    context_gain: float | None
    context_gain_low: float | None
    control_kl: float | None


def objections(measured: Measured, floors: Floors) -> tuple[str, ...]:
    """Every reason to reject; empty: none."""
    found = []
    if not measured.identity_exact:
        found.append("the target's own cache does not score as it does by itself: nothing measured here counts")
    for name, value, floor in (
        ("attention cosine", measured.attention_cosine, floors.attention_cosine),
        ("top-1 agreement", measured.agreement, floors.agreement),
        ("context gain (lower end)", measured.context_gain_low, floors.context_gain),
    ):
        if floor is not None and (value is None or not value >= floor):
            found.append(f"{name} {_shown(value)}, below the floor of {floor:g}")
    if measured.kl is None or not measured.kl <= floors.kl:
        found.append(f"KL {_shown(measured.kl)}, above {floors.kl:g}")
    if (
        measured.kl is None
        or measured.control_kl is None
        or not measured.control_kl >= floors.control_margin * measured.kl
    ):
        found.append(
            f"another text's cache scores KL {_shown(measured.control_kl)}, not {floors.control_margin:g} times worse "
            f"than this text's {_shown(measured.kl)}: the map does not tell them apart"
        )
    return tuple(found)


def too_native(mapper: Mapper, floors: Floors) -> tuple[str, ...]:
    """Why a mapper leaves too much to the target to be judged by what comes out; empty: it does not."""
    left = mapper.recipe.native_prefix
    if left <= floors.native_prefix:
        return ()
    return (f"the mapper leaves the first {left} tokens to the target, more than {floors.native_prefix:g}",)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A receiver's record on one mapper, bound to it and to both models by their hashes.

    Attributes:
        mapper: digest.
        source, target: hashes of the two models' weights, each with its dtype.
        floors: that were held against it.
        measured: what was found.
        reasons: why it is rejected; empty: accepted.
        text: digest of the texts that it was measured on.
        kvferry: version that measured.
    """

    mapper: str
    source: tuple[str, str]
    target: tuple[str, str]
    floors: Floors
    measured: Measured
    reasons: tuple[str, ...]
    text: str
    kvferry: str = __version__

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    def against(self, mapper: Mapper, target: Identity, floors: Floors) -> tuple[str, ...]:
        """Every reason why this record does not let ``mapper`` serve ``target`` under ``floors``; empty: it does.

        The measures are held against the floors anew: what was accepted under lower ones does not pass by that.
        """
        found = []
        for name, have, want in (
            ("mapper", self.mapper, mapper.digest),
            ("source", self.source, weights_of(mapper.source)),
            ("target", self.target, weights_of(target)),
        ):
            if have != want:
                found.append(f"the record is of another {name}: {have}, not {want}")
        return (*found, *too_native(mapper, floors), *objections(self.measured, floors))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "accepted": self.accepted}

    def save(self, path: Path | None = None) -> Path:
        """Write the record, by default to the cache folder, where `kept` finds it."""
        place = record_path(self.mapper, self.target[0]) if path is None else path
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, json.dumps(self.to_json(), allow_nan=False, indent=1) + "\n")
        return place


def weights_of(identity: Identity) -> tuple[str, str]:
    """What a record names a model by."""
    return identity.weights, identity.dtype


def record_path(mapper: str, target: str) -> Path:
    """Where the record on a mapper for a target is kept."""
    return cache_folder() / "gates" / f"{mapper[:32]}-{target.rpartition(':')[2][:32]}.json"


def kept(mapper: Mapper, target: Identity) -> Acceptance | None:
    """The kept record on a mapper for a target; ``None`` where there is none."""
    path = record_path(mapper.digest, target.weights)
    return load_acceptance(path) if path.is_file() else None


def standing(mapper: Mapper, target: Identity, floors: Floors, record: Acceptance | None = None) -> tuple[str, ...]:
    """Every reason why a mapper may not serve ``target`` under ``floors``, by a receiver's record on it, by default the
    kept one; empty: it may."""
    known = kept(mapper, target) if record is None else record
    if known is None:
        return ("nobody has judged this mapper for this target here: run 'kvferry map gate'",)
    return known.against(mapper, target, floors)


def load_acceptance(path: Path) -> Acceptance:
    """A record from disk.

    Raises:
        CorruptPacket: it is none.
        InvalidInput: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    data = parse_json(text, f"the record {path}", most=1000)
    try:
        return Acceptance(
            mapper=_text(data["mapper"]),
            source=_two(data["source"]),
            target=_two(data["target"]),
            floors=_floors(data["floors"]),
            measured=_measured(data["measured"]),
            reasons=tuple(map(_text, data["reasons"])),
            text=_text(data["text"]),
            kvferry=_text(data["kvferry"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptPacket(f"{path} is no record of a gate: {error}") from error


def _floors(data: Any) -> Floors:
    gain = data["context_gain"]
    rest = {name: _number(value) for name, value in data.items() if name != "context_gain"}
    return Floors(context_gain=None if gain is None else _number(gain), **rest)


def _measured(data: Any) -> Measured:
    if type(data["n"]) is not int or type(data["identity_exact"]) is not bool:
        raise ValueError("n or identity_exact")
    rest = {name: None if value is None else _number(value) for name, value in data.items() if name not in _PLAIN}
    return Measured(data["n"], data["identity_exact"], **rest)


_PLAIN = ("n", "identity_exact")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _two(value: Any) -> tuple[str, str]:
    one, other = value
    return _text(one), _text(other)


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
