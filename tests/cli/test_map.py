"""``kvferry map``: fit, eval, gate, apply and explain, and ``inspect`` of what they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry as kv
from kvferry.cli.main import run
from kvferry.hf.text import default_text
from tests.cli import models
from tests.hf import tiny
from tests.map import builders

FIT = ("--sequences", 10, "--length", 120, "--stride", 1, "--dtype", "float32")
EVAL = ("--windows", 2, "--prefix", 64, "--suffix", 16)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))


def call(capfd: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    ended = run([*map(str, arguments), "--json"])
    out, err = capfd.readouterr()
    assert ended == status, err
    content = json.loads(out)
    result: dict[str, Any] = content["result"] if content["result"] is not None else content["error"]
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    root = tmp_path_factory.mktemp("pair")
    source = builders.llama()
    (root / "text").write_text(default_text()[:12_000])
    return (
        models.save(source, root / "source"),
        models.save(builders.without_layer(source, 2), root / "target"),
        root / "text",
    )


@pytest.fixture(scope="module")
def mapper(folders: tuple[str, str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mapper") / "m"
    arguments = ("map", "fit", *folders[:2], "--text", folders[2], "-o", folder, "--top-k", 2, *FIT)
    assert run([str(argument) for argument in (*arguments, "--json")]) == 0
    return folder


def test_fit_and_inspect(folders: tuple[str, str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target, text = folders
    folder = tmp_path / "m"
    made = call(
        capfd, "map", "fit", source, target, "--text", text, "--text", text, "-o", folder, "--top-k", "1,2,all",
        "--ridge", "0.01,1e9", "--resume", tmp_path / "moments", *FIT,
    )  # fmt: skip
    assert [row["top_k"] for row in made["tries"]] == [1, 2, None, 1, 2, None]
    best = max(made["tries"], key=lambda row: row["keys"] + row["values"])
    assert (made["top_k"], made["ridge"]) == (best["top_k"], 0.01)
    assert made["r2_mean"]["keys"] == pytest.approx(best["keys"])
    assert min(made["r2"]["keys"][:2]) > 0.999
    assert made["seconds"]["ratio"] > 1
    assert made["peak_bytes"] is None or made["peak_bytes"] > made["moments_bytes"]
    assert (made["taken_up"], made["made"]["tokens_fit"]) == (False, 8 * 116)
    assert made["digest"] == kv.Mapper.from_pretrained(folder).digest
    seen = call(capfd, "inspect", folder)
    assert (seen["kind"], seen["digest"], seen["checksums_ok"]) == ("mapper", made["digest"], True)
    assert seen["identity"]["model"] == target
    assert seen["bytes"] == made["bytes"]
    again = call(
        capfd, "map", "fit", source, target, "--text", text, "--text", text, "-o", folder, "--top-k", "all",
        "--resume", tmp_path / "moments", *FIT,
    )  # fmt: skip
    assert again["seconds"]["models"] == made["seconds"]["models"], "what an earlier run took counts"
    assert again["seconds"]["fit"] > again["seconds"]["models"]
    ablated = call(
        capfd, "map", "fit", source, target, "--text", text, "-o", folder, "--no-strip", "--no-reapply", *FIT
    )  # fmt: skip
    assert sum(ablated["r2"]["keys"]) < sum(again["r2"]["keys"])
    assert kv.Mapper.from_pretrained(folder).recipe.reapply is False
    weights = folder / "mapper.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert call(capfd, "inspect", folder, status=1)["checksums_ok"] is False
    assert call(capfd, "inspect", tmp_path, status=2)["type"] == "InvalidInput"


def test_eval(mapper: Path, folders: tuple[str, str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    item = {"ctx": "A cache that", "endings": ["is mapped", "is lost"], "label": 0}
    questions.write_text("\n".join([json.dumps(item)] * 3))
    found = call(
        capfd, "map", "eval", mapper, "--text", folders[2], "--native", "0,8", "--recompute-last", 16,
        "--recompute", "attention:0.1,spread:0.1", "--tasks", questions, "--items", 3, *EVAL,
    )  # fmt: skip
    assert [task["arm"] for task in found["tasks"][:6]] == [row["name"] for row in found["rows"]][:6]
    assert [task["arm"] for task in found["tasks"][6:]] == [
        "identity", "no_prefix", "zero", "shuffled", "other_document",
    ]  # fmt: skip
    assert {(task["name"], task["n"]) for task in found["tasks"]} == {("questions", 3)}
    assert found["identity_exact"] is True
    assert [row["name"] for row in found["rows"]][:6] == [
        "mapped", "native 0", "native 8", "last 16 computed", "attention 0.1 computed", "spread 0.1 computed",
    ]  # fmt: skip
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["identity"]["kl_max"] == 0
    assert rows["other_document"]["kl_mean"] > 3 * rows["mapped"]["kl_mean"]
    assert set(found["seconds"]) == {"map", "transfer", "prefill", "source_prefill", "speedup"}
    assert len(found["r2"]["keys"]) == 3
    assert found["ppl_target"] > 1
    assert run([str(word) for word in ("map", "eval", mapper, "--text", folders[2], *EVAL)]) == 0
    out, _ = capfd.readouterr()
    assert "context gain" in out
    assert "exact" in out


def test_gate(mapper: Path, folders: tuple[str, str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    gate = ("map", "gate", mapper, "--text", folders[2], *EVAL, "--floor", "context_gain=none")
    good = call(capfd, *gate)
    assert (good["accepted"], good["reasons"]) == (True, [])
    assert Path(good["kept"]).is_file()
    bad = call(capfd, *gate, "--floor", "agreement=1.5", "--no-keep", status=1)
    assert not bad["accepted"]
    assert "agreement" in bad["reasons"][0]
    assert bad["kept"] is None
    assert "kl=0.3" in call(capfd, *gate, "--floor", "magic=1", status=2)["message"]
    assert call(capfd, *gate, "--floor", "kl=low", status=2)["type"] == "InvalidInput"


def test_apply(mapper: Path, folders: tuple[str, str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target, text = folders
    short, long, one, two, three = (tmp_path / name for name in ("short", "long", "one", "two", "three"))
    for path, count in ((short, 50), (long, 90)):
        call(capfd, "capture", source, "--text", text, "--max-tokens", count, "--dtype", "float32", "-o", path)
    made = call(capfd, "map", "apply", mapper, short, "-o", one)
    assert (made["tokens"], made["computed_tokens"]) == (50, 0)
    call(capfd, "map", "apply", mapper, long, "-o", two, "--extend", one)
    call(capfd, "map", "apply", mapper, long, "-o", three)
    grown, at_once = kv.Snapshot.load(two), kv.Snapshot.load(three)
    for a, b in zip(grown.layers, at_once.layers, strict=True):
        assert torch.allclose(a.keys, b.keys, atol=1e-4)
    done = call(capfd, "map", "apply", mapper, long, "-o", three, "--target", target, "--recompute-last", 10)
    assert done["computed_tokens"] == 14
    assert done["construction"][-2:] == ["native(4)", "recomputed(10 of 90)"]
    assert len(call(capfd, "generate", target, "--from-cache", three, "--max-new", 3)["token_ids"]) == 3
    assert call(capfd, "map", "apply", mapper, one, "-o", two, status=1)["type"] == "IncompatibleIdentity"
    for wrong in (("--recompute-last", 3), ("--target", target, "--extend", one)):
        assert call(capfd, "map", "apply", mapper, long, "-o", two, *wrong, status=2)["type"] == "InvalidInput"
    assert "what is read" in call(capfd, "map", "apply", mapper, long, "-o", long, status=2)["message"]


def test_explain(mapper: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "r2.png"
    found = call(capfd, "map", "explain", mapper, "--plot", plot)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert [len(row) for row in found["r2_single"]["keys"]] == [4, 4, 4]
    assert found["layers_chosen"]["values"][0][0] == [0, "values"]
    assert found["recipe"]["top_k"] == 2
    assert run(["map", "explain", str(mapper)]) == 0
    assert "R² keys" in capfd.readouterr()[0]
    assert "drawn as" in call(capfd, "map", "explain", mapper, "--plot", tmp_path / "r2.txt", status=2)["message"]


def test_wrong_uses(folders: tuple[str, str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target, text = folders
    fit = ("map", "fit", source, target, "--text", text, "-o", tmp_path / "m", *FIT)
    for wrong, words in (
        (("--top-k", "none"), "top-k none"),
        (("--top-k", "0"), "top-k 0"),
        (("--variant", "magic"), "magic"),
        (("--top-k", "1,x"), "top-k x"),
        (("--ridge", "-1"), "ridge -1"),
        (("--ridge", ","), "at least one"),
    ):
        found = call(capfd, *fit, *wrong, status=2)
        assert found["type"] == "InvalidInput"
        assert words in found["message"]
    other = models.save(tiny.llama(num_key_value_heads=1), tmp_path / "other")
    found = call(capfd, "map", "fit", source, other, "--text", text, "-o", tmp_path / "m", *FIT, status=1)
    assert found["type"] == "IncompatibleIdentity"
    assert "kv_heads" in found["message"]
    assert not (tmp_path / "m").exists()
    assert call(capfd, "map", "explain", tmp_path, status=2)["type"] == "InvalidInput"
    assert call(capfd, "map", "eval", tmp_path / "m", status=2)["type"] == "InvalidInput"


def test_a_trained_variant_learns_for_as_long_as_it_is_told(
    folders: tuple[str, str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit = ("map", "fit", *folders[:2], "--text", folders[2], "-o", tmp_path / "m", "--top-k", 1, *FIT)
    asked = ("--variant", "ridge+e2e", "--epochs", 1, "--train-sequences", 3, "--resume", tmp_path / "kept")
    made = call(capfd, *fit, *asked)
    assert (made["made"]["steps"], made["made"]["settings"]["epochs"]) == (3, 1)
    assert made["variant"] == "ridge+e2e"
    assert made["seconds"]["fit"] >= made["made"]["train_seconds"]
    again = call(capfd, *fit, *asked)
    assert again["digest"] == made["digest"], "what is there already is not learnt again"
    assert call(capfd, *fit, "--epochs", 2, status=2)["type"] == "InvalidInput"


def test_few_controls_shares_and_a_log(
    mapper: Path, folders: tuple[str, str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    questions, log = tmp_path / "questions.jsonl", tmp_path / "log.jsonl"
    item = {"ctx": "A cache that", "endings": ["is mapped", "is lost"], "label": 0}
    questions.write_text("\n".join([json.dumps(item)] * 4))
    asked = ("--native", "", "--recompute-last", "25%", "--controls", "few", "--control-items", 0)
    tasks = ("--tasks", questions, "--items", 4, "--log", log)
    found = call(capfd, "map", "eval", mapper, "--text", folders[2], *asked, *tasks, *EVAL)
    assert [row["name"] for row in found["rows"]] == ["mapped", "last 25% computed", "no_prefix"]
    assert found["rows"][1]["share"] == pytest.approx((16 + 4) / 64)
    assert [task["arm"] for task in found["tasks"]] == ["mapped", "last 25% computed"]
    assert len(log.read_text().splitlines()) == 1, "the same question is asked once"
    for wrong in ("0%", "101%", "x%"):
        bad = call(capfd, "map", "eval", mapper, "--recompute-last", wrong, *EVAL, status=2)
        assert "share of tokens" in bad["message"]
