"""Standard output that is full or closed, and outputs that would destroy what is read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvferry.cli.common import check_output, prompt_text
from kvferry.cli.main import run
from kvferry.errors import InvalidInput
from kvferry.snapshot import Snapshot, files
from tests.snapshot.builders import make_snapshot

RUN = (sys.executable, "-m", "kvferry.cli.main")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    make_snapshot().save(path)
    return path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_standard_output_is_one_line_and_a_failure(saved: Path, options: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*RUN, "inspect", str(saved), *options], check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_is_told_with_the_file(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "packet"
    assert run(["ship", "encode", str(saved), "-o", str(path), "--budget", "1"]) == 1
    assert capfd.readouterr().err == f"kvferry: cannot write {path}: No space left on device\n"
    assert not list(tmp_path.iterdir())


def test_a_closed_standard_output_is_no_fault(saved: Path) -> None:
    done = subprocess.run(
        [*RUN, "inspect", str(saved)], check=False, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1)
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_a_file_is_never_written_over_itself(saved: Path, tmp_path: Path, verb: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(saved)
    before = saved.read_bytes()
    budget = ("--budget", "1") if verb == "encode" else ()
    done = subprocess.run(
        [*RUN, "ship", verb, str(saved), "-o", str(link), *budget], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "it is what is read" in done.stderr
    assert saved.read_bytes() == before
    assert torch.equal(Snapshot.load(saved).token_ids, make_snapshot().token_ids)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
def test_a_text_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "MOST_CHARACTERS", 1000)
    long = tmp_path / "long"
    long.write_text("a" * 1001)
    for path in ("/dev/zero", str(long)):
        with pytest.raises(InvalidInput, match="more than 1,000 characters"):
            prompt_text(None, path)
    long.write_text("ä\r\n" * 500)
    assert prompt_text(None, str(long)) == "ä\n" * 500


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    pipe, gone = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    gone.symlink_to(tmp_path / "no folder" / "x")
    for path in (str(pipe), "/dev/null", "/proc/x", str(gone), str(tmp_path), "", str(tmp_path / "none" / "x")):
        with pytest.raises(InvalidInput, match="write"):
            check_output(path)
    check_output(str(tmp_path / "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
