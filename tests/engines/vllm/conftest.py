"""The tests under `serving` run engines: they are there only where vLLM is installed (``make test-vllm``)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") is not None else ["serving/*"]
