"""``ship encode --progressive``, ``ship decode --refinement`` and what ``inspect`` says of a refinement."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvferry as kv
from kvferry.cli.main import run
from tests.cli.models import TEXT
from tests.cli.test_commands import call
from tests.ship.test_packet import assert_same_cache

pytestmark = pytest.mark.usefixtures("llama_folder")


@pytest.fixture
def cache(llama_folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "cache"
    call(capfd, "capture", llama_folder, "--prompt", TEXT * 4, "-o", path)
    return path


def test_a_packet_and_its_refinement_give_the_cache_back(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packet, refinement = tmp_path / "packet", tmp_path / "packet.refinement"
    made = call(capfd, "ship", "encode", cache, "-o", packet, "--budget", 0.5, "--progressive")
    told = made["refinement"]
    assert (Path(told["path"]), told["file_bytes"]) == (refinement, refinement.stat().st_size)
    assert told["total_budget"] == pytest.approx((made["bytes"] + told["bytes"]) / made["full_bytes"])
    assert told["total_budget"] < 1.02
    assert kv.Packet.load(packet).budget <= 0.5

    half, whole = tmp_path / "half", tmp_path / "whole"
    one = call(capfd, "ship", "decode", packet, "-o", half, "--refinement", refinement, "--level", 1)
    assert not one["refinement"]["bit_exact"]
    two = call(capfd, "ship", "decode", packet, "-o", whole, "--refinement", refinement)
    assert two["refinement"]["bit_exact"]
    source = kv.Snapshot.load(cache)
    assert_same_cache(kv.Snapshot.load(whole), source)
    with pytest.raises(AssertionError):
        assert_same_cache(kv.Snapshot.load(half), source)

    seen = call(capfd, "inspect", refinement)
    assert seen["kind"] == "refinement"
    assert seen["checksums_ok"]
    assert seen["tokens"] == source.seq_len
    assert seen["level_bytes"] == told["level_bytes"]
    assert seen["base_packet"] == kv.Packet.load(packet).header_bytes[-16:].hex()


def test_people_are_told(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packet, whole = str(tmp_path / "packet"), str(tmp_path / "whole")
    assert run(["ship", "encode", str(cache), "-o", packet, "--budget", "0.5", "--progressive"]) == 0
    assert "both together" in capfd.readouterr().out
    assert run(["ship", "decode", packet, "-o", whole, "--refinement", packet + ".refinement"]) == 0
    assert "yes, by the sender's digest" in capfd.readouterr().out
    assert run(["inspect", packet + ".refinement"]) == 0
    out = capfd.readouterr().out
    assert "level 2 (exact)" in out
    assert "all match" in out


def test_what_does_not_belong_together_is_refused(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packet, other, out = (str(tmp_path / name) for name in ("packet", "other", "out"))
    refinement = Path(packet + ".refinement")
    call(capfd, "ship", "encode", cache, "-o", packet, "--budget", 0.5, "--progressive")
    call(capfd, "ship", "encode", cache, "-o", other, "--budget", 0.6)
    assert run(["ship", "decode", other, "-o", out, "--refinement", str(refinement)]) == 1
    assert "another packet" in capfd.readouterr().err
    assert run(["ship", "decode", packet, "-o", out, "--level", "1"]) == 2
    assert run(["ship", "decode", packet, "-o", str(refinement), "--refinement", str(refinement)]) == 2
    capfd.readouterr()
    data = bytearray(refinement.read_bytes())
    data[-20] ^= 1
    refinement.write_bytes(data)
    assert run(["ship", "decode", packet, "-o", out, "--refinement", str(refinement)]) == 1
    assert "checksum" in capfd.readouterr().err
    assert not Path(out).exists()
    assert run(["inspect", str(refinement)]) == 1
    assert "refinement" in capfd.readouterr().out


def test_a_hand_off_says_which_cache_was_judged(
    llama_folder: str, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "handoff",
        llama_folder,
        "--budget",
        "0.6",
        "--text",
        str(text_file),
        "--max-tokens",
        "200",
        "--max-new",
        "4",
    ]
    assert run([*words, "--threads", "1", "--progressive"]) == 0
    lines = dict(line.split("  ", 1) for line in capfd.readouterr().out.splitlines() if "  " in line)
    assert lines["KL, mean (nats)"].strip() == "0, once refined"
    assert lines["bit-exact"].strip() == "yes"
