"""What is wrong is said in one line, with the right exit status, and nothing is left behind."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

import kvferry as kv
from kvferry.cli.main import COMMANDS, GROUPS, run
from tests.cli.models import TEXT
from tests.hf import tiny

CASES = {
    "no command": ([], 2),
    "unknown command": (["frobnicate"], 2),
    "unknown option": (["inspect", "x", "--frobnicate"], 2),
    "inspect nothing": (["inspect"], 2),
    "inspect a missing file": (["inspect", "{tmp}/missing"], 2),
    "inspect a folder": (["inspect", "{tmp}"], 2),
    "inspect garbage": (["inspect", "{garbage}"], 1),
    "inspect an empty file": (["inspect", "{empty}"], 1),
    "capture without a prompt": (["capture", "{model}", "-o", "{tmp}/x"], 2),
    "capture with two prompts": (["capture", "{model}", "--prompt", "a", "--text", "{text}", "-o", "{tmp}/x"], 2),
    "capture without output": (["capture", "{model}", "--prompt", "a"], 2),
    "capture an empty prompt": (["capture", "{model}", "--prompt", "", "-o", "{tmp}/x"], 2),
    "capture an empty file": (["capture", "{model}", "--text", "{empty}", "-o", "{tmp}/x"], 2),
    "capture a folder": (["capture", "{model}", "--text", "{tmp}", "-o", "{tmp}/x"], 2),
    "capture what is no text": (["capture", "{model}", "--text", "{garbage}", "-o", "{tmp}/x"], 2),
    "capture a negative number": (["capture", "{model}", "--prompt", "a", "--max-tokens", "-3", "-o", "{tmp}/x"], 2),
    "capture into no folder": (["capture", "{model}", "--prompt", "abc", "-o", "{tmp}/none/x"], 2),
    "capture onto a folder": (["capture", "{model}", "--prompt", "abc", "-o", "{tmp}"], 2),
    "capture with no such model": (["capture", "{tmp}/no-model", "--prompt", "abc", "-o", "{tmp}/x"], 1),
    "capture with a file for a model": (["capture", "{text}", "--prompt", "abc", "-o", "{tmp}/x"], 1),
    "capture with an unknown dtype": (["capture", "{model}", "--prompt", "a", "--dtype", "int8", "-o", "{tmp}/x"], 2),
    "capture with an unknown backend": (["capture", "{model}", "--prompt", "a", "--attn", "no", "-o", "{tmp}/x"], 2),
    "capture more than the context": (["capture", "{model}", "--text", "{long}", "-o", "{tmp}/x"], 2),
    "generate without a cache": (["generate", "{model}"], 2),
    "generate from a missing file": (["generate", "{model}", "--from-cache", "{tmp}/missing"], 2),
    "generate from garbage": (["generate", "{model}", "--from-cache", "{garbage}"], 1),
    "generate no tokens": (["generate", "{model}", "--from-cache", "{snapshot}", "--max-new", "0"], 2),
    "generate after no prompt, cut": (["generate", "{model}", "--from-cache", "{snapshot}", "--max-tokens", "3"], 2),
    "generate with no such model": (["generate", "{tmp}/no-model", "--from-cache", "{snapshot}"], 1),
    "generate after another prompt": (["generate", "{model}", "--from-cache", "{snapshot}", "--prompt", "B"], 1),
    "ship nothing": (["ship"], 2),
    "ship an unknown verb": (["ship", "frobnicate"], 2),
    "encode without a budget": (["ship", "encode", "{snapshot}", "-o", "{tmp}/x"], 2),
    "encode with two budgets": (
        ["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "1", "--nominal-budget", "1"],
        2,
    ),
    "encode in fewer bytes than none": (["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "-1"], 2),
    "encode in not a number": (["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "nan"], 2),
    "encode in too few bytes": (["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "0.01"], 1),
    "encode by no policy": (["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "1", "--policy", "no"], 2),
    "encode by no scorer": (
        ["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "0.6", "--policy", "greedy", "--scorer", "no"],
        2,
    ),
    "encode a packet": (["ship", "encode", "{packet}", "-o", "{tmp}/x", "--budget", "1"], 2),
    "encode with a packet for a transform": (
        [
            "ship",
            "encode",
            "{snapshot}",
            "-o",
            "{tmp}/x",
            "--budget",
            "0.6",
            "--policy",
            "klt",
            "--transform",
            "{packet}",
        ],
        2,
    ),
    "encode what cannot be refined": (
        ["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "0.6", "--policy", "klt", "--progressive"],
        2,
    ),
    "encode in frames without end": (
        ["ship", "encode", "{snapshot}", "-o", "{tmp}/x", "--budget", "0.6", "--frame-tokens", "9" * 20],
        2,
    ),
    "encode from a seed without end": (
        [
            "ship",
            "encode",
            "{snapshot}",
            "-o",
            "{tmp}/x",
            "--budget",
            "0.6",
            "--policy",
            "random_tier",
            "--seed",
            "9" * 20,
        ],
        2,
    ),
    "encode into a file without a name": (["ship", "encode", "{snapshot}", "-o", "", "--budget", "1"], 2),
    "encode a missing file": (["ship", "encode", "{tmp}/missing", "-o", "{tmp}/x", "--budget", "1"], 2),
    "decode a snapshot": (["ship", "decode", "{snapshot}", "-o", "{tmp}/x"], 2),
    "decode with a packet for a refinement": (
        ["ship", "decode", "{packet}", "-o", "{tmp}/x", "--refinement", "{packet}"],
        2,
    ),
    "decode with a transform that is not there": (
        ["ship", "decode", "{packet}", "-o", "{tmp}/x", "--transform", "{tmp}/missing"],
        2,
    ),
    "decode a file without a name": (["ship", "decode", "", "-o", "{tmp}/x"], 2),
    "sweep at no number": (["ship", "sweep", "{tmp}/no-model", "--budgets", "0.5,nan"], 2),
    "sweep at nothing": (["ship", "sweep", "{tmp}/no-model", "--budgets", "0"], 2),
    "sweep with no decay": (["ship", "sweep", "{tmp}/no-model", "--decay", "nan"], 2),
    "sweep for needles without end": (["ship", "sweep", "{tmp}/no-model", "--needle", "--needle-lengths", "inf"], 2),
    "sweep into a folder": (["ship", "sweep", "{tmp}/no-model", "--csv", "{tmp}"], 2),
    "sweep with no such model into new folders": (
        ["ship", "sweep", "{tmp}/no-model", "--csv", "{tmp}/new/x.csv", "--plots", "{tmp}/plots"],
        1,
    ),
    "sweep with a log that is none": (["ship", "sweep", "{model}", "--windows", "1", "--log", "{garbage}"], 2),
    "sweep anew, and go on": (["ship", "sweep", "{tmp}/no-model", "--fresh", "--log", "{tmp}/x"], 2),
    "decode garbage": (["ship", "decode", "{garbage}", "-o", "{tmp}/x"], 1),
    "decode a missing file": (["ship", "decode", "{tmp}/missing", "-o", "{tmp}/x"], 2),
    "hand off nothing": (["handoff", "--budget", "1"], 2),
    "hand off without a budget": (["handoff", "{model}"], 2),
    "hand off in too many ways": (["handoff", "{model}", "--prefill", "{model}", "--budget", "1"], 2),
    "hand off less than nothing": (["handoff", "{model}", "--budget", "-0.5"], 2),
    "hand off one token": (["handoff", "{model}", "--budget", "1", "--max-tokens", "1"], 2),
    "hand off what cannot be refined": (
        ["handoff", "{model}", "--budget", "0.6", "--policy", "klt", "--progressive"],
        2,
    ),
    "hand off through a mapper to nobody": (["handoff", "{model}", "--budget", "1", "--mapper", "{tmp}/m"], 2),
    "hand off through no mapper": (
        ["handoff", "--prefill", "{model}", "--decode", "{model}", "--budget", "1", "--mapper", "{tmp}/m"],
        2,
    ),
    "hand off with tokens computed anew and no mapper": (
        ["handoff", "{model}", "--budget", "1", "--recompute-last", "3"],
        2,
    ),
    "hand off no text": (["handoff", "{model}", "--budget", "1", "--text", "{empty}"], 2),
    "hand off with no such model": (["handoff", "{tmp}/no-model", "--budget", "1"], 1),
    "hand off to no such model": (["handoff", "{model}", "--decode", "{tmp}/no-model", "--budget", "1"], 1),
    "audit a snapshot as a packet": (["audit", "{model}", "--packet", "{snapshot}"], 2),
    "audit a packet as a snapshot": (["audit", "{model}", "--cache", "{packet}"], 2),
    "audit with no such model into a new folder": (["audit", "{tmp}/no-model", "--plots", "{tmp}/plots"], 1),
    "audit with a log that is none": (["audit", "{model}", "--n", "1", "--log", "{garbage}"], 2),
    "audit garbage": (["audit", "{model}", "--packet", "{garbage}"], 1),
    "bench a codec on no number of bytes": (["bench", "codec", "--megabytes", "nan"], 2),
    "bench a codec on too many bytes": (["bench", "codec", "--megabytes", "1e12"], 2),
    "bench hand-offs of no length": (["bench", "handoff", "{model}", "--tokens", "abc"], 2),
    "bench hand-offs of no budget": (["bench", "handoff", "{model}", "--budgets", "0.5,x"], 2),
    "demo with no such model": (["demo", "--model", "{tmp}/no-model", "--out", "{tmp}/report"], 1),
    "demo into a file": (["demo", "--out", "{text}"], 2),
}


@pytest.fixture(scope="module")
def names(llama_folder: str, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the names in braces: real files, good and bad."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "garbage").write_bytes(bytes(range(256)) * 8)
    (folder / "empty").touch()
    (folder / "long.txt").write_text(TEXT * 40)
    model, _ = kv.load_model(llama_folder)
    snapshot = kv.capture(model, tiny.prompt(1, 200), query_window=8)
    snapshot.save(folder / "snapshot")
    kv.encode(snapshot, budget=1.0).save(folder / "packet")
    files = {name: str(folder / name) for name in ("garbage", "empty", "snapshot", "packet")}
    return {**files, "long": str(folder / "long.txt"), "text": str(text_file), "model": llama_folder}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("as_json", [False, True], ids=["plain", "json"])
def test_what_is_wrong_is_said(
    case: str, as_json: bool, names: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, expected = CASES[case]
    given = [word.format(tmp=tmp_path, **names) for word in words]
    status = run([*given, *(["--json"] if as_json else [])])
    out, err = capfd.readouterr()
    assert status == expected, err
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    if given not in ([], ["ship"]):  # which show their help
        assert len(lines) == 1
    assert lines[-1].startswith("kvferry: ") or given in ([], ["ship"])
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"{names['garbage']}.lock").exists()
    if as_json and given and given[0] in COMMANDS:
        content = json.loads(out)
        assert content.keys() == {"kvferry", "command", "environment", "result", "error"}
        assert content["result"] is None
        assert content["environment"]["python"] == platform.python_version()
        assert content["environment"]["arguments"] == sys.argv[1:]
        assert content["command"] == (" ".join(given[:2]) if given[0] in GROUPS else given[0])
        assert content["error"]["type"]
        assert content["error"]["message"]
    elif not as_json:
        assert out == ""


def test_messages_name_the_field_and_the_remedy(names: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["ship", "encode", names["snapshot"], "-o", "/dev/null/x", "--budget", "1"]) == 2
    assert (
        run(["ship", "encode", names["snapshot"], "-o", f"{names['garbage']}.out", "--budget", "0.01", "--json"]) == 1
    )
    assert run(["ship", "encode", names["packet"], "-o", f"{names['garbage']}.out", "--budget", "1"]) == 2
    out, err = capfd.readouterr()
    assert f"decode it first, with `kvferry ship decode {names['packet']} -o FILE`" in err
    assert (
        run(["ship", "encode", names["snapshot"], "-o", f"{names['garbage']}.out", "--budget", "1", "--policy", "no"])
        == 2
    )
    assert "klt" in capfd.readouterr().err
    fault = json.loads(out)["error"]
    assert fault["type"] == "BudgetTooSmall"
    assert fault["budget"] == 0.01
    assert f"{fault['least_budget']:g}" in fault["message"]
    assert run(["generate", names["model"], "--from-cache", names["snapshot"], "--dtype", "float32", "--json"]) == 1
    fault = json.loads(capfd.readouterr().out)["error"]
    assert fault["type"] == "IncompatibleIdentity"
    assert fault["differences"]["dtype"] == ["bfloat16", "float32"]
    assert run(["audit", names["model"], "--cache", names["packet"]]) == 2
    assert run(["handoff", names["model"]]) == 2
    _, err = capfd.readouterr()
    assert "give it with --packet" in err
    assert "--nominal-budget" in err


def test_a_failure_tells_how_the_command_ran(names: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", names["model"], "--from-cache", names["snapshot"], "--dtype", "float32"]
    assert run([*arguments, "--threads", "1", "--seed", "7", "--json"]) == 1
    environment = json.loads(capfd.readouterr().out)["environment"]
    assert (environment["dtype"], environment["threads"], environment["seed"]) == ("float32", 1, 7)


def test_an_unexpected_error_is_one_line_and_debug_shows_where(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: object
) -> None:
    monkeypatch.setattr("kvferry.cli.inspect._READERS", {"snapshot": lambda path: 1 / 0})
    assert run(["inspect", names["snapshot"]]) == 1
    _, err = capfd.readouterr()
    assert err.count("\n") == 1
    assert "unexpected ZeroDivisionError" in err
    assert "--debug" in err
    assert run(["inspect", names["snapshot"], "--debug"]) == 1
    assert "1 / 0" in caplog.text  # type: ignore[attr-defined]


def test_a_damaged_payload_is_a_failed_check_with_a_result(
    names: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for kind in ("snapshot", "packet"):
        assert run(["inspect", names[kind], "--json"]) == 0
        whole = json.loads(capfd.readouterr().out)["result"]
        assert whole["bytes"] == whole["file_bytes"] == Path(names[kind]).stat().st_size
        data = bytearray(Path(names[kind]).read_bytes())
        data[len(data) // 2] ^= 1  # keys or values, or a frame
        (tmp_path / kind).write_bytes(data)
        assert run(["inspect", str(tmp_path / kind), "--json"]) == 1
        result = json.loads(capfd.readouterr().out)["result"]
        assert (result["kind"], result["checksums_ok"]) == (kind, False)
        assert "checksum" in result["problem"]
        for name in ("identity", "batch", "tokens", "layers", "bytes", "file_bytes", "full_bytes"):
            assert result[name] == whole[name], name
        if kind == "packet":
            for name in ("packet_bytes", "nominal_budget", "policy"):
                assert result[name] == whole[name], name
        assert run(["inspect", str(tmp_path / kind)]) == 1
        assert whole["identity"]["model"] in capfd.readouterr().out


def test_a_damaged_header_is_a_failed_check_too(
    names: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged"
    for kind in ("snapshot", "packet"):
        whole = Path(names[kind]).read_bytes()
        length = int.from_bytes(whole[:8], "little")
        edited, unpadded = bytearray(whole), bytearray(whole)
        edited[8 + length // 2] ^= 1
        unpadded[0] ^= 1
        for data in (edited, unpadded, whole[:-1], whole[: 8 + length // 2], whole + b"x"):
            path.write_bytes(data)
            assert run(["inspect", str(path), "--json"]) == 1
            result = json.loads(capfd.readouterr().out)["result"]
            assert (result["kind"], result["checksums_ok"]) == (kind, False)
            assert result["bytes"] == result["file_bytes"] == len(data)
            assert result["problem"]
            assert (result["identity"], result["tokens"], result["layers"], result["full_bytes"]) == (None,) * 4
        assert run(["inspect", str(path)]) == 1
        assert "the file is damaged" in capfd.readouterr().out
