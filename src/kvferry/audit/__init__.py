"""Audits: is a cache what recomputation would have built, and if not, where and why not.

``kvferry.audit(model, token_ids, protocols=[…])`` is the verb, and ``kvferry.audit.…`` this room: the module is called
as the function is, whichever of both names was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def audit(*arguments: Any, **settings: Any) -> Any:
    """See `kvferry.audit.protocols.audit`, which is imported when this is first called."""
    from kvferry.audit.protocols import audit as run

    return run(*arguments, **settings)


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return audit(*arguments, **settings)


sys.modules[__name__].__class__ = _Callable
