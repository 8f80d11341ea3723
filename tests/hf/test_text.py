"""The text that every Python installation carries."""

from __future__ import annotations

from typing import Any

import pytest

import kvferry as kv
from kvferry.hf.text import default_part, default_text, tokens_of


def test_the_default_text_is_long_prose() -> None:
    text = default_text()
    assert len(text) > 400_000
    assert text.count(" the ") > 3_000
    assert default_text() is text


def test_what_is_fitted_on_and_what_is_judged_on_share_nothing() -> None:
    assert default_part(judged=False) + default_part(judged=True) == default_text()
    assert min(len(default_part(judged=judged)) for judged in (False, True)) > 150_000


def test_tokens_of_a_long_text_are_its_first(smollm2: tuple[Any, Any], gemma3: tuple[Any, Any]) -> None:
    for _, tokenizer in (smollm2, gemma3):
        text = default_text()[:60_000]
        whole = tokenizer(text).input_ids
        for count in (1, 100, 1500):
            assert tokens_of(tokenizer, text, count)[0].tolist() == whole[:count]
        assert tokens_of(tokenizer, text)[0].tolist() == whole
        assert tokens_of(tokenizer, "short", 100)[0].tolist() == tokenizer("short").input_ids
        sparse = " " * 40_000 + "word"  # a token may be very long
        assert tokens_of(tokenizer, sparse, 20)[0].tolist() == tokenizer(sparse).input_ids[:20]


def test_no_text_and_no_tokens_are_refused(smollm2: tuple[Any, Any]) -> None:
    with pytest.raises(kv.InvalidInput, match="no tokens"):
        tokens_of(smollm2[1], "")
    with pytest.raises(kv.InvalidInput, match="max_tokens"):
        tokens_of(smollm2[1], "text", 0)
