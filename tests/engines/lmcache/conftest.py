"""The tests under `storage` run LMCache's own storage manager: they are there only where it is installed
(``make test-lmcache``)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lmcache") is not None else ["storage", "storage/*"]
