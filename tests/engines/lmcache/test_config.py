from __future__ import annotations

from typing import Any

import pytest

from kvferry.engines.lmcache.config import SerdeConfig
from kvferry.errors import InvalidInput
from tests.engines.lmcache.builders import SETTINGS


def test_settings_are_read() -> None:
    config = SerdeConfig.parse({**SETTINGS, "quantizer": "chan4b128:asym4g64", "max_workers": 2, "weights": "v2"})
    assert (config.hidden, config.quantizers, config.weights) == (192, ("chan4b128", "asym4g64"), "v2")
    assert SerdeConfig.parse(SETTINGS).quantizers == ("raw", "raw")
    assert SerdeConfig.parse({**SETTINGS, "budget": 0.28}).budget == 0.28


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantiser": "raw"}, "no setting quantiser; there are budget, head_dim"),
        ({"num_kv_heads": 0}, "num_kv_heads = 0"),
        ({"num_kv_heads": True}, "num_kv_heads = True"),
        ({"head_dim": "64"}, "head_dim = '64'"),
        ({"max_workers": 1.5}, r"max_workers = 1\.5"),
        ({"quantizer": "int8"}, "unknown quantiser 'int8'"),
        ({"quantizer": "sym8:"}, "unknown quantiser ''"),
        ({"quantizer": 8}, "quantizer that is no text"),
        ({"weights": None}, "weights that is no text"),
        ({"budget": 1.0}, r"budget = 1\.0"),
        ({"budget": True}, "budget = True"),
        ({"budget": float("nan")}, "budget = nan"),
        ({"budget": 0.5, "quantizer": "sym8"}, "both a quantizer and a budget"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SerdeConfig.parse({**SETTINGS, **given})


def test_the_heads_must_be_said() -> None:
    with pytest.raises(InvalidInput, match="needs head_dim and num_kv_heads"):
        SerdeConfig.parse({})
