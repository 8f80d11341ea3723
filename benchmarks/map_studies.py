"""Two studies of a pair's mappers that no command makes: ten turns between the models, and the rates of the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from kvferry.errors import IncompatibleIdentity
from kvferry.evaluate.map_fit import FitSettings, start_calibration
from kvferry.evaluate.map_gate import accept, guarded_transfer
from kvferry.evaluate.map_turns import take_turns
from kvferry.evidence.statistics import wilson
from kvferry.hf.capture import capture
from kvferry.hf.models import load_model
from kvferry.map.fit import fit_linear
from kvferry.map.gate import Floors
from kvferry.map.mapper import Mapper

FIRST, TURN, TURNS = 256, 48, 10
GATES = 20
CONTEXT = 256
SHUFFLED = 20


def _pair(folders: Mapping[str, Path]) -> tuple[dict[str, Mapper], dict[str, Any], Any]:
    """The mappers, the models by name, and their tokenizer."""
    mappers = {name: Mapper.from_pretrained(folder) for name, folder in folders.items()}
    found: dict[str, Any] = {}
    tokenizer = None
    for mapper in mappers.values():
        for identity in (mapper.source, mapper.target):
            if identity.model not in found:
                found[identity.model], tokenizer = load_model(identity.model, dtype=identity.dtype)
    return mappers, found, tokenizer


def turns(folders: Mapping[str, Path], path: Path, text: Path, *, starts: int = 4) -> None:
    """A → B → A → B …, from both ends of the pair, at several places of a text."""
    mappers, models, tokenizer = _pair(folders)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids
    length = FIRST + TURN * TURNS
    rows = []
    for first, second in (("up", "down"), ("down", "up")):
        ends = models[mappers[first].source.model], models[mappers[first].target.model]
        for start in range(starts):
            piece = ids[:, start * length : (start + 1) * length]
            done = take_turns(ends, (mappers[first], mappers[second]), piece, first=FIRST, turn=TURN)
            rows += [{"begins": mappers[first].source.model, "start": start, **turn.to_json()} for turn in done]
    record.write(path, "map turns", {"rows": rows, "first": FIRST, "turn": TURN}, seed=0)


def gate_rates(folders: Mapping[str, Path], path: Path, text: Path, *, count: int = GATES) -> None:
    """How often the gate opens for the good mapper, and for those that it must keep out, on texts of its own each."""
    mappers, models, tokenizer = _pair(folders)
    words = text.read_text(encoding="utf-8")
    share = len(words) // count
    good = mappers["up"]
    source, target = models[good.source.model], models[good.target.model]
    ids = tokenizer(words, return_tensors="pt", verbose=False).input_ids
    shuffled = _fitted_on_shuffled(good, source, target, ids)
    low = Floors(-1.0, 1e6, 0.0, None, 1.0, 1e6)
    tried: dict[str, Callable[[str], tuple[bool, str]]] = {
        "good, judged": lambda piece: _accepted(good, source, target, tokenizer, piece),
        "good, at a hand-off": lambda piece: _opens(good, good, source, target, tokenizer, piece),
        "fitted on shuffled tokens, judged": lambda piece: _accepted(shuffled, source, target, tokenizer, piece),
        "the same, under the good one's record": lambda piece: _opens(shuffled, good, source, target, tokenizer, piece),
        "the same, under a record with lower floors": lambda piece: _opens(
            shuffled, shuffled, source, target, tokenizer, piece, floors=low
        ),
        "the good one's weights turned round, under its record": lambda piece: _opens(
            _turned(good), good, source, target, tokenizer, piece
        ),
        "of the other direction": lambda piece: _accepted(mappers["down"], source, target, tokenizer, piece),
    }
    rows = []
    for name, attempt in tried.items():
        opened, reasons = 0, set()
        for index in range(count):
            passed, reason = attempt(words[index * share : (index + 1) * share])
            opened += passed
            reasons.add(reason)
            record.tell(f"{name}: {index + 1}/{count}")
        rows.append(
            {"mapper": name, "n": count, "opened": opened, "ci": wilson(opened, count), "reasons": sorted(reasons)[:6]}
        )
    record.write(path, "map gates", {"rows": rows, "context": CONTEXT}, seed=0)


def _accepted(mapper: Mapper, source: Any, target: Any, tokenizer: Any, text: str) -> tuple[bool, str]:
    try:
        found = accept(mapper, source, target, tokenizer, text, windows=3, prefix=CONTEXT, suffix=64)
    except IncompatibleIdentity as error:
        return False, str(error)
    return found.accepted, "; ".join(found.reasons)


def _opens(
    offered: Mapper,
    judged: Mapper,
    source: Any,
    target: Any,
    tokenizer: Any,
    text: str,
    floors: Floors | None = None,
) -> tuple[bool, str]:
    """Whether a hand-off takes the cache of ``offered`` under the record on ``judged``, forged to name the other and to
    accept it.
    """
    known = accept(judged, source, target, tokenizer, text, floors=floors, windows=3, prefix=CONTEXT, suffix=64)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :CONTEXT]
    forged = replace(known, mapper=offered.digest, reasons=())
    done = guarded_transfer(offered, target, capture(source, ids), acceptance=forged)
    return done.mapped, "; ".join(done.reasons)


def _fitted_on_shuffled(good: Mapper, source: Any, target: Any, ids: Tensor) -> Mapper:
    """A mapper of the same recipe, fitted on caches whose tokens are out of step."""
    made = start_calibration(source, target, good.recipe, settings=FitSettings(stride=1))
    for index in range(SHUFFLED):
        piece = ids[:, index * 512 : (index + 1) * 512]
        own = capture(target, piece)
        layers = tuple(layer.map_tensors(layer.keys.roll(177, 2), layer.values.roll(177, 2)) for layer in own.layers)
        made.add(capture(source, piece), replace(own, layers=layers), held=index % 5 == 4)
    return fit_linear(made, {})


def _turned(mapper: Mapper) -> Mapper:
    """The same mapper with the inputs of every map in the opposite order."""
    parts = []
    for part in mapper.parts:
        assert part.affine is not None
        weight, bias = part.affine
        parts.append(replace(part, affine=(torch.flip(weight, (0,)), bias)))
    return replace(mapper, parts=tuple(parts))
