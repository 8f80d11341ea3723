"""Studies of a pair's mappers that no command makes: ten turns between the models, and the rates of the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from kvferry.errors import IncompatibleIdentity
from kvferry.evaluate.log import code_digest
from kvferry.evaluate.map_fit import FitSettings, start_calibration
from kvferry.evaluate.map_gate import accept, guarded_transfer
from kvferry.evaluate.map_turns import take_turns
from kvferry.evidence.log import ResultLog, digest
from kvferry.evidence.statistics import wilson
from kvferry.hf.capture import capture
from kvferry.hf.models import load_model
from kvferry.map.fit import fit_linear
from kvferry.map.gate import Acceptance, Floors
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot

FIRST, TURN, TURNS = 256, 48, 10
SPLITS = (1, 100, 128, 400, 700)
"""Tokens that are there when a mapped cache is extended."""

RECORDS, HANDOFFS = 10, 20
"""Texts that each mapper is judged on, and contexts that each is offered at a hand-off."""
WINDOWS, PREFIX, SUFFIX = 6, 256, 64
"""Of a record, as `kvferry map gate` has them by default."""
CONTEXT = 256
SHUFFLED = 20
LOW = Floors(-1.0, 1e6, 0.0, None, 1.0, 1e6)
"""A bar that anything passes."""


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
    """A → B → A → B …, from both ends of the pair, at several places of a text; and, at each place, a cache that is
    mapped at once beside one that is extended."""
    mappers, models, tokenizer = _pair(folders)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids
    length = FIRST + TURN * TURNS
    rows, extended = [], []
    for first, second in (("up", "down"), ("down", "up")):
        ends = models[mappers[first].source.model], models[mappers[first].target.model]
        for start in range(starts):
            piece = ids[:, start * length : (start + 1) * length]
            done = take_turns(ends, (mappers[first], mappers[second]), piece, first=FIRST, turn=TURN)
            rows += [{"begins": mappers[first].source.model, "start": start, **turn.to_json()} for turn in done]
            extended += [
                {"source": mappers[first].source.model, "start": start, **one}
                for one in _extended(mappers[first], capture(ends[0], piece))
            ]
            record.tell(f"turns from {first}: {start + 1}/{starts}")
    result = {"rows": rows, "first": FIRST, "turn": TURN, "mappers": _names(mappers), "extended": extended}
    record.write(path, "map turns", result, seed=0)


def _extended(mapper: Mapper, cache: Snapshot) -> list[dict[str, Any]]:
    """For each split, how far a cache that was mapped in two steps is from one that was mapped at once."""
    whole = mapper.map(cache)
    found = []
    for split in [split for split in SPLITS if split < cache.seq_len]:
        grown = mapper.extend(mapper.map(cache.crop(split)), cache)
        pairs = zip(_tensors(whole), _tensors(grown), strict=True)
        found.append(
            {
                "split": split,
                "tokens": cache.seq_len,
                "max_abs": max(float((one.float() - other.float()).abs().max()) for one, other in pairs),
            }
        )
    return found


def _tensors(snapshot: Snapshot) -> list[Tensor]:
    return [tensor for layer in snapshot.layers for tensor in (layer.keys, layer.values) if tensor is not None]


def _names(mappers: Mapping[str, Mapper]) -> dict[str, dict[str, Any]]:
    return {name: {"digest": mapper.digest, **asdict(mapper.recipe)} for name, mapper in mappers.items()}


class _Gate:
    """One target, one source, and mappers that want to serve."""

    def __init__(self, source: Any, target: Any, tokenizer: Any, text: str, records: int, handoffs: int):
        self.source, self.target, self.tokenizer = source, target, tokenizer
        share = len(text) // (records + 1)
        self.texts = [text[index * share : (index + 1) * share] for index in range(records)]
        ids = tokenizer(text[records * share :], return_tensors="pt", verbose=False).input_ids
        size = min(CONTEXT, ids.shape[1] // handoffs)
        self.contexts = [ids[:, index * size : (index + 1) * size] for index in range(handoffs)]

    def judged(self, mapper: Mapper, text: str, floors: Floors | None = None) -> Acceptance | str:
        """A record, or why there is none."""
        sizes = {"windows": WINDOWS, "prefix": PREFIX, "suffix": SUFFIX}
        try:
            return accept(mapper, self.source, self.target, self.tokenizer, text, floors=floors, **sizes)
        except IncompatibleIdentity as error:
            return str(error)

    def accepted(self, mapper: Mapper, index: int) -> tuple[bool, str]:
        """Whether the receiver's own floors let a mapper pass, on one of its texts."""
        found = self.judged(mapper, self.texts[index])
        return (False, found) if isinstance(found, str) else (found.accepted, "; ".join(found.reasons))

    def opens(self, mapper: Mapper, known: Acceptance, index: int) -> tuple[bool, str]:
        """Whether a hand-off takes the mapper's cache of one of the contexts under a record."""
        done = guarded_transfer(mapper, self.target, capture(self.source, self.contexts[index]), acceptance=known)
        return done.mapped, "; ".join(done.reasons)


def gate_rates(
    folders: Mapping[str, Path],
    path: Path,
    text: Path,
    *,
    records: int = RECORDS,
    handoffs: int = HANDOFFS,
    log: Path | None = None,
) -> None:
    """How often the gate opens for the good mapper, and for those that it must keep out: the same texts, and the same
    contexts, for each of them."""
    mappers, models, tokenizer = _pair(folders)
    good = mappers["up"]
    source, target = models[good.source.model], models[good.target.model]
    words = text.read_text(encoding="utf-8")
    gate = _Gate(source, target, tokenizer, words, records, handoffs)
    shuffled = _fitted_on_shuffled(good, source, target, tokenizer(words, return_tensors="pt", verbose=False).input_ids)
    boasting = replace(shuffled, measures={**shuffled.measures, "floors": LOW.to_json(), "accepted": True})
    turned = _turned(good)
    elsewhere = replace(good, source=replace(good.source, weights="sha256:" + "0" * 64))
    record_of = gate.judged(good, gate.texts[0])
    low = gate.judged(boasting, gate.texts[0], LOW)
    assert isinstance(record_of, Acceptance)
    assert isinstance(low, Acceptance)

    def named(mapper: Mapper, known: Acceptance) -> Acceptance:
        """A record that was forged to name a mapper, and to accept it."""
        return replace(known, mapper=mapper.digest, reasons=())

    tried: dict[str, tuple[int, Callable[[int], tuple[bool, str]]]] = {
        "good, judged": (records, lambda i: gate.accepted(good, i)),
        "good, at a hand-off": (handoffs, lambda i: gate.opens(good, record_of, i)),
        "fitted on shuffled tokens, judged": (records, lambda i: gate.accepted(shuffled, i)),
        "the same, under a record forged from the good one's": (
            handoffs,
            lambda i: gate.opens(shuffled, named(shuffled, record_of), i),
        ),
        "of the other direction, judged": (records, lambda i: gate.accepted(mappers["down"], i)),
        "of another source's weights, under a forged record": (
            handoffs,
            lambda i: gate.opens(elsewhere, named(elsewhere, record_of), i),
        ),
        "with floors of its own, judged": (records, lambda i: gate.accepted(boasting, i)),
        "the same, under a record with those floors": (handoffs, lambda i: gate.opens(boasting, low, i)),
        "the good one's weights turned round, under its record": (
            handoffs,
            lambda i: gate.opens(turned, record_of, i),
        ),
        "the same, under a record forged to name it": (
            handoffs,
            lambda i: gate.opens(turned, named(turned, record_of), i),
        ),
    }
    rows = []
    of = digest([good.digest, code_digest(), records, handoffs, digest(words)])
    with ResultLog(log) as done:
        for name, (count, attempt) in tried.items():
            found = []
            for index in range(count):
                key = f"{of} {name} {index}"
                if key not in done:
                    passed, reason = attempt(index)
                    done.add(key, {"passed": passed, "reason": reason})
                    record.tell(f"{name}: {index + 1}/{count}")
                found.append(done[key])
            opened = sum(one["passed"] for one in found)
            reasons = sorted({one["reason"] for one in found})[:6]
            ci = wilson(opened, count)
            rows.append({"mapper": name, "n": count, "opened": opened, "ci": ci, "reasons": reasons})
    result = {
        "rows": rows,
        "context": CONTEXT,
        "windows": [WINDOWS, PREFIX, SUFFIX],
        "floors": Floors().to_json(),
        "record": record_of.to_json(),
        "mappers": _names(mappers),
    }
    record.write(path, "map gates", result, seed=0)


def _fitted_on_shuffled(good: Mapper, source: Any, target: Any, ids: Tensor) -> Mapper:
    """A mapper of the same recipe, fitted on caches whose tokens are out of step."""
    recipe = replace(good.recipe, variant="ridge")
    made = start_calibration(source, target, recipe, settings=FitSettings(stride=1))
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
