from __future__ import annotations

from typing import Any

import pytest

from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.errors import InvalidInput


def test_settings_are_read() -> None:
    config = ConnectorConfig.parse({"store": "/somewhere", "budget": 1, "policy": "greedy", "mode": "sync"})
    assert (config.store, config.budget, config.policy, config.mode) == ("/somewhere", 1.0, "greedy", "sync")
    assert ConnectorConfig.parse({"store": "/somewhere", "policy": "klt"}).policy == "klt"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (None, "folder of the packets"),
        ({"store": 3}, "folder of the packets"),
        ({"budgets": 0.5}, "no setting budgets; there are budget, chunk_tokens"),
        ({"budget": 0}, "budget = 0"),
        ({"budget": True}, "budget = True"),
        ({"budget": float("nan")}, "budget = nan"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"policy": "sws"}, "drops tokens"),
        ({"mode": "later"}, "async and sync are possible"),
        ({"save": "never"}, "sync and background are possible"),
        ({"identity": "ignore"}, "refuse and raise are possible"),
        ({"chunk_tokens": 0}, "chunk_tokens = 0"),
        ({"chunk_tokens": 1.5}, r"chunk_tokens = 1\.5"),
        ({"namespace": 1}, "namespace"),
        ({"mapper": 3}, "mapper = 3"),
        ({"mapper": "/there", "gate": 1}, "gate = 1"),
        ({"mapper": "/there", "floors": 0.3}, "floors that are no object"),
        ({"gate": False}, "a gate but no mapper"),
        ({"mapper": "/there", "gate": False, "floors": {"kl": 0.3}}, "floors but no gate"),
        ({"tails": 1}, "tails = 1"),
    ],
)
def test_wrong_settings_are_refused(extra: dict[str, Any] | None, message: str) -> None:
    given = extra if extra is None or "store" in extra else {"store": "/somewhere", **extra}
    with pytest.raises(InvalidInput, match=message):
        ConnectorConfig.parse(given)


def test_a_chunk_is_whole_blocks() -> None:
    default = ConnectorConfig.parse({"store": "/somewhere"})
    assert [default.chunk(block) for block in (16, 32, 96, 128, 256)] == [128, 128, 192, 128, 256]
    chosen = ConnectorConfig.parse({"store": "/somewhere", "chunk_tokens": 96})
    assert chosen.chunk(32) == 96
    with pytest.raises(InvalidInput, match="no multiple of the engine's blocks of 64"):
        chosen.chunk(64)
