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


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="LMCache is here")
def test_without_lmcache_register_says_so() -> None:
    last = "from kvferry.engines.lmcache import register"
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last)], capture_output=True, text=True, check=False
    )
    assert result.returncode
    assert "No module named 'lmcache'" in result.stderr
