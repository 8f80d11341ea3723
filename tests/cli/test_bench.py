"""``kvferry bench``: rows with ratios to memcpy in the same run, by the contract's names."""

from __future__ import annotations

import json

import pytest

from kvferry.cli.main import run


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict, str]:
    status = run(["bench", "codec", *arguments, "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def test_rows_by_the_contracts_names(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = bench(
        capsys, "--threads", "1", "--dtype", "float16", "--megabytes", "0.5", "--rounds", "3",
        "--quantizers", "sym8,chan4b128,mixed", "--peers", "torch_eager,torch_oracle,fbgemm",
    )  # fmt: skip
    assert status == 0
    assert found["command"] == "bench codec"
    rows = found["result"]["rows"]
    assert {"op", "quantizer", "dtype", "threads", "gb_per_s", "memcpy_gb_per_s", "ratio", "peer"} <= set(rows[0])
    assert {row["peer"] for row in rows} == {"kvferry", "torch eager", "torch oracle", "FBGEMM in torch"}
    assert {row["quantizer"] for row in rows if row["op"] == "encode" and row["peer"] == "kvferry"} == {
        "sym8", "chan4b128", "mixed",
    }  # fmt: skip
    for row in rows:
        assert row["n"] == 3
        assert row["gb_per_s_quartiles"][0] <= row["gb_per_s"] <= row["gb_per_s_quartiles"][1]
        assert row["ratio_quartiles"][0] <= row["ratio"] <= row["ratio_quartiles"][1]
        assert 0 < row["relative_error"] < 0.2
        assert 0.2 < row["size"] < 0.6
    assert found["result"]["skipped"] == []


def test_two_threads_and_no_peers(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = bench(
        capsys, "--threads", "2", "--dtype", "bfloat16", "--megabytes", "0.5", "--rounds", "1", "--quantizers", "raw",
        "--peers", "none",
    )  # fmt: skip
    assert status == 0
    rows = found["result"]["rows"]
    assert {row["peer"] for row in rows} == {"kvferry", "memcpy"}
    assert {row["threads"] for row in rows} == {2}
    raw = [row for row in rows if row["quantizer"] == "raw"]
    assert [row["op"] for row in raw] == ["encode", "decode"]
    assert {(row["size"], row["relative_error"]) for row in raw} == {(1.0, 0.0)}


@pytest.mark.parametrize("wrong", [["--peers", "nobody"], ["--quantizers", "sym9"], ["--megabytes", "0"]])
def test_wrong_use(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    status, found, err = bench(capsys, *wrong)
    assert status == 2
    assert found["result"] is None
    assert err


def test_the_groups_help_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    assert "codec" in capsys.readouterr().out
