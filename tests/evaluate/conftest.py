"""Windows and prepared prefixes, made once."""

from __future__ import annotations

from typing import Any

import pytest

import kvferry as kv
from kvferry.evaluate.map_fit import FitSettings
from kvferry.evaluate.perplexity import PreparedWindow
from kvferry.evaluate.windows import Window, cut_windows
from kvferry.hf.text import default_text
from kvferry.map.mapper import Mapper
from tests.map import builders

PREFIX, SUFFIX = 160, 48


@pytest.fixture(scope="session")
def window(smollm2: tuple[Any, Any]) -> Window:
    return cut_windows(smollm2[1], default_text(), windows=1, prefix=PREFIX, suffix=SUFFIX)[0]


@pytest.fixture(scope="session")
def prepared(smollm2: tuple[Any, Any], window: Window) -> PreparedWindow:
    """Of SmolLM2 in bfloat16."""
    return PreparedWindow(smollm2[0], window)


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any, Mapper]:
    """Two tiny models of a family, their tokenizer, and a mapper from the first to the second."""
    source, target, tokenizer = builders.saved_pair(tmp_path_factory.mktemp("pair"))
    settings = FitSettings(sequences=25, length=200, stride=1)
    return source, target, tokenizer, kv.fit(source, target, default_text()[:20_000], top_k=2, settings=settings)
