"""Seeded mutations of kvferry files of any kind, blind ones and ones by someone who knows the format.

`mutants` makes broken files out of a valid one; `attack` gives each to a reader and tells what went wrong.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import CorruptPacket, TooLarge, UnsupportedVersion
from tests.attacks.anatomy import START, Change, Entries, File, compact, rebuilt, sign, without

REFUSALS = (CorruptPacket, UnsupportedVersion, TooLarge)
"""What a reader may answer to a broken file."""

SLACK = 128 << 10
"""Bytes that a reader may allocate whatever the file's size: messages, compiled patterns, tracebacks."""

SECONDS = 5.0
"""Longer than that on a small file is a hang."""


@dataclass(frozen=True)
class Mutant:
    """A broken file, and how it was broken."""

    name: str
    data: bytes


def mutants(
    valid: bytes, other: bytes, *, seed: int, count: int = 500, optional: Callable[[str], bool] = lambda name: False
) -> list[Mutant]:
    """At least ``count`` files, none equal to another or to a valid one, each of which a reader must refuse.

    Args:
        valid: a file of at least three tensors.
        other: another valid file of the same kind, with the same names and shapes but other data.
        seed: of every choice.
        count: how many at least; the systematic ones are all there, random ones fill up.
        optional: names of tensors that a file may lack.
    """
    rng = random.Random(seed)
    file, second = File(valid), File(other)
    systematic = [
        *_truncated(file),
        *_forged_lengths(file),
        *_other_files(file),
        *_swapped(file, second),
        *_edited_text(file),
        *_resigned(file, rng, optional),
    ]
    found = {mutant.data: mutant for mutant in systematic if mutant.data not in (valid, other)}
    while len(found) < count:
        mutant = rng.choice([_flipped, _cut, _spliced, _overwritten])(file, second, rng)
        if mutant.data not in (valid, other):
            found.setdefault(mutant.data, mutant)
    return list(found.values())


def attack(cases: Iterable[Mutant], read: Callable[[Path], object], folder: Path) -> list[str]:
    """Give every file to ``read``; a line for each that was not refused as it should be, in time, in little space."""
    complaints = []
    path = folder / "mutant"
    tracemalloc.start()
    try:
        for case in cases:
            path.write_bytes(case.data)
            tracemalloc.reset_peak()
            before, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
            outcome = _outcome(read, path)
            seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1] - before
            if outcome is not None:
                complaints.append(f"{case.name}: {outcome}")
            if peak > 2 * len(case.data) + SLACK:
                complaints.append(f"{case.name}: {peak} bytes allocated for a file of {len(case.data)}")
            if seconds > SECONDS:
                complaints.append(f"{case.name}: took {seconds:.1f} s")
    finally:
        tracemalloc.stop()
    return complaints


def _outcome(read: Callable[[Path], object], path: Path) -> str | None:
    try:
        read(path)
    except REFUSALS as error:
        return None if len(str(error)) < 2_000 else "the message is over 2,000 characters long"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _truncated(file: File) -> Iterator[Mutant]:
    size, start = len(file.data), 8 + file.length
    ends = [start + end for name in file.names for end in file.entries[name]["data_offsets"]]
    quotes = [8 + place for place, letter in enumerate(file.text) if letter in '{}"'][::11]
    for stop in sorted({*range(17), *quotes, *(end + step for end in (start, *ends) for step in (-1, 0, 1)), size - 8}):
        if 0 <= stop < size:
            yield Mutant(f"cut to {stop} of {size} bytes", file.data[:stop])
    for extra in (b"\0", b" ", b"\0" * 8, b"x" * 4096, file.data):
        yield Mutant(f"{len(extra)} bytes more", file.data + extra)
    yield Mutant("a byte in front", b"\0" + file.data)


def _forged_lengths(file: File) -> Iterator[Mutant]:
    true, size = file.length, len(file.data)
    steps = [true + step for step in (-64, -9, -8, -1, 1, 8, 9, 64)]
    big = [size - 8, size - 7, size, 2**20, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    for length in (0, 1, 2, 7, 8, 16, *steps, *big):
        yield Mutant(f"header length {length} for {true}", length.to_bytes(8, "little") + file.data[8:])
    yield Mutant("header length big-endian", true.to_bytes(8, "big") + file.data[8:])


def _other_files(file: File) -> Iterator[Mutant]:
    payload = file.payload
    plain = compact({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
    foreign = compact({"__metadata__": {"format": "pt"}, **json.loads(plain)})
    yield Mutant("nothing", b"")
    yield Mutant("zeros", b"\0" * len(file.data))
    yield Mutant("ones", b"\xff" * len(file.data))
    yield Mutant("a pickle", b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93." + b"\0" * 80)
    yield Mutant("a zip", b"PK\x03\x04" + b"\0" * 200)
    yield Mutant("a gguf", b"GGUF\x03\0\0\0" + b"\1\0\0\0\0\0\0\0" * 20)
    yield Mutant("text", b"hello, I am no cache\n" * 10)
    yield Mutant("safetensors without metadata", sign(plain, b"abcd"))
    yield Mutant("safetensors of someone else", sign(foreign, b"abcd"))
    yield Mutant("an empty header", sign("{}", b""))
    for depth in (10, 1_000, 100_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            nested = opening * depth + "1" + closing * depth
            yield Mutant(f"{depth} deep {opening}", sign(nested, payload))
            yield Mutant(f"{depth} deep {opening}, open", sign(opening * depth, payload))
            yield Mutant(f"{depth} deep {opening} inside", sign(file.text.rstrip()[:-1] + f',"n":{nested}}}', payload))
    for name, raw in {
        "not UTF-8": b"\xff\xfe",
        "UTF-8": "ü".encode(),
        "overlong": b"\xc0\xaf",
        "a zero": b"\0",
        "a surrogate": b"\xed\xa0\x80",
        "a line break": b"\n",
    }.items():
        for place in (0, 1, 40, file.length // 2, file.length - 1):
            header = file.data[8 : 8 + place] + raw + file.data[8 + place : 8 + file.length]
            yield Mutant(f"{name} in the header at {place}", len(header).to_bytes(8, "little") + header + payload)


def _swapped(file: File, second: File) -> Iterator[Mutant]:
    """Parts of two valid files, each with its own right checksums, in one."""
    yield Mutant("header of one, payload of the other", file.data[:8] + file.data[8:][: file.length] + second.payload)
    yield Mutant("payload of one, header of the other", second.data[: 8 + second.length] + file.payload)
    entries, start = file.entries, 8 + file.length
    for name in file.names:
        begin, end = entries[name]["data_offsets"]
        if begin == end or second.entries[name]["data_offsets"] != [begin, end]:
            continue
        data = file.data[: start + begin] + second.payload[begin:end] + file.data[start + end :]
        yield Mutant(f"tensor {name} of the other", data)
    same: dict[str, str] = {}
    for name in file.names:
        form = compact([entries[name]["dtype"], entries[name]["shape"]])
        twin = same.setdefault(form, name)
        first, last = (slice(*(start + place for place in entries[key]["data_offsets"])) for key in (twin, name))
        data = bytearray(file.data)
        data[first], data[last] = file.data[last], file.data[first]
        yield Mutant(f"tensors {twin} and {name} exchanged", bytes(data))
    for key in ("identity", "layers"):
        if (have := file.entries["__metadata__"].get(key)) != (new := second.entries["__metadata__"].get(key)):
            data = file.text.replace(compact(have), compact(new))
            yield Mutant(f"{key} of the other, unsigned", file.data[:8] + data.encode() + file.payload)


def _edited_text(file: File) -> Iterator[Mutant]:
    """The header's text edited and signed anew: what only a strict parser refuses."""
    text, payload, names = file.text.rstrip(), file.payload, file.names
    first = names[0]
    entry = f'"{first}":{compact(file.entries[first])}'
    assert entry in text
    edits = {
        "first tensor twice": text.replace(entry, f"{entry},{entry}"),
        "metadata twice": text[:-1] + f',"__metadata__":{compact(file.entries["__metadata__"])}}}',
        "kind twice": text.replace('"kind":', '"kind":"snapshot","kind":', 1),
        "digest twice": text.replace('"checksums":', f'"digest":"{"0" * 32}","checksums":', 1),
        "checksums twice": text.replace('"checksums":', '"checksums":"{}","checksums":', 1),
        "format twice": text.replace('"checksums":', '"format":"kvferry","checksums":', 1),
        "dtype twice": text.replace('"dtype":', '"dtype":"U8","dtype":', 1),
        "offsets twice": text.replace('"data_offsets":', '"data_offsets":[0,0],"data_offsets":', 1),
        "a field more": text.replace('"dtype":', '"extra":1,"dtype":', 1),
        "a field less": text.replace('"shape":', '"form":', 1),
        "fields in another order": text.replace('"dtype":', '"shape":[0],"dtype":', 1),
        "a space": text.replace('"shape":', '"shape": ', 1),
        "a tab": text.replace('"shape":', '"shape":\t', 1),
        "a comma more": text[:-1] + ",}",
        "a bracket less": text[:-1],
        "a bracket more": text + "}",
        "text behind": text + "{}",
        "much padding": text + " " * 64,
        "padding with zeros": text + "\0" * (-len(text) % 8 or 8),
        "padding in front": " " * 8 + text,
        "single quotes": text.replace('"', "'"),
        "a comment": text[:-1] + "/**/}",
        "digest in capitals": text.replace('"checksums":"{', '"checksums":"{ABCDEF', 1),
        "no format": text.replace('"format":"kvferry",', "", 1),
        "another format": text.replace('"format":"kvferry"', '"format":"pt"', 1),
        "no kind": text.replace(f'"kind":"{file.entries["__metadata__"]["kind"]}",', "", 1),
        "kind number": text.replace('"kind":"', '"kind":1,"k":"', 1),
        "kind other": text.replace('"kind":"', '"kind":"x', 1),
        "no version": text.replace('"version":"1",', "", 1),
        "no digest": text.replace(START, '{"__metadata__":{"tsegid":"', 1),
        "array": "[" + text + "]",
        "string": compact(text),
        "null": "null",
    }
    for number in ("NaN", "Infinity", "-1", "1e3", "1.0", "true", "null", '"1"', "[]", "{}", "0x10", "01", "9" * 400):
        edits[f"shape {number[:9]}"] = text.replace('"shape":[', f'"shape":[{number},', 1)
        edits[f"offset {number[:9]}"] = text.replace('"data_offsets":[0', f'"data_offsets":[{number}', 1)
    for version in ("0", "2", "99", "1.0", "-1", "", "one", "9" * 40):
        edits[f"version {version[:9]}"] = text.replace('"version":"1"', f'"version":"{version}"', 1)
    for name, edited in edits.items():
        if edited != text:
            yield Mutant(f"signed: {name}", sign(edited, payload))


def _resigned(file: File, rng: random.Random, optional: Callable[[str], bool]) -> Iterator[Mutant]:
    """Well-formed headers that lie, with every checksum and digest right."""

    def put(name: str, field: str, value: object) -> Change:
        return lambda entries, _: entries[name].update({field: value})

    def mutant(label: str, change: Change, payload: bytes | None = None) -> Mutant:
        return Mutant(f"signed: {label}", rebuilt(file, change, payload))

    names, size, meta = file.names, len(file.payload), "__metadata__"
    for name in rng.sample(names, min(6, len(names))):
        entry = file.entries[name]
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        huge = [[2**62], [2**31, 2**31, 4], [2**63 - 1] * 8, [10**18, 10**18], [0, 2**62, 2**62], [2**40], [1] * 9]
        near = [[], [*shape, 2], [1, *shape], [sum(shape)], [end - begin + 1], [0]]
        for wrong in (*huge, *near):
            if wrong != shape:
                yield mutant(f"{name} of shape {wrong}", put(name, "shape", wrong))
        for dtype in {"F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "U64", "X"} - {entry["dtype"]}:
            yield mutant(f"{name} of dtype {dtype}", put(name, "dtype", dtype))
        places = {
            "one early": [begin - 1, end - 1],
            "one late": [begin + 1, end + 1],
            "backwards": [end, begin],
            "longer": [begin, end + 1],
            "shorter": [begin, end - 1],
            "empty": [begin, begin],
            "from the start": [0, end],
            "to the end": [begin, size],
            "behind the end": [size, size + end - begin],
            "far off": [2**62, 2**62 + end - begin],
        }
        for label, place in places.items():
            if place != [begin, end] and place[0] >= 0:
                yield mutant(f"{name} at {label}", put(name, "data_offsets", place))
        if not optional(name):
            yield Mutant(f"signed: {name} missing", without(file, name))
        yield mutant(f"{name} renamed", lambda entries, _, name=name: entries.update(renamed=entries.pop(name)))
        yield mutant(f"{name} last", lambda entries, _, name=name: entries.update({name: entries.pop(name)}))
        # All that follow leave a gap of 8 bytes, with the data moved along.
        moved = file.payload[:begin] + b"\0" * 8 + file.payload[begin:]
        yield mutant(f"a hole before {name}", lambda entries, _, at=begin: _shift(entries, at), moved)
    more = {"dtype": "U8", "shape": [8], "data_offsets": [size, size + 8]}
    yield mutant("a tensor more", lambda entries, _: entries.update(more=more), file.payload + b"\0" * 8)
    yield mutant(
        "a tensor more over the others", lambda entries, _: entries.update(more={**more, "data_offsets": [0, 8]})
    )
    yield mutant(
        "an empty tensor more",
        lambda entries, _: entries.update(more={**more, "shape": [0], "data_offsets": [size, size]}),
    )
    yield mutant("no tensors", lambda entries, _: [entries.pop(name) for name in names])
    yield mutant("no tensors, no data", lambda entries, _: [entries.pop(name) for name in names], b"")
    yield mutant("data after the last tensor", lambda entries, _: None, file.payload + b"\0" * 8)
    yield mutant("data missing from the last tensor", lambda entries, _: None, file.payload[:-1])
    for key in file.entries[meta]:
        yield mutant(f"no {key}", lambda entries, _, key=key: entries[meta].pop(key))
        if key not in ("digest", "checksums"):
            for wrong in ("", "{", "[]", "\0", "ü", "[" * 4000, None, 7, {}):
                yield mutant(
                    f"{key} = {str(wrong)[:5]!r}", lambda e, _, key=key, wrong=wrong: e[meta].update({key: wrong})
                )
    text = file.text.rstrip()
    sums = file.entries[meta]["checksums"]
    some = {
        "",
        "{}",
        "[]",
        "{",
        "null",
        sums[:-1],
        sums.replace(":", ": "),
        sums[:-3] + '"}',
        compact(dict.fromkeys(names, 1)),
    }
    for wrong in {*some, compact(dict.fromkeys(names, "0" * 32)), compact({**json.loads(sums), "more": "0" * 32})} - {
        sums
    }:
        edited = text.replace(compact(sums), compact(wrong))
        if json.loads(edited)[meta]["checksums"] != sums and ": " not in wrong:
            yield Mutant(f"signed: checksums {wrong[:24]}", sign(edited, file.payload))


def _shift(entries: Entries, start: int) -> None:
    for name, entry in entries.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= start:
            entry["data_offsets"] = [place + 8 for place in entry["data_offsets"]]


def _flipped(file: File, _: File, rng: random.Random) -> Mutant:
    data = bytearray(file.data)
    # Half of the flips hit the header, however small it is beside the payload.
    limit = 8 + file.length if rng.random() < 0.5 else len(data)
    bits = sorted({rng.randrange(8 * limit) for _ in range(rng.choice([1, 1, 1, 2, 5]))})
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return Mutant(f"flipped bits {bits}", bytes(data))


def _cut(file: File, _: File, rng: random.Random) -> Mutant:
    start, stop = sorted(rng.randrange(len(file.data) + 1) for _ in range(2))
    return Mutant(f"without bytes {start}…{stop}", file.data[:start] + file.data[stop:])


def _spliced(file: File, second: File, rng: random.Random) -> Mutant:
    place = rng.randrange(1, min(len(file.data), len(second.data)))
    return Mutant(f"two files spliced at {place}", file.data[:place] + second.data[place:])


def _overwritten(file: File, _: File, rng: random.Random) -> Mutant:
    start, length = rng.randrange(len(file.data)), rng.choice([1, 2, 8, 32])
    junk = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length), b"9" * length])
    data = file.data[:start] + junk + file.data[start + length :]
    return Mutant(f"{length} bytes overwritten at {start}", data)
