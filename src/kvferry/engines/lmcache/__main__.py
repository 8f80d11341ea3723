"""``python -m kvferry.engines.lmcache …`` is ``lmcache …`` with the serde registered: LMCache has no entry points."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

from kvferry.engines.lmcache.config import NAME, SerdeConfig
from kvferry.errors import InvalidInput


def check(arguments: Sequence[str]) -> None:
    """Raise `InvalidInput` for wrong settings of the serde: LMCache would tell of them by a traceback, once it runs."""
    for option, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        if name != "--l2-adapter":
            continue
        with suppress(json.JSONDecodeError, AttributeError):  # LMCache says itself what is wrong with an adapter
            serde = json.loads(value if equals else following).get("serde")
            if isinstance(serde, dict) and serde.get("type") == NAME:
                SerdeConfig.parse({key: setting for key, setting in serde.items() if key != "type"})


def run(arguments: Sequence[str]) -> None:
    """Check, register, and hand over to LMCache."""
    try:
        check(arguments)
        if find_spec("lmcache") is None:
            raise InvalidInput("LMCache is not installed: pip install lmcache==0.5.6")
    except InvalidInput as error:
        sys.stderr.write(f"kvferry: {error}\n")
        sys.exit(2)
    from lmcache.cli.main import main

    from kvferry.engines.lmcache.serde import register

    register()
    main()


if __name__ == "__main__":
    run(sys.argv[1:])
