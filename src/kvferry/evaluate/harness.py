"""lm-evaluation-harness: any of its tasks scores a model on caches that were shipped or mapped.

`register` makes the model type ``kvferry`` known to lm-eval; ``kvferry lm-eval …`` is lm-eval's own command line with
that done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvferry.errors import InvalidInput

NAME = "kvferry"
"""What stands behind ``--model``."""

_TARGET = "kvferry.evaluate.harness_model:KVFerryLM"


def register() -> None:
    """Make ``model="kvferry"`` known to lm-eval in this process. Raises `InvalidInput` where lm-eval is missing."""
    try:
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise InvalidInput(f"lm-eval is missing ({error}): pip install 'kvferry[lm-eval]'") from error
    if NAME not in model_registry:
        model_registry.register(NAME, target=_TARGET)


def run(arguments: Sequence[str]) -> int:
    """lm-eval's command line, with `register` done; returns its exit status.

    Raises:
        InvalidInput: lm-eval is missing.
        KVFerryError: what the model type raises.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["kvferry lm-eval", *arguments]  # lm-eval reads its arguments there and nowhere else
    try:
        cli_evaluate()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = before
    return 0
