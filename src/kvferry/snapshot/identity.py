"""Who made a cache: enough to say yes, or no with every field that differs, before it enters a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvferry.errors import CorruptPacket, IncompatibleIdentity
from kvferry.snapshot.layer import LayerKind
from kvferry.snapshot.strict_json import parse_json


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one layer.

    Attributes:
        type: transformers' name: ``default``, ``linear``, ``dynamic``, ``yarn``, ``longrope``, ``llama3``…
        theta: the base.
        partial: fraction of head_dim that is rotated.
        scaling: the type's other parameters, sorted by name.
    """

    type: str
    theta: float
    partial: float = 1.0
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's cache and its rotary embedding (``None``: no rotary positions)."""

    kind: LayerKind
    kv_heads: int
    head_dim: int
    value_head_dim: int
    rope: RopeSpec | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What a cache was made by, from and for.

    Compatibility looks at what the model is (weights, geometry, rotary embedding, dtype, tokenizer), not at what it
    is called: ``model``, ``revision``, the attention backend and the versions are recorded and shown, but two
    checkouts of the same weights under two names are compatible, and other weights under the same name are not.

    Attributes:
        model: name or path that the model was loaded by.
        weights: hash of the configuration and a sample of the bytes of every weight tensor.
        layers: geometry, a decoder layer.
        dtype: ``bfloat16``, ``float16``, ``float32``…
        revision: the hub's commit, where known.
        full_weights: hash of every byte of every weight, where it was asked for.
        tokenizer: hash of the tokenizer, where one is known.
        attention: attention backend (``sdpa``, ``eager``…).
        transformers: version that built the cache.
        kvferry: version that captured it.
        construction: stages that the cache went through, oldest first: ``prefill``, ``chunked(n)``, ``incremental``,
            ``decoded(k)``, ``packet(policy; quantizers, bytes)``, ``mapped(from, mapper hash)``; and
            ``awaits(tokens at length)``, see `kvferry.snapshot.awaits`.
    """

    model: str
    weights: str
    layers: tuple[LayerGeometry, ...]
    dtype: str
    revision: str | None = None
    full_weights: str | None = None
    tokenizer: str | None = None
    attention: str | None = None
    transformers: str | None = None
    kvferry: str | None = None
    construction: tuple[str, ...] = field(default=())

    def differences(self, want: Identity) -> dict[str, tuple[Any, Any]]:
        """Fields in which a cache with this identity does not suit a receiver with identity ``want``.

        Returns ``field -> (have, want)``, empty when compatible. The tokenizer and the full hash count only where both
        sides know theirs.
        """
        found: dict[str, tuple[Any, Any]] = {}
        for name in ("weights", "dtype"):
            have_value, want_value = getattr(self, name), getattr(want, name)
            if have_value != want_value:
                found[name] = (have_value, want_value)
        for name in ("full_weights", "tokenizer"):
            have_value, want_value = getattr(self, name), getattr(want, name)
            if None not in (have_value, want_value) and have_value != want_value:
                found[name] = (have_value, want_value)
        found.update(self.layout_differences(want))
        if found and self.model != want.model:
            found = {"model": (self.model, want.model), **found}
        return found

    def layout_differences(self, want: Identity) -> dict[str, tuple[Any, Any]]:
        """The part of `differences` about layers: their number, kinds, shapes and rotary embeddings."""
        if len(self.layers) != len(want.layers):
            return {"num_layers": (len(self.layers), len(want.layers))}
        found: dict[str, tuple[Any, Any]] = {}
        for index, (have, need) in enumerate(zip(self.layers, want.layers, strict=True)):
            if have == need:
                continue
            for name in ("kv_heads", "head_dim", "value_head_dim"):
                if getattr(have, name) != getattr(need, name):
                    found[f"layers[{index}].{name}"] = (getattr(have, name), getattr(need, name))
            if have.kind != need.kind:
                found[f"layers[{index}].kind"] = (str(have.kind), str(need.kind))
            found.update(_rope_differences(f"layers[{index}].rope", have.rope, need.rope))
        return found

    def require_compatible(self, want: Identity, what: str = "this cache was not made for this model") -> None:
        """Raise `IncompatibleIdentity` with every differing field unless `differences` is empty."""
        found = self.differences(want)
        if found:
            raise IncompatibleIdentity(what, found)

    def then(self, stage: str) -> Identity:
        """This identity after one more stage of construction."""
        return replace(self, construction=(*self.construction, stage))

    def to_json(self) -> str:
        """Compact JSON, equal layers written once."""
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True, allow_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `to_json`: ``layers`` are indices into ``geometries``."""
        unique = list(dict.fromkeys(self.layers))
        plain = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        return {
            **plain,
            "construction": list(self.construction),
            "geometries": [_geometry_to_dict(geometry) for geometry in unique],
            "layers": [unique.index(geometry) for geometry in self.layers],
        }

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Inverse of `to_json`; raises `CorruptPacket` for anything else."""
        return cls.from_dict(parse_json(text, "the identity"))

    @classmethod
    def from_dict(cls, data: object) -> Identity:
        """Inverse of `to_dict`; raises `CorruptPacket` where a field is missing or of the wrong type."""
        fields = _mapping(data, "identity")
        unknown = set(fields) - {*_PLAIN_FIELDS, "construction", "geometries", "layers"}
        if unknown:
            raise CorruptPacket(f"the identity has unknown fields: {', '.join(sorted(unknown))}")
        geometries = [_geometry_from_dict(item) for item in _list(fields, "geometries", 10_000)]
        layers = []
        for position in _list(fields, "layers", 10_000):
            if type(position) is not int or not 0 <= position < len(geometries):
                raise CorruptPacket(f"the identity names layer geometry {position!r} of {len(geometries)}")
            layers.append(geometries[position])
        plain: dict[str, Any] = {}
        for name in _PLAIN_FIELDS:
            value = fields.get(name)
            if not (isinstance(value, str) or (value is None and name not in _REQUIRED)):
                raise CorruptPacket(f"the identity's field {name!r} is {value!r}, not text")
            plain[name] = value
        construction = _list(fields, "construction", 10_000)
        if not all(isinstance(stage, str) for stage in construction):
            raise CorruptPacket("the identity's construction path is not a list of texts")
        return cls(layers=tuple(layers), construction=tuple(construction), **plain)


_REQUIRED = ("model", "weights", "dtype")
_PLAIN_FIELDS = (
    "model",
    "weights",
    "dtype",
    "revision",
    "full_weights",
    "tokenizer",
    "attention",
    "transformers",
    "kvferry",
)


def _rope_differences(prefix: str, have: RopeSpec | None, want: RopeSpec | None) -> dict[str, tuple[Any, Any]]:
    if have is None or want is None:
        return {} if have is want else {prefix: (have, want)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("type", "theta", "partial"):
        if getattr(have, name) != getattr(want, name):
            found[f"{prefix}.{name}"] = (getattr(have, name), getattr(want, name))
    have_scaling, want_scaling = dict(have.scaling), dict(want.scaling)
    for name in sorted(have_scaling.keys() | want_scaling.keys()):
        if have_scaling.get(name) != want_scaling.get(name):
            found[f"{prefix}.{name}"] = (have_scaling.get(name), want_scaling.get(name))
    return found


def _geometry_to_dict(geometry: LayerGeometry) -> dict[str, Any]:
    rope = geometry.rope
    return {
        "kind": str(geometry.kind),
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "value_head_dim": geometry.value_head_dim,
        "rope": None if rope is None else {**asdict(rope), "scaling": dict(rope.scaling)},
    }


def _geometry_from_dict(data: object) -> LayerGeometry:
    fields = _mapping(data, "layer geometry")
    sizes = {}
    for name in ("kv_heads", "head_dim", "value_head_dim"):
        value = fields.get(name)
        if type(value) is not int or not 0 < value < 2**20:
            raise CorruptPacket(f"a layer geometry has {name} = {value!r}")
        sizes[name] = value
    kind = fields.get("kind")
    if not isinstance(kind, str):
        raise CorruptPacket(f"a layer geometry has kind {kind!r}")
    return LayerGeometry(kind=LayerKind.parse(kind), rope=_rope_from_dict(fields.get("rope")), **sizes)


def _rope_from_dict(data: object) -> RopeSpec | None:
    if data is None:
        return None
    fields = _mapping(data, "rotary embedding")
    kind, theta, partial = fields.get("type"), fields.get("theta"), fields.get("partial")
    scaling = _mapping(fields.get("scaling"), "rotary scaling")
    if not (isinstance(kind, str) and isinstance(theta, int | float) and isinstance(partial, int | float)):
        raise CorruptPacket(f"a rotary embedding has type {kind!r}, theta {theta!r}, partial factor {partial!r}")
    parameters = tuple(
        (name, tuple(value) if isinstance(value, list) else value) for name, value in sorted(scaling.items())
    )
    try:
        hash(parameters)
    except TypeError as error:
        raise CorruptPacket("a rotary embedding has nested parameters") from error
    return RopeSpec(kind, float(theta), float(partial), parameters)


def _mapping(data: object, what: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise CorruptPacket(f"the {what} is {type(data).__name__}, not an object")
    return data


def _list(fields: Mapping[str, Any], name: str, most: int) -> Sequence[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > most:
        raise CorruptPacket(f"the identity's field {name!r} is not a list of at most {most} items")
    return value
