"""A mapper in a folder: ``mapper.safetensors``, ``config.json`` and a model card.

The weights' file carries the configuration too, under its own checksum; ``config.json`` is the same for people and
programs, and has to agree. Nothing is read that is not safetensors or JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput, TooLarge, UnsupportedVersion
from kvferry.map.blocks import Block
from kvferry.map.part import Layer, Part
from kvferry.map.rotaries import pack_rotaries, unpack_rotaries
from kvferry.snapshot import Identity
from kvferry.snapshot.container import naming, read_container, write_container
from kvferry.snapshot.files import BAD_PATH, write_text
from kvferry.snapshot.strict_json import parse_json

if TYPE_CHECKING:
    from kvferry.map.mapper import Mapper, Recipe

KIND = "mapper"
VERSION = 1
WEIGHTS, CONFIG, CARD = "mapper.safetensors", "config.json", "README.md"

_MAX_CONFIG = 16 << 20
_MAX_VALUES = 1 << 18
_FIELDS = {"format", "version", "digest", "source", "target", "recipe", "made", "measures", "parts", "rotaries"}


TIMES = frozenset({"model_seconds", "fit_seconds", "train_seconds"})
"""Of `Mapper.made`: how long it took, which is no part of what it is. Ranks of one fit differ by nothing else."""


def mapper_digest(mapper: Mapper) -> str:
    """SHA-256 over all that a mapper is: its models, recipe, provenance and weights."""
    config, tensors = _pack(mapper)
    config["made"] = {name: value for name, value in config["made"].items() if name not in TIMES}
    state = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def save(mapper: Mapper, folder: str | os.PathLike[str]) -> None:
    """See `Mapper.save_pretrained`."""
    from kvferry.map.card import model_card

    path = Path(folder)
    require_place(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in BAD_PATH and not isinstance(error, FileExistsError):
            raise
        raise InvalidInput(f"cannot make the folder {path}: {error.strerror}") from error
    config, tensors = _pack(mapper)
    text = json.dumps({**config, "digest": mapper.digest}, sort_keys=True, allow_nan=False)
    nbytes = write_container(path / WEIGHTS, KIND, tensors, {"config": text})
    write_text(path / CONFIG, json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n")
    write_text(path / CARD, model_card(mapper, nbytes))


def require_place(folder: str | os.PathLike[str]) -> None:
    """Raise `InvalidInput` for a folder whose `CONFIG` or `CARD` is of something else, such as a model's."""
    path = Path(folder)
    taken = [name for name in (CONFIG, CARD) if (path / name).exists()]
    if taken and not is_mapper(path):
        raise InvalidInput(f"{path} holds a {taken[0]} that is no mapper's: name another folder")


def load(folder_or_hub: str | os.PathLike[str], *, max_bytes: int | None = None) -> Mapper:
    """See `Mapper.from_pretrained`."""
    folder = _folder(folder_or_hub)
    written = _read_config(folder / CONFIG)
    container = read_container(folder / WEIGHTS, kind=KIND, max_bytes=max_bytes, mapped=False)
    with naming(folder):
        config = parse_json(container.metadata.get("config", "null"), "the mapper's configuration", most=_MAX_VALUES)
        if written != config:
            raise CorruptPacket(f"{CONFIG} and {WEIGHTS} are of different mappers, or one of them was edited")
        try:
            mapper = _unpack(config, dict(container.tensors))
        except (InvalidInput, IncompatibleIdentity) as error:
            raise CorruptPacket(f"the mapper contradicts itself: {error}") from error
        if mapper.digest != config["digest"]:
            raise CorruptPacket("the mapper is not the one that its digest names")
        return mapper


def is_mapper(path: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like a mapper's."""
    return (Path(path) / WEIGHTS).is_file()


def _folder(given: str | os.PathLike[str]) -> Path:
    path = Path(given)
    text = str(given)
    if path.is_dir():
        if not is_mapper(path):
            raise InvalidInput(f"{path} holds no {WEIGHTS}: it is no mapper's folder")
        return path
    if path.exists() or isinstance(given, Path) or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise InvalidInput(f"{text} is no mapper's folder; make one with 'kvferry map fit'")
    fetched: Path = importlib.import_module("kvferry.hf.hub").fetch_files(text, (WEIGHTS, CONFIG))
    return fetched


def _read_config(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_CONFIG + 1)
    except OSError as error:
        if error.errno not in BAD_PATH:
            raise
        raise CorruptPacket(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_CONFIG:
        raise TooLarge(f"{path} has more than {_MAX_CONFIG} bytes")
    with naming(path):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptPacket("it is not UTF-8") from error
        return parse_json(text, "the mapper's configuration", most=_MAX_VALUES)


def _pack(mapper: Mapper) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    parts = []
    for index, part in enumerate(mapper.parts):
        for number, (weight, bias) in enumerate(part.layers):
            tensors[f"parts.{index}.{number}.weight"], tensors[f"parts.{index}.{number}.bias"] = weight, bias
        parts.append(
            {
                "target": part.target.to_json(),
                "heads": [part.first_head, part.heads],
                "sources": [block.to_json() for block in part.sources],
                "affine": part.affine is not None,
                "hidden": len(part.hidden),
            }
        )
    rotaries = {}
    for name in ("source", "target"):
        rotaries[name], own = pack_rotaries(f"rotary.{name}", getattr(mapper, f"{name}_rotaries"))
        tensors |= own
    config = {
        "format": "kvferry-mapper",
        "version": VERSION,
        "source": mapper.source.to_dict(),
        "target": mapper.target.to_dict(),
        "recipe": asdict(mapper.recipe),
        "made": dict(mapper.made),
        "measures": dict(mapper.measures),
        "parts": parts,
        "rotaries": rotaries,
    }
    return json.loads(json.dumps(config, allow_nan=False)), tensors


def _unpack(config: object, tensors: dict[str, Tensor]) -> Mapper:
    from kvferry.map.mapper import Mapper

    if not isinstance(config, dict) or config.get("format") != "kvferry-mapper":
        raise CorruptPacket("it is no mapper's configuration")
    if type(config.get("version")) is not int or config["version"] > VERSION:
        raise UnsupportedVersion(f"a mapper of version {config.get('version')!r}; this one reads up to {VERSION}")
    if set(config) != _FIELDS:
        raise CorruptPacket(f"the configuration has the fields {sorted(config)[:12]}, not {sorted(_FIELDS)}")
    source, target = Identity.from_dict(config["source"]), Identity.from_dict(config["target"])
    described, rotaries = config["parts"], config["rotaries"]
    if not isinstance(described, list) or not isinstance(rotaries, dict) or set(rotaries) != {"source", "target"}:
        raise CorruptPacket("the configuration describes no parts or no rotations")
    parts = tuple(_part(index, data, tensors, source, target) for index, data in enumerate(described))
    turns = unpack_rotaries("rotary.source", rotaries["source"], tensors, source)
    turns_back = unpack_rotaries("rotary.target", rotaries["target"], tensors, target)
    if tensors:
        raise CorruptPacket(f"the mapper has tensors that belong to no part: {', '.join(sorted(tensors)[:4])}")
    for name in ("made", "measures"):
        if not isinstance(config[name], dict):
            raise CorruptPacket(f"the configuration's {name} is no object")
    return Mapper(
        source, target, parts, turns, turns_back, _recipe(config["recipe"]), config["made"], config["measures"]
    )


def _part(index: int, data: object, tensors: dict[str, Tensor], source: Identity, target: Identity) -> Part:
    match data:
        case {
            "target": made,
            "heads": [int(first), int(heads)],
            "sources": list(sources),
            "affine": bool(affine),
            "hidden": int(hidden),
            **rest,
        } if not rest and type(hidden) is int and 0 <= hidden <= 8:
            pass
        case _:
            raise CorruptPacket(f"part {index} is not described by target, heads, sources, affine and hidden")
    layers = tuple(_layer(f"parts.{index}.{number}", tensors) for number in range(int(affine) + hidden))
    return Part(
        target=Block.from_json(made, target),
        first_head=first,
        heads=heads,
        sources=tuple(Block.from_json(block, source) for block in sources),
        affine=layers[0] if affine else None,
        hidden=layers[int(affine) :],
    )


def _layer(name: str, tensors: dict[str, Tensor]) -> Layer:
    found = []
    for kind in ("weight", "bias"):
        tensor = tensors.pop(f"{name}.{kind}", None)
        if tensor is None or tensor.dtype not in (torch.float32, torch.bfloat16) or not bool(tensor.isfinite().all()):
            raise CorruptPacket(f"{name}.{kind} is missing, of another type, or not finite")
        found.append(tensor)
    return found[0], found[1]


def _recipe(data: object) -> Recipe:
    from kvferry.map.mapper import VARIANTS, Recipe

    if not isinstance(data, Mapping) or set(data) != {item.name for item in fields(Recipe)}:
        raise CorruptPacket("the mapper's recipe is not described")
    recipe = Recipe(**data)
    good = (
        recipe.variant in VARIANTS
        and (recipe.top_k is None or (type(recipe.top_k) is int and recipe.top_k > 0))
        and isinstance(recipe.ridge, int | float)
        and recipe.sources in ("same", "both")
        and type(recipe.strip) is bool
        and type(recipe.reapply) is bool
        and type(recipe.native_prefix) is int
        and 0 <= recipe.native_prefix < 1 << 20
    )
    if not good:
        raise CorruptPacket(f"the mapper's recipe is {dict(data)!r}")
    return recipe
