"""Going on from a cache gives the tokens that the whole prompt gives, also where a window has moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvferry as kv
from kvferry.cli.main import run
from kvferry.engines.resume import awaited_tokens, can_crop_by_one, capture_prompt, resume, with_stage
from kvferry.errors import IncompatibleIdentity
from kvferry.hf.decode import continue_greedy
from kvferry.hf.identity import identity_of
from kvferry.hf.restore import empty_cache
from kvferry.snapshot import Snapshot
from tests.hf import tiny

NEW = 12


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def gemma() -> Any:
    return tiny.gemma3()


def whole_run(model: Any, ids: torch.Tensor) -> list[list[int]]:
    """What the model goes on with when it prefills everything itself, the last token apart, as a receiver does."""
    snapshot = kv.capture(model, ids[:, :-1])
    return continue_greedy(model, snapshot, ids, max_new_tokens=NEW).token_ids.tolist()


@pytest.mark.parametrize("length", [2, 7, 40])
def test_full_layers_hold_the_whole_prompt_and_are_cropped(llama: Any, length: int) -> None:
    ids = tiny.prompt(1, length)
    snapshot = capture_prompt(llama, ids)
    assert snapshot.seq_len == length
    assert awaited_tokens(snapshot) is None
    went = resume(llama, snapshot, None, max_new_tokens=NEW)
    assert went.continuation.token_ids.tolist() == whole_run(llama, ids)
    assert (went.prompt_tokens, went.reused_tokens) == (length, length - 1)


@pytest.mark.parametrize("length", [2, 6, 7, 8, 9, 10, 30])
def test_sliding_layers_go_on_exactly_on_both_sides_of_the_window(gemma: Any, length: int) -> None:
    ids = tiny.prompt(1, length)
    snapshot = capture_prompt(gemma, ids)
    held_back = length > 7  # the window of 8 keeps 7
    assert snapshot.seq_len == length - held_back
    assert (awaited_tokens(snapshot) is not None) == held_back
    went = resume(gemma, snapshot, None, max_new_tokens=NEW)
    assert went.continuation.token_ids.tolist() == whole_run(gemma, ids)
    assert (went.prompt_tokens, went.reused_tokens) == (length, length - 1)


def test_the_awaited_token_travels_through_a_packet_and_a_file(gemma: Any, tmp_path: Any) -> None:
    ids = tiny.prompt(1, 30)
    packet = kv.encode(capture_prompt(gemma, ids), budget=1.0)
    packet.save(tmp_path / "packet")
    snapshot = kv.decode(kv.Packet.load(tmp_path / "packet"))
    snapshot.save(tmp_path / "snapshot")
    went = resume(gemma, kv.Snapshot.load(tmp_path / "snapshot"), None, max_new_tokens=NEW)
    assert went.continuation.token_ids.tolist() == whole_run(gemma, ids)
    assert went.reused_tokens == 29


def test_several_sequences_at_once(gemma: Any) -> None:
    ids = tiny.prompt(3, 30)
    went = resume(gemma, capture_prompt(gemma, ids), None, max_new_tokens=NEW)
    assert went.continuation.token_ids.tolist() == whole_run(gemma, ids)


def test_a_longer_prompt_goes_on_from_the_cache(gemma: Any) -> None:
    ids = tiny.prompt(1, 40)
    snapshot = capture_prompt(gemma, ids[:, :25])
    went = resume(gemma, snapshot, ids, max_new_tokens=NEW)
    expected = continue_greedy(gemma, kv.capture(gemma, ids[:, :24]), ids, max_new_tokens=NEW)
    assert went.continuation.token_ids.tolist() == expected.token_ids.tolist()
    assert (went.prompt_tokens, went.reused_tokens) == (40, 24)


def test_what_cannot_be_cropped_is_computed_anew_and_says_so(gemma: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = tiny.prompt(1, 30)
    went = resume(gemma, kv.capture(gemma, ids), None, max_new_tokens=NEW)
    alone = resume(gemma, kv.capture(gemma, ids[:, :1]), None, max_new_tokens=NEW)
    assert went.reused_tokens == alone.reused_tokens == 0
    with torch.no_grad():
        expected = gemma.generate(ids, max_new_tokens=NEW, do_sample=False)[:, 30:].tolist()
    assert went.continuation.token_ids.tolist() == expected
    assert "computed anew" in caplog.text


def test_other_tokens_and_other_models_are_refused(llama: Any, gemma: Any) -> None:
    ids = tiny.prompt(1, 20)
    snapshot = capture_prompt(llama, ids)
    other = ids.clone()
    other[0, 4] += 1
    with pytest.raises(IncompatibleIdentity) as caught:
        resume(llama, snapshot, other, max_new_tokens=1)
    assert list(caught.value.differences) == ["token_ids[0, 4]"]
    with pytest.raises(IncompatibleIdentity):
        resume(gemma, snapshot, None, max_new_tokens=1)


def test_a_forged_stage_is_not_believed(llama: Any) -> None:
    """A stage that names more tokens than there are sequences, or another length, is passed over."""
    snapshot = kv.capture(llama, tiny.prompt(1, 20), construction="prefill")
    assert awaited_tokens(with_stage(snapshot, "awaits(1 at 20)")) is not None
    for stage in ("awaits(1, 2 at 20)", "awaits(1)", "awaits(1 at 21)", "awaits( at 20)", "awaits(1 at 20"):
        assert awaited_tokens(with_stage(snapshot, stage)) is None
    assert can_crop_by_one(identity_of(llama), 20)


def test_a_cropped_cache_does_not_go_on_with_a_token_that_never_followed(llama: Any) -> None:
    ids = tiny.prompt(1, 20)
    held_back = with_stage(kv.capture(llama, ids[:, :-1]), f"awaits({int(ids[0, -1])} at 19)")
    assert resume(llama, held_back, None, max_new_tokens=1).prompt_tokens == 20
    cropped = held_back.crop(12)
    assert awaited_tokens(cropped) is None
    went = resume(llama, cropped, None, max_new_tokens=NEW)
    assert went.continuation.token_ids.tolist() == whole_run(llama, ids[:, :12])


def test_selected_sequences_go_on_with_their_own_tokens(gemma: Any) -> None:
    ids = tiny.prompt(3, 30)
    snapshot = capture_prompt(gemma, ids)
    for rows in ([2, 0], [1], slice(1, 3)):
        went = resume(gemma, snapshot.select(rows), None, max_new_tokens=NEW)
        assert went.reused_tokens == 29
        assert went.continuation.token_ids.tolist() == whole_run(gemma, ids[rows])


@pytest.mark.parametrize("first", [0, 5])
def test_computed_anew_is_computed_with_what_a_packet_dropped(first: int) -> None:
    """The prompt as it was: its left padding hidden, every other token there."""
    gemma = tiny.gemma3(tie_word_embeddings=False)  # a tied one likes to repeat its last token
    ids = tiny.prompt(2, 30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :4] = False
    whole = kv.capture(gemma, ids, attention_mask=mask)
    expected = resume(gemma, whole, None, max_new_tokens=NEW)
    dropped = whole.mask.clone()
    dropped[:, first : first + 23] = False
    thinned = with_stage(replace(whole, mask=dropped), "packet(pdtrim, 1000)")
    went = resume(gemma, thinned, None, max_new_tokens=NEW)
    assert went.reused_tokens == expected.reused_tokens == 0
    assert went.continuation.token_ids.tolist() == expected.continuation.token_ids.tolist()
    alone = resume(gemma, kv.capture(gemma, ids[1:, 4:]), None, max_new_tokens=NEW)
    assert went.continuation.token_ids[1:].tolist() == alone.continuation.token_ids.tolist()


def test_a_packet_that_drops_tokens_is_computed_anew_whole(gemma: Any) -> None:
    ids = tiny.prompt(1, 40)
    packet = kv.encode(kv.capture(gemma, ids, query_window=8), budget=0.5, policy="pdtrim")
    snapshot = kv.decode(packet)
    assert not snapshot.mask.all()
    went = resume(gemma, snapshot, None, max_new_tokens=NEW)
    with torch.no_grad():
        expected = gemma.generate(ids, max_new_tokens=NEW, do_sample=False)[:, 40:].tolist()
    assert went.continuation.token_ids.tolist() == expected


def test_computing_anew_copies_no_cache(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = kv.capture(gemma, tiny.prompt(1, 30))
    monkeypatch.setattr(Snapshot, "to_cache", None)
    assert resume(gemma, snapshot, None, max_new_tokens=1).reused_tokens == 0
    assert isinstance(empty_cache(gemma), DynamicCache)


@pytest.mark.parametrize("length", [6, 30])
@pytest.mark.parametrize("anew", [False, True])
def test_a_full_hash_is_recorded_and_compared(gemma: Any, length: int, anew: bool) -> None:
    ids = tiny.prompt(1, length)
    snapshot = kv.capture(gemma, ids, full_hash=True) if anew else capture_prompt(gemma, ids, full_hash=True)
    want = identity_of(gemma, full_hash=True).full_weights
    assert snapshot.identity.full_weights == want
    resume(gemma, snapshot, None, max_new_tokens=1)
    other = replace(snapshot, identity=replace(snapshot.identity, full_weights="sha256-full:" + "0" * 64))
    with pytest.raises(IncompatibleIdentity) as caught:
        resume(gemma, other, None, max_new_tokens=1)
    assert set(caught.value.differences) == {"full_weights"}


def test_the_command_line_records_a_full_hash(llama_folder: str, tmp_path: Any) -> None:
    path = tmp_path / "snapshot"
    words = ["capture", llama_folder, "--prompt", "a few words", "--threads", "1", "-o", str(path)]
    assert run(words) == 0
    assert kv.Snapshot.load(path).identity.full_weights is None
    assert run([*words, "--full-hash"]) == 0
    assert str(kv.Snapshot.load(path).identity.full_weights).startswith("sha256-full:")
    assert run(["generate", llama_folder, "--from-cache", str(path), "--max-new", "2", "--threads", "1"]) == 0
