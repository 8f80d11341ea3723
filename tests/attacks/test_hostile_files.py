"""Files that were cut, flipped, forged and signed anew: each refused, by a typed error, in little space and time.

A new kind of file joins with one line in `FORMATS`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

from kvferry.ship.encode import encode
from kvferry.ship.refine import refine
from kvferry.snapshot import FULL, LayerKind
from tests.attacks.anatomy import START, File, compact, sign
from tests.attacks.mutate import Mutant, attack, mutants
from tests.snapshot.builders import SLIDING, make_snapshot


@dataclass(frozen=True)
class Format:
    """A kind of file under attack.

    Attributes:
        save: write the file of a seed; files of two seeds have the same names and shapes.
        reader: ``module:name`` of what reads a path.
        optional: whether a file may lack the tensor of a name.
    """

    save: Callable[[Path, int], object]
    reader: str
    optional: Callable[[str], bool] = lambda name: False

    def read(self, path: Path) -> object:
        module, _, names = self.reader.partition(":")
        return reduce(getattr, names.split("."), import_module(module))(path)

    def files(self, folder: Path) -> tuple[bytes, bytes]:
        """Two valid files."""
        for seed in (1, 2):
            self.save(folder / str(seed), seed)
            self.read(folder / str(seed))
        return (folder / "1").read_bytes(), (folder / "2").read_bytes()


def snapshot(seed: int):
    kinds = (FULL, SLIDING, LayerKind("shared", 0))
    return make_snapshot(kinds, batch=2, seq_len=11, dtype="bfloat16", heads=4, seed=seed, model=f"model-{seed}")


def save_refinement(path: Path, seed: int) -> None:
    """All values within one power of two: what is coded has then the same size whatever the seed."""
    given = snapshot(seed)
    layers = tuple(
        each if each.keys is None else each.map_tensors(1 + each.keys.abs() % 0.5, 1 + each.values.abs() % 0.5)
        for each in given.layers
    )
    flat = replace(given, layers=layers)
    refine(flat, encode(flat, budget=1.0)).save(path)


FORMATS = {
    "snapshot": Format(
        lambda path, seed: snapshot(seed).save(path),
        "kvferry.snapshot.storage:load_snapshot",
        lambda name: name.endswith(".queries"),
    ),
    "packet": Format(
        lambda path, seed: encode(snapshot(seed), budget=1.0).save(path),
        "kvferry.ship.packet:Packet.load",
    ),
    "refinement": Format(save_refinement, "kvferry.ship.refine:Refinement.load"),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_mutant_is_refused(tmp_path, kind, seed):
    form = FORMATS[kind]
    cases = mutants(*form.files(tmp_path), seed=seed, count=900, optional=form.optional)
    assert len(cases) >= 500
    complaints = attack(cases, form.read, tmp_path)
    assert not complaints, f"{len(complaints)} of {len(cases)}:\n" + "\n".join(complaints[:40])


@pytest.mark.parametrize("kind", FORMATS)
def test_every_mutant_is_refused_where_memory_is_short(tmp_path, kind):
    """No library beneath allocates what a header merely claims: 64 MiB are enough for all files of some kilobytes."""
    form = FORMATS[kind]
    cases = mutants(*form.files(tmp_path), seed=2, count=600, optional=form.optional)
    folder = tmp_path / "mutants"
    folder.mkdir()
    for number, case in enumerate(cases):
        (folder / f"{number:04d} {''.join(c if c.isalnum() else ' ' for c in case.name)[:80]}").write_bytes(case.data)
    command = [sys.executable, "-m", "tests.attacks.confined", form.reader, str(folder), str(64 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_bits_all_over_the_header_count(tmp_path, kind):
    form = FORMATS[kind]
    valid, _ = form.files(tmp_path)
    cases = []
    for bit in range(0, 8 * (8 + File(valid).length), 23):
        data = bytearray(valid)
        data[bit // 8] ^= 1 << bit % 8
        cases.append(Mutant(f"bit {bit}", bytes(data)))
    assert attack(cases, form.read, tmp_path) == []


def bombs(valid: bytes, size: int) -> list[Mutant]:
    """Signed headers of about ``size`` bytes that would take many times that once parsed without care."""
    file = File(valid)
    text = file.text.rstrip()
    room = b"\0" * size  # as much data as header: a header out of proportion is refused at once

    def lists(opening: str) -> str:
        return "[" + opening * (size // len(opening)) + "0]"

    def tensors(count: int) -> str:
        entries = "".join(f',"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
        sums = compact({f"t{i}": "0" * 32 for i in range(count)})
        metadata = {**file.entries["__metadata__"], "checksums": sums}
        return compact({"__metadata__": metadata})[:-1] + entries + "}"

    found = {
        "many tensors": tensors(size // 96),
        "many keys": text.replace(
            '"checksums":', "".join(f'"k{i}":"",' for i in range(size // 12)) + '"checksums":', 1
        ),
        "a long text": text.replace('"checksums":', f'"long":"{"x" * size}","checksums":', 1),
        "a text of escapes": text.replace('"checksums":', '"long":"' + '\\"' * (size // 2) + '","checksums":', 1),
        "a wide text": text.replace('"checksums":', f'"long":"{"x" * size}\\ud83d\\ude00","checksums":', 1),
        "a shape of many": text.replace('"shape":[', '"shape":[' + "1," * (size // 2), 1),
        "a long number": text.replace('"shape":[', '"shape":[' + "1" * size, 1),
        "a long name": text[:-1] + f',"{"n" * size}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}',
        "many brackets": "[" * size,
        "many quotes": START + '"' * size,
        "many spaces": text + " " * size,
    }
    for opening in ("[],", "{},", '"",', "1e5,", "[[[[[[]]]]]],"):
        for key, value in file.entries["__metadata__"].items():
            if key in ("identity", "layers", "checksums"):
                found[f"{key} of {opening}"] = text.replace(compact(value), compact(lists(opening)))
    return [Mutant(name, sign(header, room)) for name, header in found.items()]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [60_000, 600_000, 4_000_000])
def test_no_header_is_a_bomb(tmp_path, kind, size):
    form = FORMATS[kind]
    complaints = attack(bombs(form.files(tmp_path)[0], size), form.read, tmp_path)
    assert not complaints, "\n".join(complaints)
