"""vLLM is no dependency: nothing imports it before the connector is asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import sys
import kvferry, kvferry.engines.vllm
assert "vllm" not in sys.modules and "torch" not in sys.modules
from kvferry.engines.vllm import FolderStore, fetch, publish
assert "vllm" not in sys.modules and "transformers" not in sys.modules
{last}
"""


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT.format(last="")], check=True)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_the_connector_says_so() -> None:
    last = "from kvferry.engines.vllm import KVFerryConnector"
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last)], capture_output=True, text=True, check=False
    )
    assert result.returncode
    assert "No module named 'vllm'" in result.stderr
