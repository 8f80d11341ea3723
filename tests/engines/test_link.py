"""Shaped links: rates, what is missing said, and nothing left behind. Where no link can be made, most is skipped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.engines import link
from kvferry.engines.handoff import HandoffJob, Session
from kvferry.engines.link import ShapedLink, parse_rate, sweep, why_no_link
from kvferry.errors import InvalidInput, TransferFailed
from tests.cli.models import environment

NAMESPACES = Path("/run/netns")


def _impossible() -> str:
    if missing := why_no_link():
        return missing
    try:
        with ShapedLink("10mbit"):
            return ""
    except TransferFailed as error:
        return str(error)


WHY_NOT = _impossible()
needs_link = pytest.mark.skipif(bool(WHY_NOT), reason=f"no shaped link here: {WHY_NOT}")


def own_namespaces(pid: int) -> list[str]:
    return [path.name for path in NAMESPACES.iterdir() if f"kvferry-{pid}-" in path.name] if NAMESPACES.is_dir() else []


def test_rates() -> None:
    assert [parse_rate(text) for text in ("1gbit", "2.5Gbit", "100mbit", "512kbit")] == [
        10**9,
        2_500_000_000,
        10**8,
        512_000,
    ]
    for text in ("", "1", "fast", "1gb", "0gbit", "-1gbit", "1e3mbit", "999gbit", "1kbit", "1gbit; reboot"):
        with pytest.raises(InvalidInput, match="rate"):
            parse_rate(text)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.sys, "platform", "linux")
    monkeypatch.setattr(link.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(TransferFailed, match=r"tc cannot be found.*iproute2"):
        ShapedLink("1gbit")
    monkeypatch.setattr(link.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    with pytest.raises(TransferFailed, match="root"):
        ShapedLink("1gbit")
    monkeypatch.setattr(link.sys, "platform", "darwin")
    with pytest.raises(TransferFailed, match="Linux"):
        ShapedLink("1gbit")


SEND = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print("sent", flush=True)
sys.stdin.read()
"""

RECEIVE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
count, began = len(peer.recv(1 << 16)), time.monotonic()
while got := len(peer.recv(1 << 16)):
    count += got
print(count, time.monotonic() - began)
"""


@needs_link
def test_the_link_has_its_rate_and_its_bytes_are_counted() -> None:
    size = 4_000_000
    with ShapedLink("40mbit") as shaped:
        sender = subprocess.Popen(
            [*shaped.inside(0), sys.executable, "-c", SEND, shaped.host, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port = sender.stdout.readline().strip()
        said = subprocess.run(
            [*shaped.inside(1), sys.executable, "-c", RECEIVE, shaped.host, port],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert sender.stdout.readline() == "sent\n"
        out, back = link.counted(sender.pid)
        sender.communicate()
    assert int(said[0]) == size
    assert 8 * size / float(said[1]) == pytest.approx(40e6, rel=0.15)
    assert size < out < 1.1 * size
    assert 0 < back < 0.1 * size
    assert own_namespaces(os.getpid()) == []
    assert link.counted(os.getpid()) == (0, 0)


@needs_link
def test_a_hand_off_crosses_the_link_encrypted_and_is_the_same(llama_folder: str, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    job = HandoffJob(llama_folder, llama_folder, budget=1.0, max_tokens=1500, max_new=4, threads=1)
    with Session("100mbit") as session:
        first = session.run(job)
        session.link.set_rate("10mbit")
        slower = session.run(job)
        for child in session._children.values():
            told = Path(f"/proc/{child.process.pid}/cmdline").read_bytes()
            assert all(setting.own.secret not in told for setting in session._settings)
        assert len(own_namespaces(os.getpid())) == 2
    assert own_namespaces(os.getpid()) == []
    assert first.tokens_equal
    assert first.kl_mean == 0.0
    assert (first.link["rate"], slower.link["rate"]) == ("100mbit", "10mbit")
    for result in (first, slower):
        assert result.wire_bytes < result.link["bytes_out"] < result.wire_bytes + 100_000
    # one frame a layer, two layers: the second follows the first at the rate of the link
    assert slower.seconds["wire"] > 0.8 * 8 * slower.packet_bytes / 2 / 10e6


HOLD = """
import sys, time
from kvferry.engines.link import ShapedLink
with ShapedLink("10mbit"):
    print("up", flush=True)
    sys.stdin.read()
"""


@needs_link
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout.readline() == b"up\n"
    assert len(own_namespaces(process.pid)) == 2
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number
    if number == signal.SIGKILL:
        assert len(own_namespaces(process.pid)) == 2
        assert len(sweep()) >= 2
    assert own_namespaces(process.pid) == []


@needs_link
def test_the_namespaces_of_whoever_lives_are_left_alone() -> None:
    with ShapedLink("10mbit") as mine:
        sweep()
        assert len(own_namespaces(os.getpid())) == 2
        with ShapedLink("20mbit") as second:
            assert len(own_namespaces(os.getpid())) == 4
            assert second.inside(0) != mine.inside(0)
    assert own_namespaces(os.getpid()) == []


@needs_link
def test_what_cannot_be_made_is_removed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = link._run

    def failing(*command: str) -> None:
        if command[0] == "tc":
            raise TransferFailed("no shaped link can be made: no token bucket in this kernel")
        plain(*command)

    monkeypatch.setattr(link, "_run", failing)
    with pytest.raises(TransferFailed, match="no token bucket"), ShapedLink("10mbit"):
        pytest.fail("there is a link")
    assert own_namespaces(os.getpid()) == []
