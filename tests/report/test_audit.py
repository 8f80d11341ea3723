"""The page of audits: ours beside the papers' figures, out of results as the command prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.audit.codec import audit_packet
from kvferry.audit.models import ModelSet
from kvferry.audit.settings import Settings
from kvferry.errors import InvalidInput
from kvferry.report.audit import survival
from kvferry.report.audit_page import page, read, write
from kvferry.report.audit_said import hybrids, sentences
from tests.hf import tiny

ENVIRONMENT = {
    "arguments": ["audit", "tiny"],
    "git_revision": "abc",
    "torch": "2",
    "transformers": "5",
    "cpu": "one",
    "threads": 1,
    "seed": 0,
}


SERIES = ("free", "stages", "transplant", "patch")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    settings = Settings(new_tokens=3, explain=1, layer_step=2, patch_positions=1, horizon=1, resamples=100)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        result = kv.audit(
            tiny.llama(dtype=dtype),
            tiny.prompt(1, 34),  # long enough for bfloat16 to differ by construction
            start=30,
            protocols=["fixed_prefix", "stage_replay", "transplant", "residual_patch", "free_run"],
            settings=settings,
        )
        found[str(dtype)[6:]] = {"environment": ENVIRONMENT, "result": result.to_json()}
    return found


def test_the_page_says_what_was_found(results: dict[str, Any], tmp_path: Path) -> None:
    for name, content in results.items():
        (tmp_path / f"audit-{name}.json").write_text(json.dumps(content))
    text = page(read(tmp_path))
    assert "bf16 83 % (77.2 to 87.6)" in text
    assert "gives the donor's logits to the bit in 4 of 4" in text
    assert "Of 8 clean pairs of runs that did not overflow, 0 were called semantic (at most 32.44%" in text
    assert "times: it is quadratic in the difference of the logits" in text
    for title in ("Fixed prefixes", "Free runs", "Constructions", "Transplants", "Patches", "Verdicts"):
        assert len(text.partition(f"\n## {title}")[2].partition("\n## ")[0].split("\n|")) > 2, title
    assert "; the ratio of the two epsilons is 65,536" in text
    assert "kvferry audit tiny" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_a_shipped_cache_is_told_stage_by_stage(tmp_path: Path) -> None:
    models = ModelSet(tiny.llama(dtype=torch.bfloat16))
    packet = kv.encode(kv.capture(models.own, tiny.prompt(1, 40)), 0.6, "fast")
    finding = audit_packet(models, packet, new_tokens=4)
    (tmp_path / "audit-x.json").write_text(
        json.dumps({"environment": ENVIRONMENT, "result": {"findings": [finding.to_json()]}})
    )
    text = write(tmp_path).read_text()
    told = text.partition("\n## A shipped cache")[2].partition("\n## ")[0]
    for stage in ("replica", "construction: incremental", "codec: own cache through it", "given, keys alone"):
        assert f"| tiny | {stage} |" in told
    assert "A shipped cache is `codec`: no larger than what the declared lossy stage does" in text


def test_figures_lie_beside_the_page_and_are_the_same_each_time(results: dict[str, Any], tmp_path: Path) -> None:
    for name, content in results.items():
        longer = content | {"environment": ENVIRONMENT | {"arguments": ["audit", "tiny", "--longest", "48"]}}
        (tmp_path / f"audit-{name}.json").write_text(json.dumps(longer))
    text = write(tmp_path).read_text()
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {f"audit-tiny-{name}.svg" for name in ("drift", "margins", "oracle", *SERIES)}
    assert all(f"]({name})" in text for name in drawn)
    assert max(map(len, drawn.values())) < 100_000
    assert "at most 48 tokens" in text
    write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")} == drawn


def free(hits: int, dtype: str, sampler: str = "greedy", **more: Any) -> dict[str, Any]:
    rate = {"value": hits / 20, "n": 20, "ci": [0.0, 0.16], "unit": "prompts"}
    detail = {"sampler": {"name": sampler}, "survival": {"times": [3]}, "new_tokens": 64, **more}
    return {
        "protocol": "free_run",
        "arms": [{"dtype": dtype}] * 2,
        "measures": {"prompts_diverging": rate},
        "detail": detail,
        "verdicts": {},
        "replicas": None,
    }


def test_what_is_said_follows_from_the_numbers() -> None:
    assert "0 of 20 (at most 16.1%)" in sentences([free(0, "float32")])[0]
    assert "none, as in" in sentences([free(0, "float32")])[0]
    assert "where that paper has none" in sentences([free(2, "float32")])[0]
    assert sentences([free(20, "bfloat16")])[0].endswith("holds.")
    assert "does not hold" in sentences([free(19, "bfloat16")])[0]


def test_drawn_splits_are_told_apart() -> None:
    splits = [
        {"split": 3, "margins": [2.0, 0.7], "crossed": True},
        {"split": 4, "margins": [0.5, 0.04], "crossed": False},
        {"split": None, "margins": None, "crossed": None},
    ]
    (said,) = sentences([free(2, "bfloat16", "top_k", splits=splits)])
    assert "at 1 of 2 splits a token had crossed the edge" in said
    assert "led by 0.04 at most" in said


def test_keys_and_values_tell_of_the_same_caches() -> None:
    def transplant(direction: str, keys: int, values: int) -> dict[str, Any]:
        parts = {"keys": keys, "values": values}
        matrix = {part: {"recovered": hits, "n": 12, "exact": 0, "n_exact": 12} for part, hits in parts.items()}
        return {"protocol": "transplant", "detail": {"direction": direction, "matrix": matrix}}

    tables = [transplant("donor_to_recipient", 4, 3), transplant("recipient_to_donor", 5, 3)]
    assert hybrids(tables) == (9, 6, 9)
    assert hybrids(tables[:1]) is None


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        read(tmp_path)
    (tmp_path / "audit-x.json").write_text("{}")
    with pytest.raises(InvalidInput):
        read(tmp_path)


def test_a_survival_curve_goes_on_to_where_runs_are_censored() -> None:
    curve = {"times": [3, 5], "surviving": [0.75, 0.5], "low": [0.4, None], "high": [0.9, 0.8], "events": 2, "n": 4}
    figure = survival({"detail": {"survival": curve, "new_tokens": 64}})
    (line,) = figure.axes[0].get_lines()
    assert line.get_xydata().tolist() == [[0, 1], [3, 0.75], [5, 0.5], [64, 0.5]]
