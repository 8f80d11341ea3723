"""Hand-offs by a transform: both processes find the same one in the cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvferry as kv
from kvferry.engines.handoff import run_handoff
from kvferry.errors import InvalidInput
from kvferry.ship.transform.store import keep
from tests.cli.models import TEXT
from tests.engines.test_handoff import job, source_on_path

__all__ = ["source_on_path"]

pytestmark = pytest.mark.usefixtures("source_on_path")


def test_a_cache_is_handed_off_by_a_transform(
    llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match="ship calibrate"):
        run_handoff(job(llama_folder, budget=0.5, policy="klt"))
    model, tokenizer = kv.load_model(llama_folder)
    sizes = {"windows": 8, "gradient_windows": 6, "prefix": 80, "suffix": 30}
    keep(kv.calibrate(model, tokenizer, TEXT * 9, **sizes))
    result = run_handoff(job(llama_folder, budget=0.5, policy="klt"))
    assert result.policy == "klt"
    assert result.quantizer == "klt+raw / klt+raw"
    assert 0.4 < result.budget <= 0.5
    assert not result.pipelined
    assert "cannot be pipelined" in result.why_not_pipelined
    assert result.kl_mean < 0.5


@pytest.mark.parametrize("changes", [{"progressive": True}, {"scorer": "kv_norm"}], ids=str)
def test_what_does_not_go_with_a_transform(llama_folder: str, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(changes))):
        run_handoff(job(llama_folder, budget=0.5, policy="klt", **changes))
