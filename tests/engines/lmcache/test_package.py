"""LMCache is no dependency: nothing imports it before `register` is asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import sys
import kvferry, kvferry.engines.lmcache
assert "lmcache" not in sys.modules and "torch" not in sys.modules
{last}
"""


def test_importing_the_package_imports_neither_lmcache_nor_torch() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT.format(last="")], check=True)


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        ('{"serde": {"type": "kvferry", "num_kv_heads": 3, "head_dim": 64, "quantizer": "sym9"}}', "unknown quantiser"),
        ('{"serde": {"type": "kvferry", "num_kv_heads": 3}}', "needs head_dim"),
        ('{"serde": {"type": "kvferry", "num_kv_heads": 3, "head_dim": 64, "bits": 4}}', "has no setting bits"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_wrong_settings_are_told_before_a_server_starts(adapter: str, told: str, joined: bool) -> None:
    given = [f"--l2-adapter={adapter}"] if joined else ["--l2-adapter", adapter]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.engines.lmcache", "server", *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="LMCache is here")
def test_without_lmcache_the_program_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.engines.lmcache", "server"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "kvferry: LMCache is not installed: pip install lmcache==0.5.6\n")


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="LMCache is here")
def test_without_lmcache_register_says_so() -> None:
    last = "from kvferry.engines.lmcache import register"
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last)], capture_output=True, text=True, check=False
    )
    assert result.returncode
    assert "No module named 'lmcache'" in result.stderr
