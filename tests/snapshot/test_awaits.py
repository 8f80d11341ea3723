"""The token that followed a cache is believed for exactly that cache, and for no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.snapshot import Snapshot
from kvferry.snapshot.awaits import awaited, awaits
from tests.snapshot.builders import make_snapshot


def followed(batch: int = 3, seq_len: int = 6) -> Snapshot:
    snapshot = make_snapshot(batch=batch, seq_len=seq_len)
    stage = awaits(range(10, 10 + batch), seq_len)
    return replace(snapshot, identity=snapshot.identity.then(stage).then("decoded(0)"))


def next_tokens(snapshot: Snapshot) -> tuple[int, ...] | None:
    return awaited(snapshot.identity.construction, snapshot.batch_size, snapshot.seq_len)


def test_it_is_read_as_it_was_written() -> None:
    snapshot = followed()
    assert snapshot.identity.construction[1] == "awaits(10, 11, 12 at 6)"
    assert next_tokens(snapshot) == (10, 11, 12)


def test_a_shorter_cache_is_not_followed_by_it() -> None:
    snapshot = followed()
    assert next_tokens(snapshot.crop(6)) == (10, 11, 12)
    cropped = snapshot.crop(5)
    assert cropped.identity.construction == ("prefill", "decoded(0)")
    assert awaited(snapshot.identity.construction, 3, 5) is None, "also where a crop of another kind left the stage"


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([1], (11,)),
        ([2, 0, 2], (12, 10, 12)),
        ([-1], (12,)),
        (slice(1, 3), (11, 12)),
        (slice(None, None, -1), (12, 11, 10)),
    ],
)
def test_sequences_keep_their_own(rows: list[int] | slice, tokens: tuple[int, ...]) -> None:
    assert next_tokens(followed().select(rows)) == tokens


def test_a_stage_for_another_batch_is_dropped_by_select() -> None:
    snapshot = make_snapshot(batch=3, seq_len=6)
    for stage in ("awaits(1 at 6)", "awaits(5)", "awaits(nothing"):
        forged = replace(snapshot, identity=snapshot.identity.then(stage))
        assert next_tokens(forged) is None
        assert next_tokens(forged.select([0])) is None
        assert forged.select([0]).identity.construction == ("prefill",)


@pytest.mark.parametrize(
    "stage",
    ["awaits(1)", "awaits(1 at 7)", "awaits(1, 2 at 6)", "awaits(-1 at 6)", f"awaits({'9' * 5000} at 6)",
     "awaits(4294967296 at 6)", "awaits( at 6)", "awaits(\u0661 at 6)"],
)  # fmt: skip
def test_other_and_impossible_stages_are_passed_over(stage: str) -> None:
    assert awaited(("prefill", stage), 1, 6) is None
