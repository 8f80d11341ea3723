"""``python -m kvferry.engines.lmcache …`` is ``lmcache …`` with the serde registered: LMCache has no entry points."""

from __future__ import annotations

from lmcache.cli.main import main

from kvferry.engines.lmcache.serde import register

if __name__ == "__main__":
    register()
    main()
