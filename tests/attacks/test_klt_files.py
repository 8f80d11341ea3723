"""Files of transforms and of klt packets, broken in every way that files of kvferry are broken in."""

from __future__ import annotations

from pathlib import Path

import kvferry as kv
from kvferry.ship.transform.artifact import Transform
from kvferry.snapshot import FULL, Snapshot
from tests.attacks.mutate import attack, mutants
from tests.ship.builders import unmasked
from tests.ship.transform.builders import make_cache, make_transform
from tests.snapshot.builders import SLIDING, make_identity

WIDE = {"kv_heads": 4, "head_dim": 16, "dtype": "bfloat16"}


def files(tmp_path: Path, one: kv.Packet | Transform, other: kv.Packet | Transform) -> tuple[bytes, bytes]:
    found = []
    for thing in (one, other):
        thing.save(tmp_path / "valid")
        found.append((tmp_path / "valid").read_bytes())
    return found[0], found[1]


def test_broken_transforms_are_refused(tmp_path: Path) -> None:
    made = [make_transform(make_identity((FULL, SLIDING), **WIDE), which, width=128) for which in (0, 1)]
    cases = mutants(*files(tmp_path, *made), seed=0, count=400)
    assert attack(cases, Transform.load, tmp_path) == []


def test_broken_packets_are_refused(tmp_path: Path) -> None:
    snapshots: list[Snapshot] = [
        unmasked(make_cache((FULL, SLIDING), batch=2, seq_len=60, seed=3 + which, **WIDE)) for which in (0, 1)
    ]
    transform = make_transform(snapshots[0].identity)
    made = [kv.encode(snapshot, 0.9, "klt", transform=transform, frame_tokens=16) for snapshot in snapshots]
    cases = mutants(*files(tmp_path, *made), seed=0, count=400)

    def read(path: Path) -> None:
        kv.decode(kv.Packet.load(path), transform=transform)

    assert attack(cases, read, tmp_path) == []
